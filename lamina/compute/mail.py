"""Holds the messages that a compute worker has received from its peers, by lane.

A message stays in its slot until it is used, so that partials are merged in place. To prevent deadlock, a message that
occupies the last slot of its link is copied out of the slot if its lane cannot run yet. Then every link has a free
slot, or a slot whose lane can run without waiting.

Compute workers of other replicas may also send requests, for KV in this worker's local memory
(``lamina.compute.lending``). A request that occupies the last slot of its link is always copied out.
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from lamina.core.errors import DeadlineError
from lamina.core.topology import Topology
from lamina.dataplane.channel import Arrival, Channel, Hub
from lamina.dataplane.fetching import Fetcher
from lamina.dataplane.wire import LENT
from lamina.transport.base import Buffer, Target
from lamina.transport.endpoint import Wait


class Request(NamedTuple):
    """A request of another replica.

    Attributes:
        arrival: The message.
        body: Its bytes, which are fetched if they are larger than a slot.
    """

    arrival: Arrival
    body: Buffer | Any


class Mail:
    """The received messages of all lanes.

    Attributes:
        channels: Channels by peer.
        landing_nbytes: Most bytes of one fetch.
        missing: By lane, the peers whose messages its next slice still waits for.
        lenders: Compute workers of other replicas that request attention here, or reply to such requests.
        requests: Requests of other replicas that have arrived, oldest first.
    """

    def __init__(
        self,
        hub: Hub,
        channels: Mapping[str, Channel],
        fetcher: Fetcher,
        may_run: Callable[[int], bool] | None = None,
        lenders: Collection[str] = (),
    ) -> None:
        """``may_run``: Returns False for a lane whose slice rank 0 has not announced, or whose step is parked."""
        self.lenders = frozenset(lenders)
        self.requests = collections.deque[Request]()
        self.channels = channels
        self.landing_nbytes = fetcher.landing_nbytes
        # Another stage may take in new members first: its messages may name lanes that this worker does not know yet.
        self.missing = collections.defaultdict[int, set[str]](set)
        self._arrived = collections.defaultdict[int, dict[str, Arrival]](dict)
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
        self.lenders &= topology.names
        self.requests.clear()
        self._fetched.clear()
        self._expecting.clear()
        self.missing.clear()
        self._arrived.clear()

    def drop_fetches(self, peers: Sequence[str]) -> None:
        """Drop what is fetched from peers whose processes have ended."""
        for peer in peers:
            self._fetcher.forget(peer)

    def change_members(self, topology: Topology, new: Mapping[str, Channel], lenders: Collection[str]) -> None:
        """Replace the members by those of ``topology``, and ``lenders``. ``new``: channels to workers that join.

        No message from or to a worker that has left may be in flight, but for pieces of moves that have ended.
        """
        self._fetcher.drop_queued(topology.names)
        kept = {name: channel for name, channel in self.channels.items() if name in topology.names}
        self.channels = {**kept, **new}
        self.lenders = frozenset(lenders) & self.channels.keys()

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
        ``besides`` rings, or a request of another replica arrives. Returns the lanes of the messages received, without
        those of requests. Raises DeadlineError, PeerLostError.
        """
        before = len(self.requests)
        # The credit for a kept message may be in the header of a message that no lane waits for yet.
        peers = list(dict.fromkeys((*peers, *(channel.name for channel in self._hub.keeping))))
        if (lanes := self._receive_from(peers)) or len(self.requests) > before:
            return lanes
        coming = self._fetcher.awaited
        targets = [*self._awaited_of(peers), *coming, *self._hub.credits, *besides]
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

    def awaited(self, peers: Collection[str]) -> list[Target]:
        """Return the doorbells any of which lets ``receive`` for ``peers`` do something."""
        return [*self._awaited_of(peers), *self._fetcher.awaited, *self._hub.credits]

    def _awaited_of(self, peers: Collection[str]) -> list[Target]:
        return [target for peer in peers for target in self.channels[peer].awaited.values()]

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
        """Read an arrived message; return its lane. None: its body must be fetched first, or it is a request."""
        channel.close_slot(slot)
        arrival = channel.read(slot)
        if self._hub.keeping:
            self._hub.send_kept()  # its header may bring credits
        if arrival.body is None:
            self._fetch(arrival)
            return None
        if arrival.lane & LENT:
            if not channel.awaited:
                arrival.set_aside()
            self._queue_request(arrival, arrival.whole)
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
            if arrival.lane & LENT:  # its region may also have K and V of prompt chunks
                self._queue_request(arrival, body)
                return
            channel.fetched(arrival.number)
            arrival.body = body
            self._deliver(arrival)
            self._fetched.append(arrival.lane)

        self._fetcher.add_body(channel.name, arrival.fetched_at, body, deliver)
        self.request_pieces()

    def _store_piece(self, index: int) -> list[int]:
        self._fetcher.finish(index)
        self.request_pieces()
        fetched, self._fetched = self._fetched, []
        return fetched

    def request_pieces(self) -> None:
        """Start to fetch as many queued pieces as landing slots are free. Raises PeerLostError."""
        while self._fetcher.can_start:
            self._fetcher.start_next()

    def fetch_first(self, lane: int, turn: int) -> None:
        """Fetch K and V of attention ``turn`` of a lane before others."""
        self._fetcher.fetch_first(lane, turn)

    def _queue_request(self, arrival: Arrival, body: Buffer | Any) -> None:
        arrival.lane -= LENT
        self.requests.append(Request(arrival, body))

    def _deliver(self, arrival: Arrival) -> None:
        peer = arrival.channel.name
        self._arrived[arrival.lane][peer] = arrival
        self.missing[arrival.lane].discard(peer)

    def flush(self) -> None:
        """Send credits for freed slots and fetched regions that no message has carried. Raises PeerLostError."""
        self._hub.flush()
