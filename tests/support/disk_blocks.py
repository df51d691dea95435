"""Whether each block of a disk is accounted for."""

from lamina.core.steps import blocks_of
from lamina.kv.disk import Disks


def unaccounted(disks: Disks) -> dict[str, list[int]]:
    """Return, by worker, the blocks that are not exactly one of free, kept and being written; empty if there are none.

    No fetch may be in progress.
    """
    found: dict[str, list[int]] = {}
    for worker, disk in disks._disks.items():
        copying = disks._copying.get(worker)
        known = [*disk._free, *disk._kept.values(), *([] if copying is None else copying.spill.blocks)]
        count = blocks_of(disks._placement.capacities[worker], disks._overcommit)
        wrong = [block for block in range(count) if known.count(block) != 1] + list(+disk._pinned)
        if wrong or len(known) != count:
            found[worker] = wrong
    return found
