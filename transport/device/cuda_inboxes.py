"""Inboxes in the memory of NVIDIA GPUs. Imports CuPy only when used."""

import numpy as np

from lamina.errors import TransportError
from lamina.transport.device.inboxes import Held, Inbox, Opened
from lamina.transport.device.ipc import PeerArena
from lamina.transport.device.peer_memory import PeerMemory


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
                memory = PeerMemory(nbytes)
                inbox = Inbox(memory.address, memory.bytes, memory.settle)
                return Held(
                    inbox, memory.handle(), memory, lambda count: bytes(inbox.array[:count].get()), lambda: None
                )
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

        def write(content: bytes) -> None:
            try:
                array[: len(content)] = cupy.array(list(content), np.uint8)
                cupy.cuda.get_current_stream().synchronize()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise TransportError(f"cuda:{self._index} cannot write there: {error}") from error

        return Opened(Inbox(arena.address, array), write, arena.close)
