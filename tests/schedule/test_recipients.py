"""A plan goes to the workers it concerns: against workers that are told of everything."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from unittest import mock
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.compute.sequences import Sequences
from lamina.control.messages import MemorySetup
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Arrangement, Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.segments import by_sequence, for_sequence, forked, grown, moved
from lamina.core.steps import Admission, DecodeRows, Fork, SequenceStep, StepPlan, Switch
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.dataplane.wire import message_rows
from lamina.memory.device.cpu import CpuTable
from lamina.memory.store import KvStore, StepTables
from lamina.schedule.admission import SHARE
from lamina.schedule.recipients import RELEASE_S, Recipients
from lamina.schedule.turn import DEPTH
from tests.support.schedules import client, request
from tests.support.turn_driver import CHOICES, ENOUGH, FIXED, INSTANCES, WHOLE, Driver

pytestmark = pytest.mark.usefixtures("impatient")

SHARDED = HeadShards(3, 3)
APART, LOCAL, SEVERAL = ("memory0", "memory1"), ("compute0", "memory1"), ("compute0", "compute1")
REPLICAS = Pipeline(4, 3, choices=(Arrangement(3), Arrangement(4, rotates=True)))


def stores(memories: tuple[str, str], shards: HeadShards) -> dict[str, KvStore]:
    spec = AttentionSpec(layer=0, query_heads=shards.heads, kv_heads=shards.heads, qk_dim=1, v_dim=1, scale=1.0)
    return {
        name: KvStore(name, MemorySetup([spec], DType.FLOAT32, room, 1, Overlap(), False, head_shards=shards.count))
        for name, room in zip(memories, (60, 40), strict=True)
    }


def concerns(plan: StepPlan, tables: StepTables, worker: str, had: Mapping[int, Sequence[Segment]]) -> bool:
    """Whether a memory worker that holds ``had``, and is told of everything, has anything to do for a plan."""
    return (
        not tables.rows.empty
        or any(fork.parent in had for fork in plan.forks)
        or any(worker in (move.source, move.target) for move in plan.moves)
        or any(segment.worker == worker for admission in plan.admitted for segment in admission.segments)
        or any(segment.worker == worker or ends(had.get(segment.sequence, ()), segment) for segment in plan.grown)
        or any(
            segment.worker == worker or overlaps(had.get(segment.sequence, ()), segment)
            for switch in plan.switches
            for segment in switch.segments
        )
    )


def overlaps(had: Sequence[Segment], new: Segment) -> bool:
    """Whether some of the tokens of ``new`` are in segments that a worker has."""
    first, last = new.tokens
    spans = [segment.tokens for segment in had]
    return any((last is None or start < last) and (stop is None or stop > first) for start, stop in spans)


def ends(had: Sequence[Segment], new: Segment) -> bool:
    """Whether a segment that a worker has ends where another takes over."""
    return any(segment.tokens[1] is None or segment.tokens[1] > new.tokens[0] for segment in had)


def same(part: StepTables, whole: StepTables) -> None:
    """A worker does the same for its part of a plan as for the whole."""
    assert [msgspec.structs.replace(each, row=0) for each in part.rows.attends] == [
        msgspec.structs.replace(each, row=0) for each in whole.rows.attends
    ]
    assert (part.rows.kept, part.pieces) == (whole.rows.kept, whole.pieces)
    assert [(each.sequence, each.rows) for each in part.rows.pulled] == [
        (each.sequence, each.rows) for each in whole.rows.pulled
    ]
    assert len(part.rows.queries) == len(whole.rows.queries) and len(part.rows.appends) == len(whole.rows.appends)
    assert [len(part.slots), len(part.pulled_slots)] == [len(whole.slots), len(whole.pulled_slots)]
    for ours, theirs in zip(part.tables, whole.tables, strict=True):
        for own, their in zip(ours, theirs, strict=True):  # the slots differ: theirs may be freed later
            assert isinstance(own.table, CpuTable) and isinstance(their.table, CpuTable)
            np.testing.assert_array_equal(own.table.segments.kv_offsets, their.table.segments.kv_offsets)


class Replica:
    """What a compute worker keeps of sequences, from plans as ``ComputeWorker`` takes them in."""

    def __init__(self) -> None:
        self.segments: dict[int, list[Segment]] = {}

    def apply(self, plan: StepPlan) -> None:
        for segment in (segment for switch in plan.switches for segment in switch.segments):
            if segment.sequence in self.segments:
                self.segments[segment.sequence] = moved(self.segments[segment.sequence], segment)
        for fork in plan.forks:
            if fork.parent in self.segments:
                self.segments[fork.child] = forked(self.segments[fork.parent], fork.child, fork.tokens)
        self.release(plan.released)
        for admission in plan.admitted:
            placed = by_sequence(admission.segments)
            for sequence in range(admission.sequence, admission.sequence + admission.count):
                self.segments[sequence] = placed.get(sequence) or for_sequence(sequence, admission.segments)
        for segment in plan.grown:
            if segment.sequence in self.segments:  # else a plan that runs it admits it
                self.segments[segment.sequence] = grown(self.segments[segment.sequence], segment)
        assert self.segments.keys() >= plan.histories.keys()

    def release(self, sequences: list[int]) -> None:
        for sequence in sequences:
            self.segments.pop(sequence, None)


class Told(Driver):
    """Every plan goes to workers that are told of everything, and its parts to workers that are told what concerns
    them: with equal slabs, these must do the same."""

    def __init__(
        self,
        pipeline: Pipeline,
        depth: int,
        chance: random.Random,
        longest: int | None,
        memories: tuple[str, str],
        shards: HeadShards,
        clients: int,
    ) -> None:
        super().__init__(pipeline, depth, chance, longest, memories, shards, clients)
        self.shards = shards
        self.computes = [f"compute{number}" for number in range(pipeline.replicas)]
        self.pipeline = pipeline
        self.recipients = Recipients(self.computes, pipeline)
        self.everything, self.theirs = stores(memories, shards), stores(memories, shards)
        self.replicas = {name: Replica() for name in self.computes}
        self.all_knowing = Replica()
        self.told = Counter[str]()
        self.released = set[int]()
        self.late: dict[tuple[str, int], float] = {}  # since when a worker has held a sequence that is released

    def come(self, name: str) -> None:
        """Mostly with one completion, so that it may move; some with histories."""
        n, penalty = self.chance.choice([1, 1, 1, 3]), self.chance.choice([1.0, 1.0, 1.2])
        prompt, most = self.chance.randint(1, 20), self.chance.randint(1, 24 // n)
        asks = client(int(name), self.clients)
        made = request(name, prompt, asks, max_tokens=most, n=n, repetition_penalty=penalty)
        self.live[name] = self.turn.scheduler.submit(made)

    def take(self, plan: StepPlan) -> None:
        had = {name: dict(store.held.segments) for name, store in self.everything.items()}
        for store in had.values():  # a parent's last segment is open in its child, which may grow at once
            store.update({fork.child: store[fork.parent] for fork in plan.forks if fork.parent in store})
        tables = {name: store.apply(plan)[0] for name, store in self.everything.items()}
        self.all_knowing.apply(plan)
        parts = [(name, part) for names, part in self.recipients.select(plan, self.now) for name in names]
        by_name = dict(parts)
        assert len(by_name) == len(parts), "nobody is told twice"
        runs = {self.pipeline.replica(plan.lane, plan.turn + k, plan.rotates) for k in range(self.pipeline.replicas)}
        running = {self.computes[number] for number in runs}
        expected = running | {name for name in self.theirs if concerns(plan, tables[name], name, had[name])}
        aside = set(self.computes).difference(expected)  # with other plans, they run or ran sequences that move or grow
        changes = plan.switches or plan.grown or plan.forks
        assert by_name.keys() - aside == expected and (changes or not by_name.keys() & aside)
        for name, part in parts:
            self.told[name] += 1
            if name in aside:
                self.replicas[name].apply(part)
                if name in self.theirs:
                    self.theirs[name].apply(part)
                assert not part.runs and (part.switches or part.released)
            elif name in self.theirs:
                same(self.theirs[name].apply(part)[0], tables[name])
            if name in self.replicas and name not in aside:
                self.replicas[name].apply(part)
            if name in running:
                assert (part.chunks, part.decoding, part.turn) == (plan.chunks, plan.decoding, plan.turn)
                known, knows = self.all_knowing.segments, self.replicas[name].segments
                for step in plan.sequences:
                    for sequence in (step.sequence, *step.draws):
                        assert knows[sequence] == known[sequence]
                for worker in self.theirs:  # both ends derive the same message
                    assert message_rows(part, knows, worker, self.shards).kept == tables[worker].rows.kept
        self.released.update(plan.released)

    def tell_overdue(self, now: float) -> None:
        for name, sequences in self.recipients.overdue(now):
            for worker in [roles[name] for roles in (self.theirs, self.replicas) if name in roles]:
                worker.release(sequences)
        held = {(name, one) for name, store in self.theirs.items() for one in store.held.segments}
        held |= {(name, one) for name, replica in self.replicas.items() for one in replica.segments}
        # The admission of a request tells a replica of all its completions, of which some may have been released.
        self.late = {place: self.late.get(place, now) for place in held if place[1] in self.released}
        assert all(now - since < RELEASE_S for since in self.late.values())

    def plan(self) -> None:
        super().plan()
        self.tell_overdue(self.now)

    def on_plan(self, plan: StepPlan) -> None:
        self.take(plan)

    def move(self) -> None:
        """Some tokens of a request go to the other memory worker, if they can."""
        scheduler = self.turn.scheduler
        groups = [group for lane in scheduler._lanes for group in lane.running]
        if groups:
            source, target = self.chance.sample(list(self.theirs), 2)
            scheduler.moves.try_move(self.chance.choice(groups), source, target, self.chance.randint(1, 20))


@example(FIXED, 1, 13, 0.1, 6, "striped", 198851571, 1, SHARE)  # a chunk before the first segment of a worker
@example(REPLICAS, 1, 25, 0.0, None, "apart", 2563118332, 1, SHARE)  # a replica gets to know a released completion
@given(
    pipeline=st.sampled_from([FIXED, CHOICES, REPLICAS, INSTANCES]),
    depth=st.integers(1, DEPTH),
    requests=st.integers(1, 25),
    leaving=st.sampled_from([0.0, 0.1]),
    longest=st.sampled_from([None, 6]),
    kind=st.sampled_from(["apart", "local", "striped"]),
    seed=st.integers(0, 2**32),
    clients=st.integers(1, 5),
    share=st.sampled_from([0, SHARE]),
)
def test_those_concerned_and_nobody_else_are_told_what_they_need(
    pipeline: Pipeline,
    depth: int,
    requests: int,
    leaving: float,
    longest: int | None,
    kind: str,
    seed: int,
    clients: int,
    share: int,
) -> None:
    chance = random.Random(seed)
    local = {FIXED: LOCAL, INSTANCES: SEVERAL}.get(pipeline, APART)
    memories = local if kind == "local" else APART
    driver = Told(pipeline, depth, chance, longest, memories, SHARDED if kind == "striped" else WHOLE, clients)
    driver.pause_s = RELEASE_S
    with mock.patch("lamina.schedule.admission.SHARE", share):
        for number in range(requests):
            driver.come(str(number))
            if chance.random() < leaving:
                driver.go()
            if chance.random() < 0.1:
                one = chance.choice([pipeline.first_arrangement, *pipeline.choices])
                driver.turn.scheduler.use_lanes(one.lanes, one.rotates)
            driver.move()
            driver.turn_once()
        for _ in range(ENOUGH):
            if not driver.live and not driver.turn.in_flight:
                break
            driver.move()
            driver.turn_once()
    assert driver.ended == Counter(map(str, range(requests)))
    driver.tell_overdue(float("inf"))
    assert all(store.slab.used == 0 and store.sequences == 0 for store in driver.theirs.values())
    assert not any(replica.segments for replica in driver.replicas.values())
    recipients = driver.recipients
    assert not recipients._known


def test_a_replica_learns_of_a_sequence_with_its_history_before_it_runs_it() -> None:
    recipients = Recipients(["compute0", "compute1"], Pipeline(2, 2, choices=(Arrangement(2), Arrangement(4))))
    admission = Admission(0, 2, 1, [Segment(0, "memory0", (0, 2), (0, None))], SamplingParams(), 0)
    nobody = DecodeRows([], [], [])
    recipients.select(StepPlan(1, 0, 0, [], [], [admission], [SequenceStep(0, 0, [5], [0, 1])], nobody), 0.0)
    dealt_out_again = StepPlan(2, 1, 0, [], [], [], [], nobody, histories={0: [7], 1: []})
    assert recipients.select(dealt_out_again, 0.0) == [
        (("compute1",), msgspec.structs.replace(dealt_out_again, admitted=[admission]))
    ]
    ((told, plan),) = recipients.select(StepPlan(3, 1, 0, [], [0, 1], [], [], nobody), 0.0)
    assert told == ("compute1",) and plan.released == [0, 1]
    assert dict(recipients.overdue(RELEASE_S)) == {"compute0": [0, 1], "memory0": [0, 1]}


def test_a_replica_ignores_that_a_sequence_grows_which_it_has_not_run_and_does_not_run_yet() -> None:
    """The prompt has run on another replica, and the first step here lacks slots, or preempts the request."""
    recipients = Recipients(["compute0", "compute1"], Pipeline(2, 2, prefill=1))
    admission = Admission(0, 1, 2, [Segment(0, "memory0", (0, 2), (0, None))], SamplingParams(), 0, indices=[0])
    nobody, later = DecodeRows([], [], []), Segment(0, "memory1", (0, 2), (2, None))
    recipients.select(StepPlan(1, 0, 0, [], [], [admission], [SequenceStep(0, 0, [5, 6], [0])], nobody), 0.0)
    sequences = Sequences(Mock(), [], lambda tokens: tokens)
    for number, decoding in ((2, nobody), (3, DecodeRows([0], [2], [7]))):
        plan = StepPlan(number, 1, 0, [], [], [], [], decoding, grown=[later] if number == 2 else [])
        parts = {name: part for names, part in recipients.select(plan, 0.0) for name in names}
        sequences.apply_plan(parts["compute1"])
    assert sequences.segments == {0: grown(admission.segments, later)}


def test_a_replica_learns_again_of_a_sequence_that_grew_elsewhere_and_comes_back_to_its_lane() -> None:
    """The lane has had no other step in between."""
    recipients = Recipients(["compute0", "compute1"], Pipeline(2, 2))
    admission = Admission(0, 1, 2, [Segment(0, "memory0", (0, 2), (0, None))], SamplingParams(), 0, indices=[0])
    later = Segment(0, "memory1", (0, 2), (3, None))
    sequences = Sequences(Mock(), [], lambda tokens: tokens)
    for plan in (
        StepPlan(1, 0, 0, [], [], [admission], [SequenceStep(0, 0, [5, 6], [0])], DecodeRows([], [], [])),
        StepPlan(2, 0, 3, [], [], [], [], DecodeRows([0], [2], [7])),
        StepPlan(3, 1, 0, [], [], [], [], DecodeRows([0], [3], [8]), grown=[later]),
        StepPlan(4, 0, 6, [], [], [], [], DecodeRows([0], [4], [9])),
    ):
        parts = {name: part for names, part in recipients.select(plan, 0.0) for name in names}
        if (part := parts.get("compute0")) is not None:
            sequences.apply_plan(part)
    assert sequences.segments == {0: grown(admission.segments, later)}


def test_a_replica_learns_again_of_a_sequence_whose_last_segment_was_extended_while_another_ran_it() -> None:
    """Its segments are as before, and both replicas hold KV of it."""
    recipients = Recipients(["compute0", "compute1"], Pipeline(2, 2, lends=True))
    heads = (0, 2)
    segments = [Segment(0, "compute0", heads, (0, 1)), Segment(0, "compute1", heads, (1, None))]
    admission = Admission(0, 1, 2, segments, SamplingParams(), 0, indices=[0])
    again = Segment(0, "compute1", heads, (3, None))
    sequences = Sequences(Mock(), [], lambda tokens: tokens)
    for plan in (
        StepPlan(1, 0, 0, [], [], [admission], [SequenceStep(0, 0, [5, 6], [0])], DecodeRows([], [], [])),
        StepPlan(2, 0, 3, [], [], [], [], DecodeRows([0], [2], [7])),
        StepPlan(3, 1, 0, [], [], [], [], DecodeRows([0], [3], [8]), grown=[again]),
        StepPlan(4, 0, 6, [], [], [], [], DecodeRows([0], [4], [9])),
    ):
        parts = {name: part for names, part in recipients.select(plan, 0.0) for name in names}
        if (part := parts.get("compute0")) is not None:
            (sequences.apply_part if plan.lane else sequences.apply_plan)(part)
    assert sequences.segments == {0: segments}


def test_a_replica_forgets_a_sequence_that_grows_elsewhere_before_kv_of_it_may_move_there() -> None:
    """In one plan, the release would come after the switch, and free the KV that has moved."""
    recipients = Recipients(["compute0", "compute1"], Pipeline(2, 2, prefill=1, lends=True))
    admission = Admission(0, 1, 2, [Segment(0, "compute1", (0, 2), (0, None))], SamplingParams(), 0, indices=[0])
    nobody, moved_there = DecodeRows([], [], []), Segment(0, "compute0", (0, 2), (0, 2))
    grows = [Segment(0, "memory0", (0, 2), (2, None))]
    plans = [
        StepPlan(1, 0, 0, [], [], [admission], [SequenceStep(0, 0, [5, 6], [0])], nobody),
        StepPlan(2, 1, 0, [], [], [], [], DecodeRows([0], [2], [7]), grown=grows),
        StepPlan(3, 1, 3, [], [], [], [], DecodeRows([0], [3], [8]), switches=[Switch(9, [moved_there])]),
    ]
    told = [dict(recipients.select(plan, 0.0)).get(("compute0",)) for plan in plans]
    assert [part and (part.released, len(part.switches)) for part in told] == [([], 0), ([0], 0), ([], 1)]


def test_a_request_whose_prompt_has_moved_outlives_the_worker_that_it_left() -> None:
    """Its second completion has not been forked yet: it never had anything on the lost worker."""
    members = (
        Member("compute0", "compute", "cpu", ""),
        *(Member(f"memory{n}", "memory", "cpu", "", 9) for n in (0, 1)),
    )
    topology, nobody = Topology(FIRST, members, Pipeline(1, 1)), DecodeRows([], [], [])
    recipients = Recipients(["compute0"], topology.pipeline)
    admitted = [
        Admission(first, 2, 2, [Segment(first, worker, (0, 2), (0, None))], SamplingParams(), 0)
        for first, worker in ((0, "memory0"), (2, "memory0"), (4, "memory1"))
    ]
    recipients.select(StepPlan(1, 0, 0, [], [], admitted, [], nobody), 0.0)
    switch = Switch(9, [Segment(0, "memory1", (0, 2), (0, None))])
    recipients.select(StepPlan(2, 0, 0, [], [], [], [], nobody, switches=[switch]), 0.0)
    recipients.end_epoch(topology.without(["memory0"]), {"memory1": {0: 2, 4: 2, 5: 1}})
    forks = [Fork(0, 1, 2)]
    told = recipients.select(StepPlan(3, 0, 0, forks, [2, 3], [], [SequenceStep(1, 2, [7], [1])], nobody), 0.0)
    ((_, part),) = [one for one in told if one[0] == ("memory1",)]
    assert part.forks == forks and [chunk.sequence for chunk in part.chunks] == [1]
    recipients.select(StepPlan(4, 0, 0, [], [0, 1, 4, 5], [], [], nobody), 0.0)
    assert not recipients._known
