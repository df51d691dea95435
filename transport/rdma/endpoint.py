"""The RDMA transport between machines, with pyverbs (rdma-core). Implements ``transport.base.Endpoint``.

Every connection is a reliable queue pair, set up over an authenticated TCP connection (``transport.listener``), which
carries the keys to the arena. The TCP connection stays open: when it closes, the peer has exited. A message is one post
of two writes, data then doorbell, which a reliable queue pair executes in order. Messages are sent from registered
memory, which is reused once their writes have completed. The receiver's CPU takes no part: a wait polls the doorbells
in memory, and sleeps if none is ready. Doorbells are written with immediate data, so that they also complete at the
receiver and can raise an event there (``transport.rdma.events``).

pyverbs comes with the distribution (Debian: python3-pyverbs), not from PyPI; it is imported when an endpoint registers.
"""

import contextlib
import errno
import functools
import math
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import msgspec

from lamina._native import Arena as NativeArena
from lamina.config.environment import environment
from lamina.core.errors import PeerLostError, TransportError
from lamina.transport import listener
from lamina.transport.arena import OwnArena
from lamina.transport.base import (
    DeviceMemory,
    Fetch,
    Part,
    Peer,
    Target,
    check_doorbell,
    check_fetch,
    check_range,
    deadline_error,
    part_nbytes,
)
from lamina.transport.endpoint import ListeningEndpoint, ListeningOwn, Options
from lamina.transport.listener import SocketDescriptor
from lamina.transport.rdma import events as rdma_events
from lamina.transport.rdma.events import Events
from lamina.transport.rdma.ports import SelectedPort, choose, inventory, own_numa_node
from lamina.transport.rdma.queue import (
    Device,
    Granted,
    Pair,
    QueuePair,
    Reader,
    RemoteMemory,
    Sender,
    refusal,
    register_memory,
)

SLICE_S = 0.02  # time between checks whether peers are alive
READ_SLICE_S = 100e-6  # time between checks whether a read is done, while spinning
SHORTEST_SLEEP_S = 1e-3  # resolution of poll(); shorter waits use the native nap
WAITS = 64  # calls of wait between two refills of the receive queue, if every wait ends while spinning
LAST_WORDS_S = 0.05  # time for messages that a peer wrote before it exited to arrive


def _verbs() -> Any:
    """Return the modules of pyverbs used here, in one namespace."""
    try:
        from types import SimpleNamespace

        from pyverbs import addr, cq, device, enums, mr, pd, pyverbs_error, qp, srq, wr
    except ImportError as error:
        raise TransportError(
            f"rdma needs pyverbs, which cannot be imported: {error}. It comes with rdma-core (Debian: apt-get install "
            "python3-pyverbs ibverbs-providers), for the distribution's own Python: add its directory to sys.path"
        ) from error
    modules = {"addr": addr, "cq": cq, "device": device, "enums": enums, "mr": mr, "pd": pd, "qp": qp, "srq": srq}
    return SimpleNamespace(**modules, wr=wr, error=pyverbs_error.PyverbsError)


class RdmaPeer:
    """A connected remote arena."""

    def __init__(self, where: SocketDescriptor, connection: socket.socket, sender: Sender) -> None:
        self.where = where
        self.name = where.name
        self.nbytes = where.nbytes
        self.doorbells = where.doorbells
        self.connection = connection
        self.sender = sender
        self.reader: Reader | None = None
        self.reader_connection: socket.socket | None = None
        self.lost = ""  # the reason; empty while the peer is connected
        self.lost_at = 0.0

    def close(self) -> None:
        self.sender.close()
        self.connection.close()
        if self.reader is not None and self.reader_connection is not None:
            self.reader.close()
            self.reader_connection.close()


class _Request(msgspec.Struct, array_like=True, frozen=True):
    """A peer's request for a queue pair: the identity of the peer's arena, and the peer's end of the pair."""

    identity: int
    pair: Pair


