"""Finds the cores and GPUs that this machine offers to workers."""

import os

import psutil

from lamina.cluster.pool import GPUS, Devices, parse
from lamina.env import environment
from lamina.kernels.gpu.device import find_gpus


def find_devices() -> Devices:
    """Cores that this process may use, RAM, and NVIDIA GPUs, or those of ``LAMINA_EMULATED_GPUS``."""
    cores, ram_bytes = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    if emulated := environment().emulated_gpus:
        names = [GPUS[entry.kind] for entry in parse(emulated, GPUS) for _ in range(entry.count)]
        return Devices(cores, ram_bytes, tuple(names), emulated=True)
    return Devices(cores, ram_bytes, tuple(gpu.name for gpu in find_gpus() or ()))
