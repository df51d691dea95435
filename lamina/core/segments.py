"""Which segments hold which tokens of a sequence. Pure.

The segments of a sequence with the same heads follow one another from token 0 on; the last has no end. They are listed
by ascending first token, so that those of a prefix are the first ones, in a list and in its forks. Each function
gives the same for one worker's segments of a sequence as for all of them, less those of the others: so a memory worker
needs to know its own alone.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from lamina.core.types import Segment


def for_sequence(sequence: int, segments: Sequence[Segment]) -> list[Segment]:
    """Return the same segments for another sequence, a completion of the same request."""
    return [dataclasses.replace(segment, sequence=sequence) for segment in segments]


def by_sequence(segments: Iterable[Segment]) -> dict[int, list[Segment]]:
    """Return the segments of each sequence, by ascending token, then head."""
    found: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda one: (one.tokens[0], one.heads)):
        found.setdefault(segment.sequence, []).append(segment)
    return found


def forked(segments: Sequence[Segment], child: int, tokens: int) -> list[Segment]:
    """Return the segments of ``child``, which shares the first ``tokens`` tokens: the last of them takes what it
    adds."""
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
    """The segments of a sequence once ``new`` takes all tokens of its heads from its first on. Growing twice changes
    nothing.

    A sequence grows with all heads at once: a segment that has one of them ends there with all of its own. One that
    grew to another worker and comes back before it has a token there goes on in the segment it had.
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
    """Return the segments of a sequence once ``new`` holds its tokens, whichever held them before.

    Neighbours on one worker become one segment.
    """
    first, last = new.tokens
    parts = [new]
    for segment in segments:
        start, stop = segment.tokens
        if start < first:
            before = first if stop is None else min(stop, first)
            parts.append(dataclasses.replace(segment, tokens=(start, before)))
        if last is not None and (stop is None or stop > last):
            parts.append(dataclasses.replace(segment, tokens=(max(start, last), stop)))
    return joined(sorted(parts, key=lambda one: one.tokens[0]))


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Segments by ascending token, with neighbours on one worker as one."""
    result: list[Segment] = []
    for segment in segments:
        last = result[-1] if result else None
        if last is not None and (last.worker, last.tokens[1]) == (segment.worker, segment.tokens[0]):
            result[-1] = dataclasses.replace(last, tokens=(last.tokens[0], segment.tokens[1]))
        else:
            result.append(segment)
    return result


def continued(segments: list[Segment], first: Segment, spans: Iterable[tuple[str, int]]) -> list[Segment]:
    """Return the segments of a sequence once it continues with so many tokens on each worker, in this order, from the
    first token of ``first`` on, which names its sequence and heads."""
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
    """Return how many of tokens [start, stop) each worker holds; workers without any are left out."""
    tokens: dict[str, int] = {}
    for segment in segments:
        first, last = segment.tokens
        held = (stop if last is None else min(stop, last)) - max(start, first)
        if held > 0:
            tokens[segment.worker] = tokens.get(segment.worker, 0) + held
    return tokens
