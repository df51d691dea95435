"""Lanes over few slots and a small pool: whatever the order of events, all end, and every slot and region is free."""

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina.compute.lanes import Lanes
from lamina.compute.mail import Mail
from lamina.core.errors import DeadlineError
from lamina.core.pipeline import Pipeline
from lamina.dataplane.channel import Arrival, Channel
from lamina.dataplane.leases import SLOTS, ArenaPlan, lease_nbytes
from tests.support.channels import Station, link
from tests.support.null_transport import NullEndpoint
from tests.support.sweep import MANY_EXAMPLES

SLOT, LARGEST = 64 + 64, 400
PLAN = ArenaPlan(landing_nbytes=150, stages=False, pool_nbytes=LARGEST + 64, leases={lease_nbytes(128): 8})


def content(kind: int, lane: int, turn: int, nbytes: int) -> np.ndarray:
    """Bytes that say which message they are."""
    return np.random.default_rng([kind, lane, turn]).integers(0, 256, nbytes, np.uint8)


@dataclass(frozen=True)
class Attention:
    """Which memory workers take part, and bytes of request, bulk, reply and context."""

    memories: tuple[int, ...]
    request: int
    bulk: int
    reply: int
    context: int


class Memory:
    """The rules of the memory worker, without attention."""

    def __init__(self, station: Station, work: "Work") -> None:
        self.station, self.work = station, work
        self.fetcher = station.fetcher()

    def step(self, _: int) -> bool:
        """One event; False if there was none."""
        station = self.station
        told = bool(station.hub.owing)
        station.hub.flush()
        doors = [(channel, slot) for channel in station.channels.values() for slot in channel.awaited]
        targets = [channel.awaited[slot] for channel, slot in doors] + self.fetcher.awaited + station.hub.credits
        while self.fetcher.can_start:
            self.fetcher.start_next()
        try:
            index = station.endpoint.wait(targets, 0.0)
        except DeadlineError:
            return told or bool(self.fetcher.awaited)
        fetches = len(targets) - len(doors) - len(station.hub.credits)
        if index < len(doors):
            self._open(*doors[index])
        elif index < len(doors) + fetches:
            self.fetcher.finish(index - len(doors))
        else:
            station.hub.send_kept()
        return True

    def _open(self, channel: Channel, slot: int) -> None:
        channel.close_slot(slot)
        request = channel.read(slot)
        self.station.hub.send_kept()
        if request.body is not None:
            self._serve(request, request.body)
            return
        body = memoryview(bytearray(request.nbytes))
        self.fetcher.add_body(channel.name, request.fetched_at, body, lambda: self._serve(request, body))

    def _serve(self, request: Arrival, body: memoryview) -> None:
        lane, turn, channel = request.lane, request.turn, request.channel
        attention = self.work.attentions[lane][turn]
        assert bytes(body) == content(0, lane, turn, attention.request).tobytes()
        channel.free(request.slot)
        if attention.bulk:
            bulk = memoryview(bytearray(attention.bulk))

            def check() -> None:
                assert bytes(bulk) == content(1, lane, turn, attention.bulk).tobytes()
                channel.fetched(request.number)

            self.fetcher.add_body(channel.name, request.bulk_at, bulk, check)
        elif request.fetched_at >= 0:
            channel.fetched(request.number)
        to = self.station.channels[f"compute{self.work.replica(lane, turn + 1)}"]
        to.begin(lane, turn, attention.reply, copies=False).send_piece([content(2, lane, turn, attention.reply)])


