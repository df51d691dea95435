"""From where on a step needs the tokens of each of its sequences."""

from collections.abc import Callable, Iterable

from lamina.protocol.wire import MessageRows, SegmentKey

Brought = tuple[SegmentKey, int]
"""A segment that gets tokens with a message, and how many."""


def brought(rows: MessageRows, key: Callable[[int, int, int], SegmentKey]) -> list[Brought]:
    """What a message brings; those that must be fetched last. ``key``: of a sequence's segment and shard."""
    return [*rows.kept, *((key(each.sequence, each.kv_start, each.shard), each.rows) for each in rows.pulled)]


def step_starts(
    messages: Iterable[tuple[MessageRows, list[Brought]]], end: Callable[[SegmentKey], int]
) -> dict[int, int]:
    """By sequence: the first position of a step, whether it attends there or only brings tokens, which are stored layer
    by layer until it has ended. ``end``: the position behind the last token of a segment, with those of the step."""
    first: dict[int, int] = {}
    for rows, brings in messages:
        attends = [(one.sequence, one.start) for one in (*rows.attends, *dict(rows.further).values())]
        for sequence, start in (*attends, *((key[0], end(key) - count) for key, count in brings)):
            first[sequence] = min(start, first.get(sequence, start))
    return first
