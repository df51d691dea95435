"""When NICs may write into GPU memory: how the driver's answers are read, and errors without a driver."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.core.errors import TransportError
from lamina.transport.device.peer_memory import Ability, ability


@pytest.mark.parametrize(
    ("said", "obstacle"),
    [
        (Ability(exports=True, ordered=True, flushes=False), ""),
        (Ability(exports=True, ordered=False, flushes=True), ""),
        (Ability(exports=True, ordered=False, flushes=False), "neither orders nor flushes .* use a later one"),
        (Ability(exports=False, ordered=True, flushes=True), "DMA_BUF_SUPPORTED is 0.* open kernel modules"),
    ],
)
def test_a_card_needs_dma_bufs_and_a_way_to_see_what_was_written(said: Ability, obstacle: str) -> None:
    assert bool(said.obstacle) == bool(obstacle)
    if obstacle:
        with pytest.raises(TransportError, match=obstacle):
            raise TransportError(said.obstacle)


def test_without_a_driver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(TransportError, match=r"NVIDIA driver cannot be loaded \(libcuda.so.1.*install it"):
        ability(0)


def driver(values: dict[int, int]) -> SimpleNamespace:
    """A fake driver with one GPU and these attributes."""

    def attribute(value: Any, number: int, device: object) -> int:
        if number not in values:
            return 1  # CUDA_ERROR_INVALID_VALUE
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = values[number]
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGet=lambda device, index: 0 if index == 0 else 101,  # CUDA_ERROR_INVALID_DEVICE
        cuDeviceGetAttribute=attribute,
        cuGetErrorString=lambda result, text: 1,
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({124: 1, 117: 3, 118: 200}, Ability(True, True, True)),
        ({124: 1, 117: 1, 118: 0}, Ability(True, False, True)),
        ({124: 1, 117: 2, 118: 100}, Ability(True, True, False)),
        ({}, Ability(False, False, False)),
    ],
)
def test_what_the_driver_answers_is_read_as_its_header_says(
    monkeypatch: pytest.MonkeyPatch, values: dict[int, int], expected: Ability
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver(values))
    assert ability(0) == expected
    with pytest.raises(TransportError, match=r"GPU 1 failed: unknown error \(CUDA error 101\)"):
        ability(1)
