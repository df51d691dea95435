"""What this machine offers to workers."""

import os
from pathlib import Path

import psutil

from lamina.cluster.pool import Devices
from lamina.kernels.gpu.device import find_cards

CGROUP = Path("/sys/fs/cgroup")  # inside a container: its own control group


def find_devices() -> Devices:
    """Cores that this process may use, RAM, and NVIDIA GPUs."""
    gpus = tuple(card.name for card in find_cards() or ())
    return Devices(len(os.sched_getaffinity(0)), psutil.virtual_memory().total, gpus)


def free_memory() -> int:
    """Bytes that new allocations may take: what the machine has free, or what the control group still allows.

    Cached files, such as a checkpoint that has been read, count as used by a control group but make room when asked to;
    here those do that are not in active use, as in Kubernetes' working set.
    """
    free = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.is_file() and (bound := limit.read_text().strip()) != "max":
        used = int((CGROUP / "memory.current").read_text())
        kinds = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, int(bound) - used + int(kinds["inactive_file"]))
    return max(0, free)
