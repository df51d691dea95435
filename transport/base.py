"""``Endpoint``, the interface of every transport; one conformance suite tests all implementations."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy.typing as npt

from lamina.core.errors import DeadlineError


class DmaBuf(NamedTuple):
    """Device memory as a file that other drivers can map. The caller of ``export`` closes ``fd``; ``offset`` is in
    bytes."""

    fd: int
    offset: int
    nbytes: int


class DeviceMemory(Protocol):
    """Memory of a device into which NICs write.

    Attributes:
        name: name of the device, for errors and logs.
        address: address of the first byte, for this process or for the device.
    """

    name: str
    address: int
    nbytes: int

    def export(self) -> DmaBuf | None:
        """Export the memory as a dma-buf; None for host memory, which NICs register by its address.

        Raises TransportError with the reason if neither is possible.
        """


Target = tuple[int, int]  # a doorbell, and the sequence number that it must reach
Buffer = memoryview  # C-contiguous, format "B"
Part = bytes | bytearray | memoryview | npt.NDArray[Any]  # anything C-contiguous that exports the buffer protocol


class Fetch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A read of bytes [offset, offset + nbytes) of a peer's arena to offset ``to`` of the reader's arena.

    ``doorbell`` of the reader's arena is set to ``sequence`` once all bytes have arrived.
    """

    offset: int
    nbytes: int
    to: int
    doorbell: int
    sequence: int


class Arena(Protocol):
    """Registered memory of this process that peers may write into."""

    nbytes: int
    doorbells: int

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a writable view of [offset, offset + nbytes). Raises ValueError outside the arena."""

    def sequence(self, doorbell: int) -> int:
        """Return the number with which a doorbell was last rung, as far as this endpoint has seen. All writes before
        that ring are visible."""


class Peer(Protocol):
    """A connected remote arena."""

    name: str
    nbytes: int
    doorbells: int


class Endpoint(Protocol):
    """One worker's end of the data plane. Not thread-safe: one thread owns it.

    A write, announced by a doorbell, over shared memory:

    >>> from lamina.transport.shm import ShmEndpoint
    >>> near, far = ShmEndpoint("near"), ShmEndpoint("far")
    >>> arenas = near.register(4096, doorbells=1), far.register(4096, doorbells=1)
    >>> peer = near.connect(far.descriptor(), timeout_s=5.0)
    >>> near.write(peer, 64, b"q of attention 0")
    >>> near.ring(peer, 0, 1)
    >>> far.wait([(0, 1)], timeout_s=5.0)  # the index of the doorbell that was rung
    0
    >>> bytes(arenas[1].view(64, 16))
    b'q of attention 0'
    >>> near.close(), far.close()
    (None, None)
    """

    name: str

    def register(self, nbytes: int, doorbells: int) -> Arena:
        """Allocate the arena (once per endpoint), all doorbells 0."""

    def descriptor(self) -> bytes:
        """Return opaque bytes with which a peer can connect to this endpoint's arena."""

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Open a peer's arena for writing. Raises TransportError if that fails or takes longer than ``timeout_s``."""

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; from now on its loss does not interrupt waits."""

    def disconnect_for_good(self, peer: Peer) -> None:
        """Disconnect a peer that must not reach this arena again: nothing that it has sent arrives from now on.

        The process of a peer that shares memory must have ended before, since nothing else stops its writes.
        """

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        """Copy ``data`` into the peer's arena at ``offset``.

        Raises ValueError outside the arena; PeerLostError once the peer is known to have exited: ``wait``
        detects that, ``write`` itself may not.
        """

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        """Set the peer's doorbell to ``sequence`` after all earlier writes to that peer, and wake its waiter.

        Only one peer may ring a doorbell. Raises like ``write``.
        """

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        """Send a message in one call: write the parts consecutively into [offset, offset + nbytes), then ring.

        Raises ValueError, before anything is written, if the parts are larger than ``nbytes``; else like ``write``.
        """

    def fetch(self, peer: Peer, fetch: Fetch) -> None:
        """Read bytes of the peer's arena into this endpoint's, then ring a doorbell of this endpoint.

        Returns at once: ``wait`` sees the doorbell when all bytes have arrived. The peer takes no part, and must not
        change these bytes until it knows that they have been read. Fetches from one peer arrive in the order of the
        calls, on a separate connection, so that messages do not queue behind them.

        Raises ValueError outside an arena or for 0 bytes; PeerLostError like ``write``.
        """

    def wait(self, targets: Sequence[Target], timeout_s: float) -> int:
        """Wait until one of this endpoint's doorbells has reached its target; ``targets`` are (doorbell, sequence).

        Returns the index of the first ready target; there is no fairness across calls. Raises DeadlineError after
        ``timeout_s``; PeerLostError if nothing is ready and a connected peer has closed its endpoint or exited, in
        every call until that peer is disconnected. A timeout of 0 or less only checks. Spins briefly, then sleeps;
        releases the GIL.
        """

    def close(self) -> None:
        """Release all memory and handles. Idempotent."""


@runtime_checkable
class SharesMemory(Protocol):
    """An endpoint whose network interface lets peers write into memory besides the arena, such as a device's."""

    def share(self, memory: DeviceMemory) -> bytes:
        """Return a key with which peers may write into ``memory`` (``post_apart``), until ``unshare``. Raises
        TransportError with the reason if they cannot."""

    def unshare(self, key: bytes) -> None:
        """End peers' access by this key."""

    def post_apart(
        self,
        peer: Peer,
        key: bytes,
        at: int,
        parts: Sequence[Part],
        offset: int,
        header: bytes,
        doorbell: int,
        sequence: int,
    ) -> None:
        """Write the parts into the peer's memory of this key, from byte ``at`` on, then ``post`` a header."""


def part_nbytes(part: Part) -> int:
    return len(part) if isinstance(part, (bytes, bytearray)) else part.nbytes


def check_fetch(fetch: Fetch, peer_nbytes: int, own_nbytes: int, own_doorbells: int) -> None:
    """Raise ValueError unless the fetch reads at least 1 byte and stays inside both arenas."""
    check_doorbell(fetch.doorbell, own_doorbells)
    check_range(fetch.offset, fetch.nbytes, peer_nbytes)
    check_range(fetch.to, fetch.nbytes, own_nbytes)
    if fetch.nbytes == 0:
        raise ValueError("cannot fetch 0 bytes")


def check_range(offset: int, nbytes: int, arena_nbytes: int) -> None:
    """Raise ValueError unless [offset, offset + nbytes) lies inside an arena of ``arena_nbytes``."""
    if offset < 0 or nbytes < 0 or offset + nbytes > arena_nbytes:
        raise ValueError(f"{nbytes} bytes at offset {offset} lie outside an arena of {arena_nbytes} bytes")


def check_doorbell(doorbell: int, doorbells: int) -> None:
    """Raise ValueError unless the arena has this doorbell."""
    if not 0 <= doorbell < doorbells:
        raise ValueError(f"doorbell {doorbell} does not exist: the arena has {doorbells}")


def deadline_error(name: str, targets: Sequence[Target], reached: Sequence[int], timeout_s: float) -> DeadlineError:
    """Return the error that ``wait`` of endpoint ``name`` raises. ``reached`` has the current values of doorbells."""
    states = ", ".join(f"{bell} is at {at} of {goal}" for (bell, goal), at in zip(targets, reached, strict=True))
    return DeadlineError(f"{name} waited {timeout_s:g} s for a message (doorbell {states})")
