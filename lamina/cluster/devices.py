"""Finds the cores, memory and GPUs that this machine offers to workers."""

import os
from pathlib import Path

import psutil

from lamina.cluster.pool import GPUS, Devices, parse
from lamina.env import environment
from lamina.kernels.gpu.device import find_gpus

CGROUP = Path("/sys/fs/cgroup")  # inside a container, its own control group


def find_devices() -> Devices:
    """Cores that this process may use, RAM, and NVIDIA GPUs, or those of ``LAMINA_EMULATED_GPUS``."""
    cores, ram_bytes = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    if emulated := environment().emulated_gpus:
        names = [GPUS[entry.kind] for entry in parse(emulated, GPUS) for _ in range(entry.count)]
        return Devices(cores, ram_bytes, tuple(names), emulated=True)
    return Devices(cores, ram_bytes, tuple(gpu.name for gpu in find_gpus() or ()))


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