@dataclass(frozen=True)
class _Incoming:
    """A queue pair through which a peer, known by the ``identity`` of its arena, accesses this arena."""

    connection: socket.socket
    pair: QueuePair
    identity: int

    def close(self) -> None:
        self.pair.close()
        self.connection.close()


@dataclass(frozen=True)
class _Own(ListeningOwn):
    """State of a registered endpoint. ``refused``: Identities of peers that must not connect again."""

    device: Device
    incoming: list[_Incoming]
    refused: set[int]

    def close_incoming(self, closing: list[_Incoming]) -> None:
        for pair in closing:
            self.incoming.remove(pair)
            pair.close()


class RdmaEndpoint(ListeningEndpoint[_Own, RdmaPeer]):
    """One worker's end of the data plane over RDMA. By default, peers reach it at the address of the RDMA port.

    ``register`` raises TransportError without pyverbs, without a usable device, or if too little memory can be locked.
    """

    transport = "rdma"

    def __init__(self, name: str, **options: Unpack[Options]) -> None:
        super().__init__(name, **options)
        self._waits = 0
        self._shared: dict[bytes, Any] = {}  # registered memory regions on GPUs, by key

    @property
    def device(self) -> str:
        """The port in use, its address, and why it was selected."""
        return self._registered().device.selected.reason

    def share(self, memory: DeviceMemory) -> bytes:
        device, enums = self._registered().device, self._registered().device.verbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        nic = device.selected.port.device
        region, address = register_memory(device.verbs, device.domain, nic, memory, access)
        key = msgspec.msgpack.encode(RemoteMemory(region.rkey, address))
        self._shared[key] = region
        return key

    def unshare(self, key: bytes) -> None:
        self._shared.pop(key).close()

    def connect(self, descriptor: bytes, timeout_s: float) -> RdmaPeer:
        where = listener.decode(descriptor, "rdma", SocketDescriptor)
        with contextlib.ExitStack() as undo:
            connection, pair, granted = self._join(where, timeout_s, undo)
            sender = Sender(self._registered().device, pair, granted, where.name)
            undo.pop_all()
        peer = RdmaPeer(where, connection, sender)
        self._peers[id(peer)] = peer
        return peer

    def _join(
        self, where: SocketDescriptor, timeout_s: float, undo: contextlib.ExitStack
    ) -> tuple[socket.socket, QueuePair, Granted]:
        """Make another queue pair to a peer, with its TCP connection."""
        pair = undo.enter_context(contextlib.closing(QueuePair(self._registered().device)))
        request = msgspec.msgpack.encode(_Request(self._registered().arena.identity, pair.local))
        connection, answer = listener.connect(self.name, where, self._secret, request, timeout_s, self._silence_s)
        undo.callback(connection.close)
        granted = msgspec.msgpack.decode(answer, type=Granted)
        pair.join(granted.pair)
        return connection, pair, granted

    def disconnect(self, peer: Peer) -> None:
        known = self._connected(peer)
        del self._peers[id(known)]
        known.close()

    def disconnect_for_good(self, peer: Peer) -> None:
        own, identity = self._registered(), self._connected(peer).where.identity
        self.disconnect(peer)
        own.refused.add(identity)
        own.close_incoming([pair for pair in own.incoming if pair.identity == identity])

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        known, total = self._connected(peer), part_nbytes(data)
        check_range(offset, total, known.nbytes)
        self._living(known).write_and_ring(offset, [data], total, None, self._stall_s)

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        known = self._connected(peer)
        check_doorbell(doorbell, known.doorbells)
        self._living(known).write_and_ring(0, [], 0, (doorbell, sequence), self._stall_s)

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        known = self._connected(peer)
        check_doorbell(doorbell, known.doorbells)
        check_range(offset, nbytes, known.nbytes)
        total = sum(map(part_nbytes, parts))
        if total > nbytes:
            raise ValueError(f"a message of {total} bytes does not fit into {nbytes} bytes")
        self._living(known).write_and_ring(offset, parts, total, (doorbell, sequence), self._stall_s)

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
        known = self._connected(peer)
        total = sum(map(part_nbytes, parts))
        self._living(known).write_and_ring(at, parts, total, None, self._stall_s, _remote_memory(key))
        self.post(peer, offset, len(header), [header], doorbell, sequence)

    def fetch(self, peer: Peer, fetch: Fetch) -> None:
        """Post a one-sided read on a queue pair for reads, which the first fetch connects."""
        own, known = self._registered(), self._connected(peer)
        check_fetch(fetch, known.nbytes, own.arena.native.nbytes, own.arena.native.doorbells)
        self._living(known)
        if known.reader is None:
            with contextlib.ExitStack() as undo:
                known.reader_connection, pair, granted = self._join(known.where, self._silence_s, undo)
                known.reader = Reader(own.device, pair, granted, own.arena.native, known.name)
                undo.pop_all()
        known.reader.fetch(fetch, self._stall_s)

    def wait(self, targets: Sequence[Target], timeout_s: float) -> int:
        own = self._registered()
        if not math.isfinite(timeout_s):
            raise ValueError("a wait needs a finite timeout")
        native = own.arena.native
        self._waits += 1
        if self._waits % WAITS == 0:
            own.device.receiver.refill()
        begun = time.monotonic()
        deadline, awake_until = begun + timeout_s, begun + self.spin_s
        index = self._spin(native, targets, min(timeout_s, self.spin_s))
        while index is None:
            gone = self._find_gone(own)
            index = native.watch(targets, 0.0, 0.0)  # checked after the peer's exit, so that its last rings still count
            if index is not None:
                break
            if gone is not None:
                raise PeerLostError(gone.name, gone.lost)
            now = time.monotonic()
            if now >= deadline:
                reached = [native.sequence(doorbell) for doorbell, _ in targets]
                raise deadline_error(self.name, targets, reached, timeout_s)
            if now < awake_until:
                index = self._spin(native, targets, min(awake_until, deadline) - now)
            else:
                index = self._sleep(own, targets, min(deadline - now, SLICE_S))
        return index

    def _spin(self, native: NativeArena, targets: Sequence[Target], seconds: float) -> int | None:
        """Busy-wait on the doorbells; only ``READ_SLICE_S`` at a time while reads are in flight."""
        at_most = min(seconds, READ_SLICE_S) if self._reads() else seconds
        return native.watch(targets, at_most, at_most)

    def _sleep(self, own: _Own, targets: Sequence[Target], seconds: float) -> int | None:
        """Sleep until a message arrives or a read completes, at most ``seconds``; returns a ready target, if any."""
        native = own.arena.native
        reads = self._reads()
        if seconds < SHORTEST_SLEEP_S:
            return native.watch(targets, min(seconds, READ_SLICE_S) if reads else seconds, 0.0)
        sources = [own.device.receiver.events, *reads]
        for source in sources:
            source.arm()
        self._collect(own)  # completions from before arming raise no event
        index = native.watch(targets, 0.0, 0.0)
        if index is None:
            rdma_events.sleep(sources, seconds)
            self._collect(own)
            index = native.watch(targets, 0.0, 0.0)
        return index

    def _reads(self) -> list[Events]:
        readers = [peer.reader for peer in self._peers.values() if peer.reader is not None]
        return [reader.events for reader in readers if reader.events is not None]

    def _collect(self, own: _Own) -> None:
        """Process completions of messages and of reads; a completed read rings its doorbell."""
        own.device.receiver.refill()
        for peer in self._peers.values():
            if peer.reader is not None:
                peer.reader.process_completions()

    def _open(self, arena: OwnArena) -> _Own:
        node = own_numa_node(os.sched_getaffinity(0))
        selected = choose(inventory(), wanted=environment().rdma_device, numa_node=node)
        host = self._host or selected.host
        if host is None:
            raise TransportError(f"{selected.reason} has no IPv4 address for {self.name} to listen on; give a host")
        device = Device(_verbs(), selected, arena.native)
        incoming, refused = list[_Incoming](), set[int]()
        try:
            return _Own(
                arena, self._listen(arena, host, _admit_to(device, incoming, refused)), device, incoming, refused
            )
        except TransportError:
            device.close()
            raise

    def _leave(self, own: _Own) -> None:
        own.listener.close()
        for peer in self._peers.values():
            peer.close()
        own.close_incoming(list(own.incoming))
        for key in list(self._shared):
            self.unshare(key)
        own.device.close()

    def _living(self, peer: RdmaPeer) -> Sender:
        lost = peer.lost or peer.sender.failure
        if lost:
            raise PeerLostError(peer.name, lost)
        return peer.sender

    def _find_gone(self, own: _Own) -> RdmaPeer | None:
        """Return a peer lost at least ``LAST_WORDS_S`` ago, if any. Closes queue pairs of exited peers."""
        connections = [peer.connection for peer in self._peers.values()]
        ended = _ended(connections + [pair.connection for pair in own.incoming])
        own.close_incoming([pair for pair in own.incoming if pair.connection in ended])
        now = time.monotonic()
        for peer in self._peers.values():
            if not peer.lost:
                peer.sender.process_completions()
                peer.lost = peer.sender.failure
                if peer.reader is not None:
                    peer.reader.process_completions()
                    peer.lost = peer.lost or peer.reader.failure
                if peer.connection in ended:
                    peer.lost = "its process has exited or closed its endpoint"
                peer.lost_at = now
        return next((peer for peer in self._peers.values() if peer.lost and now - peer.lost_at > LAST_WORDS_S), None)


