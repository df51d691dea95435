"""An in-process transport for fault tests: it drops, delays, reorders and corrupts messages on command.

Nothing is random: a test schedules every fault. To its peers, a closed endpoint is an exited process.
"""

import enum
import itertools
import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lamina.core.errors import PeerLostError, TransportError
from lamina.transport.base import Buffer, Fetch, Part, Peer, check_doorbell, check_fetch, check_range, deadline_error


class Operation(enum.Enum):
    """An operation on a peer's arena. ``post`` is one WRITE of all its parts and one RING."""

    WRITE = enum.auto()
    RING = enum.auto()


class Fault(enum.Enum):
    """What happens to an operation between sender and arena."""

    DROP = enum.auto()  # it never arrives
    HOLD = enum.auto()  # it arrives when the test releases it: delays and reorders
    CORRUPT = enum.auto()  # a write arrives with one bit of its middle byte flipped


@dataclass
class _Scheduled:
    fault: Fault
    operation: Operation
    skip: int
    count: int


@dataclass
class _Sent:
    """An operation on its way to an arena."""

    operation: Operation
    arena: "NullArena"
    place: int  # offset of a write, number of a doorbell
    sender: int  # number of its endpoint
    data: bytes
    sequence: int

    def arrive(self) -> None:
        with _changed:
            if self.sender in self.arena.refused:
                return
            if self.operation is Operation.WRITE:
                self.arena.data[self.place : self.place + len(self.data)] = self.data
            else:
                self.arena.sequences[self.place] = self.sequence
                _changed.notify_all()


@dataclass
class Faults:
    """Faults of everything one endpoint sends.

    ::

        faults.plan(Fault.DROP, Operation.RING)             # the next ring is lost
        faults.plan(Fault.HOLD, Operation.WRITE, count=2)   # two writes are delayed ...
        faults.release(1, 0)                                # ... and arrive in reverse order
    """

    held: list[_Sent] = field(default_factory=list)
    _schedule: list[_Scheduled] = field(default_factory=list)

    def plan(self, fault: Fault, operation: Operation, *, skip: int = 0, count: int = 1) -> None:
        """Apply ``fault`` to ``count`` operations of this kind after the next ``skip``; calls take effect in order."""
        if fault is Fault.CORRUPT and operation is Operation.RING:
            raise ValueError("only a WRITE can be corrupted; a RING carries only its sequence number")
        self._schedule.append(_Scheduled(fault, operation, skip, count))

    def release(self, *order: int) -> None:
        """Deliver held operations by their indices in ``held``, in this order; without indices all, oldest first."""
        released = [self.held[index] for index in (order or range(len(self.held)))]
        self.held = [sent for sent in self.held if not any(sent is other for other in released)]
        for sent in released:
            sent.arrive()

    def send(self, sent: _Sent) -> None:
        """Deliver an operation, or apply the fault scheduled for it."""
        match self._next(sent.operation):
            case None:
                sent.arrive()
            case Fault.DROP:
                pass
            case Fault.HOLD:
                self.held.append(sent)
            case Fault.CORRUPT:
                middle = len(sent.data) // 2
                damaged = bytes(byte ^ (index == middle) for index, byte in enumerate(sent.data))
                _Sent(sent.operation, sent.arena, sent.place, sent.sender, damaged, sent.sequence).arrive()

    def _next(self, operation: Operation) -> Fault | None:
        scheduled = next((entry for entry in self._schedule if entry.operation is operation), None)
        if scheduled is None:
            return None
        if scheduled.skip > 0:
            scheduled.skip -= 1
            return None
        scheduled.count -= 1
        if scheduled.count == 0:
            self._schedule.remove(scheduled)
        return scheduled.fault


