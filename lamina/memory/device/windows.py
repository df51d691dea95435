"""Storage of layers with a sliding window: rows only for tokens that a step may still attend to.

All layers share the slots of a slab, but layers with a window need only those near the ends of sequences. So their
arrays are indexed by rows, which slots get when their K and V arrive. A row is not freed when its token leaves the
window. Instead, whenever many rows are in use, the ends of all segments show which slots are still needed, and the rows
of the others are freed, as by a garbage collector. So forks, moves and releases need no bookkeeping here.

A cached prefix has rows for the window before its end. A request that recomputes tokens of a prefix has rows for them
too: two slots with the same token of the same prefix may share one row (``renew``).

Rows are used from the first on, so resident memory is that of the most rows in use at once.
"""

import collections
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from lamina.kernels.segments import SegmentTable

Rows = npt.NDArray[np.int32]
Needed = Callable[[int], Iterator[Rows]]
"""The slots whose tokens layers with this window may still attend to."""

STEPS_KEPT = 4
"""Steps of a sequence whose tokens are kept besides the window: those in flight may be undone at an epoch's end."""

FEWEST = 1024  # rows in use before rows are first freed
SPARE = 8  # rows are freed again once an eighth more are in use
TABLES = 64  # of the latest steps


def most_rows(window: int, sequences: int, tokens: int) -> int:
    """Most rows in use with so many sequences at once. ``tokens``: the most that steps of all lanes run."""
    needed = sequences * (window + STEPS_KEPT) + STEPS_KEPT * tokens
    return FEWEST + with_spare(needed)


def with_spare(needed: int) -> int:
    """The rows in use before others are freed, if so many are needed."""
    return needed * (SPARE + 1) // SPARE


class Windows:
    """The rows of all layers with the same window. One thread owns it."""

    def __init__(self, window: int, capacity: int, needed: Needed) -> None:
        """``capacity``: slots of the slab. ``needed``: tells which of them layers must keep."""
        self.window = window
        self._needed = needed
        self._rows = np.full(capacity, -1, np.int32)  # by slot
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)  # a stack: the top is at the end
        self._free_count = capacity
        self._shared = np.zeros(capacity, bool)  # by row: several slots have it
        self._most = FEWEST
        self._tables: collections.OrderedDict[int, tuple[SegmentTable, SegmentTable]] = collections.OrderedDict()

    @property
    def used(self) -> int:
        """Rows that slots have."""
        return len(self._free) - self._free_count

    def place(self, slots: Rows) -> Rows:
        """Return the rows of these slots, whose K and V arrive; those that have none of their own get one."""
        rows = self._rows[slots]
        new = slots[(rows < 0) | self._shared[rows]]
        if not len(new):
            return rows
        self._rows[new] = -1
        if self.used + len(new) > min(self._most, len(self._free)):
            self._collect(slots)
            self._most = max(FEWEST, with_spare(self.used + len(new)))
        self._free_count -= len(new)
        self._rows[new] = self._free[self._free_count : self._free_count + len(new)][::-1]
        return self._rows[slots]

    def find(self, slots: Rows) -> Rows:
        """Return the rows of these slots; any row for one that has been forgotten."""
        return np.maximum(self._rows[slots], 0)

    def renew(self, slots: Rows, others: Rows, left: int) -> None:
        """Let ``slots`` have the rows of ``others``, which hold the same tokens, in the window of a step that begins
        ``left`` tokens after the first of them. Rows from before may hold anything if they have moved.
        """
        begin = max(0, left - self.window + 1)
        slots, others = slots[begin:], others[begin:]
        rows = self._rows[others]
        new = (slots != others) & (rows >= 0)
        self._rows[slots[new]] = rows[new]
        self._shared[rows[new]] = True

    def _collect(self, arriving: Rows) -> None:
        """Take back the rows of slots that are not needed. Those ``arriving`` may have left the window already: later
        steps of their sequence have been planned."""
        stays = np.zeros(len(self._rows), bool)
        stays[arriving] = True
        for slots in self._needed(self.window):
            stays[slots] = True
        self._rows[~stays] = -1
        owners = np.bincount(self._rows[self._rows >= 0], minlength=len(self._rows))
        free = np.flatnonzero(owners == 0)[::-1]  # the first rows are used again first
        self._free_count = len(free)
        self._free[: self._free_count] = free
        self._shared = owners > 1

    def table(self, table: SegmentTable) -> SegmentTable:
        """Return what is left of a table for these layers, by row. Made once per step: the rows of what it may attend
        to stay as they are."""
        known = self._tables.get(id(table))
        if known is None or known[0] is not table:
            known = self._tables[id(table)] = table, self._cut(table)
            if len(self._tables) > TABLES:
                self._tables.popitem(last=False)
        return known[1]

    def _cut(self, table: SegmentTable) -> SegmentTable:
        held = np.diff(table.kv_offsets)
        left = np.maximum(table.query_start.astype(np.int64) - self.window + 1 - table.kv_start, 0)
        seen = left < held
        first = np.minimum(left, np.maximum(held - 1, 0))  # a pair that sees nothing keeps a token, which is masked
        counts = held - first
        offsets = np.concatenate(([0], np.cumsum(counts)))
        indices = np.arange(offsets[-1]) + np.repeat(table.kv_offsets[:-1] + first - offsets[:-1], counts)
        rows = self._rows[table.slots[indices]]
        if (rows[np.repeat(seen, counts)] < 0).any():
            raise AssertionError(f"a step attends to tokens that layers with a window of {self.window} have forgotten")
        kv_start = table.kv_start + first.astype(np.int32)
        return SegmentTable(
            table.query_offsets, table.query_start, offsets.astype(np.int64), kv_start, np.maximum(rows, 0)
        )
