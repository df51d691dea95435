"""The simulated network: an ordered way between each two ends, with delays, partitions and the ends' deaths."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from lamina.core.errors import PeerLostError, TransportError
from lamina.core.topology import Epoch
from lamina.transport.arena import OwnArena
from lamina.transport.base import Arena, Fetch, Part, Peer, check_doorbell, check_fetch, check_range, deadline_error
from lamina.worker.loop import Fence
from tests.simulation.world import Broken, Task, World

SILENCE_S = 10.0  # after which a connection of the data plane counts as lost, as of the TCP transport
DELAY_S = 50e-6


class Network:
    """Carries what ends send each other. Messages on one way keep their order; those on different ways do not.

    Attributes:
        endpoints: of the data plane, by number.
        jitter: how many times as long as ``DELAY_S`` a message takes on average, by plane; once, if it is not named.
    """

    def __init__(self, world: World, jitter: Mapping[str, float]) -> None:
        self.world, self.jitter = world, jitter
        self.endpoints: list[SimulatedEndpoint] = []
        self._last: dict[tuple[str, str, str], float] = {}  # by way: when its latest message arrives
        self._blocked: dict[tuple[str, str], list[tuple[str, Callable[[], None]]]] = {}
        self._slow: dict[tuple[str, str], float] = {}

    def send(self, plane: str, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver something later, after everything sent on the same way before."""
        if (held := self._blocked.get((source, target))) is not None:
            held.append((plane, deliver))
            return
        way = plane, source, target
        delay = DELAY_S * (0.2 + self.world.random.expovariate(1.0) * self.jitter.get(plane, 1.0)) + self._slow.get(
            way[1:], 0.0
        )
        at = max(self.world.now + delay, self._last.get(way, 0.0))
        self._last[way] = at
        self.world.call_at(at, deliver)

    def is_blocked(self, source: str, target: str) -> bool:
        """True while nothing gets from one to the other."""
        return (source, target) in self._blocked

    def block(self, source: str, target: str) -> None:
        """Hold back all messages on this way from now on. The connection is lost if that lasts too long."""
        if not self.is_blocked(source, target):
            held: list[tuple[str, Callable[[], None]]] = []
            self._blocked[source, target] = held
            self.world.call_later(SILENCE_S, lambda: self._lose(source, target, held))

    def unblock(self, source: str, target: str) -> None:
        """Let messages pass again, also those that were held back."""
        for plane, deliver in self._blocked.pop((source, target), []):
            self.send(plane, source, target, deliver)

    def slow_down(self, source: str, target: str, seconds: float) -> None:
        """Let messages on this way take so much longer; 0: no longer than others."""
        self._slow[source, target] = seconds

    def heal(self) -> None:
        """Let all messages pass in time again."""
        self._slow.clear()
        for way in list(self._blocked):
            self.unblock(*way)

    def _lose(self, source: str, target: str, held: list[tuple[str, Callable[[], None]]]) -> None:
        if self._blocked.get((source, target)) is not held:
            return  # it was healed in time
        self._blocked[source, target][:] = [each for each in held if each[0] != "data"]
        for endpoint in self.endpoints:
            for other, peers in ((target, source), (source, target)):
                if endpoint.name == peers:
                    endpoint.lose(other, f"nothing has come from it for {SILENCE_S:g} s")


class SimulatedPeer:
    """A connected arena of another process."""

    def __init__(self, endpoint: "SimulatedEndpoint") -> None:
        self.name = endpoint.name
        self.endpoint = endpoint
        self.nbytes, self.doorbells = endpoint.native.nbytes, endpoint.native.doorbells
        self.lost = ""


