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

    def allocate_blocks(self, count: int) -> list[int]:
        """Return up to ``count`` blocks to write to: free blocks, then those of the least recently used entries."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        for entry, blocks in list(self._kept.items()) if len(taken) < count else ():
            if len(taken) >= count:
                break
            if not any(self._pinned[block] for block in blocks):
                del self._kept[entry]
                taken += blocks
        self._free += taken[count:]
        return taken[:count]

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
        """Return for how many of ``count`` keys all disks have blocks, and these blocks by worker."""
        taken = {worker: disk.allocate_blocks(count * len(part)) for worker, (disk, part) in self.parts.items()}
        fitting = min(len(taken[worker]) // len(shards) for worker, (_, shards) in self.parts.items())
        for worker, (disk, shards) in self.parts.items():
            disk.free_unwritten(taken[worker][fitting * len(shards) :])
            taken[worker] = taken[worker][: fitting * len(shards)]
        return fitting, taken

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
