"""Doorbells waited on and rung by a card in stream order: no launch and no host delays what follows a message."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lamina.errors import DeadlineError, PeerLostError, TransportError

SOURCE = Path(__file__).with_name("polling.cu")
DRAIN_S = 5.0  # what kernels take at most to end after an abort
WATCH_S = 0.001  # how often the host looks after a peer while the card waits
BLOCK = 2 << 20
"""Bytes: cudaMalloc gives multiples of it memory of their own, at a host page. Smaller requests share a block, which a
handle for CUDA IPC opens as a whole (CUDA C++ Programming Guide, interprocess communication)."""


class Outcome(enum.IntEnum):
    """How the waits of a stream have ended; anything but READY makes all later ones do nothing."""

    READY = 0
    EXPIRED = 1
    ABORTED = 2


@dataclass(frozen=True)
class Doorbell:
    """A 64-bit sequence number at a device address, and this side's count of it, in device memory."""

    address: int
    sequence: Any


class Polling:
    """Waits and rings on the current card, in CuPy's current stream; all of them can be captured in a graph.

    The host sees a failure when it asks (``check``): after one, nothing rings any more, so that no peer takes what
    kernels made of a message that never came.
    """

    def __init__(self, peer: str) -> None:
        """``peer`` is named by errors. Raises ImportError without CuPy; ``kernels.gpu.device`` says what to do."""
        import cupy

        self._cupy = cupy
        self._peer = peer
        self._failed = cupy.zeros(1, np.uint32)
        # The host writes the first word, abort, and the card the second, the outcome.
        self._pinned = cupy.cuda.alloc_pinned_memory(8)
        self._words = np.frombuffer(self._pinned, np.uint32, 2)
        self._words[:] = 0
        runtime, device = cupy.cuda.runtime, cupy.cuda.Device().id
        self._ticks_per_s = 1000 * runtime.deviceGetAttribute(runtime.cudaDevAttrClockRate, device)  # of kHz
        self._timeout_s = 0.0
        for name in ("lamina_wait", "lamina_ring"):
            _kernel(name, device)  # compiled and loaded before anything waits

    def doorbell(self, address: int) -> Doorbell:
        """A doorbell at the address of an 8-byte word in device, peer or pinned memory, counted from 0."""
        return Doorbell(address, self._cupy.zeros(1, np.uint64))

    def wait(self, doorbell: Doorbell, timeout_s: float) -> None:
        """Hold the stream until the next message is there.

        The deadline counts the card's clock at its highest rate: on a card that runs slower it comes later by as much,
        and never earlier.
        """
        self._timeout_s = timeout_s
        ticks = np.int64(timeout_s * self._ticks_per_s)
        arguments = np.uint64(doorbell.address), doorbell.sequence, ticks, self._at(0), self._failed, self._at(1)
        _kernel("lamina_wait", self._cupy.cuda.Device().id)((1,), (1,), arguments)

    def ring(self, doorbell: Doorbell) -> None:
        """Say that the next message is there: everything that the stream has written before."""
        arguments = np.uint64(doorbell.address), doorbell.sequence, self._failed
        _kernel("lamina_ring", self._cupy.cuda.Device().id)((1,), (1,), arguments)

    def abort(self) -> None:
        """End every wait, soon. From any thread."""
        self._words[0] = 1

    def check(self) -> None:
        """Raise what the waits that ended so far have met; asks no kernel to finish.

        Raises:
            DeadlineError: a wait passed its deadline. PeerLostError: ``abort`` ended one.
        """
        outcome = Outcome(int(self._words[1]))
        if outcome is Outcome.EXPIRED:
            raise DeadlineError(
                f"nothing came from {self._peer} within {self._timeout_s:g} s of the card's clock; "
                "see whether it still works, or allow more time"
            )
        if outcome is Outcome.ABORTED:
            raise PeerLostError(self._peer, "the card's wait for its message was ended")

    def synchronize(self, alive: Callable[[], bool]) -> None:
        """Wait for the stream on the host while looking after the peer: ``alive`` says whether its process is there.

        Returns when the stream is empty, at the latest when the deadlines of its waits have passed.

        Raises:
            As ``check``. TransportError: kernels run on after an abort.
        """
        done = self._cupy.cuda.Event(disable_timing=True)
        done.record()
        aborted_at: float | None = None
        while not done.done:
            if aborted_at is None and not alive():
                self.abort()
                aborted_at = time.monotonic()
            if aborted_at is not None and time.monotonic() - aborted_at > DRAIN_S:
                raise TransportError(f"kernels run on {DRAIN_S:g} s after the wait for {self._peer} was aborted")
            time.sleep(WATCH_S)
        self.check()

    def reset(self) -> None:
        """Forget a failure, for the next peer. The stream must be empty."""
        self._words[:] = 0
        self._failed[...] = 0

    def _at(self, word: int) -> np.uint64:
        return np.uint64(self._pinned.ptr + 4 * word)


class DeviceArena:
    """Memory on the current card that other processes can write into: plain, zeroed, in blocks of its own.

    Attributes:
        bytes: CuPy's array of all of it, at least ``nbytes`` long: whole ``BLOCK``s.
    """

    def __init__(self, nbytes: int) -> None:
        import cupy

        memory = cupy.cuda.Memory(-(-nbytes // BLOCK) * BLOCK)  # not from CuPy's pool, which cuts what it allocates
        self.bytes = cupy.ndarray((memory.size,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        self.bytes[...] = 0
        cupy.cuda.get_current_stream().synchronize()  # a peer may write as soon as it has the handle

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return int(self.bytes.data.ptr)

    def handle(self) -> bytes:
        """What ``PeerArena`` in another process of this machine needs; good while this arena lives."""
        import cupy

        return bytes(cupy.cuda.runtime.ipcGetMemHandle(self.address))


class PeerArena:
    """Another process's DeviceArena on the same card, or one that this card reaches, mapped here until ``close``."""

    def __init__(self, handle: bytes) -> None:
        import cupy

        self.address = int(cupy.cuda.runtime.ipcOpenMemHandle(handle))

    def close(self) -> None:
        """Unmap. The stream must be done with it."""
        import cupy

        cupy.cuda.runtime.ipcCloseMemHandle(self.address)


@cache
def _kernel(name: str, device: int) -> Any:
    """The compiled kernel for one card; CuPy compiles for the current one, which ``device`` is.

    Its code is loaded when this returns. A kernel that is loaded at its first launch may have to wait for running ones
    to end: never, for one that the rest of the stream is to ring.
    """
    import cupy

    kernel = cupy.RawModule(code=SOURCE.read_text(), options=("--std=c++17",)).get_function(name)
    # As attention has it (cuda.py): beside a wait with another division of a multiprocessor's memory it could not run.
    kernel.preferred_shared_memory_carveout = 100
    return kernel