class SimulatedEndpoint:
    """One end of the data plane. Implements ``transport.base.Endpoint`` over a ``Network``."""

    def __init__(
        self,
        name: str,
        network: Network,
        task: Task,
        fence: Callable[[], Fence | None],
        allocate: Callable[[], None],
    ) -> None:
        """Create an endpoint without an arena.

        Args:
            fence: Returns that of its worker, once there is one.
            allocate: Called before a message is sent; raises MemoryError if there is no memory for it.
        """
        self.name = name
        self.spin_s = 0.0
        self.task = task
        self.is_closed = False
        self._network, self._world, self._fence, self._allocate = network, network.world, fence, allocate
        self._number = len(network.endpoints)
        network.endpoints.append(self)
        self._arena: OwnArena | None = None
        self._peers: list[SimulatedPeer] = []
        self._refused = set[int]()
        self._targets: Sequence[tuple[int, int]] = ()

    @property
    def native(self) -> Any:
        """The arena."""
        assert self._arena is not None
        return self._arena.native

    def register(self, nbytes: int, doorbells: int) -> Arena:
        """Workers share one arena between endpoints: see ``use_arena``."""
        raise NotImplementedError

    def use_arena(self, arena: OwnArena) -> None:
        """Use this arena."""
        self._arena = arena

    def descriptor(self) -> bytes:
        """What a peer needs to connect."""
        return msgspec.msgpack.encode((self.name, self._number))

    def connect(self, descriptor: bytes, timeout_s: float) -> SimulatedPeer:
        """Open a peer's arena for writing. Raises TransportError."""
        name, number = msgspec.msgpack.decode(descriptor)
        there = self._network.endpoints[number]
        deadline = self._world.now + timeout_s
        self._world.block(DELAY_S)
        while self._network.is_blocked(self.name, name) or self._network.is_blocked(name, self.name):
            if self._world.now >= deadline:
                raise TransportError(f"{name} does not answer")
            self._world.block(0.1)
        if there.is_closed:
            raise PeerLostError(name, "its process has exited or closed its endpoint")
        peer = SimulatedPeer(there)
        self._peers.append(peer)
        there._refused.discard(self._number)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer."""
        self._peers.remove(self._known(peer))

    def disconnect_for_good(self, peer: Peer) -> None:
        """Forget a peer; nothing that it has sent arrives any more."""
        self._refused.add(self._known(peer).endpoint._number)
        self.disconnect(peer)

    def lose(self, name: str, reason: str) -> None:
        """The connections to a peer are lost."""
        for peer in self._peers:
            if peer.name == name and not peer.lost:
                peer.lost = reason
                self.task.wake()

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        """Copy ``data`` into the peer's arena."""
        content = bytes(memoryview(data))  # type: ignore[arg-type]
        check_range(offset, len(content), peer.nbytes)
        there = self._known(peer).endpoint
        self._send(peer, lambda: there.native.write(offset, content))

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        """Set the peer's doorbell."""
        check_doorbell(doorbell, peer.doorbells)
        there = self._known(peer).endpoint
        self._send(peer, lambda: there._ring(doorbell, sequence))

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        """Write the parts one after another, then ring."""
        content = b"".join(memoryview(part).tobytes() for part in parts)  # type: ignore[arg-type]
        if len(content) > nbytes:
            raise ValueError(f"a message of {len(content)} bytes does not fit into {nbytes} bytes")
        check_range(offset, nbytes, peer.nbytes)
        there = self._known(peer).endpoint

        def arrive() -> None:
            there.native.write(offset, content)
            there._ring(doorbell, sequence)

        self._send(peer, arrive)

    def fetch(self, peer: Peer, fetch: Fetch) -> None:
        """Read bytes of the peer's arena into the own one, then ring one's own doorbell."""
        there, network = self._known(peer).endpoint, self._network
        check_fetch(fetch, peer.nbytes, self.native.nbytes, self.native.doorbells)
        self._require_connected(peer)

        def keep(content: bytes) -> None:
            if not self.is_closed and peer in self._peers:
                self.native.write(fetch.to, content)
                self._ring(fetch.doorbell, fetch.sequence)

        def read() -> None:
            if there.is_closed or there.task.dead:
                return
            if there.task.stopped_until > self._world.now:  # its threads are stopped as well
                self._world.call_at(there.task.stopped_until, read)
                return
            content = bytes(memoryview(there.native)[fetch.offset : fetch.offset + fetch.nbytes])
            network.send("fetch", there.name, self.name, lambda: keep(content))

        network.send("fetch", self.name, there.name, read)

    def wait(self, targets: Sequence[tuple[int, int]], timeout_s: float) -> int:
        """Wait until a doorbell has reached its target; returns the index of the first one that has."""
        if not targets or not math.isfinite(timeout_s):
            raise ValueError("a wait needs doorbells and a finite timeout")
        deadline = self._world.now + timeout_s
        while True:
            if (index := self._ready(targets)) is not None:
                return index
            if lost := next((peer for peer in self._peers if peer.lost), None):
                self._world.pass_time()
                raise PeerLostError(lost.name, lost.lost)
            if self._world.now >= deadline:
                self._world.pass_time()
                raise deadline_error(self.name, targets, [self.native.sequence(bell) for bell, _ in targets], timeout_s)
            self._targets = targets
            self._world.block(deadline - self._world.now)
            self._targets = ()

    def _ready(self, targets: Sequence[tuple[int, int]]) -> int | None:
        sequence = self.native.sequence
        return next((index for index, (bell, goal) in enumerate(targets) if sequence(bell) >= goal), None)

    def close(self) -> None:
        """Leave the network: peers notice it after everything that is on its way."""
        if self.is_closed:
            return
        self.is_closed = True
        reason = "its process has exited or closed its endpoint"
        for other in self._network.endpoints:
            if other is not self and not other.is_closed:
                self._network.send("data", self.name, other.name, functools.partial(other.lose, self.name, reason))

    def _known(self, peer: Peer) -> SimulatedPeer:
        if not isinstance(peer, SimulatedPeer) or peer not in self._peers:
            raise TransportError(f"endpoint {self.name} is not connected to {peer.name}")
        return peer

    def _require_connected(self, peer: Peer) -> None:
        if reason := self._known(peer).lost:
            raise PeerLostError(peer.name, reason)

    def _send(self, peer: Peer, action: Callable[[], None]) -> None:
        self._require_connected(peer)
        if self.task.dead:
            return
        self._allocate()
        there, own = self._known(peer).endpoint, self._fence()
        sent = None if own is None else own.epoch

        def arrive() -> None:
            if not there.is_closed and self._number not in there._refused:
                there._require_epoch(self.name, sent)
                action()

        self._network.send("data", self.name, there.name, arrive)

    def _require_epoch(self, sender: str, sent: Epoch | None) -> None:
        """Raise Broken if a message of an old epoch arrives where steps of a later one may run."""
        own = self._fence()
        if own is None or sent is None or not own.open:
            return
        if own.epoch > sent:
            raise Broken(f"a message of {sender} from {sent} arrives at {self.name}, which runs steps of {own.epoch}")

    def _ring(self, doorbell: int, sequence: int) -> None:
        self.native.ring(doorbell, sequence)
        if self._targets and self._ready(self._targets) is not None:
            self.task.wake()