def dma_buf_obstacle(selected: SelectedPort) -> str:
    """Return why a port's driver cannot register GPU memory; empty if it can.

    Registers an invalid file descriptor: a driver that reports EBADF supports dma-bufs. Raises TransportError if the
    port cannot be opened.
    """
    verbs, port = _verbs(), selected.port
    access = verbs.enums.IBV_ACCESS_LOCAL_WRITE
    try:
        with (
            contextlib.closing(verbs.device.Context(name=port.device)) as context,
            contextlib.closing(verbs.pd.PD(context)) as domain,
        ):
            try:
                verbs.mr.DmaBufMR(domain, mmap.PAGESIZE, access, dmabuf=-1).close()
            except verbs.error as error:
                return "" if getattr(error, "error_code", 0) == errno.EBADF else refusal(error)
    except verbs.error as error:
        raise TransportError(f"cannot open {port}: {error}") from error
    return ""


def _admit_to(device: Device, incoming: list[_Incoming], refused: set[int]) -> listener.Admit:
    """Return the listener's ``admit``, which gives each connecting peer a queue pair to the arena."""

    def admit(request: bytes) -> tuple[bytes, Callable[[socket.socket], None]]:
        try:
            other = msgspec.msgpack.decode(request, type=_Request)
        except msgspec.DecodeError as error:
            raise TransportError(f"invalid request, not a queue pair: {error}") from error
        if other.identity in refused:
            raise TransportError("this peer was disconnected for good")
        pair = QueuePair(device, accepted=True)
        try:
            pair.join(other.pair)
        except TransportError:
            pair.close()
            raise
        granted = Granted(pair.local, device.data, device.doorbells)
        return msgspec.msgpack.encode(granted), lambda connection: incoming.append(
            _Incoming(connection, pair, other.identity)
        )

    return admit


@functools.cache
def _remote_memory(key: bytes) -> RemoteMemory:
    return msgspec.msgpack.decode(key, type=RemoteMemory)


def _ended(connections: Sequence[socket.socket]) -> set[socket.socket]:
    """Return the connections that peers have closed. Peers send nothing over a connection after the handshake."""
    poller = select.poll()
    by_fd = {connection.fileno(): connection for connection in connections}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    return {by_fd[fd] for fd, _ in poller.poll(0)}
