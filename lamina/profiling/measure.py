"""Measures this machine for the hardware catalogue: the entry ``cpu`` that `lamina plan --measure FILE` writes.

Peaks are measured, not taken from specifications: the fastest of a few rounds of a large matrix product, of a read of
more memory than the caches hold and of a copy, each on all cores that this process may use.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lamina.types import DType

READ_BYTES = 2**30
PRODUCT = (512, 4096, 4096)
ROUNDS = 5


def entry() -> dict[str, float | str]:
    """Measure a catalogue entry, in the units of ``hardware.toml``. Takes a few seconds and 1 GiB of memory."""
    import psutil

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
    """The text of a hardware file with ``values`` as the kind ``cpu``."""
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
    """Seconds of the fastest of ROUNDS calls, after a warm-up call."""
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _flops(dtype: DType) -> float:
    import torch

    from lamina.models.config import torch_dtype

    rows, columns, depth = PRODUCT
    weight = torch.ones(columns, depth, dtype=torch_dtype(dtype))
    hidden = torch.ones(rows, depth, dtype=torch_dtype(dtype))
    with torch.inference_mode():
        return 2 * rows * columns * depth / _fastest_s(lambda: torch.nn.functional.linear(hidden, weight))


def _read_bytes_s(threads: int) -> float:
    from lamina.kernels.memory import allocate, read

    memory = allocate(READ_BYTES)
    memory[:] = 1  # allocates every page
    return READ_BYTES / _fastest_s(lambda: read(memory, threads))


def _copy_bytes_s() -> float:
    source = np.ones(READ_BYTES // 8, dtype=np.uint8)
    target = np.empty_like(source)
    return source.nbytes / _fastest_s(lambda: np.copyto(target, source))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0].replace('"', "") if names else platform.machine()
