"""Holds the messages that a compute worker has received from its peers, by lane.

A message stays in its slot until it is used, so that partials are merged in place. To prevent deadlock, a message that
occupies the last slot of its link is copied out of the slot if its lane cannot run yet. Then every link has a free
slot, or a slot whose lane can run without waiting.
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
        channels: Channels by peer.
        landing_nbytes: Most bytes of one fetch.
        missing: By lane, the peers whose messages its next slice still waits for.
    """

    def __init__(
        self,
        hub: Hub,
        channels: Mapping[str, Channel],
        fetcher: Fetcher,
        lanes: int,
        may_run: Callable[[int], bool] | None = None,
    ) -> None:
        """``may_run``: Returns False for a lane whose slice rank 0 has not announced."""
        self.channels = channels
        self.landing_nbytes = fetcher.landing_nbytes
        self.missing = [set[str]() for _ in range(lanes)]
        self._arrived: list[dict[str, Arrival]] = [{} for _ in range(lanes)]
        self._expecting = set[int]()  # lanes with a slice to run
        self._fetcher, self._hub, self._may_run = fetcher, hub, may_run
        self._fetched: list[int] = []  # lanes whose message has just been fetched

    def reset(self, topology: Topology) -> None:
        """Drop all messages, and the channels to workers that are not members of ``topology``."""
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
        """Replace the members by those of ``topology``. ``new``: channels to workers that join.

        No message from or to a worker that has left may be in flight.
        """
        kept = {name: channel for name, channel in self.channels.items() if name in topology.names}
        self.channels = {**kept, **new}
        for _ in range(len(self.missing), topology.pipeline.lanes):
            self.missing.append(set())
            self._arrived.append({})

    def expect(self, lane: int, peers: Collection[str] | None) -> None:
        """Set the peers whose messages a lane's next slice needs; None: the lane has no slice to run."""
        if peers is None:
            self._expecting.discard(lane)
            peers = ()
        else:
            self._expecting.add(lane)
        self.missing[lane] = {peer for peer in peers if peer not in self._arrived[lane]}

    def pop_message(self, lane: int, peer: str) -> Arrival:
        """Remove and return the lane's message from a peer, which must have arrived."""
        return self._arrived[lane].pop(peer)

    def receive(
        self, wait: Wait, peers: Collection[str], timeout_s: float, besides: Sequence[Target] = ()
    ) -> list[int]:
        """Wait for a message of one of ``peers``, and receive all of their messages that have arrived.

        Also returns when a piece of a fetched message or a credit for a queued message arrives, or a doorbell of
        ``besides`` rings. Returns the lanes of the messages received. Raises DeadlineError, PeerLostError.
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
            return self._store_piece(index)
        self._hub.send_kept()
        return []

    def _receive_from(self, peers: Collection[str]) -> list[int]:
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
        """Whether a fetch is in flight or a message is queued for lack of credits."""
        return bool(self._fetcher.awaited or self._hub.keeping)

    def _receive(self, channel: Channel, slot: int) -> int | None:
        """Read an arrived message; return its lane, or None if its body must be fetched first."""
        channel.close_slot(slot)
        arrival = channel.read(slot)
        if self._hub.keeping:
            self._hub.send_kept()  # its header may bring credits
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
        self._request_pieces()

    def _store_piece(self, index: int) -> list[int]:
        self._fetcher.finish(index)
        self._request_pieces()
        fetched, self._fetched = self._fetched, []
        return fetched

    def _request_pieces(self) -> None:
        while self._fetcher.can_start:
            self._fetcher.start_next()

    def _deliver(self, arrival: Arrival) -> None:
        peer = arrival.channel.name
        self._arrived[arrival.lane][peer] = arrival
        self.missing[arrival.lane].discard(peer)

    def flush(self) -> None:
        """Send credits for freed slots and fetched regions that no message has carried. Raises PeerLostError."""
        self._hub.flush()
