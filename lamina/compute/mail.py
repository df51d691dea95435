"""The messages that a compute worker has received from its peers, sorted by lane.

A message stays in its slot until it is used, so that partials are merged in place. This alone could deadlock: a lane
waits for another peer's message, and that peer for a slot that such a lane holds. So a message is copied out of its
slot if it took the last slot of its link and its lane cannot continue yet. Then each link always has a free slot, or
one whose lane can run without waiting.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from lamina.core.errors import DeadlineError
from lamina.core.topology import Topology
from lamina.dataplane.channel import Arrival, Channel, Hub
from lamina.dataplane.fetching import Fetcher
from lamina.transport.base import Target
from lamina.transport.endpoint import Wait


class Mail:
    """The received messages of all lanes.

    Attributes:
        channels: by peer.
        missing: by lane, the peers from which it still waits for a message.
    """

    def __init__(
        self,
        hub: Hub,
        channels: Mapping[str, Channel],
        fetcher: Fetcher,
        lanes: int,
        may_run: Callable[[int], bool] | None = None,
    ) -> None:
        """``may_run``: False for lanes that wait for another rank to announce their slice, whatever has arrived."""
        self.channels = channels
        self.landing_nbytes = fetcher.landing_nbytes
        self.missing = [set[str]() for _ in range(lanes)]
        self._arrived: list[dict[str, Arrival]] = [{} for _ in range(lanes)]
        self._expecting = set[int]()  # lanes with a slice to run
        self._fetcher, self._hub, self._may_run = fetcher, hub, may_run
        self._fetched: list[int] = []  # lanes whose message has just been fetched

    def reset(self, topology: Topology) -> None:
        """Drop all messages. From now on, only members of ``topology`` send and receive."""
        for peer in self.channels.keys() - topology.names:
            self._fetcher.forget(peer)
        self._fetcher.drop_all()
        self._hub.restart(topology)
        self.channels = {name: channel for name, channel in self.channels.items() if name in topology.names}
        self._fetched.clear()
        self._expecting.clear()
        for missing, arrived in zip(self.missing, self._arrived, strict=True):
            missing.clear()
            arrived.clear()

    def change_members(self, topology: Topology, new: Mapping[str, Channel]) -> None:
        """Change the members to those of ``topology``. ``new``: channels to those that join. No message from or
        to a worker that has left may be in flight."""
        kept = {name: channel for name, channel in self.channels.items() if name in topology.names}
        self.channels = {**kept, **new}
        for _ in range(len(self.missing), topology.pipeline.lanes):
            self.missing.append(set())
            self._arrived.append({})

    def expect(self, lane: int, peers: Collection[str] | None) -> None:
        """Note that the lane needs a message from each of these peers; None: it has nothing to do."""
        if peers is None:
            self._expecting.discard(lane)
            peers = ()
        else:
            self._expecting.add(lane)
        self.missing[lane] = {peer for peer in peers if peer not in self._arrived[lane]}

    def pop_message(self, lane: int, peer: str) -> Arrival:
        """Return the lane's message from a peer, which must have arrived, with its body."""
        return self._arrived[lane].pop(peer)

    def receive(
        self, wait: Wait, peers: Collection[str], timeout_s: float, besides: Sequence[Target] = ()
    ) -> list[int]:
        """Wait until a message of one of ``peers``, a piece of a fetched one or a credit for a kept one arrives, or one
        of ``besides`` is reached.

        All messages of ``peers`` that have arrived by then are taken in. Returns their lanes. Raises DeadlineError;
        PeerLostError.
        """
        # The credit for a kept message may be in the header of a message that no lane waits for yet.
        peers = list(dict.fromkeys((*peers, *(channel.name for channel in self._hub.keeping))))
        if lanes := self._receive_from(peers):
            return lanes
        targets: list[Target] = []
        for peer in peers:
            targets += self.channels[peer].awaited.values()
        coming = self._fetcher.awaited
        targets += coming
        targets += self._hub.credits
        targets += besides
        if not targets:
            raise DeadlineError("nothing is awaited")
        index = wait(targets, timeout_s)
        for peer in peers:
            channel = self.channels[peer]
            if index < len(channel.awaited):
                return self._receive_from(peers[peers.index(peer) :])
            index -= len(channel.awaited)
        if index < len(coming):
            return self._keep(index)
        self._hub.go_on()
        return []

    def _receive_from(self, peers: Collection[str]) -> list[int]:
        """Every message of these that has arrived: looking at a bell takes a small part of a call of ``wait``."""
        lanes: list[int] = []
        sequence = self._hub.sequence
        for peer in peers:
            channel = self.channels[peer]
            for slot, (doorbell, number) in list(channel.awaited.items()):
                if sequence(doorbell) >= number and (lane := self._receive(channel, slot)) is not None:
                    lanes.append(lane)
        return lanes

    @property
    def is_waiting(self) -> bool:
        """True if it waits for anything besides messages."""
        return bool(self._fetcher.awaited or self._hub.keeping)

    def _receive(self, channel: Channel, slot: int) -> int | None:
        """Take in a message that has arrived; returns its lane, or None if it must be fetched first."""
        channel.close_slot(slot)
        arrival = channel.read(slot)
        if self._hub.keeping:
            self._hub.go_on()  # its header may bring credits
        if arrival.body is None:
            self._fetch(arrival)
            return None
        self._deliver(arrival)
        if not channel.awaited and not self._can_run(arrival.lane):
            arrival.set_aside()
        return arrival.lane

    def _can_run(self, lane: int) -> bool:
        return lane in self._expecting and not self.missing[lane] and (self._may_run is None or self._may_run(lane))

    def _fetch(self, arrival: Arrival) -> None:
        channel, body = arrival.channel, memoryview(bytearray(arrival.nbytes))
        arrival.free()

        def deliver() -> None:
            channel.fetched(arrival.number)
            arrival.body = body
            self._deliver(arrival)
            self._fetched.append(arrival.lane)

        self._fetcher.add_body(channel.name, arrival.fetched_at, body, deliver)
        self._ask()

    def _keep(self, index: int) -> list[int]:
        self._fetcher.keep(index)
        self._ask()
        fetched, self._fetched = self._fetched, []
        return fetched

    def _ask(self) -> None:
        while self._fetcher.may_ask:
            self._fetcher.ask()

    def _deliver(self, arrival: Arrival) -> None:
        peer = arrival.channel.name
        self._arrived[arrival.lane][peer] = arrival
        self.missing[arrival.lane].discard(peer)

    def flush(self) -> None:
        """Tell peers of freed slots and fetched regions that no message has told them of. Raises PeerLostError."""
        self._hub.flush()
