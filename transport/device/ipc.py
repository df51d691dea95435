"""Memory of a GPU that other processes of the machine open by CUDA IPC. Imports CuPy only when used.

CUDA C++ Programming Guide, interprocess communication. A GPU reaches another one's memory if the driver lets it: over
NVLink, or over PCIe, but not between GeForce cards without NVLink.
"""

import numpy as np

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
