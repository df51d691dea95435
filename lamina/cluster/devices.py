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
    """Bytes that new allocations may take: what the machine has free, or what the control group still allows."""
    free = psutil.virtual_memory().available
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and (bound := limit.read_text().strip()) != "max":
        free = min(free, int(bound) - int(used.read_text()))
    return max(0, free)


def _nvidia_models() -> list[str]:
    if not NVIDIA_GPUS.is_dir():
        return []
    lines = [line for gpu in sorted(NVIDIA_GPUS.iterdir()) for line in (gpu / "information").read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
