"""A worker's links to its peers: leases of its arena, connections over a transport, and the proof that each works."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from lamina.control.messages import Connect, Grant, Granted, Link, Linked, Register, Registered
from lamina.control.sockets import SETUP_TIMEOUT_S, ControlClient, expect
from lamina.core.errors import DeadlineError, PeerLostError, TransportError, WorkerError
from lamina.core.topology import Topology
from lamina.dataplane.channel import Channel, Hub
from lamina.dataplane.leases import DOORBELLS, PROOF, PROOF_NBYTES, SLOTS, VERDICT, ArenaPlan, Lease, Leases
from lamina.dataplane.slot import Direct, Outbox, Slot
from lamina.dataplane.transport_choice import Offer, Transport
from lamina.transport.arena import MappedArena, OwnArena, allocate
from lamina.transport.base import Endpoint, Fetch, Peer, SharesMemory, Target
from lamina.transport.device.inboxes import Inbox, Inboxes
from lamina.transport.endpoint import SPIN_S, Wait, WaitInTurns
from lamina.transport.rdma.endpoint import RdmaEndpoint
from lamina.transport.shm import ShmEndpoint, ShmPeer, host
from lamina.transport.tcp import TcpEndpoint

logger = logging.getLogger(__name__)


class LinkEndpoint(Endpoint, Protocol):
    """An endpoint that shares the worker's arena with the endpoints of other transports."""

    spin_s: float

    def use_arena(self, arena: OwnArena) -> None: ...


CONNECT_TIMEOUT_S = 10.0
PROOF_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Member:
    """A worker as its peers know it.

    Attributes:
        secret: secret of the data plane, which only workers of this cluster know.
        address: address at which peers reach this machine.
        bind: address to listen on; empty: ``address``.
    """

    name: str
    secret: bytes
    address: str
    bind: str = ""


@dataclass
class _Round:
    """A round of linking: ``waiting`` has the transport of each peer whose proof has not arrived."""

    number: int
    waiting: dict[str, Transport]
    failures: dict[str, str]
    patience_s: float
    deadline: float


@dataclass(frozen=True)
class _Link:
    endpoint: Endpoint
    peer: Peer
    lease: Lease  # of the peer's arena


def open_endpoint(member: Member, transport: Transport, tls: bool) -> LinkEndpoint:
    """Return a new endpoint of this transport, without an arena. Raises TransportError if it cannot be used here."""
    match transport:
        case Transport.SHM:
            return ShmEndpoint(member.name)
        case Transport.TCP:
            own = member.bind or member.address
            return TcpEndpoint(member.name, secret=member.secret, host=own, advertised=member.address, tls=tls)
        case Transport.RDMA if tls:
            raise TransportError("rdma cannot be encrypted, which --tls requires")
        case Transport.RDMA:
            return RdmaEndpoint(member.name, secret=member.secret)


OpenEndpoint = Callable[[Member, Transport, bool], LinkEndpoint]


def open_links(
    member: Member, register: Register, inboxes: Inboxes | None = None, open_endpoint: OpenEndpoint = open_endpoint
) -> "Links":
    """Allocate the arena, and accept peers over every requested transport that works here. Raises TransportError.

    Arguments are those of ``set_up_links``.
    """
    arena = allocate(member.name, register.arena.nbytes, register.arena.doorbells)
    endpoints: dict[Transport, LinkEndpoint] = {}
    descriptors, obstacles = {}, {}
    for transport in register.transports:
        try:
            endpoint = open_endpoint(member, transport, register.tls)
            endpoint.use_arena(arena)
            endpoints[transport] = endpoint
            descriptors[transport] = endpoint.descriptor()
        except TransportError as error:
            obstacles[transport] = f"{member.name}: {error}"
    kind = inboxes.kind if inboxes is not None else ""
    return Links(member.name, register, arena, endpoints, Offer(host(), descriptors, obstacles, kind), inboxes)


