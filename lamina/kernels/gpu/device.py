"""Finds this machine's NVIDIA GPUs and checks whether kernels can run on one. Imports neither CuPy nor Triton."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lamina.core.errors import ConfigError

LEAST_CAPABILITY = 80  # products of bfloat16
CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
REMEDY = "pip install triton 'cupy-cuda13x[ctk]' torchao"


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. ``capability`` is 90 for compute capability 9.0, ``address`` the address on the PCI bus."""

    name: str
    capability: int
    memory_bytes: int = 0
    uuid: str = ""
    address: str = ""

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability // 10}.{self.capability % 10})"


@dataclass(frozen=True)
class Found:
    """GPUs and packages found. ``gpus`` is None without a driver; a version is None if its package is missing."""

    gpus: tuple[Gpu, ...] | None
    triton: str | None
    cupy: str | None

    def __str__(self) -> str:
        gpus = "no NVIDIA driver" if self.gpus is None else "an NVIDIA driver without GPUs"
        if self.gpus:
            gpus = ", ".join(f"cuda:{index} {gpu}" for index, gpu in enumerate(self.gpus))
        packages = ((self.triton, "Triton"), (self.cupy, "CuPy"))
        return f"{gpus}; " + ", ".join(f"{name} {version}" if version else f"no {name}" for version, name in packages)


def require(index: int, found: Found) -> Gpu:
    """Return GPU ``index`` if kernels can run on it.

    Raises:
        ConfigError: the GPU does not exist or is too old, or a package is missing; says what was found and the remedy.
    """

    def refuse(remedy: str) -> ConfigError:
        return ConfigError(f"cuda device {index} cannot be used; found {found}. {remedy}, or use a CPU")

    if not found.gpus:
        install = "Install NVIDIA's driver" if found.gpus is None else "Check nvidia-smi and CUDA_VISIBLE_DEVICES"
        raise refuse(install if found.triton and found.cupy else f"{install} and {REMEDY}")
    if not 0 <= index < len(found.gpus):
        raise refuse(f"Use a device from 0 to {len(found.gpus) - 1}")
    gpu = found.gpus[index]
    if gpu.capability < LEAST_CAPABILITY:
        raise refuse("Attention needs compute capability 8.0 or higher: use another GPU")
    if not (found.triton and found.cupy):
        raise refuse(f"Run {REMEDY}")
    return gpu


def set_up_cuda() -> None:
    """Make CUDA count GPUs by their PCI bus addresses, as ``find_gpus`` does: by default the fastest comes first. And
    give streams as many hardware queues as there can be: streams that share a queue wait for each other.

    Call it before this process initialises CUDA.
    """
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def find() -> Found:
    """Look for GPUs and packages. Makes no CUDA context, so this process may still fork."""
    cupy = next(filter(None, map(_version, CUPY_PACKAGES)), None)
    return Found(find_gpus(), _version("triton"), cupy)


def _version(package: str) -> str | None:
    from importlib import metadata  # brings parsers of mail and CSV, for which no worker is to wait

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def memory(index: int) -> tuple[int, int]:
    """Return the bytes of memory of GPU ``index`` that nobody uses, and all; zeros if it does not exist."""
    gpus = find_gpus() or ()
    if index >= len(gpus):
        return 0, 0
    with _nvml() as nvml:
        found = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpus[index].uuid))
        return int(found.free), int(found.total)


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the initialised library. Raises NVMLError without a driver."""
    import pynvml  # takes 20 ms, and most processes do not need it

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def find_gpus() -> tuple[Gpu, ...] | None:
    """Return the GPUs that this process may use, in the order of their PCI bus addresses; None without a driver."""
    import pynvml

    with ExitStack() as stack:
        try:
            stack.enter_context(_nvml())
        except pynvml.NVMLError:
            return None
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return visible(tuple(map(_gpu, handles)), os.environ.get("CUDA_VISIBLE_DEVICES"))


def reach(gpus: Sequence[Gpu]) -> frozenset[tuple[int, int]]:
    """Return the pairs of these GPUs, by their places, of which the first can write into the other's memory."""
    with _nvml() as nvml:

        def writes(one: Any, other: Any) -> bool:
            try:
                status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_WRITE)
            except nvml.NVMLError:  # what a driver cannot tell, it hardly supports
                return False
            return bool(status == nvml.NVML_P2P_STATUS_OK)

        handles = [nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
        pairs = itertools.permutations(range(len(gpus)), 2)
        return frozenset(pair for pair in pairs if writes(*(handles[place] for place in pair)))


def _gpu(handle: Any) -> Gpu:
    import pynvml

    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    address = pynvml.nvmlDeviceGetPciInfo(handle).busId
    return Gpu(name, 10 * major + minor, memory, uuid, address)


def visible(gpus: tuple[Gpu, ...], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows if CUDA_VISIBLE_DEVICES is ``wanted``: indices or prefixes of UUIDs, up to the
    first entry that matches no GPU. https://docs.nvidia.com/cuda/cuda-programming-guide (environment variables)
    """
    if wanted is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in map(str.strip, wanted.split(",")):
        if entry.isdecimal():
            named = gpus[int(entry) : int(entry) + 1]
        else:
            named = tuple(gpu for gpu in gpus if entry and gpu.uuid.startswith(entry))
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)
