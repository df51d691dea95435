"""Base classes of the endpoints of shm, TCP and RDMA: arena, peers, descriptor and options."""

import abc
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Required, TypedDict, TypeVar, Unpack

import msgspec

from lamina._native import Arena as NativeArena
from lamina.core.errors import DeadlineError, TransportError
from lamina.transport.arena import MappedArena, OwnArena, allocate
from lamina.transport.base import Endpoint, Peer, Target, deadline_error
from lamina.transport.listener import PROTOCOL, Admit, Listener, SocketDescriptor, check_secret

SPIN_S = 20e-6  # about the cost of a wake-up, so that a wait costs at most twice the better of spinning and sleeping
OWN_CORES_SPIN_S = 2e-3  # if workers share no core: after such a wait, a wake-up adds about 2%
SILENCE_S = 10.0
STALL_S = 60.0
MIN_NAP_S = 50e-6
MAX_NAP_S = 2e-3
NAP_SHARE = 8  # a wait on several transports delays a message by at most 1/8 of the time waited

Wait = Callable[[Sequence[Target], float], int]
"""The type of ``Endpoint.wait``."""


def spin_s(workers: Collection[frozenset[int]]) -> float:
    """Return how long waits spin before they sleep, given the cores of each worker: longer if workers share no core."""
    return OWN_CORES_SPIN_S if sum(map(len, workers)) == len(frozenset.union(*workers)) else SPIN_S


class Options(TypedDict, total=False):
    """Options of an endpoint that peers reach at a host and a port.

    Attributes:
        secret: secret of the workers of one cluster, at least 16 bytes.
        host: address of this machine to listen on (the system picks the port); None: the transport's default.
        advertised: address at which peers reach the endpoint; None: ``host``.
        spin_s: seconds that a wait spins before it sleeps; more only if a core is free for it. The endpoint's attribute
            of this name may be changed between waits.
        silence_s: seconds without a sign of life after which a connection counts as lost. A transport that reconnects
            then tries for as long again before the peer counts as lost.
        stall_s: seconds for which a live peer may accept no byte of a message.
    """

    secret: Required[bytes]
    host: str | None
    advertised: str | None
    spin_s: float
    silence_s: float
    stall_s: float


@dataclass(frozen=True)
class Own:
    """State of an endpoint from ``register`` to ``close``."""

    arena: OwnArena


@dataclass(frozen=True)
class ListeningOwn(Own):
    """State of an endpoint that listens on a port, from ``register`` to ``close``."""

    listener: Listener


OwnT = TypeVar("OwnT", bound=Own)
ListeningOwnT = TypeVar("ListeningOwnT", bound=ListeningOwn)
PeerT = TypeVar("PeerT", bound=Peer)


class ArenaEndpoint(abc.ABC, Generic[OwnT, PeerT]):
    """The part of an ``Endpoint`` that holds the arena and peers. A closed endpoint may register again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._own: OwnT | None = None
        self._allocated: OwnArena | None = None
        self._peers: dict[int, PeerT] = {}  # by id()

    def register(self, nbytes: int, doorbells: int) -> MappedArena:
        self._check_unregistered()
        arena = allocate(self.name, nbytes, doorbells)
        try:
            self.use_arena(arena)
        except BaseException:
            arena.close()
            raise
        self._allocated = arena
        return MappedArena(arena.native)

    def use_arena(self, arena: OwnArena) -> None:
        """Use an arena that several endpoints of this process share; it must stay open until ``close``."""
        self._check_unregistered()
        self._own = self._open(arena)

    def close(self) -> None:
        """Notify peers, then release all memory and handles. Idempotent. Views keep their memory."""
        own, self._own = self._own, None
        if own is None:
            return
        self._leave(own)
        self._peers.clear()
        if self._allocated is not None:
            self._allocated.close()
            self._allocated = None

    @abc.abstractmethod
    def _open(self, arena: OwnArena) -> OwnT:
        """Let peers write into the arena."""

    @abc.abstractmethod
    def _leave(self, own: OwnT) -> None:
        """Release what ``_open`` returned, and the peers."""

    def _check_unregistered(self) -> None:
        if self._own is not None:
            nbytes = self._own.arena.native.nbytes
            raise TransportError(f"endpoint {self.name} already has an arena of {nbytes} bytes")

    def _registered(self) -> OwnT:
        if self._own is None:
            raise TransportError(f"endpoint {self.name} has no arena: call register() first, and nothing after close()")
        return self._own

    def _connected(self, peer: Peer) -> PeerT:
        known = self._peers.get(id(peer))
        if known is None:
            raise TransportError(f"endpoint {self.name} is not connected to {peer.name}")
        return known


class ListeningEndpoint(ArenaEndpoint[ListeningOwnT, PeerT]):
    """An endpoint that peers reach at a host and a port, where both sides prove that they know the cluster secret."""

    transport: ClassVar[str]

    def __init__(self, name: str, **options: Unpack[Options]) -> None:
        super().__init__(name)
        self._secret = options["secret"]
        check_secret(self._secret)
        self._host = options.get("host")
        self._advertised = options.get("advertised")
        self.spin_s = options.get("spin_s", SPIN_S)
        self._silence_s = options.get("silence_s", SILENCE_S)
        self._stall_s = options.get("stall_s", STALL_S)

    def descriptor(self) -> bytes:
        own = self._registered()
        native, listens = own.arena.native, own.listener
        where = own.arena.identity, self._advertised or listens.host, listens.port, native.nbytes, native.doorbells
        return msgspec.msgpack.encode(SocketDescriptor(self.transport, PROTOCOL, self.name, *where))

    @property
    def refused(self) -> Counter[str]:
        """Connections rejected so far, by kind."""
        return Counter(self._registered().listener.refusals.by_kind)

    def _listen(self, arena: OwnArena, host: str, admit: Admit) -> Listener:
        try:
            return Listener(self.name, host, self._secret, arena.identity, self._silence_s, admit)
        except OSError as error:
            raise TransportError(
                f"{self.name} cannot listen on {host}: {error}; give it an address of this machine"
            ) from error


class WaitInTurns:
    """A ``Wait`` on several endpoints of one arena: on each in turn, for longer the longer nothing arrives."""

    def __init__(self, name: str, arena: NativeArena, endpoints: Sequence[Endpoint]) -> None:
        self._name, self._arena, self._endpoints = name, arena, endpoints

    def __call__(self, targets: Sequence[Target], timeout_s: float) -> int:
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
