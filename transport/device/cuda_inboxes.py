"""Inboxes in the memory of NVIDIA GPUs, opened by CUDA IPC."""

import contextlib
from collections.abc import Iterator

import numpy as np

from lamina.core.errors import TransportError
from lamina.transport.device.inboxes import Inbox, OwnInbox, PeerInbox
from lamina.transport.device.peer_memory import PeerArena, PeerMemory


class CudaMaker:
    """``inboxes.Maker`` of a GPU."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self._index = index

    def make(self, nbytes: int) -> OwnInbox:
        with self._on_the_gpu(f"cannot share {nbytes} bytes of its memory"):
            memory = PeerMemory(nbytes)
            inbox, handle = Inbox(memory.address, memory.bytes, memory.make_writes_visible), memory.handle()

        def read(count: int) -> bytes:
            with self._on_the_gpu("cannot read its memory"):
                return bytes(inbox.array[:count].get())

        return OwnInbox(inbox, handle, memory, read, lambda: None)  # freed with the last array of it

    def open(self, handle: bytes, nbytes: int) -> PeerInbox:
        with self._on_the_gpu("cannot reach it by CUDA IPC"):
            import cupy

            arena = PeerArena(handle)
            # Declared as memory of this GPU, else CuPy launches no kernels on it; opening it has enabled the access.
            memory = cupy.cuda.UnownedMemory(arena.address, nbytes, arena, self._index)
            array = cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))

        def write(content: bytes) -> None:
            with self._on_the_gpu("cannot write there"):
                array[: len(content)] = cupy.array(list(content), np.uint8)
                cupy.cuda.get_current_stream().synchronize()

        def close() -> None:
            with self._on_the_gpu("cannot close what it has opened by CUDA IPC"):
                arena.close()

        return PeerInbox(Inbox(arena.address, array), write, close)

    @contextlib.contextmanager
    def _on_the_gpu(self, what: str) -> Iterator[None]:
        """Make the GPU the current one, and convert CuPy's errors to TransportErrors that name ``what``."""
        try:
            import cupy

            failures: tuple[type[Exception], ...] = cupy.cuda.runtime.CUDARuntimeError, MemoryError
        except ImportError as error:
            raise TransportError(f"cuda:{self._index} {what}: {error}") from error
        try:
            with cupy.cuda.Device(self._index):
                yield
        except failures as error:
            raise TransportError(f"cuda:{self._index} {what}: {error}") from error
