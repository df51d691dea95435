"""Places page tables in GPU memory. The host tracks where each table is and sends only the words that changed.

All tables of a memory worker are in one int32 array on the device, each in a region whose size is a power of two. A
step changes one word per new token. A table that outgrows its region moves to a region twice as large and is sent
again, so each slot of a sequence is sent at most twice on average.
"""

import collections
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from lamina.core.errors import CapacityError

Slots = npt.NDArray[np.int32]
FIRST_REGION = 64  # words
MOST_BYTES = 16  # bytes of the array for each KV slot: two words of 4 bytes, doubled by rounding to a power of two


class Regions:
    """A buddy allocator: regions are powers of two in words; free neighbours are merged."""

    def __init__(self, words: int) -> None:
        """``words`` is a power of two. Raises ValueError otherwise."""
        if words < 1 or words & (words - 1):
            raise ValueError(
                f"{words} words of page tables are not a power of two; give {1 << max(0, words).bit_length()}"
            )
        self.words = words
        self._free: dict[int, set[int]] = {words: {0}}

    @property
    def free_words(self) -> int:
        """Free words; they need not be contiguous."""
        return sum(size * len(starts) for size, starts in self._free.items())

    def allocate_words(self, size: int) -> int:
        """Allocate a region of ``size`` words, a power of two; returns its first word. Raises CapacityError."""
        fitting = [held for held, starts in self._free.items() if starts and held >= size]
        if not fitting:
            raise CapacityError(needed=size, free=self.free_words, capacity=self.words)
        held = min(fitting)
        start = self._free[held].pop()
        while held > size:
            held //= 2
            self._free.setdefault(held, set()).add(start + held)
        return start

    def free(self, start: int, size: int) -> None:
        """Free a region."""
        while size < self.words and start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free.setdefault(size, set()).add(start)


class PageTables:
    """Maps each segment to the words of the device's array that hold its slots, and collects unsent changes.

    A step reads its tables long after they were sent, so it pins them (``pin_tables``). Words freed while tables are
    pinned are not reused before every step that may read them has unpinned its tables.

    Not thread-safe: one thread owns it. An operation that raises changes nothing.
    """

    def __init__(self, words: int) -> None:
        """``words``: Length of the device's array, a power of two. Twice the slots suffice if segments share few."""
        self._regions = Regions(words)
        self._tables: dict[Hashable, tuple[int, int, int]] = {}  # first word, words, slots sent
        self._changes: list[tuple[int, Slots]] = []
        self._latest_reader = 0
        self._readers: dict[int, None] = {}  # numbers from pin_tables, oldest first
        # Of each region freed while tables were pinned: latest reader then, first word, words.
        self._freed: collections.deque[tuple[int, int, int]] = collections.deque()

    @property
    def words(self) -> int:
        """Length of the device's array."""
        return self._regions.words

    def start(self, segment: Hashable) -> int:
        """Return the first word of a segment's table. Raises KeyError if the segment has no table."""
        return self._tables[segment][0]

    def update(self, segment: Hashable, slots: Slots) -> None:
        """Set the table of ``segment`` to ``slots``, which must extend or truncate the previous one.

        Raises CapacityError, counted in words, if no region is large enough.
        """
        start, size, sent = self._tables.get(segment, (0, 0, 0))
        count = len(slots)
        if count > size:
            grown = max(FIRST_REGION, 1 << (count - 1).bit_length())
            region = self._regions.allocate_words(grown)
            self._free_region(start, size)
            start, size, sent = region, grown, 0
        if count > sent:
            self._changes.append((start + sent, slots[sent:].copy()))
        self._tables[segment] = start, size, count

    def free(self, segment: Hashable) -> None:
        """Free the table of a segment. Does nothing if it has none."""
        start, size, _ = self._tables.pop(segment, (0, 0, 0))
        self._free_region(start, size)

    def pin_tables(self) -> int:
        """Keep all current tables readable until ``unpin_tables`` is called with the number returned."""
        self._latest_reader += 1
        self._readers[self._latest_reader] = None
        return self._latest_reader

    def unpin_tables(self, reader: int) -> None:
        """Release the tables pinned as number ``reader``, and free words that nobody reads any more."""
        del self._readers[reader]
        oldest = next(iter(self._readers), self._latest_reader + 1)
        while self._freed and self._freed[0][0] < oldest:
            _, start, size = self._freed.popleft()
            self._regions.free(start, size)

    def _free_region(self, start: int, size: int) -> None:
        if not size:
            return
        if self._readers:
            self._freed.append((self._latest_reader, start, size))
        else:
            self._regions.free(start, size)

    def changes(self) -> npt.NDArray[np.int32]:
        """Return the changes since the last call: int32 [2, n], word indices and their new values, each word once."""
        if not self._changes:
            return np.empty((2, 0), np.int32)
        values = np.concatenate([slots for _, slots in self._changes])
        words = np.concatenate([np.arange(first, first + len(slots), dtype=np.int32) for first, slots in self._changes])
        self._changes.clear()
        # Regions are reused: of several writes to one word, the last one counts.
        _, last = np.unique(words[::-1], return_index=True)
        keep = len(words) - 1 - last
        return np.stack([words[keep], values[keep]])
