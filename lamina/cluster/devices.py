"""Finds the cores, memory and GPUs that this machine offers to workers."""

import os
from pathlib import Path

import psutil

from lamina.cluster.pool import Devices
from lamina.kernels.gpu.device import find_gpus

CGROUP = Path("/sys/fs/cgroup")  # inside a container, its own control group


def find_devices() -> Devices:
    """Cores that this process may use, RAM, and NVIDIA GPUs."""
    gpus = tuple(gpu.name for gpu in find_gpus() or ())
    return Devices(len(os.sched_getaffinity(0)), psutil.virtual_memory().total, gpus)


def free_memory() -> int:
    """Bytes available for new allocations: free memory of the machine or, if less, of this control group.

    A control group counts cached files, such as a checkpoint that has been read, as used, although they can be
    reclaimed. Inactive ones count as free here, as in Kubernetes' working set.
    """
    free = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.is_file() and (bound := limit.read_text().strip()) != "max":
        used = int((CGROUP / "memory.current").read_text())
        kinds = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, int(bound) - used + int(kinds["inactive_file"]))
    return max(0, free)