class Links:
    """A worker's arena and its links to peers.

    The engine calls for rounds of ``link`` until each pair of workers has exchanged a proof over some transport; then
    comes ``close_unused_endpoints``. A peer's lease lasts from ``grant`` to ``end_lease``, which may be later than its
    disconnection: a lost peer may still write.

    Attributes:
        arena: this worker's arena.
        plan: the parts of the arena.
        hub: what the channels of all links share.
        offer: how peers reach the arena.
        inboxes: memory of the worker's device that peers write; None: the device has none.
    """

    def __init__(
        self,
        name: str,
        register: Register,
        arena: OwnArena,
        endpoints: Mapping[Transport, LinkEndpoint],
        offer: Offer,
        inboxes: Inboxes | None = None,
    ) -> None:
        self.name = name
        self.arena = MappedArena(arena.native)
        self.plan: ArenaPlan = register.arena
        self.hub = Hub(self.arena, self.plan.pool)
        self.offer = offer
        self.inboxes = inboxes
        self._spin_s, self._open = register.spin_s, register.open
        self._settled = False
        self._books = Leases(self.plan)
        self._leases: dict[str, Lease] = {}
        self._own = arena
        self._endpoints = dict(endpoints)
        self._links: dict[str, _Link] = {}
        self._members = set[str]()  # linked peers that take part
        self._left = set[str]()  # peers without a link whose processes may still run: their leases stay
        self._round: _Round | None = None
        self._closed = False
        self._current = self._choose_wait()

    def grant(self, grant: Grant) -> Granted:
        """Lease a part of the arena to each peer in ``grant``, or to none if the arena has too little room."""
        granted: dict[str, Lease] = {}
        try:
            for name, slot_nbytes in grant.slots.items():
                granted[name] = self._books.lease(slot_nbytes)
        except TransportError as error:
            for lease in granted.values():
                self._books.end_lease(lease)
            return Granted({}, f"{self.name}: {error}")
        for name in dict.fromkeys((*grant.inboxes, *grant.inbox_keys)):
            granted[name] = self._with_inbox(name, granted[name], name in grant.inboxes, name in grant.inbox_keys)
        self._leases |= granted
        return Granted(granted)

    def _with_inbox(self, name: str, lease: Lease, by_device: bool, by_nic: bool) -> Lease:
        """Return a lease with an inbox for a peer's device or NIC, if that is possible."""
        endpoint = self._sharing() if by_nic else None
        if self.inboxes is None or not (by_device or endpoint):
            return lease
        held = self.inboxes.make(name, SLOTS * lease.body_nbytes)
        if held is None:
            return lease
        if endpoint is None:
            return msgspec.structs.replace(lease, inbox=held.handle)
        try:
            return msgspec.structs.replace(lease, inbox_key=endpoint.share(held.memory))
        except TransportError as error:
            logger.warning("messages of %s over rdma go through the host's memory: %s", name, error)
            self.inboxes.close(name)
            return lease

    def _sharing(self) -> SharesMemory | None:
        endpoint = self._endpoints.get(Transport.RDMA)
        return endpoint if isinstance(endpoint, SharesMemory) else None

    def end_lease(self, name: str) -> None:
        """End a peer's lease, so that its part of the arena can be leased again.

        The caller guarantees that the peer cannot write any more: its process was reaped, its TCP connection is closed,
        or its RDMA queue pair is destroyed.
        """
        self.disconnect(name)
        lease = self._leases.pop(name)
        if lease.inbox_key and (endpoint := self._sharing()):
            endpoint.unshare(lease.inbox_key)
        if self.inboxes is not None:
            self.inboxes.close(name)
        for doorbell in range(lease.doorbell, lease.doorbell + DOORBELLS):
            self._own.native.reset(doorbell)
        self._books.end_lease(lease)

    def link(self, link: Link) -> Linked:
        """Connect to peers, replacing earlier links to them, and exchange proofs with each."""
        self.connect(link)
        while (linked := self.linked(PROOF_TIMEOUT_S)) is None:
            pass
        return linked

    def connect(self, link: Link) -> None:
        """Connect to peers, replacing earlier links to them, and send each a proof. ``linked`` awaits their proofs."""
        failures: dict[str, str] = {}
        for name in link.peers:
            self.disconnect(name)
        for name, way in link.peers.items():
            try:
                if (endpoint := self._endpoints.get(way.transport)) is None:
                    raise TransportError(f"{self.name} has closed its {way.transport} endpoint, which no link used")
                peer = endpoint.connect(way.descriptor, CONNECT_TIMEOUT_S)
                self._links[name], proof = _Link(endpoint, peer, way.lease), _proof(link.round, way.transport)
                if self.inboxes is not None and isinstance(peer, ShmPeer):
                    self.inboxes.open(name, way.lease.inbox, SLOTS * way.lease.body_nbytes, proof)
                self.outbox(name, _place(way.lease)).write_and_ring([proof], link.round)
            except TransportError as error:
                failures[name] = str(error)
        waiting = {name: way.transport for name, way in link.peers.items() if name not in failures}
        # Every peer may first time out on all the others.
        patience_s = PROOF_TIMEOUT_S + CONNECT_TIMEOUT_S * (link.workers - 2)
        self._round = _Round(link.round, waiting, failures, patience_s, time.monotonic() + patience_s)
        self._current = self._choose_wait()

    @property
    def is_linking(self) -> bool:
        """True from ``connect`` until ``linked`` has returned a result."""
        return self._round is not None

    def linked(self, timeout_s: float) -> Linked | None:
        """Wait for the proofs of the peers given to ``connect``; None if some may still come after ``timeout_s``.

        Raises PeerLostError for any other peer.
        """
        current = self._round
        if current is None:
            return None
        waiting, failures, wait = current.waiting, current.failures, self.wait
        places = {name: _place(self._leases[name]) for name in waiting}
        until = time.monotonic() + timeout_s
        while waiting:
            names = list(waiting)
            try:
                targets = [(places[name].doorbell, current.number) for name in names]
                name = names[wait(targets, min(until, current.deadline) - time.monotonic())]
            except PeerLostError as error:
                if error.peer not in waiting:
                    raise
                self.disconnect(error.peer, str(error))
                continue
            except DeadlineError:
                if time.monotonic() < current.deadline:
                    return None
                late = f"{self.name} did not see its write within {current.patience_s:g} s"
                failures |= {name: f"{name} connected, but {late}" for name in names}
                break
            expected = _proof(current.number, waiting.pop(name))
            if bytes(self.arena.view(places[name].offset, len(expected))) != expected:
                failures[name] = f"the write of {name} reached {self.name} with other bytes"
            self._judge_inbox(name, expected)
        self._round = None
        return Linked(failures)

    def _judge_inbox(self, name: str, proof: bytes) -> None:
        """Tell a peer on this host, through the arena, whether its device's writes into its inbox here arrive."""
        arrived = self.inboxes is not None and self.inboxes.proof_arrived(name, proof)
        self.arena.view(self._leases[name].offset + VERDICT, 1)[0] = arrived

    def close_unused_endpoints(self) -> Wait:
        """Close endpoints that no link uses, unless later workers may use them. Returns how to wait for messages.

        Call it once the first workers are linked. Without a link, the most preferred endpoint stays open.
        """
        self._members = set(self._links)
        self._settled = True
        used = self._used() or list(self._endpoints.values())[:1]
        for transport, endpoint in list(self._endpoints.items()):
            if endpoint not in used and not self._open:
                endpoint.close()
                del self._endpoints[transport]
        self._current = self._choose_wait()
        return self.wait if self._open else self._current

    def receive_always(self) -> None:
        """Receive over TCP also while the worker's thread waits for its device, where no wait of this class runs."""
        for endpoint in self._endpoints.values():
            if isinstance(endpoint, TcpEndpoint):
                endpoint.receive_always()

    def wait(self, targets: Sequence[Target], timeout_s: float) -> int:
        """Wait for the first of ``targets`` on all endpoints that links use."""
        return self._current(targets, timeout_s)

    def _used(self) -> list[LinkEndpoint]:
        return [one for one in self._endpoints.values() if any(link.endpoint is one for link in self._links.values())]

    def _choose_wait(self) -> Wait:
        endpoints = (self._used() if self._settled else []) or list(self._endpoints.values())
        alone = self._settled and len(endpoints) == 1  # a wait on one of several must leave time for the others
        for endpoint in endpoints:
            endpoint.spin_s = self._spin_s if alone else SPIN_S
        return endpoints[0].wait if len(endpoints) == 1 else WaitInTurns(self.name, self._own.native, endpoints)

    @property
    def peers(self) -> list[str]:
        """Peers in the current topology, also those whose link was cut since ``apply_topology``."""
        return sorted(self._members)

    @property
    def left(self) -> list[str]:
        """Peers that have left, and whose processes may still run."""
        return sorted(self._left)

    def has(self, name: str) -> bool:
        return name in self._links

    def apply_topology(self, topology: Topology) -> None:
        """End the links to peers that are not in ``topology``, and their leases."""
        for name in (self._members | self._leases.keys()) - topology.names - self._left:
            self.disconnect_for_good(name)
            self.end_lease(name)  # the engine has ended its process
        self._members &= topology.names

    def change_members(self, topology: Topology) -> None:
        """Make the peers in ``topology`` members, and end the links to members that are not in it.

        A peer whose link was cut is a member as well: until the epoch ends without the peer, this worker waits for it.
        """
        for name in self._members - topology.names:
            self.disconnect(name)
            self._left.add(name)
        self._members = set(topology.names & self._leases.keys())

    def remove_peers(self, names: Sequence[str]) -> None:
        """End the leases of peers whose processes have ended."""
        for name in names:
            self._left.discard(name)
            if name in self._leases:
                self.end_lease(name)

    def remove_leavers(self) -> None:
        """End the leases of all peers that have left: their processes have ended."""
        self.remove_peers(list(self._left))

    def disconnect_for_good(self, name: str) -> None:
        """End the link to a peer, if there is one, so that nothing more of the peer arrives."""
        self._forget_channel(name)
        if link := self._links.pop(name, None):
            link.endpoint.disconnect_for_good(link.peer)

    def ring(self, name: str, sequence: int) -> None:
        """Ring the doorbell that a peer's ``bell`` names, after everything that was sent to the peer.

        Does nothing without a link, or if the peer is lost, which ``wait`` reports.
        """
        if link := self._links.get(name):
            with contextlib.suppress(PeerLostError):
                link.endpoint.ring(link.peer, link.lease.doorbell + PROOF, sequence)

    def bell(self, name: str) -> int:
        """Return the doorbell that a peer's ``ring`` rings here."""
        return self._leases[name].doorbell + PROOF

    def channel(self, name: str) -> Channel:
        """Return this end of the link to a peer, for messages in slots."""
        link = self._links[name]
        channel = Channel(link.endpoint, link.peer, self.arena, self.hub, self._leases[name], link.lease)
        if isinstance(link.endpoint, SharesMemory) and link.lease.inbox_key:
            channel.post_apart = functools.partial(link.endpoint.post_apart, link.peer, link.lease.inbox_key)
        return channel

    def inbox(self, name: str) -> Inbox | None:
        """Return the device memory into which a peer's device or NIC writes message bodies; None if it cannot."""
        return None if self.inboxes is None else self.inboxes.own(name)

    def direct(self, name: str) -> Direct | None:
        """Return the memory of a link that a device may read and write; None unless the peer is on this host."""
        link = self._links.get(name)
        if link is None or not isinstance(link.peer, ShmPeer):
            return None
        arrives = memoryview(link.peer.native)[link.lease.offset + VERDICT]
        theirs = self.inboxes.theirs(name) if self.inboxes is not None and arrives else None
        return Direct(self._own.native, link.peer.native, self._leases[name], link.lease, self.inbox(name), theirs)

    def leases(self, name: str) -> tuple[Lease, Lease]:
        """Return the linked peer's lease of this arena, and this worker's lease of the peer's arena."""
        return self._leases[name], self._links[name].lease

    def leases_of(self, names: Iterable[str]) -> dict[str, tuple[Lease, Lease]]:
        """Return ``leases`` of those of these workers that are linked."""
        return {name: self.leases(name) for name in names if self.has(name)}

    def outbox(self, name: str, slot: Slot) -> Outbox:
        """Return the sender for a slot in a linked peer's arena."""
        return Outbox(self._links[name].endpoint, self._links[name].peer, slot)

    def fetch(self, name: str, fetch: Fetch) -> None:
        """Read from a linked peer's arena, see ``Endpoint.fetch``. Raises PeerLostError, also if it is not linked."""
        link = self._links.get(name)
        if link is None:
            raise PeerLostError(name, "it has been disconnected")
        link.endpoint.fetch(link.peer, fetch)

    def disconnect(self, name: str, reason: str = "") -> None:
        """End the link to a peer, if there is one. The peer's death then no longer ends waits."""
        self._forget_channel(name)
        if self._round is not None and name in self._round.waiting:
            del self._round.waiting[name]
            self._round.failures[name] = reason or f"{name} has been disconnected"
        if link := self._links.pop(name, None):
            link.endpoint.disconnect(link.peer)

    def drop_newcomer(self, name: str) -> bool:
        """End the link to a peer that is not yet a member. Return False, with no effect, for a member."""
        if name in self._members:
            return False
        self.disconnect(name)
        return True

    def _forget_channel(self, name: str) -> None:
        if self.inboxes is not None:
            self.inboxes.close_outgoing(name)
        for channel in [channel for channel in self.hub.channels if channel.name == name]:
            self.hub.forget(channel)

    def close(self) -> None:
        """Close all endpoints and free the arena. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._links.clear()
        with contextlib.ExitStack() as stack:
            stack.callback(self._own.close)
            if self.inboxes is not None:
                stack.callback(self.inboxes.close_all)
            for endpoint in self._endpoints.values():
                stack.callback(endpoint.close)


def _place(lease: Lease) -> Slot:
    """Return the slot for the proof of a peer with this lease."""
    return Slot(lease.offset, PROOF_NBYTES, lease.doorbell + PROOF)


def _proof(round_: int, transport: Transport) -> bytes:
    return f"round {round_} over {transport}".encode()


def set_up_links(
    control: ControlClient,
    resources: contextlib.ExitStack,
    inboxes: Inboxes | None,
    open_endpoint: OpenEndpoint,
) -> tuple[Links, Connect]:
    """Link this worker to its peers as the engine directs. Returns the links and the engine's ``Connect``.

    Args:
        control: connection to the engine.
        resources: stack that closes the links.
        inboxes: memory of the worker's device that peers may write, if the device has any.
        open_endpoint: opens the endpoint of a transport.

    Raises TransportError, PeerLostError, DeadlineError, WorkerError.
    """
    member = Member(control.name, control.data_secret, control.local_address, control.bind_address)
    links = open_links(member, expect(control, Register), inboxes, open_endpoint)
    resources.callback(links.close)
    control.send(Registered(links.offer))
    while isinstance(message := control.receive(SETUP_TIMEOUT_S), Grant | Link):
        control.send(links.grant(message) if isinstance(message, Grant) else links.link(message))
    if not isinstance(message, Connect):
        raise WorkerError(control.name, f"expected Connect from the engine, got {type(message).__name__}")
    return links, message


LINKING_SLICE_S = 0.002  # how long a worker may wait for other things while the proof of a newcomer may arrive


class Newcomers:
    """Links this worker to workers that join while steps run: proofs are polled, not waited for."""

    def __init__(self, control: ControlClient, links: Links) -> None:
        self._control, self._links = control, links

    def handle_link_message(self, message: Grant | Link) -> None:
        """Carry out a request about links. Connecting to a peer takes seconds if its host does not answer."""
        if isinstance(message, Grant):
            self._control.send(self._links.grant(message))
        else:
            self._links.connect(message)

    @property
    def pending(self) -> bool:
        """True while a proof is awaited: call ``poll`` every ``LINKING_SLICE_S``."""
        return self._links.is_linking

    def poll(self) -> None:
        """Answer the engine if all proofs have arrived, or are late. Raises PeerLostError."""
        if self.pending and (linked := self._links.linked(0.0)) is not None:
            self._control.send(linked)
