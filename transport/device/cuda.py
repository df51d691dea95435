"""Memory of NVIDIA GPUs that peers reach: polled slots in registered host memory, and inboxes opened by CUDA IPC."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lamina._native import Arena as NativeArena
from lamina.core.errors import TransportError
from lamina.transport.arena import Pages
from lamina.transport.device.emulated_slots import expired
from lamina.transport.device.inboxes import Inbox, OwnInbox, PeerInbox
from lamina.transport.device.peer_memory import PeerArena, PeerMemory, uses_host_addresses
from lamina.transport.device.polling import Polling, kernel
from lamina.transport.device.slots import CREDIT_WORD, RECORD, SILENCE_S, Incoming, Outgoing, Records

THREADS, BLOCKS = 256, 32  # grid of copies: messages in slots have some MiB at most
REGISTERED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
KERNELS = ("lamina_receive", "lamina_take_in", "lamina_give_out", "lamina_answer")


class CudaSlots:
    """``PolledSlots`` of the current GPU. ``unmap`` waits for the GPU, so no stream may be waiting then."""

    def __init__(self) -> None:
        """Load the kernels. Raises ImportError without CuPy."""
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device().id
        self._arenas: dict[int, tuple[NativeArena, Pages]] = {}
        for name in KERNELS:
            kernel(name, self._device)

    def map_ranges(self, arena: NativeArena, ranges: Sequence[tuple[int, int]]) -> None:
        runtime = self._cupy.cuda.runtime
        if not uses_host_addresses(self._device):
            raise TransportError(f"cuda:{self._device} cannot use host memory under its own addresses")
        if id(arena) not in self._arenas:
            self._arenas[id(arena)] = arena, Pages(self._register, runtime.hostUnregister)
        for at, nbytes in ranges:
            self._arenas[id(arena)][1].register(at, nbytes)

    def _register(self, at: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        try:
            runtime.hostRegister(at, nbytes, REGISTERED)
        except runtime.CUDARuntimeError as error:
            raise TransportError(f"cannot register {nbytes} bytes of an arena with CUDA: {error}") from error

    def unmap(self, arena: NativeArena) -> None:
        if known := self._arenas.pop(id(arena), None):
            known[1].clear()

    def stream(self, records: int) -> "CudaStream":
        return CudaStream(records)


class CudaStream:
    def __init__(self, records: int) -> None:
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device().id
        # Non-blocking: else the legacy default stream, on which the host's other work runs, would wait for this one.
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pinned = cupy.cuda.alloc_pinned_memory(records * RECORD.itemsize)
        self.records: Records = np.frombuffer(self._pinned, RECORD, records)
        self.records[:] = np.zeros(1, RECORD)
        self._polling = Polling("the peer")
        self._found = cupy.zeros(RECORD.itemsize, np.uint8)
        cupy.cuda.get_current_stream().synchronize()

    def order_after_host(self) -> None:
        self._stream.wait_event(self._cupy.cuda.get_current_stream().record())

    def launch(self, work: Callable[[], None]) -> None:
        with self._stream:
            work()

    def receive(self, incoming: Incoming, into: Any, nbytes: int) -> None:
        slots, flags = [np.uint64(at) for at in incoming.slots], self._polling.flags
        bells, floors = ([np.uint64(each) for each in many] for many in (incoming.doorbells, incoming.floors))
        stamp, ticks = np.uint64(incoming.stamp), np.int64(SILENCE_S * self._polling.ticks_per_s)
        waiting = *slots, *bells, *floors, stamp, ticks, flags.host, flags.failed, flags.outcome, self._found
        kernel("lamina_receive", self._device)((1,), (1,), waiting)
        inbox = [np.uint64(at) for at in incoming.inbox]
        copying = *slots, *inbox, self._found, flags.failed, into, np.int64(nbytes)
        kernel("lamina_take_in", self._device)(_grid(nbytes), (THREADS,), copying)

    def answer(self, outgoing: Outgoing, parts: Sequence[Any], record: int, pieces: int) -> None:
        flags, at = self._polling.flags, outgoing.body
        for part in parts:
            copying = part, np.uint64(at), np.int64(part.nbytes // 4), flags.failed
            kernel("lamina_give_out", self._device)(_grid(part.nbytes), (THREADS,), copying)
            at += part.nbytes
        words = [np.uint64(word) for word in outgoing.header[:CREDIT_WORD]]
        places = np.uint64(outgoing.slot), np.uint64(outgoing.doorbell), np.uint64(outgoing.number), np.uint64(pieces)
        row = np.uint64(self._pinned.ptr + record * RECORD.itemsize)
        kernel("lamina_answer", self._device)((1,), (1,), (self._found, *words, *places, flags.failed, row))

    def beat(self) -> None:
        self._polling.beat()

    def abort(self) -> None:
        self._polling.abort()

    def raise_failure(self) -> None:
        if self._polling.has_expired:
            raise expired(SILENCE_S)

    def drain(self) -> None:
        with self._stream:
            self._polling.drain()

    def reset(self) -> None:
        with self._stream:
            self._polling.reset()

    def close(self) -> None:
        self.abort()
        self.drain()


def _grid(nbytes: int) -> tuple[int]:
    return (min(BLOCKS, -(-nbytes // (16 * THREADS)) or 1),)


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
