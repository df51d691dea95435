"""Devices of memory workers, which hold KV and run attention: CPU, GPU or emulated GPU behind one protocol."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lamina.core.types import AttentionSpec, KvElement, Polling
from lamina.kernels.gpu.device import memory
from lamina.memory.device.base import Device, Largest
from lamina.memory.device.windows import Needed


def make(
    name: str,
    attentions: Sequence[AttentionSpec],
    element: KvElement,
    capacity: int,
    threads: int,
    needed: Needed | None = None,
    polling: Polling = "host",
) -> Device:
    """Return the device ``name``, with slabs of ``capacity`` token slots: "cpu", "cuda:0", or "emulated", which runs
    the code for GPUs in Triton's interpreter. ``needed``: the slots that layers with a window keep on a CPU; GPUs keep
    all. ``polling``: who waits for messages, the host or the GPU.

    Raises ConfigError if the device does not exist or a package is missing.
    """
    if name == "cpu":
        from lamina.memory.device.cpu import Cpu

        return Cpu(attentions, element, capacity, threads, needed)
    from lamina.memory.device.gpu import Gpu, backend, polled_slots, workspaces

    slots = polled_slots(name) if gpu_polls(name, polling) else None
    return Gpu(backend(name), attentions, element, capacity, workspaces(name), slots)


@functools.cache
def gpu_polls(name: str, polling: Polling) -> bool:
    """Return whether the device ``name`` waits for messages itself; CPUs never do. Raises ConfigError if it cannot be
    used."""
    if name == "cpu" or polling == "host":
        return False
    from lamina.memory.device.gpu import backend, polled_slots
    from lamina.memory.device.polling import polls

    return polls(polling, backend(name), lambda: polled_slots(name))


def reserve(
    name: str, attentions: Sequence[AttentionSpec], element: KvElement, query: np.dtype[Any], largest: Largest
) -> None:
    """Compile the kernels of steps up to the ``largest`` for the device ``name`` and messages of type ``query``, and
    allocate the memory that they need on a GPU beside slabs. The memory that is free afterwards is for slabs.

    Raises ConfigError if the device cannot be used, and MemoryError if it has too little memory.
    """
    if name != "cpu":
        from lamina.memory.device.gpu import reserve

        reserve(name, attentions, element, query, largest)


def gpu_memory(name: str) -> tuple[int, int]:
    """Return the (free, total) bytes of the device ``name``; zeros if it is no GPU that this process may use."""
    kind, _, index = name.partition(":")
    return memory(int(index)) if kind == "cuda" and index.isdecimal() else (0, 0)
