"""Measures this machine for the hardware catalogue, and the load of other processes meanwhile."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from lamina.core.types import DType

QUIET = 0.05
"""Share of the cores' time for others up to which a measurement counts as undisturbed: a desktop's own daemons."""


@dataclass(frozen=True)
class Disturbance:
    """Share of this process's cores, 0 to 1, that other processes used during ``seconds`` of wall time."""

    others: float
    seconds: float

    @property
    def disturbed(self) -> bool:
        """Whether the share is too high to trust a measurement."""
        return self.others > QUIET

    def __str__(self) -> str:
        return f"other processes took {self.others:.0%} of this machine's processor time"


class Watch:
    """Measures the disturbance since its creation. This process's children do not count as other processes."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._all_s, self._own_s = _all_seconds(), _own_seconds()

    @classmethod
    def sample(cls) -> Disturbance:
        """Sleep for a second and return the disturbance during it."""
        watch = cls()
        time.sleep(1.0)
        return watch.so_far()

    def so_far(self) -> Disturbance:
        """Return the disturbance since the creation."""
        seconds = time.monotonic() - self._begun_s
        others = _all_seconds() - self._all_s - (_own_seconds() - self._own_s)
        available = max(1e-9, seconds * len(os.sched_getaffinity(0)))
        return Disturbance(min(1.0, max(0.0, others / available)), seconds)


def _all_seconds() -> float:
    """Return seconds for which this process's cores were busy, or were stolen by the hypervisor."""
    cores, times = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
    mine = [times[core] for core in cores if core < len(times)]
    return float(sum(one.user + one.nice + one.system + one.irq + one.softirq + one.steal for one in mine))


def _own_seconds() -> float:
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:  # ended since it was listed
            continue
        seconds += used.user + used.system + used.children_user + used.children_system
    return seconds


READ_BYTES = 2**30
PRODUCT = (512, 4096, 4096)
ROUNDS = 5


def entry() -> dict[str, float | str]:
    """Measure a catalogue entry, in the units of ``hardware.toml``. Takes a few seconds and 1 GiB of memory."""
    cores = len(os.sched_getaffinity(0))
    copied = _copy_bytes_s() / 1e9
    clock = psutil.cpu_freq()
    return {
        "device": f"{_processor()}, {cores} cores",
        "processors": cores,
        "clock_ghz": (clock.max or clock.current) / 1000 if clock else 1.0,
        **{f"{dtype.value}_tflops": _flops(dtype) / 1e12 for dtype in DType},
        "memory_gb_s": _read_bytes_s(cores) / 1e9,
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "link": "shared memory",
        "link_gb_s": copied,
        "nic_gb_s": copied,
        "watts": 0,
    }


def as_toml(values: dict[str, float | str]) -> str:
    """Return the text of a hardware file with ``values`` as the kind ``cpu``."""
    lines = [
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value:.4g}" for name, value in values.items()
    ]
    return "\n".join(
        [
            "# Measured by lamina plan --measure. Fill in watts yourself; prices go into a file for --prices.",
            "# memory_gib is all memory of this machine: lower it to what one worker may use.",
            "[cpu]",
            *lines,
            "[cpu.sources]",
            'specification = "measured on this machine; NIC: workers on one machine share memory"',
            "",
        ]
    )


def _fastest_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _flops(dtype: DType) -> float:
    import torch

    from lamina.models.pretrained import torch_dtype

    rows, columns, depth = PRODUCT
    weight = torch.ones(columns, depth, dtype=torch_dtype(dtype))
    hidden = torch.ones(rows, depth, dtype=torch_dtype(dtype))
    with torch.inference_mode():
        return 2 * rows * columns * depth / _fastest_s(lambda: torch.nn.functional.linear(hidden, weight))


def _read_bytes_s(threads: int) -> float:
    from lamina import _native
    from lamina.kernels.host_memory import allocate

    memory = allocate(READ_BYTES)
    memory[:] = 1  # allocates every page
    return READ_BYTES / _fastest_s(lambda: _native.read_memory(memory, threads))


def _copy_bytes_s() -> float:
    source = np.ones(READ_BYTES // 8, dtype=np.uint8)
    target = np.empty_like(source)
    return source.nbytes / _fastest_s(lambda: np.copyto(target, source))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0].replace('"', "") if names else platform.machine()
