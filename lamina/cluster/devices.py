"""Finds the cores and GPUs that this machine offers to workers."""

import os

import psutil

from lamina.cluster.pool import Devices
from lamina.kernels.gpu.device import find_gpus


def find_devices() -> Devices:
    """Cores that this process may use, RAM, and NVIDIA GPUs."""
    gpus = tuple(gpu.name for gpu in find_gpus() or ())
    return Devices(len(os.sched_getaffinity(0)), psutil.virtual_memory().total, gpus)
