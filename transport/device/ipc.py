"""Memory of a GPU that other processes of the machine open by CUDA IPC. Imports CuPy only when used.

CUDA C++ Programming Guide, interprocess communication. A GPU reaches another one's memory if the driver lets it: over
NVLink, or over PCIe, but not between GeForce cards without NVLink.
"""

import numpy as np

from lamina.errors import TransportError
from lamina.transport.device.inboxes import Held, Inbox, Opened

BLOCK = 2 << 20
"""Bytes. Requests to cudaMalloc in multiples of it get page-aligned memory of their own. Smaller ones share a block,
which a CUDA IPC handle would open as a whole (CUDA C++ Programming Guide, interprocess communication)."""


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
        """Device address of the first byte."""
        return int(self.bytes.data.ptr)

    def handle(self) -> bytes:
        """What ``PeerArena`` in another process of this machine needs; valid while this arena lives."""
        import cupy

        return bytes(cupy.cuda.runtime.ipcGetMemHandle(self.address))


class PeerArena:
    """Another process's DeviceArena, on this GPU or one that it can access, mapped here until ``close``."""

    def __init__(self, handle: bytes) -> None:
        import cupy

        self.address = int(cupy.cuda.runtime.ipcOpenMemHandle(handle))

    def close(self) -> None:
        """Unmap. The stream must be done with it."""
        import cupy

        cupy.cuda.runtime.ipcCloseMemHandle(self.address)


class CudaMaker:
    """``inboxes.Maker`` of a GPU."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self._index = index

    def make(self, nbytes: int) -> Held:
        """See ``Maker``."""
        import cupy

        try:
            with cupy.cuda.Device(self._index):
                arena = DeviceArena(nbytes)
                return Held(Inbox(arena.address, arena.bytes[:nbytes]), arena.handle(), lambda: None)  # freed with it
        except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
            raise TransportError(f"cuda:{self._index} cannot share {nbytes} bytes of its memory: {error}") from error

    def open(self, handle: bytes, nbytes: int) -> Opened:
        """See ``Maker``."""
        import cupy

        try:
            with cupy.cuda.Device(self._index):
                arena = PeerArena(handle)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise TransportError(f"cuda:{self._index} cannot reach it by CUDA IPC: {error}") from error
        # Of this GPU, for CuPy, which else refuses to launch kernels on it; opening it has enabled the access.
        memory = cupy.cuda.UnownedMemory(arena.address, nbytes, arena, self._index)
        array = cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        return Opened(Inbox(arena.address, array), arena.close)
