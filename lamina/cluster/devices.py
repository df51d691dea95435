"""What this machine offers to workers."""

import os
from pathlib import Path

import psutil

from lamina.cluster.pool import Devices

CGROUP = Path("/sys/fs/cgroup")  # inside a container: its own control group
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def find_devices() -> Devices:
    """Cores this process may use, RAM, and GPUs as the NVIDIA kernel driver lists them."""
    return Devices(len(os.sched_getaffinity(0)), psutil.virtual_memory().total, tuple(_nvidia_models()))


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


def _nvidia_models() -> list[str]:
    if not NVIDIA_GPUS.is_dir():
        return []
    lines = [line for gpu in sorted(NVIDIA_GPUS.iterdir()) for line in (gpu / "information").read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
