"""Chunks of one prompt that run in several lanes: a memory worker attends for each once it has what comes before."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from lamina.control.messages import EndEpoch, Step
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.topology import Epoch, Member, Topology
from lamina.core.types import AttentionSpec, Segment
from lamina.kernels.segments import SegmentTable
from lamina.memory import cuts, worker
from lamina.memory.device import cpu
from tests.support import reference_attention
from tests.support.memory_worker import Pair
from tests.support.reference_attention import read_reply

SPECS = [AttentionSpec(layer=layer, query_heads=2, kv_heads=2, qk_dim=8, v_dim=8, scale=0.5) for layer in range(2)]
PROMPT = 0  # the sequence whose chunks are dealt to lanes
PER_PULL = 100  # rows that the worker fetches at once


class Chunks:
    """The chunks of a prompt, each with its lane, as their compute workers see them."""

    def __init__(self, pair: Pair, sizes: Sequence[int], lanes: Sequence[int]) -> None:
        self.pair, self.sizes, self.lanes = pair, sizes, lanes
        self.starts = [0, *itertools.accumulate(sizes)]
        random = np.random.default_rng(sum(sizes))
        shape = len(SPECS), self.starts[-1], 2, 8
        self.q, self.k, self.v = (random.standard_normal(shape).astype(np.float32) for _ in range(3))
        self.sent = dict.fromkeys(range(len(sizes)), 0)  # attentions of each chunk
        self.answered = dict.fromkeys(range(len(sizes)), 0)

    def plan(self, chunk: int, *, first: bool) -> None:
        lane, start = self.lanes[chunk], self.starts[chunk]
        segment = Segment(PROMPT, "memory0", (0, 2), (0, None))
        admitted = [Admission(PROMPT, 1, self.starts[-1], [segment], SamplingParams(), 0)] if first else []
        turn = len(SPECS) * self.lanes[:chunk].count(lane)
        run = [SequenceStep(PROMPT, start, [0] * self.sizes[chunk], [])]
        plan = StepPlan(chunk + 1, lane, turn, [], [], admitted, run, DecodeRows([], [], []))
        self.pair.control.tell(Step(plan, self.pair.epoch))

    @property
    def sendable(self) -> list[int]:
        """The chunks whose lanes have had all replies so far."""
        first = {lane: self._unfinished(lane) for lane in dict.fromkeys(self.lanes)}
        return [chunk for chunk in first.values() if chunk is not None and self.sent[chunk] == self.answered[chunk]]

    def _unfinished(self, lane: int) -> int | None:
        own = (chunk for chunk, its in enumerate(self.lanes) if its == lane)
        return next((chunk for chunk in own if self.answered[chunk] < len(SPECS)), None)

    def send(self, chunk: int) -> None:
        layer, rows = self.sent[chunk], slice(self.starts[chunk], self.starts[chunk + 1])
        q, k, v = (each[layer, rows] for each in (self.q, self.k, self.v))
        self.sent[chunk] += 1
        if len(q) == 1:
            self.pair.send(self.lanes[chunk], k, v, q)
            return
        bulk = [part[at : at + PER_PULL] for at in range(0, len(q), PER_PULL) for part in (k, v)]
        self.pair.send(self.lanes[chunk], *([q] if self.starts[chunk] else []), bulk=bulk)

    def receive(self) -> None:
        """Check the replies that have arrived."""
        for chunk, count in self.sent.items():
            if self.answered[chunk] < count and self.pair.answered(self.lanes[chunk]):
                self._check(chunk, self.answered[chunk])
                self.answered[chunk] += 1

    def _check(self, chunk: int, layer: int) -> None:
        start, stop = self.starts[chunk : chunk + 2]
        seen = stop if stop - start == 1 else start
        if not seen:
            return
        table = SegmentTable(
            np.array([0, stop - start], np.int32),
            np.array([start], np.int32),
            np.array([0, seen], np.int64),
            np.zeros(1, np.int32),
            np.arange(seen, dtype=np.int32),
        )
        q, k, v = self.q[layer, start:stop], self.k[layer], self.v[layer]
        wanted = reference_attention.partial(q, k, v, table, SPECS[layer], threads=1)
        for ours, right in zip(
            read_reply(memoryview(self.pair.reply), SPECS[layer], stop - start), wanted, strict=True
        ):
            np.testing.assert_allclose(ours, right, rtol=2e-6, atol=4e-6)

    def serve(self, turns: int) -> None:
        for _ in range(turns):
            self.pair.worker._serve_once()
            self.receive()

    @property
    def parked(self) -> list[int]:
        return [lane.number for lane in self.pair.worker._lanes if lane.parked]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(cpu, "MOST_PRODUCTS", 1)
    monkeypatch.setattr(cuts, "_FEWEST_TOKENS", 64)
    monkeypatch.setattr(worker, "IDLE_SLICE_S", 0.0)
    made = Pair(specs=SPECS, lanes=6)
    yield made
    made.links.close()
    made.resources.close()


def run(chunks: Chunks, order: Iterator[int]) -> None:
    """Send what lanes may send in an order that ``order`` decides, until all is answered."""
    for number in range(len(chunks.sizes)):
        chunks.plan(number, first=number == 0)
    for _ in range(100_000):
        if all(count == len(SPECS) for count in chunks.answered.values()):
            assert not chunks.pair.worker._store.watermarks._storing
            return
        if sendable := chunks.sendable:
            chunks.send(sendable[next(order) % len(sendable)])
        chunks.serve(next(order) % 4)
    raise AssertionError(f"not all is answered: {chunks.answered}, parked lanes: {chunks.parked}")


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_arrival_gives_what_one_lane_gives(pair: Pair, seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 9))
    sizes = [int(size) for size in random.choice([1, 2, 30, 90, 130], count)]
    lanes = [int(lane) for lane in random.integers(0, 5, count)]
    run(Chunks(pair, sizes, lanes), iter(lambda: int(random.integers(0, 12)), -1))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_four_lanes_park_behind_a_link_of_two_slots_in_every_order(pair: Pair, order: tuple[int, ...]) -> None:
    chunks = Chunks(pair, [40, 30, 20, 10], [0, 1, 2, 3])
    for chunk in range(4):
        chunks.plan(chunk, first=chunk == 0)
    for layer in range(len(SPECS)):
        for place, chunk in enumerate(order):
            chunks.send(chunk)
            chunks.serve(30)
            arrived = {0, *order[: place + 1]} if 0 in order[: place + 1] else set(order[: place + 1])
            reached = next((one for one in range(4) if one not in arrived), 4)
            done = {one for one, count in chunks.answered.items() if count > layer}
            assert done == set(range(reached)), "exactly those whose sequence has reached their watermarks"
            assert set(chunks.parked) == arrived - done


def test_lanes_with_other_sequences_are_served_while_chunks_are_parked(pair: Pair) -> None:
    other = Chunks(pair, [20], [5])
    pair.plan(5, admitted=20, chunk=(0, 20))  # sequence 5
    for layer in range(len(SPECS)):
        pair.send(5, bulk=[other.k[layer], other.v[layer]])
        pair.serve_until_answered(5)
    chunks = Chunks(pair, [10, 60, 50, 40], [0, 1, 2, 3])
    for chunk in range(4):
        chunks.plan(chunk, first=chunk == 0)
    for chunk in (3, 2, 1):
        chunks.send(chunk)
    chunks.serve(10)
    assert chunks.parked == [1, 2, 3]
    assert (pair.worker._serving.parked, pair.worker._serving.parked_nbytes) == (3, 4 * chunks.q[0, 10:].size), (
        "q alone: K and V are pulled"
    )
    token = np.ones((1, 2, 8), np.float32)
    for step in range(3):
        pair.plan(5, decode_at=20 + step)
        for _ in SPECS:
            pair.send(5, token, token, token)
            pair.serve_until_answered(5)
    channel = pair.mail.channels["memory0"]
    channel.read_credits()
    assert not channel._regions, "parked requests leave the sender room for the chunk that they wait for"
    assert chunks.parked == [1, 2, 3]
    assert not any(chunks.answered.values())


def test_a_request_that_overtakes_its_plan_waits_while_others_are_served(pair: Pair) -> None:
    chunks = Chunks(pair, [10, 20], [0, 1])
    chunks.plan(0, first=True)
    chunks.send(1)
    chunks.serve(5)
    chunks.send(0)
    chunks.serve(20)
    assert chunks.answered == {0: 1, 1: 0}
    chunks.plan(1, first=False)
    chunks.serve(20)
    assert chunks.answered == {0: 1, 1: 1}


def test_the_end_of_an_epoch_drops_parked_requests_and_sets_watermarks(pair: Pair) -> None:
    chunks = Chunks(pair, [30, 20, 10], [0, 1, 2])
    for chunk in range(3):
        chunks.plan(chunk, first=chunk == 0)
    for _ in SPECS:
        chunks.send(0)
        chunks.serve(30)
    chunks.send(2)
    chunks.serve(30)
    assert chunks.parked == [2]
    members = (Member("compute0", "compute", "cpu", "host"), Member("memory0", "memory", "cpu", "host", 3000))
    topology = Topology(Epoch(0, 2), members, Pipeline(6, 1))
    pair.control.sent.clear()
    pair.control.tell(EndEpoch(topology, {PROMPT: 30}))
    pair.mail.reset(topology)
    while not pair.control.sent:
        pair.worker._serve_once()
    pair.links.ring("memory0", 2)
    while not pair.worker._fence.open:
        pair.worker._serve_once()
    pair.turns, pair.epoch = [0] * 6, topology.epoch
    assert not chunks.parked
    again = Chunks(pair, [30, 20, 10], [3, 2, 1])  # other lanes run the rest
    again.q, again.k, again.v = chunks.q, chunks.k, chunks.v
    again.answered[0] = len(SPECS)
    again.plan(1, first=False)
    again.plan(2, first=False)
    again.send(2)
    again.serve(30)
    assert again.parked == [1]
    again.send(1)
    again.serve(60)
    assert again.answered == {0: 2, 1: 1, 2: 1}
