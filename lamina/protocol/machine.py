"""What a worker tells the engine of the machine it runs on: the engine assumes nothing about other machines."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import psutil

from lamina.protocol.control import Inspection
from lamina.protocol.messages import Hello, Resources
from lamina.transport.shm import host
from lamina.version import __version__

RDMA_DEVICES = Path("/sys/class/infiniband")
CGROUP = Path("/sys/fs/cgroup")  # inside a container, its own control group


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


def greeting() -> Hello:
    """The first message of this process to the engine."""
    rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    return Hello(host(), __version__, platform.node(), sorted(os.sched_getaffinity(0)), rdma)


def inspection(device: str, gpu_memory: Callable[[str], tuple[int, int]]) -> Inspection:
    """What answers ``Inspect`` in a worker on ``device``. ``gpu_memory``: bytes free on it and in all, 0 unless it is a
    GPU."""

    def inspect(sent_ns: int, now_ns: int) -> Resources:
        machine = psutil.virtual_memory().available
        return Resources(sent_ns, now_ns, free_memory(), machine, *gpu_memory(device), device == "cpu")

    return inspect
