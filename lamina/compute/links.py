"""A compute worker's mail: what its peers have sent it, by lane, whichever slots it came in.

A message stays in its slot until it is used, so that partials are merged from where they arrived. But a lane may have
to wait for another peer's message, and that peer for a slot held by such a lane. So where a message takes the last slot
of its link and its lane cannot go on yet, it is set aside: copied, and its slot given back. At any time each link has a
free slot, or one whose lane can run without waiting for anybody.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lamina.errors import DeadlineError
from lamina.protocol.channel import Arrival, Channel, Hub, Target
from lamina.protocol.fetching import Fetcher
from lamina.protocol.links import Wait
from lamina.topology import Topology


@dataclass(eq=False)
class Letter:
    """A message that has arrived.

    Attributes:
        body: its bytes, until ``free``. slot: where they are; -1: not in a slot.
    """

    body: memoryview
    _channel: Channel
    slot: int

    def set_aside(self) -> None:
        """Copy the message out of its slot."""
        if self.slot >= 0:
            self.body = memoryview(bytearray(self.body))
            self.free()

    def free(self) -> None:
        """Give back the slot."""
        if self.slot >= 0:
            self._channel.free(self.slot)
            self.slot = -1


class Mail:
    """The messages of all lanes.

    Attributes:
        channels: by peer. missing: by lane, peers whose message the lane still waits for.
    """

    def __init__(self, hub: Hub, channels: Mapping[str, Channel], fetcher: Fetcher, lanes: int) -> None:
        self.channels = channels
        self.landing_nbytes = fetcher.landing_nbytes
        self.missing = [set[str]() for _ in range(lanes)]
        self._arrived: list[dict[str, Letter]] = [{} for _ in range(lanes)]
        self._expecting = set[int]()  # lanes with a slice to run
        self._fetcher, self._hub = fetcher, hub
        self._fetched: list[int] = []  # lanes whose message has just been fetched

    def restart(self, topology: Topology) -> None:
        """Drop all messages; only members of ``topology`` take part from now on."""
        for peer in self.channels.keys() - topology.names:
            self._fetcher.forget(peer)
        self._fetcher.drop()
        self._hub.restart(topology)
        self.channels = {name: channel for name, channel in self.channels.items() if name in topology.names}
        self._fetched.clear()
        self._expecting.clear()
        for missing, arrived in zip(self.missing, self._arrived, strict=True):
            missing.clear()
            arrived.clear()

    def change(self, topology: Topology, new: Mapping[str, Channel]) -> None:
        """The members are those of ``topology`` from now on, with these channels to the new ones. No message from or to
        one that has left is on its way."""
        kept = {name: channel for name, channel in self.channels.items() if name in topology.names}
        self.channels = {**kept, **new}
        for _ in range(len(self.missing), topology.pipeline.lanes):
            self.missing.append(set())
            self._arrived.append({})

    def expect(self, lane: int, peers: Collection[str] | None) -> None:
        """The lane needs a message of each of these peers to go on; None: it has nothing to do."""
        if peers is None:
            self._expecting.discard(lane)
            peers = ()
        else:
            self._expecting.add(lane)
        self.missing[lane] = {peer for peer in peers if peer not in self._arrived[lane]}

    def take(self, lane: int, peer: str) -> Letter:
        """The lane's message from a peer, which has arrived."""
        return self._arrived[lane].pop(peer)

    def wait(self, wait: Wait, peers: Collection[str], timeout_s: float) -> list[int]:
        """Wait until a message of one of ``peers``, a piece of a fetched one or a credit for a kept one arrives.

        All messages of ``peers`` that have arrived by then are taken in. Returns their lanes. Raises DeadlineError;
        PeerLostError.
        """
        peers = list(peers)
        if lanes := self._take_in(peers):
            return lanes
        targets: list[Target] = []
        for peer in peers:
            targets += self.channels[peer].awaited.values()
        coming = self._fetcher.awaited
        targets += coming
        targets += self._hub.credits
        if not targets:
            raise DeadlineError("nothing is awaited")
        index = wait(targets, timeout_s)
        for peer in peers:
            channel = self.channels[peer]
            if index < len(channel.awaited):
                return self._take_in(peers[peers.index(peer) :])
            index -= len(channel.awaited)
        if index < len(coming):
            return self._keep(index)
        self._hub.go_on()
        return []

    def _take_in(self, peers: Collection[str]) -> list[int]:
        """Every message of these that has arrived: looking at a bell takes a small part of a call of ``wait``."""
        lanes: list[int] = []
        sequence = self._hub.sequence
        for peer in peers:
            channel = self.channels[peer]
            for slot, (doorbell, number) in list(channel.awaited.items()):
                if sequence(doorbell) >= number:
                    lanes += self._receive(channel, slot)
        return lanes

    @property
    def is_waiting(self) -> bool:
        """True if something is awaited besides messages."""
        return bool(self._fetcher.awaited or self._hub.keeping)

    def _receive(self, channel: Channel, slot: int) -> list[int]:
        channel.close_slot(slot)
        arrival = channel.read(slot)
        if self._hub.keeping:
            self._hub.go_on()  # its header may bring credits
        if arrival.body is None:
            self._fetch(arrival)
            return []
        letter = Letter(arrival.body, channel, slot)
        self._deliver(arrival.lane, channel, letter)
        if not channel.free_slots and not self._can_run(arrival.lane):
            letter.set_aside()
        return [arrival.lane]

    def _can_run(self, lane: int) -> bool:
        return lane in self._expecting and not self.missing[lane]

    def _fetch(self, arrival: Arrival) -> None:
        channel, body = arrival.channel, memoryview(bytearray(arrival.nbytes))
        channel.free(arrival.slot)

        def deliver() -> None:
            channel.fetched(arrival.number)
            self._deliver(arrival.lane, channel, Letter(body, channel, -1))
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

    def _deliver(self, lane: int, channel: Channel, letter: Letter) -> None:
        self._arrived[lane][channel.name] = letter
        self.missing[lane].discard(channel.name)

    def flush(self) -> None:
        """Tell peers of slots given back and regions fetched that no message has told them of. Raises PeerLostError."""
        self._hub.flush()
