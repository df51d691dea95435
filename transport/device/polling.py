"""Doorbells that a GPU waits on and rings in stream order, so that no launch and no host delays the next kernel."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lamina.core.errors import DeadlineError, PeerLostError, TransportError
from lamina.transport.device.slots import DRAIN_S, Outcome

SOURCE = Path(__file__).with_name("polling.cu")
WATCH_S = 0.001  # time between the host's checks of a peer while the GPU waits


class Flags(NamedTuple):
    """Memory that waiting kernels share with the host.

    Attributes:
        host: address of the host's words (abort, beat), in pinned memory.
        outcome: address of the outcome, in pinned memory.
        failed: the outcome, in device memory.
    """

    host: np.uint64
    outcome: np.uint64
    failed: Any


@dataclass(frozen=True)
class Doorbell:
    """A 64-bit sequence number at a device address, and this side's copy of its last value, in device memory."""

    address: int
    sequence: Any


class Polling:
    """Waits and rings on the current GPU, in CuPy's current stream; both can be captured in a CUDA graph.

    ``raise_failure`` reports a failure to the host. After a failure, rings do nothing, so that no peer uses results
    computed from a message that never came.

    Attributes:
        flags: flags for other kernels that wait in the same stream.
        ticks_per_s: ticks of the GPU's clock per second, at its highest rate.
    """

    def __init__(self, peer: str) -> None:
        """Load the kernels. Errors name ``peer``. Raises ImportError without CuPy."""
        import cupy

        self._cupy = cupy
        self._peer = peer
        self._failed = cupy.zeros(1, np.uint32)
        # The host writes the first two words, abort and beat; the GPU writes the third, the outcome.
        self._pinned = cupy.cuda.alloc_pinned_memory(12)
        self._words = np.frombuffer(self._pinned, np.uint32, 3)
        self._words[:] = 0
        self.flags = Flags(np.uint64(self._pinned.ptr), np.uint64(self._pinned.ptr + 8), self._failed)
        runtime, device = cupy.cuda.runtime, cupy.cuda.Device().id
        self.ticks_per_s = 1000 * runtime.deviceGetAttribute(runtime.cudaDevAttrClockRate, device)  # from kHz
        self._timeout_s = 0.0
        for name in ("lamina_wait", "lamina_ring"):
            kernel(name, device)  # compiled and loaded before anything waits

    def doorbell(self, address: int) -> Doorbell:
        """Return a doorbell at the address of an 8-byte word in device, peer or pinned memory, counted from 0."""
        return Doorbell(address, self._cupy.zeros(1, np.uint64))

    def wait(self, doorbell: Doorbell, timeout_s: float) -> None:
        """Block the stream until the next message has arrived.

        The deadline is counted in clock cycles at the GPU's highest rate: at a lower rate it comes later, never
        earlier.
        """
        self._timeout_s = timeout_s
        ticks, flags = np.int64(timeout_s * self.ticks_per_s), self.flags
        arguments = np.uint64(doorbell.address), doorbell.sequence, ticks, flags.host, self._failed, flags.outcome
        kernel("lamina_wait", self._cupy.cuda.Device().id)((1,), (1,), arguments)

    def ring(self, doorbell: Doorbell) -> None:
        """Announce the next message: everything that the stream has written before."""
        arguments = np.uint64(doorbell.address), doorbell.sequence, self._failed
        kernel("lamina_ring", self._cupy.cuda.Device().id)((1,), (1,), arguments)

    def abort(self) -> None:
        """End every wait, soon. From any thread."""
        self._words[0] = 1

    def beat(self) -> None:
        """Show kernels that wait in the same stream that the host is alive."""
        self._words[1] += 1

    @property
    def has_expired(self) -> bool:
        """True if a wait has ended without a message or an abort; does not synchronise."""
        return bool(self._words[2] == Outcome.EXPIRED)

    def raise_failure(self) -> None:
        """Raise the first failure of the waits that have ended; does not synchronise.

        Raises:
            DeadlineError: a wait passed its deadline.
            PeerLostError: ``abort`` ended a wait.
        """
        outcome = Outcome(int(self._words[2]))
        if outcome is Outcome.EXPIRED:
            raise DeadlineError(
                f"no message from {self._peer} within {self._timeout_s:g} s of the GPU's clock; "
                "check whether it still runs, or allow more time"
            )
        if outcome is Outcome.ABORTED:
            raise PeerLostError(self._peer, "the GPU's wait for its message was aborted")

    def synchronize(self, alive: Callable[[], bool]) -> None:
        """Wait for the stream on the host. Abort its waits once ``alive`` returns False: the peer's process has ended.

        Returns when the stream is empty, at the latest when the deadlines of its waits have passed. Raises like
        ``raise_failure``, and TransportError if kernels still run after an abort.
        """
        done = self._cupy.cuda.Event(disable_timing=True)
        done.record()
        aborted_at: float | None = None
        while not done.done:
            if aborted_at is None and not alive():
                self.abort()
                aborted_at = time.monotonic()
            if aborted_at is not None and time.monotonic() - aborted_at > DRAIN_S:
                raise TransportError(f"kernels still run {DRAIN_S:g} s after the wait for {self._peer} was aborted")
            time.sleep(WATCH_S)
        self.raise_failure()

    def drain(self) -> None:
        """Wait until the stream is empty. Raises TransportError if it is not ``DRAIN_S`` later."""
        done, until = self._cupy.cuda.Event(disable_timing=True), time.monotonic() + DRAIN_S
        done.record()
        while not done.done:
            if time.monotonic() > until:
                raise TransportError(f"kernels still run {DRAIN_S:g} s after their waits were aborted")
            time.sleep(WATCH_S)

    def reset(self) -> None:
        """Clear a failure, for the next peer. The stream must be empty."""
        self._words[:] = 0
        self._failed[...] = 0


@cache
def kernel(name: str, device: int) -> Any:
    """Return the compiled kernel for one GPU, ``device``, which must be the current one.

    Its code is loaded when this returns. Loading a kernel at its first launch may wait for running kernels to end, a
    deadlock if one of them waits for a doorbell that this stream rings.
    """
    import cupy

    function = cupy.RawModule(code=SOURCE.read_text(), options=("--std=c++17",)).get_function(name)
    # The same split as attention's (cuda.py): kernels with different splits cannot share a multiprocessor.
    function.preferred_shared_memory_carveout = 100
    return function
