"""Cuts the attention of long prompt chunks into parts of a few milliseconds, between which other lanes are served.

The attention of 2,048 rows to 131,072 tokens takes seconds. It is cut by row block, KV head (together: the tasks of the
native kernel) and token range. Decode rows are not cut: interleaving two lanes' decode steps would only delay both.
Pure: the cuts depend on the step and the machine alone, so that results do not depend on concurrent load.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lamina.core.types import AttentionSpec
from lamina.kernels.attention import BEST_PATH, Path, count_tasks
from lamina.kernels.segments import SegmentTable

CUT_S = 4e-3
"""Target duration of a cut: a message that arrives meanwhile waits for one at most."""

_PRODUCTS_PER_S: Mapping[Path, float] = {
    Path.PORTABLE: 7e9,
    Path.AVX2: 45e9,
    Path.AVX512_BF16: 140e9,
    Path.AMX: 250e9,
}
"""Products with elements of K and V that a thread computes per second, see bench/kernels/attention.py."""

MOST_PRODUCTS = int(CUT_S * _PRODUCTS_PER_S[BEST_PATH])  # products that a thread computes in a cut
_TILE = 64  # tokens that the native kernel takes at once
_FEWEST_TOKENS = 512  # fewest tokens of a range: merging shorter ranges costs too much


class Cut(NamedTuple):
    """Attention of query rows [start, stop), which are all rows of ``table``, over the table's tokens.

    Attributes:
        tasks: [first, last) of the attention's tasks, see ``lamina.kernels.attention.partial_tasks``; None: all.
        adds: Whether the result is merged into the results of earlier cuts of these rows.
    """

    start: int
    stop: int
    table: SegmentTable
    tasks: tuple[int, int] | None = None
    adds: bool = False


def cuts(table: SegmentTable, spec: AttentionSpec, threads: int, most: int) -> Iterator[Cut]:
    """Yield the cuts of an attention in the order in which they must run: one cut unless it has a long prompt chunk.

    ``most``: approximate number of products of one thread in one cut (``MOST_PRODUCTS``).
    """
    offsets = table.query_offsets
    if table.most_rows <= 1:
        yield Cut(0, int(offsets[-1]), table)
        return
    first = 0  # of the pairs that are not cut
    for pair, rows in enumerate(np.diff(offsets).tolist()):
        if rows > 1 and _products(_seen(table, pair, spec, 0, None), spec) > most * threads:
            if first < pair:
                yield Cut(int(offsets[first]), int(offsets[pair]), _pairs(table, first, pair))
            yield from _cut_pair(table, pair, spec, threads, most)
            first = pair + 1
    if first < len(offsets) - 1 or len(offsets) == 1:
        yield Cut(int(offsets[first]), int(offsets[-1]), table if first == 0 else _pairs(table, first, None))


def _cut_pair(table: SegmentTable, pair: int, spec: AttentionSpec, threads: int, most: int) -> Iterator[Cut]:
    start, stop = table.query_offsets[pair : pair + 2].tolist()
    begin, end = _visible(table, pair, spec)
    tasks = count_tasks(np.array([0, stop - start], np.int32), spec)
    # A task's products per token, as if all of its rows saw it.
    width = max(1, (stop - start) * spec.query_heads * (spec.qk_dim + spec.v_dim) // tasks)
    tokens = max(most // width // _TILE * _TILE, _FEWEST_TOKENS)
    for at in range(begin, end, tokens):
        upto = min(at + tokens, end)
        of_task = max(1, _products(_seen(table, pair, spec, at, upto), spec) // tasks)
        together = threads * max(1, most // of_task)
        part = _tokens(table, pair, at, upto)
        for task in range(0, tasks, together):
            yield Cut(start, stop, part, (task, min(task + together, tasks)), adds=at > begin)


def _seen(table: SegmentTable, pair: int, spec: AttentionSpec, begin: int, end: int | None) -> int:
    """Return the number of (row, token) pairs in tokens [begin, end) of a pair's segment that causality allows."""
    low, high = _bounds(table, pair, spec)
    stop = int(table.kv_offsets[pair + 1] - table.kv_offsets[pair]) if end is None else end
    return int(np.maximum(np.minimum(high, stop) - np.maximum(low, begin), 0).sum())


def _visible(table: SegmentTable, pair: int, spec: AttentionSpec) -> tuple[int, int]:
    """Return the range of a pair's segment, as indices into it, that any of its rows may see."""
    low, high = _bounds(table, pair, spec)
    return int(low.min()), max(int(high.max()), int(low.min()) + 1)


def _bounds(table: SegmentTable, pair: int, spec: AttentionSpec) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first token that each row of a pair sees, and one after the last: indices into the pair's segment."""
    rows = int(table.query_offsets[pair + 1] - table.query_offsets[pair])
    tokens = int(table.kv_offsets[pair + 1] - table.kv_offsets[pair])
    positions = int(table.query_start[pair]) + np.arange(rows, dtype=np.int64)
    first = np.zeros(rows, np.int64)
    if spec.window:
        first = np.maximum(first, positions - spec.window + 1)
    if spec.chunk:
        first = np.maximum(first, positions // spec.chunk * spec.chunk)
    start = int(table.kv_start[pair])
    return np.clip(first - start, 0, tokens), np.clip(positions + 1 - start, 0, tokens)


def _products(seen: int, spec: AttentionSpec) -> int:
    """Return the multiplications for ``seen`` (row, token) pairs."""
    return seen * spec.query_heads * (spec.qk_dim + spec.v_dim)


def _pairs(table: SegmentTable, first: int, last: int | None) -> SegmentTable:
    """Return pairs [first, last) of a table, with their rows and tokens."""
    last = len(table.query_start) if last is None else last
    begin, end = table.kv_offsets[first], table.kv_offsets[last]
    return SegmentTable(
        table.query_offsets[first : last + 1] - table.query_offsets[first],
        table.query_start[first:last],
        table.kv_offsets[first : last + 1] - begin,
        table.kv_start[first:last],
        table.slots[begin:end],
    )


def _tokens(table: SegmentTable, pair: int, begin: int, end: int) -> SegmentTable:
    """Return one pair of a table, with tokens [begin, end) of its segment."""
    first = table.kv_offsets[pair]
    return SegmentTable(
        table.query_offsets[pair : pair + 2] - table.query_offsets[pair],
        table.query_start[pair : pair + 1],
        np.array([0, end - begin], np.int64),
        table.kv_start[pair : pair + 1] + np.int32(begin),
        table.slots[first + begin : first + end],
    )