class NullArena:
    """Memory of one endpoint."""

    def __init__(self, nbytes: int, doorbells: int) -> None:
        self.nbytes = nbytes
        self.doorbells = doorbells
        self.data = bytearray(nbytes)
        self.sequences = [0] * doorbells
        self.refused = set[int]()  # numbers of endpoints that were cut
        self.gone = False

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Writable view of [offset, offset + nbytes) without copying. Raises ValueError outside the arena."""
        check_range(offset, nbytes, self.nbytes)
        return memoryview(self.data)[offset : offset + nbytes]

    def sequence(self, doorbell: int) -> int:
        """What a doorbell was last rung with."""
        return self.sequences[doorbell]

    def reset(self, doorbell: int) -> None:
        """Set a doorbell back to 0, for another peer."""
        self.sequences[doorbell] = 0


class NullPeer:
    """A connected arena of this process."""

    def __init__(self, name: str, number: int, arena: NullArena) -> None:
        self.name = name
        self.number = number
        self.nbytes = arena.nbytes
        self.doorbells = arena.doorbells
        self.arena = arena


class _Descriptor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    pid: int
    number: int


# One lock and one condition for all endpoints of the process: simple, and fast enough for tests.
_changed = threading.Condition()
_arenas: "weakref.WeakValueDictionary[int, NullArena]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class NullEndpoint:
    """One end of an in-process data plane. Implements ``transport.base.Endpoint``.

    Args:
        name: this endpoint's name in peers' errors.
        faults: applied to everything this endpoint sends; none by default.
    """

    def __init__(self, name: str, faults: Faults | None = None) -> None:
        self.name = name
        self.faults = faults or Faults()
        self._arena: NullArena | None = None
        self._number = next(_numbers)
        self._peers: list[NullPeer] = []

    def register(self, nbytes: int, doorbells: int) -> NullArena:
        """Allocate the arena (once per endpoint), all doorbells 0."""
        if self._arena is not None:
            raise TransportError(f"endpoint {self.name} already has an arena of {self._arena.nbytes} bytes")
        if nbytes <= 0 or doorbells <= 0:
            raise ValueError(
                f"an arena needs at least 1 byte and 1 doorbell; got {nbytes} bytes, {doorbells} doorbells"
            )
        self._arena = _arenas[self._number] = NullArena(nbytes, doorbells)
        return self._arena

    def descriptor(self) -> bytes:
        """What a peer in this process needs to connect. Raises TransportError before ``register``."""
        self._registered()
        return msgspec.msgpack.encode(_Descriptor(self.name, os.getpid(), self._number))

    def connect(self, descriptor: bytes, timeout_s: float) -> NullPeer:
        """Find a peer's arena; does not block. Raises TransportError, PeerLostError."""
        self._registered()
        try:
            where = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"not the descriptor of a null endpoint: {error}") from error
        if where.pid != os.getpid():
            raise TransportError(
                f"{where.name} is in process {where.pid}; null endpoints connect only within one process"
            )
        arena = _arenas.get(where.number)
        if arena is None or arena.gone:
            raise PeerLostError(where.name, "its endpoint is closed")
        peer = NullPeer(where.name, where.number, arena)
        self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; from now on its loss does not interrupt waits."""
        self._peers.remove(self._connected(peer))

    def disconnect_for_good(self, peer: Peer) -> None:
        """``disconnect``; operations of that peer that are still on their way never arrive."""
        known = self._connected(peer)
        self._registered().refused.add(known.number)
        self._peers.remove(known)

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        """Copy ``data`` into the peer's arena at ``offset``. Raises ValueError outside the arena, PeerLostError."""
        content = _content(data)
        check_range(offset, len(content), peer.nbytes)
        self.faults.send(_Sent(Operation.WRITE, self._living(peer), offset, self._number, content, 0))

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        """Set the peer's doorbell to ``sequence`` after all earlier writes to that peer, and wake its waiter."""
        check_doorbell(doorbell, peer.doorbells)
        self.faults.send(_Sent(Operation.RING, self._living(peer), doorbell, self._number, b"", sequence))

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        """Write the parts one after another into the peer's [offset, offset + nbytes), then ring."""
        check_doorbell(doorbell, peer.doorbells)
        check_range(offset, nbytes, peer.nbytes)
        content = b"".join(_content(part) for part in parts)
        if len(content) > nbytes:
            raise ValueError(f"a message of {len(content)} bytes does not fit into {nbytes} bytes")
        self.write(peer, offset, content)
        self.ring(peer, doorbell, sequence)

    def fetch(self, peer: Peer, fetch: Fetch) -> None:
        """Read bytes of the peer's arena into one's own, then ring one's own doorbell."""
        own = self._registered()
        check_fetch(fetch, peer.nbytes, own.nbytes, own.doorbells)
        content = bytes(self._living(peer).view(fetch.offset, fetch.nbytes))
        self.faults.send(_Sent(Operation.WRITE, own, fetch.to, self._number, content, 0))
        self.faults.send(_Sent(Operation.RING, own, fetch.doorbell, self._number, b"", fetch.sequence))

    def wait(self, targets: Sequence[tuple[int, int]], timeout_s: float) -> int:
        """Wait until one of this endpoint's doorbells has reached its target; ``targets`` are (doorbell, sequence)."""
        arena = self._registered()
        if not targets:
            raise ValueError("a wait needs at least one doorbell")
        if not math.isfinite(timeout_s):
            raise ValueError("a wait needs a finite timeout")
        for doorbell, _ in targets:
            check_doorbell(doorbell, arena.doorbells)

        def ready() -> int | None:
            return next((i for i, (bell, goal) in enumerate(targets) if arena.sequences[bell] >= goal), None)

        def gone() -> NullPeer | None:
            return next((peer for peer in self._peers if peer.arena.gone), None)

        with _changed:
            _changed.wait_for(lambda: ready() is not None or gone() is not None, max(timeout_s, 0.0))
            index, lost = ready(), gone()
            if index is not None:
                return index
            if lost is not None:
                raise PeerLostError(lost.name, "its endpoint is closed")
            reached = [arena.sequences[doorbell] for doorbell, _ in targets]
        raise deadline_error(self.name, targets, reached, timeout_s)

    def close(self) -> None:
        """Tell peers, then release all memory. Idempotent. Views keep their memory."""
        if self._arena is None:
            return
        with _changed:
            self._arena.gone = True
            _changed.notify_all()
        self._peers.clear()
        self.faults.held.clear()
        self._arena = None

    def _registered(self) -> NullArena:
        if self._arena is None:
            raise TransportError(f"endpoint {self.name} has no arena: call register() first, and nothing after close()")
        return self._arena

    def _connected(self, peer: Peer) -> NullPeer:
        if not isinstance(peer, NullPeer) or peer not in self._peers:
            raise TransportError(f"endpoint {self.name} is not connected to {peer.name}")
        return peer

    def _living(self, peer: Peer) -> NullArena:
        arena = self._connected(peer).arena
        if arena.gone:
            raise PeerLostError(peer.name, "its endpoint is closed")
        return arena


def _content(part: Any) -> bytes:  # Any: numpy declares its buffer protocol from Python 3.12 on only
    view = memoryview(part)
    if not view.c_contiguous:
        raise ValueError("a part is not C-contiguous; copy it first")
    return view.tobytes()
