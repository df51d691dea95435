"""A worker's links to its peers, each over the transport chosen for the pair and proved by a real write.

All transports of a worker let peers into one arena: beside the slots it holds, for every worker of the cluster, a place
for a proof with a doorbell of its own. Once all links stand, sending goes to a link's own endpoint and waiting to the
one endpoint in use, so that a choice costs nothing; only a worker that uses several waits on them in turns.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamina._native import Arena as NativeArena
from lamina.errors import DeadlineError, PeerLostError, TransportError, WorkerError
from lamina.protocol.channel import ALIGNMENT, Outbox, Slot
from lamina.protocol.choice import Offer, Transport
from lamina.protocol.control import SETUP_TIMEOUT_S, ControlClient, expect
from lamina.protocol.messages import Connect, Link, Linked, Register, Registered
from lamina.transport.arena import MappedArena, OwnArena, allocate
from lamina.transport.base import Endpoint, Peer, deadline_error
from lamina.transport.rdma.endpoint import RdmaEndpoint
from lamina.transport.shm import ShmEndpoint, host
from lamina.transport.tcp import TcpEndpoint

Wait = Callable[[Sequence[tuple[int, int]], float], int]

CONNECT_TIMEOUT_S = 10.0
PROOF_TIMEOUT_S = 5.0
MIN_NAP_S = 50e-6
MAX_NAP_S = 2e-3
NAP_SHARE = 8  # a wait on several transports finds a message at most this part of its time too late


@dataclass(frozen=True)
class _Link:
    endpoint: Endpoint
    peer: Peer


class Links:
    """Set up in the engine's words: ``register``, ``link`` until every pair has proved itself, ``settle``.

    Args:
        secret: what only the workers of this cluster know. address: of this machine, as peers reach it.
    """

    def __init__(self, name: str, secret: bytes, address: str) -> None:
        self.name = name
        self._secret = secret
        self._address = address
        self._endpoints: dict[Transport, ShmEndpoint | TcpEndpoint | RdmaEndpoint] = {}
        self._links: dict[str, _Link] = {}
        self._arena: OwnArena | None = None

    def register(self, register: Register) -> tuple[MappedArena, Offer]:
        """Allocate the arena and let peers in by every transport asked for that works here."""
        self._workers, self._spin_s = register.workers, register.spin_s
        count = len(register.workers)
        nbytes = -(-register.nbytes // ALIGNMENT) * ALIGNMENT + count * ALIGNMENT
        self._arena = allocate(self.name, nbytes, register.doorbells + count)
        descriptors, obstacles = {}, {}
        for transport in register.transports:
            try:
                descriptors[transport] = self._open(transport, register.tls)
            except TransportError as error:
                obstacles[transport] = f"{self.name}: {error}"
        return MappedArena(self._arena.native), Offer(host(), descriptors, obstacles)

    def _open(self, transport: Transport, tls: bool) -> bytes:
        assert self._arena is not None
        match transport:
            case Transport.SHM:
                endpoint: ShmEndpoint | TcpEndpoint | RdmaEndpoint = ShmEndpoint(self.name)
            case Transport.TCP:
                endpoint = TcpEndpoint(self.name, secret=self._secret, host=self._address, tls=tls)
            case Transport.RDMA if tls:
                raise TransportError("rdma cannot be encrypted, which --tls asks for")
            case Transport.RDMA:
                endpoint = RdmaEndpoint(self.name, secret=self._secret)
        endpoint.adopt(self._arena)
        self._endpoints[transport] = endpoint
        return endpoint.descriptor()

    def link(self, link: Link) -> Linked:
        """Connect to these peers, replacing links that stood, and exchange proofs with each."""
        failures: dict[str, str] = {}
        for name in link.peers:
            self.disconnect(name)
        for name, (transport, descriptor) in link.peers.items():
            endpoint = self._endpoints[transport]
            try:
                self._links[name] = _Link(endpoint, endpoint.connect(descriptor, CONNECT_TIMEOUT_S))
                self._prove(name, link.round, transport)
            except TransportError as error:
                failures[name] = str(error)
        waiting = {name: transport for name, (transport, _) in link.peers.items() if name not in failures}
        return Linked(failures | self._await_proofs(waiting, link.round))

    def _prove(self, name: str, round_: int, transport: Transport) -> None:
        peer = self._links[name].peer
        place = self._place(self.name, peer.nbytes, peer.doorbells)
        self.outbox(name, place).send([_proof(round_, transport)], round_)

    def _await_proofs(self, waiting: dict[str, Transport], round_: int) -> dict[str, str]:
        """Why the proofs of some peers did not arrive."""
        assert self._arena is not None
        arena = MappedArena(self._arena.native)
        places = {name: self._place(name, arena.nbytes, arena.doorbells) for name in waiting}
        failures: dict[str, str] = {}
        patience_s = PROOF_TIMEOUT_S + CONNECT_TIMEOUT_S * (len(self._workers) - 2)  # they may try all others in vain
        wait, deadline = self._wait(), time.monotonic() + patience_s
        while waiting:
            names = list(waiting)
            try:
                targets = [(places[name].doorbell, round_) for name in names]
                name = names[wait(targets, deadline - time.monotonic())]
            except PeerLostError as error:
                if error.peer not in waiting:
                    raise
                self.disconnect(error.peer)
                del waiting[error.peer]
                failures[error.peer] = str(error)
                continue
            except DeadlineError:
                late = f"{self.name} saw nothing of its write within {patience_s:g} s"
                return failures | {name: f"{name} connected, and {late}" for name in names}
            expected = _proof(round_, waiting.pop(name))
            if bytes(arena.view(places[name].offset, len(expected))) != expected:
                failures[name] = f"what {name} wrote reached {self.name} as something else"
        return failures

    def _place(self, writer: str, nbytes: int, doorbells: int) -> Slot:
        """Where the proofs of ``writer`` lie in an arena of this size."""
        behind = len(self._workers) - self._workers.index(writer)
        return Slot(nbytes - behind * ALIGNMENT, ALIGNMENT, doorbells - behind)

    def settle(self) -> Wait:
        """Close what no link uses; how to wait for messages from now on, see ``Endpoint.wait``."""
        for transport, endpoint in list(self._endpoints.items()):
            if all(link.endpoint is not endpoint for link in self._links.values()):
                endpoint.close()
                del self._endpoints[transport]
        if len(self._endpoints) == 1:  # a wait on one of several must leave time for the others
            next(iter(self._endpoints.values())).spin_s = self._spin_s
        return self._wait()

    def _wait(self) -> Wait:
        assert self._arena is not None
        endpoints = list(self._endpoints.values())
        return endpoints[0].wait if len(endpoints) == 1 else WaitInTurns(self.name, self._arena.native, endpoints)

    def outbox(self, name: str, slot: Slot) -> Outbox:
        """Sends into a slot of a linked peer."""
        return Outbox(self._links[name].endpoint, self._links[name].peer, slot)

    def fetch(self, name: str, offset: int, nbytes: int, to: int, doorbell: int, sequence: int) -> None:
        """Read from a linked peer's arena, see ``Endpoint.fetch``. Raises PeerLostError, also if it is not linked."""
        link = self._links.get(name)
        if link is None:
            raise PeerLostError(name, "it has been disconnected")
        link.endpoint.fetch(link.peer, offset, nbytes, to, doorbell, sequence)

    def disconnect(self, name: str) -> None:
        """Forget a peer, if it is linked; its death no longer ends waits."""
        if link := self._links.pop(name, None):
            link.endpoint.disconnect(link.peer)

    def close(self) -> None:
        """Leave the data plane and give back its memory. Idempotent."""
        self._links.clear()
        with contextlib.ExitStack() as stack:
            if self._arena is not None:
                stack.callback(self._arena.close)
                self._arena = None
            for endpoint in self._endpoints.values():
                stack.callback(endpoint.close)
            self._endpoints.clear()


