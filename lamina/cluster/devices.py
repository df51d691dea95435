"""What this machine offers to workers."""

import os
from pathlib import Path

import psutil

from lamina.cluster.pool import Devices

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def find_devices() -> Devices:
    """Cores this process may use, RAM, and GPUs as the NVIDIA kernel driver lists them."""
    return Devices(len(os.sched_getaffinity(0)), psutil.virtual_memory().total, tuple(_nvidia_models()))


def _nvidia_models() -> list[str]:
    if not NVIDIA_GPUS.is_dir():
        return []
    lines = [line for gpu in sorted(NVIDIA_GPUS.iterdir()) for line in (gpu / "information").read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
