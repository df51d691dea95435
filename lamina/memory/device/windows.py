"""Storage of layers with a sliding window: rows only for tokens that a step may still attend to.

All layers share the slots of a slab, but layers with a window need only the slots near the ends of sequences. So the
arrays of these layers are indexed by row, and a slot gets a row when its K and V arrive. A row is not freed when its
token leaves the window: when many rows are in use, a garbage collection finds the slots that are still needed, and
frees all other rows. So forks, moves and releases need no bookkeeping here. Two slots with the same token of the same
prefix may share one row (``renew``).

The lowest free rows are allocated first, so resident memory is that of the most rows in use at once.
"""

import collections
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from lamina.kernels.segments import SegmentTable

Rows = npt.NDArray[np.int32]
Needed = Callable[[int], Iterator[Rows]]
"""Yields, for a window in tokens, arrays of the slots whose tokens may still be attended to."""

STEPS_KEPT = 4
"""Steps of a sequence whose tokens are kept besides the window: steps in flight may be undone when an epoch ends."""

FEWEST = 1024  # rows in use at which rows are first collected
SPARE = 8  # rows are collected again once an eighth more are in use
TABLES = 64  # tables of the latest steps that are kept


def most_rows(window: int, sequences: int, tokens: int) -> int:
    """Return the most rows in use for ``sequences``, if steps of all lanes together have at most ``tokens`` tokens."""
    needed = sequences * (window + STEPS_KEPT) + STEPS_KEPT * tokens
    return FEWEST + with_spare(needed)


def with_spare(needed: int) -> int:
    """Return the number of rows in use that triggers a collection after one that left ``needed`` rows in use."""
    return needed * (SPARE + 1) // SPARE


class Windows:
    """Maps slots to rows of the layers with one window length. One thread owns it."""

    def __init__(self, window: int, capacity: int, needed: Needed) -> None:
        """Start with all rows free.

        Args:
            window: Length in tokens.
            capacity: Slots of the slab.
            needed: Finds the slots that must keep their rows.
        """
        self.window = window
        self._needed = needed
        self._rows = np.full(capacity, -1, np.int32)  # by slot
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)  # a stack: the top is at the end
        self._free_count = capacity
        self._shared = np.zeros(capacity, bool)  # by row: several slots have it
        self._collect_at = FEWEST
        self._tables: collections.OrderedDict[int, tuple[SegmentTable, SegmentTable]] = collections.OrderedDict()

    @property
    def used(self) -> int:
        """Rows in use."""
        return len(self._free) - self._free_count

    def place(self, slots: Rows) -> Rows:
        """Return the row of each slot, to write its K and V; slots without a row of their own get a free one."""
        rows = self._rows[slots]
        new = slots[(rows < 0) | self._shared[rows]]
        if not len(new):
            return rows
        self._rows[new] = -1
        if self.used + len(new) > min(self._collect_at, len(self._free)):
            self._collect(slots)
            self._collect_at = max(FEWEST, with_spare(self.used + len(new)))
        self._free_count -= len(new)
        self._rows[new] = self._free[self._free_count : self._free_count + len(new)][::-1]
        return self._rows[slots]

    def find(self, slots: Rows) -> Rows:
        """Return the row of each slot, to read its K and V; an arbitrary row for a slot that has none."""
        return np.maximum(self._rows[slots], 0)

    def renew(self, target: Rows, source: Rows, first_query: int) -> None:
        """Let the slots ``target`` [T] share the rows of ``source`` [T], which hold the same tokens.

        Only tokens inside the window of a query at offset ``first_query`` change rows. The earlier rows of ``target``
        may be out of date, as the KV may have moved since.
        """
        begin = max(0, first_query - self.window + 1)
        target, source = target[begin:], source[begin:]
        rows = self._rows[source]
        new = (target != source) & (rows >= 0)
        self._rows[target[new]] = rows[new]
        self._shared[rows[new]] = True

    def _collect(self, arriving: Rows) -> None:
        """Free the rows of slots that are not needed, except those of slots whose K and V are ``arriving``."""
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
        """Return ``table`` with only the tokens inside the window, and rows in place of slots.

        Made once per step and kept: rows that a step may attend to do not change while it runs.
        """
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
        # A pair with nothing inside its window keeps one token, which is masked.
        first = np.minimum(left, np.maximum(held - 1, 0))
        counts = held - first
        offsets = np.concatenate(([0], np.cumsum(counts)))
        indices = np.arange(offsets[-1]) + np.repeat(table.kv_offsets[:-1] + first - offsets[:-1], counts)
        rows = self._rows[table.slots[indices]]
        if (rows[np.repeat(seen, counts)] < 0).any():
            raise AssertionError(
                f"a step attends to tokens whose rows, for a window of {self.window} tokens, have been freed"
            )
        kv_start = table.kv_start + first.astype(np.int32)
        return SegmentTable(
            table.query_offsets, table.query_start, offsets.astype(np.int64), kv_start, np.maximum(rows, 0)
        )