class WaitInTurns:
    """Waits on several endpoints of one arena: a little on each, and longer the longer nothing comes."""

    def __init__(self, name: str, arena: NativeArena, endpoints: Sequence[Endpoint]) -> None:
        self._name = name
        self._arena = arena
        self._endpoints = endpoints

    def __call__(self, targets: Sequence[tuple[int, int]], timeout_s: float) -> int:
        """See ``Endpoint.wait``."""
        begun = time.monotonic()
        deadline = begun + timeout_s
        while True:
            now = time.monotonic()
            nap_s = min(max((now - begun) / NAP_SHARE, MIN_NAP_S), MAX_NAP_S) / len(self._endpoints)
            for endpoint in self._endpoints:
                with contextlib.suppress(DeadlineError):
                    return endpoint.wait(targets, min(nap_s, deadline - now))
            if time.monotonic() >= deadline:
                reached = [self._arena.sequence(doorbell) for doorbell, _ in targets]
                raise deadline_error(self._name, targets, reached, timeout_s)


def _proof(round_: int, transport: Transport) -> bytes:
    return f"round {round_} over {transport}".encode()


def set_up_links(links: Links, control: ControlClient) -> tuple[MappedArena, Connect]:
    """A worker's side of its cluster's linking, in the engine's words; what the links are for."""
    arena, offer = links.register(expect(control, Register))
    control.send(Registered(offer))
    while isinstance(message := control.receive(SETUP_TIMEOUT_S), Link):
        control.send(links.link(message))
    if not isinstance(message, Connect):
        raise WorkerError(control.name, f"expected Connect from the engine, got {type(message).__name__}")
    return arena, message
