"""GPU memory into which other devices write directly: GPUs by CUDA IPC, NICs by GPUDirect RDMA."""

import ctypes
import enum
from dataclasses import dataclass

import numpy as np

from lamina.core.errors import TransportError
from lamina.transport.base import DmaBuf

BLOCK = 2 << 20
"""Bytes. cudaMalloc returns separate, page-aligned memory for multiples of it. Smaller allocations share a block, which
a CUDA IPC handle would open as a whole (CUDA C++ Programming Guide, interprocess communication)."""


class DeviceArena:
    """Zeroed memory on the current GPU that other processes can open with CUDA IPC.

    Attributes:
        bytes: all of it as a CuPy array, ``nbytes`` rounded up to whole ``BLOCK``s.
    """

    def __init__(self, nbytes: int) -> None:
        import cupy

        memory = cupy.cuda.Memory(-(-nbytes // BLOCK) * BLOCK)  # not from CuPy's pool, which subdivides allocations
        self.bytes = cupy.ndarray((memory.size,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        self.bytes[...] = 0
        cupy.cuda.get_current_stream().synchronize()  # a peer may write as soon as it has the handle

    @property
    def address(self) -> int:
        return int(self.bytes.data.ptr)

    def handle(self) -> bytes:
        """Return the handle for ``PeerArena`` in another process of this machine; valid while this arena lives."""
        import cupy

        return bytes(cupy.cuda.runtime.ipcGetMemHandle(self.address))


class PeerArena:
    """Another process's DeviceArena, on this GPU or one that it can access, mapped here until ``close``."""

    def __init__(self, handle: bytes) -> None:
        import cupy

        self.address = int(cupy.cuda.runtime.ipcOpenMemHandle(handle))

    def close(self) -> None:
        """Unmap the memory, which no kernel uses any more."""
        import cupy

        cupy.cuda.runtime.ipcCloseMemHandle(self.address)


DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, and the scope of a flush
FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST


class Attribute(enum.IntEnum):
    """The members of the driver's CUdevice_attribute used here."""

    HOST_ADDRESSES = 91
    FLUSH_OPTIONS = 117
    WRITES_ORDERING = 118
    DMA_BUF_SUPPORTED = 124


@dataclass(frozen=True)
class Ability:
    """What a GPU's driver supports for NICs that access the GPU's memory.

    Attributes:
        exports: True if the driver exports dma-bufs.
        ordered: True if kernels launched later see what NICs have written.
        flushes: True if the host can flush writes of NICs, so that kernels see them.
    """

    exports: bool
    ordered: bool
    flushes: bool

    @property
    def obstacle(self) -> str:
        """Why NICs cannot write into this GPU's memory, and the remedy; empty if they can."""
        if not self.exports:
            return (
                "the driver does not support it (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED is 0); use NVIDIA's open kernel "
                "modules, version 515 or later, on Linux 5.12 or later"
            )
        if not (self.ordered or self.flushes):
            return "the driver neither orders nor flushes NICs' writes; use a later one"
        return ""


def ability(index: int) -> Ability:
    """Return the ability of GPU ``index``. Initialises the driver. Raises TransportError without that GPU."""
    flushes = bool(_ask(index, Attribute.FLUSH_OPTIONS) & FLUSH_BY_HOST)
    ordered = _ask(index, Attribute.WRITES_ORDERING) >= OWNER
    return Ability(bool(_ask(index, Attribute.DMA_BUF_SUPPORTED)), ordered, flushes)


def uses_host_addresses(index: int) -> bool:
    """Return whether kernels of GPU ``index`` use registered host memory under its own addresses.

    Initialises the driver. Raises TransportError without that GPU.
    """
    return bool(_ask(index, Attribute.HOST_ADDRESSES))


def _ask(index: int, attribute: Attribute) -> int:
    driver, device, value = _driver(), ctypes.c_int(), ctypes.c_int()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGet(ctypes.byref(device), index), f"cuDeviceGet of GPU {index}")
    answer = driver.cuDeviceGetAttribute(ctypes.byref(value), int(attribute), device)
    return 0 if answer else value.value  # a driver that does not know the attribute lacks the ability


class PeerMemory:
    """Zeroed memory of the current GPU as a ``transport.base.DeviceMemory``; freed with ``bytes``.

    Attributes:
        bytes: the memory as a CuPy array.
        handle: ``DeviceArena.handle``.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory. Raises ImportError without CuPy."""
        import cupy

        self.nbytes = nbytes
        self._arena = DeviceArena(nbytes)
        self.bytes = self._arena.bytes[:nbytes]
        self.address, self.handle = self._arena.address, self._arena.handle
        self.name = f"cuda:{cupy.cuda.Device().id}"
        self._ability = ability(cupy.cuda.Device().id)

    def export(self) -> DmaBuf:
        if self._ability.obstacle:
            raise TransportError(self._ability.obstacle)
        driver, address = _driver(), ctypes.c_uint64(self._arena.address)
        # Orders copies to and from it with NICs' accesses.
        on = ctypes.c_uint(1)
        _check(driver.cuPointerSetAttribute(ctypes.byref(on), SYNC_MEMOPS, address), "cuPointerSetAttribute")
        fd, whole = ctypes.c_int(-1), ctypes.c_size_t(self._arena.bytes.nbytes)
        result = driver.cuMemGetHandleForAddressRange(ctypes.byref(fd), address, whole, DMA_BUF_FD, ctypes.c_uint64(0))
        _check(result, f"cuMemGetHandleForAddressRange of {whole.value} bytes")
        return DmaBuf(fd.value, 0, whole.value)

    def make_writes_visible(self) -> None:
        """Make writes of NICs so far visible to kernels launched from now on."""
        if not self._ability.ordered:
            _check(_driver().cuFlushGPUDirectRDMAWrites(0, OWNER), "cuFlushGPUDirectRDMAWrites")


def _driver() -> ctypes.CDLL:
    """Return the driver's C interface. Raises TransportError without it."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"the NVIDIA driver cannot be loaded ({error}); install it") from error


def _check(result: int, call: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown error"
        raise TransportError(f"{call} failed: {message} (CUDA error {result})")
