"""Which blocks of the disks of memory workers hold which cached tokens. Pure."""

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from lamina.core.steps import Spill

Entry: TypeAlias = tuple[bytes, range]
"""The key of ``BLOCK`` tokens, and shards of their heads. It has one block for each shard."""


class Blocks:
    """The blocks of one disk."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._kept: collections.OrderedDict[Entry, Sequence[int]] = collections.OrderedDict()  # in order of use
        self._pinned = collections.Counter[int]()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._kept

    def pin(self, entries: Sequence[Entry]) -> list[int]:
        """Return the blocks of these entries, mark them as just used, and keep them until ``unpin``."""
        for entry in entries:
            self._kept.move_to_end(entry)
        blocks = [block for entry in entries for block in self._kept[entry]]
        self._pinned.update(blocks)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pinned.subtract(blocks)

    def count_allocatable(self, count: int) -> int:
        """Return for how many of ``count`` blocks ``allocate_blocks`` would find room."""
        return min(count, len(self._free) + sum(map(len, self._evictable(count - len(self._free)).values())))

    def _evictable(self, count: int) -> dict[Entry, Sequence[int]]:
        """Return the least recently used entries that are not pinned, with ``count`` blocks or as many as there are."""
        found = dict[Entry, Sequence[int]]()
        for entry, blocks in self._kept.items() if count > 0 else ():
            if not any(self._pinned[block] for block in blocks):
                found[entry] = blocks
                if (count := count - len(blocks)) <= 0:
                    break
        return found

    def allocate_blocks(self, count: int) -> list[int]:
        """Return up to ``count`` blocks to write to: free blocks, then those of the least recently used entries."""
        for entry, blocks in self._evictable(count - len(self._free)).items():
            del self._kept[entry]
            self._free += blocks
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def record_written(self, entries: Sequence[Entry], blocks: Sequence[int]) -> None:
        """Record that allocated blocks now hold these entries. Entries that the disk had already stay where they are:
        they may be pinned."""
        left = iter(blocks)
        for entry in entries:
            written = [next(left) for _ in entry[1]]
            if entry in self._kept:
                self._free += written
            else:
                self._kept[entry] = written

    def free_unwritten(self, blocks: Sequence[int]) -> None:
        """Free blocks that were allocated but not written."""
        self._free += blocks

    def discard_unreadable(self, entries: Sequence[Entry]) -> None:
        """Forget entries that cannot be read."""
        for entry in entries:
            self._free += self._kept.pop(entry, ())


class PlaceBlocks:
    """The blocks of one place: each of its workers has those of its shards of heads on its disk."""

    def __init__(self, parts: Mapping[str, tuple[Blocks, range]]) -> None:
        """``parts``: The disk and the shards of each worker."""
        self.parts = parts

    def __contains__(self, key: bytes) -> bool:
        return all((key, shards) in disk for disk, shards in self.parts.values())

    def count_kept(self, keys: Sequence[bytes], first: int) -> int:
        """Return the number of consecutive ``keys`` from place ``first`` on that the disks have."""
        return next((n for n, key in enumerate(keys[first:]) if key not in self), len(keys[first:]))

    def pin(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """Return, by worker, the blocks of these keys, as ``Blocks.pin``."""
        return {worker: disk.pin(_entries(keys, shards)) for worker, (disk, shards) in self.parts.items()}

    def allocate_blocks(self, count: int) -> tuple[int, dict[str, list[int]]]:
        """Return for how many of ``count`` keys all disks have blocks, and these blocks by worker. No disk gives up
        entries for other keys."""
        parts = self.parts.items()
        fitting = min(disk.count_allocatable(count * len(part)) // len(part) for _, (disk, part) in parts)
        return fitting, {worker: disk.allocate_blocks(fitting * len(part)) for worker, (disk, part) in parts}

    def record_written(self, keys: Sequence[bytes], spills: Sequence[Spill]) -> None:
        """Record that copies have written these keys."""
        for spill in spills:
            disk, shards = self.parts[spill.worker]
            disk.record_written(_entries(keys, shards), spill.blocks)

    def discard_unreadable(self, keys: Sequence[bytes], workers: Collection[str]) -> None:
        """Forget blocks of these keys that ``workers`` cannot read."""
        for worker in workers:
            disk, shards = self.parts[worker]
            disk.discard_unreadable(_entries(keys, shards))


def _entries(keys: Sequence[bytes], shards: range) -> list[Entry]:
    return [(key, shards) for key in keys]