class Compute:
    """The rules of the compute worker, without slices."""

    def __init__(self, number: int, station: Station, work: "Work") -> None:
        self.number, self.station, self.work = number, station, work
        self.mail = Mail(station.hub, station.channels, station.fetcher())
        self.turns = [self._own(lane, 0) for lane in range(len(work.attentions))]  # of each lane's next slice here
        for lane in range(len(self.turns)):
            self._expect(lane)

    def _own(self, lane: int, start: int) -> int | None:
        turns = range(start, len(self.work.attentions[lane]) + 1)
        return next((turn for turn in turns if self.work.replica(lane, turn) == self.number), None)

    def _peers(self, lane: int) -> list[str]:
        turn = self.turns[lane]
        if not turn:
            return []
        former = self.work.replica(lane, turn - 1)
        memories = [f"memory{number}" for number in self.work.attentions[lane][turn - 1].memories]
        return [*memories, *([f"compute{former}"] if former != self.number else [])]

    def _expect(self, lane: int) -> None:
        self.mail.expect(lane, None if self.turns[lane] is None else self._peers(lane))

    def step(self, choice: int) -> bool:
        """Take in one event or run one slice; False if there was neither."""
        ready = [lane for lane, turn in enumerate(self.turns) if turn is not None and not self.mail.missing[lane]]
        if ready and choice % 2:
            self._run(ready[choice // 2 % len(ready)])
            self.mail.flush()
            return True
        missing = {peer: None for peers in self.mail.missing.values() for peer in peers}
        told = bool(self.station.hub.owing) and not ready
        if not ready:
            self.mail.flush()
        try:
            self.mail.receive(self.station.endpoint.wait, missing, 0.0)
        except DeadlineError:
            if ready:
                self._run(ready[0])
            return told or bool(ready)
        return True

    def _run(self, lane: int) -> None:
        turn = self.turns[lane]
        assert turn is not None
        for peer in self._peers(lane):
            letter = self.mail.pop_message(lane, peer)
            attention = self.work.attentions[lane][turn - 1]
            kind, nbytes = (2, attention.reply) if peer.startswith("memory") else (3, attention.context)
            assert bytes(letter.whole) == content(kind, lane, turn - 1, nbytes).tobytes()
            letter.free()
        self.turns[lane] = self._own(lane, turn + 1)
        self._expect(lane)
        if turn == len(self.work.attentions[lane]):
            self.work.ended.add(lane)
            return
        attention = self.work.attentions[lane][turn]
        for number in attention.memories:
            self._request(self.station.channels[f"memory{number}"], lane, turn, attention)
        following = self.work.replica(lane, turn + 1)
        if following != self.number:
            channel = self.station.channels[f"compute{following}"]
            channel.begin(lane, turn + 1, attention.context).send_piece([content(3, lane, turn, attention.context)])

    @staticmethod
    def _request(channel: Channel, lane: int, turn: int, attention: Attention) -> None:
        message = channel.begin(lane, turn, attention.request, attention.bulk)
        if attention.bulk:
            message.lay_out(0, [content(1, lane, turn, attention.bulk)])
        body = content(0, lane, turn, attention.request)
        message.send_piece([body])
        body[:] = 0  # what is kept is a copy


class Work:
    """All workers, and what every lane does."""

    def __init__(self, computes: int, memories: int, rotates: bool, attentions: list[list[Attention]]) -> None:
        self.pipeline = Pipeline(max(len(attentions), computes), computes)
        self.rotates, self.attentions, self.ended = rotates, attentions, set[int]()
        names = [f"compute{n}" for n in range(computes)], [f"memory{n}" for n in range(memories)]
        self.stations = {name: Station(name, NullEndpoint(name), PLAN) for each in names for name in each}
        pairs = [(a, b) for a in self.stations for b in self.stations if a != b and "compute" in a + b]
        link(list(self.stations.values()), dict.fromkeys(pairs, SLOT))
        self.actors: list[Compute | Memory] = [Compute(n, self.stations[name], self) for n, name in enumerate(names[0])]
        self.actors += [Memory(self.stations[name], self) for name in names[1]]

    def replica(self, lane: int, turn: int) -> int:
        return self.pipeline.replica(lane, turn, self.rotates)

    def run(self, order: list[tuple[int, int]]) -> None:
        for actor, choice in order:
            self.actors[actor % len(self.actors)].step(choice)
        while any([actor.step(0) for actor in self.actors]):
            pass
        assert self.ended == set(range(len(self.attentions)))
        for station in self.stations.values():
            assert not station.hub.keeping and not station.hub.owing
            for channel in station.channels.values():
                channel.read_credits()
                assert len(channel.awaited) == SLOTS and len(channel.credits) < SLOTS, (
                    "no sender is without a free slot"
                )
            assert station.hub.regions.allocate(station.hub.nbytes) is not None, "all regions have been released"


sizes = st.sampled_from([0, 1, 64, 65, 200])
attentions = st.builds(
    Attention,
    memories=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple),
    request=sizes,
    bulk=sizes,
    reply=sizes,
    context=sizes,
)


@settings(MANY_EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    computes=st.integers(1, 3),
    rotates=st.booleans(),
    work=st.lists(st.lists(attentions, min_size=1, max_size=5), min_size=1, max_size=7),
    order=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=150),
)
def test_every_lane_ends_whatever_happens_first(
    computes: int, rotates: bool, work: list[list[Attention]], order: list[tuple[int, int]]
) -> None:
    Work(computes, 3, rotates, work).run(order)


def test_a_kept_message_goes_once_a_message_that_no_lane_awaits_brings_its_credit() -> None:
    """Keep a message that arrives for a lane without a next step, such as tokens drawn by a pipeline's last stage."""
    names = ("compute0", "compute1")
    stations = [Station(name, NullEndpoint(name), PLAN) for name in names]
    link(stations, {("compute0", "compute1"): SLOT, ("compute1", "compute0"): SLOT})
    near, far = (Mail(one.hub, one.channels, one.fetcher()) for one in stations)
    for lane in range(3):
        near.channels["compute1"].send_message(lane, 0, 8, [content(0, lane, 0, 8)])
        far.expect(lane, ["compute0"])
    assert near.is_waiting, "the third message has no slot"
    while far.missing[0] or far.missing[1]:
        far.receive(stations[1].endpoint.wait, ["compute0"], 0.0)
    for lane in range(2):
        far.pop_message(lane, "compute0").free()
    far.channels["compute0"].send_message(0, 0, 8, [content(1, 0, 0, 8)])
    near.receive(stations[0].endpoint.wait, [], 0.0)
    assert not near.is_waiting
    assert far.receive(stations[1].endpoint.wait, ["compute0"], 0.0) == [2]


def test_a_message_of_a_lane_that_is_not_known_yet_waits_for_the_lane() -> None:
    """Receive a message of a stage that took in new members, and so has more lanes, before its next stage did."""
    names = ("compute0", "compute1")
    stations = [Station(name, NullEndpoint(name), PLAN) for name in names]
    link(stations, {("compute0", "compute1"): SLOT, ("compute1", "compute0"): SLOT})
    near, far = (Mail(one.hub, one.channels, one.fetcher()) for one in stations)
    lanes = Lanes(far, stations[1].endpoint.wait, None, 1)
    near.channels["compute1"].send_message(1, 0, 8, [content(0, 1, 0, 8)])
    assert lanes.receive_messages(["compute0"], 0.0) is None
    lanes.extend(2)
    far.expect(1, ["compute0"])
    assert not far.missing[1]
    assert far.pop_message(1, "compute0").lane == 1
