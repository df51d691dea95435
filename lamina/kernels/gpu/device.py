"""Which device attention runs on: what is asked for, what there is, and what to install. Imports no GPU package."""

import ctypes
import re
from dataclasses import dataclass
from importlib import metadata

from lamina.errors import ConfigError

LEAST_CAPABILITY = 80  # products of bfloat16
CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
REMEDY = "pip install 'lamina[cuda]'"


@dataclass(frozen=True)
class Card:
    """One NVIDIA card; ``capability`` is 90 for 9.0."""

    name: str
    capability: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability // 10}.{self.capability % 10})"


@dataclass(frozen=True)
class Found:
    """What this machine and this Python have. ``cards`` is None without a driver; versions are None if absent."""

    cards: tuple[Card, ...] | None
    triton: str | None
    cupy: str | None

    def __str__(self) -> str:
        cards = "no NVIDIA driver (libcuda.so.1)" if self.cards is None else "an NVIDIA driver without cards"
        if self.cards:
            cards = ", ".join(f"cuda:{index} {card}" for index, card in enumerate(self.cards))
        packages = ((self.triton, "Triton"), (self.cupy, "CuPy"))
        return f"{cards}; " + ", ".join(f"{name} {version}" if version else f"no {name}" for version, name in packages)


def select(asked: str, found: Found) -> int | None:
    """The card's number for ``cuda`` or ``cuda:1``, None for ``cpu``.

    Raises:
        ConfigError: no such device, a card too old, or a missing package; says what was found and what to do.
    """
    if asked == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::(0|[1-9][0-9]{0,3}))?", asked)
    if match is None:
        raise ConfigError(f"device {asked!r} is none; give cpu, cuda or cuda:N, such as cuda:1")
    index = int(match[1] or 0)

    def refuse(remedy: str) -> ConfigError:
        return ConfigError(f"{asked} cannot be used; found {found}. {remedy}, or ask for cpu")

    if not found.cards:
        install = "Install NVIDIA's driver" if found.cards is None else "Check nvidia-smi and CUDA_VISIBLE_DEVICES"
        raise refuse(install if found.triton and found.cupy else f"{install} and {REMEDY}")
    if index >= len(found.cards):
        raise refuse(f"Ask for cuda:0 to cuda:{len(found.cards) - 1}")
    if found.cards[index].capability < LEAST_CAPABILITY:
        raise refuse("Attention needs a card of compute capability 8.0 or higher: use another")
    if not (found.triton and found.cupy):
        raise refuse(f"Run {REMEDY}")
    return index


def find() -> Found:
    """Look for cards and packages. Initialises the driver in this process, which must not fork afterwards."""
    cupy = next(filter(None, map(_version, CUPY_PACKAGES)), None)
    return Found(_cards(), _version("triton"), cupy)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cards() -> tuple[Card, ...] | None:
    """The driver's list, through its C interface. https://docs.nvidia.com/cuda/cuda-driver-api"""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_card(driver, index) for index in range(count.value))


def _card(driver: ctypes.CDLL, index: int) -> Card:
    device, major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # ..._MINOR
    return Card(name.value.decode(), 10 * major.value + minor.value)
