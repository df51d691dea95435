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
    return Hello(host(), __version__, platform.node(), sorted(os.sched_getaffinity(0)))


def inspection(device: str, gpu_bytes: Callable[[str], int]) -> Inspection:
    """What answers ``Inspect`` in a worker on ``device``. ``gpu_bytes``: bytes free on it, 0 unless it is a GPU."""

    def inspect(sent_ns: int, now_ns: int) -> Resources:
        machine = psutil.virtual_memory().available
        return Resources(sent_ns, now_ns, free_memory(), machine, gpu_bytes(device))

    return inspect
