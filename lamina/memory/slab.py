"""Bookkeeping of the token slots of one memory worker.

Slots belong to segments, whose tokens have consecutive positions; any hashable key may name a segment. A slot number
indexes the K and V arrays of every layer. Allocation is granular to one token, so sharing needs no copy-on-write:
segments share the slots of a common prefix, and new tokens always get slots of their own.

Attention reads contiguous memory faster. So while many slots are free, each growing segment reserves a run of them for
its next tokens. Reserved slots count as free, and are released when other segments need them.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lamina.core.errors import CapacityError

Slots = NDArray[np.int32]
Key = TypeVar("Key", bound=Hashable)

_RUN = 64  # slots: 32 KiB of keys for 4 heads of 64 in bfloat16; runs of 16 read at 0.94, of 128 at 1.02 of its rate


class _PageTable:
    """The slots of one segment in token order: ``slots[:length]`` are in use, ``slots[length:held]`` reserved."""

    __slots__ = ("held", "length", "slots")

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.length = self.held = len(slots)

    def hold(self, slots: Slots) -> None:
        """Reserve more slots. Earlier views keep the old memory."""
        held = self.held + len(slots)
        if held > len(self.slots):
            grown = np.empty(max(held, 2 * len(self.slots)), np.int32)
            grown[: self.held] = self.slots[: self.held]
            self.slots = grown
        self.slots[self.held : held] = slots
        self.held = held


class Slab(Generic[Key]):
    """Allocates slots to segments, with a last-in-first-out free list and reference counts.

    Not thread-safe: one thread owns it. An operation that raises has changed nothing.

    Attributes:
        reach: All slots from this number on have never been allocated.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` is the number of token slots, at least 1. Raises ValueError otherwise."""
        if not 1 <= capacity < 2**31:
            raise ValueError(f"invalid slab of {capacity} slots; give 1 to {2**31 - 1}")
        # A stack: the top is at the end, so the first pops give slots 0, 1, 2, ...
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._free_count = capacity
        self._reserved = 0
        self.reach = 0
        self._references = np.zeros(capacity, np.int32)
        self._tables: dict[Key, _PageTable] = {}
        self._shortened: dict[Key, None] = {}
        self._growing: dict[Key, _PageTable] = {}  # segments that were appended to: only they reserve runs

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self._free)

    @property
    def free_slots(self) -> int:
        """Number of slots that no segment owns."""
        return self._free_count + self._reserved

    @property
    def used(self) -> int:
        """Number of slots that segments own; a shared slot counts once."""
        return self.capacity - self.free_slots

    @property
    def segments(self) -> list[Key]:
        """Keys of all open segments."""
        return list(self._tables)

    def __contains__(self, segment: Key) -> bool:
        return segment in self._tables

    def open(self, segment: Key) -> None:
        """Register an empty segment. Raises ValueError if it is already open."""
        self._require_new(segment)
        self._tables[segment] = _PageTable(np.empty(0, np.int32))

    def append(self, segment: Key, count: int) -> Slots:
        """Allocate slots for ``count`` more tokens of ``segment``; return them, int32 [count], in token order.

        Raises CapacityError if they do not fit, ValueError for an unknown segment or a negative count.
        """
        return self.extend((segment,), (count,))

    def extend(self, segments: Sequence[Key], counts: Sequence[int]) -> Slots:
        """Append to several segments at once, all or nothing: int32 [sum(counts)], one segment after another.

        Raises CapacityError if they do not all fit, ValueError for an unknown segment, a negative count or lengths
        that differ.
        """
        if len(segments) != len(counts) or min(counts, default=0) < 0:
            raise ValueError(f"give each of the {len(segments)} segments one count of at least 0, not {counts!r}")
        tables = [self._table(segment) for segment in segments]
        total = sum(counts)
        if total > self.free_slots:
            raise CapacityError(needed=total, free=self.free_slots, capacity=self.capacity)
        slots = np.empty(total, np.int32)
        start = 0
        for segment, table, count in zip(segments, tables, counts, strict=True):
            length = table.length + count
            if length > table.held:
                self._growing[segment] = table
                self._supply(table, length)
            if count == 1:  # decode: indexing costs a third of slicing
                slots[start] = table.slots[length - 1]
            else:
                slots[start : start + count] = table.slots[table.length : length]
            table.length = length
            start += count
        self._reserved -= total
        self._references[slots] = 1
        return slots

    def fork(self, parent: Key, child: Key, tokens: int) -> None:
        """Let ``child`` share the first ``tokens`` slots of ``parent``. A child that is open keeps the slots it has.

        Raises ValueError if the parent is unknown or shorter than that, or the child has as many tokens already.
        """
        table = self._table(parent)
        self._require_within(parent, table, tokens)
        begun = self._tables.get(child)
        if begun is None:
            shared = table.slots[:tokens].copy()
            self._tables[child] = _PageTable(shared)
        else:
            if begun.length >= tokens:
                raise ValueError(f"segment {child} has {begun.length} tokens already; fork more than {tokens}")
            self._give_up(begun)
            shared = table.slots[begun.length : tokens]
            begun.hold(shared)
            begun.length = begun.held
        self._references[shared] += 1

    def rearrange(self, old: Sequence[Key], new: Mapping[Key, Sequence[tuple[Key, int, int]]]) -> None:
        """Close the segments ``old``, and open ``new`` segments made of parts of open segments.

        A part (segment, first token, end) shares its slots with segments that stay open.

        Raises ValueError if a part is not within an open segment, or a new segment is open and not in ``old``.
        """
        tables: dict[Key, Slots] = {}
        for segment, parts in new.items():
            if segment not in old:
                self._require_new(segment)
            for source, _, stop in parts:
                self._require_within(source, self._table(source), stop)
            slots = [self._table(source).slots[start:stop] for source, start, stop in parts]
            tables[segment] = np.concatenate([np.empty(0, np.int32), *slots])
        for slots_of in tables.values():
            self._references[slots_of] += 1
        for segment in old:
            self.free(segment)
        for segment, slots_of in tables.items():
            self._tables[segment] = _PageTable(slots_of)

    def truncate(self, segment: Key, tokens: int) -> None:
        """Release all tokens of ``segment`` after its first ``tokens`` ones.

        Raises ValueError if the segment is unknown or shorter than that.
        """
        table = self._table(segment)
        self._require_within(segment, table, tokens)
        self._give_up(table)
        self._release(table.slots[tokens : table.length])
        table.length = table.held = tokens
        self._shortened[segment] = None

    def free(self, segment: Key) -> None:
        """Close ``segment``. Slots that it shares stay in use. Raises ValueError if it is unknown."""
        self.truncate(segment, 0)
        del self._tables[segment]
        self._growing.pop(segment, None)

    def slots(self, segment: Key) -> Slots:
        """Return the page table: read-only int32 [length], a view that is valid until the segment changes.

        Raises ValueError if the segment is unknown.
        """
        table = self._table(segment)
        view = table.slots[: table.length]
        view.flags.writeable = False
        return view

    def take_shortened(self) -> list[Key]:
        """Return the segments that have lost tokens or were freed since the last call, each once."""
        shortened, self._shortened = list(self._shortened), {}
        return shortened

    def _supply(self, table: _PageTable, length: int) -> None:
        """Reserve slots up to ``length``, rounded up to a run while each growing segment could have a run."""
        if length - table.held > self._free_count:
            for other in self._growing.values():
                self._give_up(other)
        count = length - table.held
        whole = -(-count // _RUN) * _RUN
        if whole + _RUN * len(self._growing) <= self._free_count:
            count = whole
        self._free_count -= count
        self._reserved += count
        self.reach = max(self.reach, self.capacity - self._free_count)
        table.hold(self._free[self._free_count : self._free_count + count][::-1])

    def _give_up(self, table: _PageTable) -> None:
        self._reserved -= table.held - table.length
        self._push(table.slots[table.length : table.held])
        table.held = table.length

    def _release(self, slots: Slots) -> None:
        self._references[slots] -= 1
        self._push(slots[self._references[slots] == 0])

    def _push(self, slots: Slots) -> None:
        # Reversed, so that the slots come back in their old order: runs in memory stay runs.
        self._free[self._free_count : self._free_count + len(slots)] = slots[::-1]
        self._free_count += len(slots)

    def _table(self, segment: Key) -> _PageTable:
        try:
            return self._tables[segment]
        except KeyError:
            raise ValueError(f"segment {segment} is not open in this slab; open or fork it first") from None

    def _require_new(self, segment: Key) -> None:
        if segment in self._tables:
            raise ValueError(f"segment {segment} is already open; free it first or choose another number")

    def _require_within(self, segment: Key, table: _PageTable, tokens: int) -> None:
        if not 0 <= tokens <= table.length:
            raise ValueError(f"segment {segment} has {table.length} tokens; give 0 to {table.length}, not {tokens}")
