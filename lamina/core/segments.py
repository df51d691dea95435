"""Which segments hold which tokens of a sequence. Pure.

The segments of a sequence with the same heads follow one another from token 0 on; the last has no end. Lists are in
ascending order of the first token. Each function may be applied to all segments of a sequence or to those of one
worker alone, with the same result for that worker: so a memory worker needs to know only its own segments.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from lamina.core.types import Segment


def for_sequence(sequence: int, segments: Sequence[Segment]) -> list[Segment]:
    """Return copies of the segments for another completion of the same request."""
    return [dataclasses.replace(segment, sequence=sequence) for segment in segments]


def by_sequence(segments: Iterable[Segment]) -> dict[int, list[Segment]]:
    """Return the segments of each sequence, by ascending token, then head."""
    found: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda one: (one.tokens[0], one.heads)):
        found.setdefault(segment.sequence, []).append(segment)
    return found


def forked(segments: Sequence[Segment], child: int, tokens: int) -> list[Segment]:
    """Return the segments of ``child``, which shares the first ``tokens`` tokens. The last one grows with ``child``."""
    return [
        dataclasses.replace(segment, sequence=child, tokens=(start, None if stop is None or stop >= tokens else stop))
        for segment in segments
        for start, stop in [segment.tokens]
        if start < tokens
    ]


def overlaps(segment: Segment, other: Segment) -> bool:
    """True if two segments of a sequence have a head in common."""
    return segment.heads[0] < other.heads[1] and other.heads[0] < segment.heads[1]


def grown(segments: Sequence[Segment], new: Segment) -> list[Segment]:
    """Return the segments of a sequence once ``new`` holds the tokens of its heads from its first token on. Idempotent.

    Segments that share a head with ``new`` end at its first token. If one of them is on the worker of ``new`` and has
    the same heads, it and ``new`` become one segment.
    """
    first, _ = new.tokens
    ended = []
    for segment in segments:
        start, stop = segment.tokens
        if not overlaps(segment, new) or (stop is not None and stop <= first):
            ended.append(segment)
        elif start < first:
            ended.append(dataclasses.replace(segment, tokens=(start, first)))
    for segment in ended:
        if (segment.worker, segment.heads, segment.tokens[1]) == (new.worker, new.heads, first):
            ended.remove(segment)
            new = dataclasses.replace(new, tokens=(segment.tokens[0], new.tokens[1]))
            break
    return sorted([*ended, new], key=lambda one: one.tokens[0])


def moved(segments: Sequence[Segment], new: Segment) -> list[Segment]:
    """Return the segments of a sequence once ``new`` holds its tokens of its heads, whichever held them before.

    Neighbours on one worker become one segment.
    """
    first, last = new.tokens
    parts = [new]
    for segment in segments:
        start, stop = segment.tokens
        if not overlaps(segment, new):
            parts.append(segment)
            continue
        if start < first:
            before = first if stop is None else min(stop, first)
            parts.append(dataclasses.replace(segment, tokens=(start, before)))
        if last is not None and (stop is None or stop > last):
            parts.append(dataclasses.replace(segment, tokens=(max(start, last), stop)))
        parts += _other_heads(segment, new)
    return joined(sorted(parts, key=lambda one: one.tokens[0]))


def _other_heads(segment: Segment, new: Segment) -> list[Segment]:
    """Return the parts of ``segment`` with the tokens of ``new``, but other heads."""
    start = max(segment.tokens[0], new.tokens[0])
    stop = min((one.tokens[1] for one in (segment, new) if one.tokens[1] is not None), default=None)
    if stop is not None and stop <= start:
        return []
    others = (segment.heads[0], new.heads[0]), (new.heads[1], segment.heads[1])
    return [dataclasses.replace(segment, heads=one, tokens=(start, stop)) for one in others if one[0] < one[1]]


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Return segments, given by ascending token, with neighbours on one worker merged, if they have the same heads."""
    result: list[Segment] = []
    latest: dict[tuple[int, str, tuple[int, int]], int] = {}  # by sequence, worker and heads: a place in ``result``
    for segment in segments:
        key = segment.sequence, segment.worker, segment.heads
        place = latest.get(key)
        if place is not None and result[place].tokens[1] == segment.tokens[0]:
            result[place] = dataclasses.replace(result[place], tokens=(result[place].tokens[0], segment.tokens[1]))
        else:
            latest[key] = len(result)
            result.append(segment)
    return result


def continued(segments: list[Segment], first: Segment, spans: Iterable[tuple[str, int]]) -> list[Segment]:
    """Return the segments of a sequence once it continues with ``spans``: workers and numbers of tokens, in order.

    ``first`` gives the sequence, its heads and the position at which the first span begins.
    """
    position, _ = first.tokens
    for worker, tokens in spans:
        if not segments or segments[-1].worker != worker:
            segments = grown(segments, dataclasses.replace(first, worker=worker, tokens=(position, None)))
        position += tokens
    return segments


def holding(segments: Sequence[Segment], position: int) -> Segment:
    """Return the segment that holds the token at ``position``."""
    return next(segment for segment in reversed(segments) if segment.tokens[0] <= position)


def by_worker(segments: Iterable[Segment], start: int, stop: int) -> dict[str, int]:
    """Return how many of tokens [start, stop) each worker holds; workers that hold none are left out."""
    tokens: dict[str, int] = {}
    for segment in segments:
        first, last = segment.tokens
        held = (stop if last is None else min(stop, last)) - max(start, first)
        if held > 0:
            tokens[segment.worker] = tokens.get(segment.worker, 0) + held
    return tokens
