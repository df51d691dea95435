"""Whether each block of a disk is accounted for."""

import itertools

from lamina.core.steps import blocks_of
from lamina.kv.disk import Disks


def unaccounted(disks: Disks) -> dict[str, list[int]]:
    """Return, by worker, the blocks that are not exactly one of free, kept and being written; empty if there are none.

    No fetch may be in progress.
    """
    found: dict[str, list[int]] = {}
    for worker, disk in disks._disks.items():
        writing = [one for copying in disks._copying.values() for one in copying.spills if one.worker == worker]
        held = [*disk._kept.values(), *(spill.blocks for spill in writing)]
        known = [*disk._free, *itertools.chain.from_iterable(held)]
        count = blocks_of(disks._placement.slots_with_disk()[worker], disks._overcommit)
        wrong = [block for block in range(count) if known.count(block) != 1] + list(+disk._pinned)
        if wrong or len(known) != count:
            found[worker] = wrong
    return found
