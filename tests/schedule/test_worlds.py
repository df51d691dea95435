"""Turn, recipients and all workers' bookkeeping together, at random, while members are lost, join and change roles.

Every worker applies its parts of plans as it does at run time. Both ends of each message must derive the same rows
from them, no slot may leak, and every request must end once.
"""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from unittest.mock import Mock, patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.compute.sequences import Sequences
from lamina.control.messages import MemorySetup, StepDone
from lamina.core.errors import ConfigError, RequestError
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.requests import Completion, Group
from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec, Balance, DType, Overlap, Request
from lamina.dataplane.wire import MessageRows, check_placements, message_rows
from lamina.engine.changes import Leaves
from lamina.kv.stripes import placement
from lamina.memory.store import KvStore, StepTables
from lamina.schedule.limits import Limits
from lamina.schedule.recipients import RELEASE_S, Recipients
from lamina.schedule.turn import Turn
from tests.support.schedules import client

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")

KINDS = (
    "lends",
    "lends, prompts apart",
    "lends, prompts apart, other degrees",
    "lends, two ranks",
    "lends, two ranks, prompts apart, one way",
    "local",
    "local, two stages",
    "local, two stages, two ranks",
    "pool",
    "pool, prompts apart",
    "stripes",
)
CAPACITIES = (27, 40, 60)
ENOUGH = 6000


class Worker:
    """The bookkeeping of one worker: of KV if it has slots, of what it computes if it is a compute worker."""

    def __init__(self, member: Member, home: Member, shards: HeadShards, ranks: int) -> None:
        """``home``: the member by whose name segments refer to the slab."""
        heads = shards.heads
        spec = AttentionSpec(layer=0, query_heads=heads, kv_heads=heads, qk_dim=1, v_dim=1, scale=1.0)
        setup = MemorySetup([spec], DType.FLOAT32, home.capacity, 1, Overlap(), False)
        setup = msgspec.structs.replace(setup, head_shards=shards.count, ranks=ranks)
        self.store = KvStore(home.name, setup) if home.capacity else None
        self.sequences = Sequences(Mock(), [], lambda tokens: tokens) if member.role == "compute" else None

    def apply(self, plan: StepPlan, ranks: int, runs: bool, lends: bool) -> list[StepTables]:
        """Apply a plan as ``ComputeWorker`` and ``MemoryWorker`` do. ``ranks``: of the replica that runs it."""
        tables = [] if self.store is None else self.store.apply(plan, ranks)
        if self.sequences is not None and not runs and lends and self.store is not None:
            self.sequences.apply_part(plan)
        elif self.sequences is not None:
            self.sequences.apply_plan(plan)
        return tables

    def release(self, sequences: Sequence[int]) -> None:
        if self.store is not None:
            self.store.release(sequences)
        if self.sequences is not None:
            self.sequences.forget(sequences)

    def end_epoch(self, kept: Mapping[int, int]) -> None:
        if self.store is not None:
            self.store.truncate(kept)
        if self.sequences is not None:
            self.sequences.drop_all()


class World:
    """A cluster, and callers that come and go. ``changes``: how often members change, 0 for never."""

    def __init__(self, kind: str, chance: random.Random, changes: int) -> None:
        self.chance, self.changes, self._numbers = chance, changes, itertools.count()
        shapes = {
            (ranks, stages): Shape(ranks, stages, (0, 1)[: 2 * stages - 2]) for ranks in (1, 2) for stages in (1, 2)
        }
        early = late = shapes[2 if "ranks" in kind else 1, 2 if "stages" in kind else 1]
        if "degrees" in kind:
            early, late = chance.sample([*shapes.values()], 2)
        ranks, stages = max(early.ranks, late.ranks), max(early.stages, late.stages)
        self.shards = HeadShards(4, 2) if "stripes" in kind or ranks > 1 else HeadShards(2)
        self.local, self.lends, self.one_way = "lends" in kind or "local" in kind, "lends" in kind, "one way" in kind
        replicas, capacity = chance.choice([2, 2, 3]), chance.choice(CAPACITIES)
        lanes, prefill = replicas * stages * chance.choice([1, 1, 2]), int("apart" in kind)
        one_way = self.one_way
        self.first = Pipeline(
            lanes,
            replicas,
            shape=late,
            prefill_shape=None if early == late else early,
            prefill=prefill,
            lends=self.lends,
            one_way=one_way,
        )
        without = prefill if one_way else 0
        members = [one for number in range(without) for one in self._replica(self.first.shape_of(number), 0)]
        for number in range(without, replicas):
            members += self._replica(self.first.shape_of(number), capacity if ranks > 1 else None)
        counts = [0] if one_way else [0, 1, 2] if self.local else [2, 3]
        members += [self._member("memory") for _ in range(chance.choice(counts))]
        self.topology = Topology(FIRST, tuple(members), self.first)
        self.turn = Turn(
            Limits(chance.choice([4, 6, 8]), chance.choice([8, 16]), 48, replicas, lanes),
            placement(
                chance.choice(["auto", "token"]) if self.lends and not one_way else "auto",
                self.topology.capacities,
                self.shards,
                None if one_way else chance.choice([None, None, 6]),
                self.topology,
                balances=ranks > 1 and chance.random() < 0.6,
            ),
            self.first,
            attentions=1,
            kv_heads=self.shards.heads,
            plan_ahead=chance.random() < 0.7,
            prefix_cache=chance.random() < 0.6,
            balance=chance.choice(list[Balance](["off", "throughput", "ledger"])),
        )
        self.scheduler = self.turn.scheduler
        self.recipients = Recipients(self.topology.computes, self.first)
        self.workers = self._workers(members)
        self.leaves = Leaves(Mock(), Mock(), self.scheduler)
        self.unanswered: dict[int, StepPlan] = {}
        self.sent: list[StepPlan] = []
        self.moves: list[int] = []
        self.now, self.asked = 0.0, 0
        self.live, self.ended = set[str](), Counter[str]()
        self.beginning = [chance.randrange(50) for _ in range(18)]

    def _member(self, role: str, capacity: int | None = None) -> Member:
        number = next(self._numbers)
        slots = self.chance.choice(CAPACITIES) if capacity is None else capacity
        if role == "memory":
            return Member(f"memory{number}", "memory", "cpu", "", slots)
        return Member(f"compute{number}", "compute", "cpu", "", slots if self.local else 0)

    def _replica(self, shape: Shape, capacity: int | None) -> list[Member]:
        """Return the compute workers of a replica, the first stage of which has the capacity of all."""
        first = [self._member("compute", capacity) for _ in range(shape.ranks)]
        return first + [self._member("compute", 0) for _ in range(shape.workers - shape.ranks)]

    def _workers(self, members: Sequence[Member], shape: Shape | None = None) -> dict[str, Worker]:
        """Return workers for all members, or for those of one replica of a ``shape``: computes come first, in order."""
        computes = [member for member in members if member.role == "compute"]
        numbers = range(len(computes))
        homes = [computes[self.first.home(one) if shape is None else one % shape.ranks] for one in numbers]
        pairs = zip(members, [*homes, *members[len(computes) :]], strict=True)
        return {member.name: Worker(member, home, self.shards, self.first.most_ranks) for member, home in pairs}

    # -- callers

    def come(self) -> None:
        name, chance = str(self.asked), self.chance
        self.asked += 1
        further = [chance.randrange(50) for _ in range(chance.choice([1, 5, 12]))]
        prompt = self.beginning[: chance.choice([0, 17, 18])] + further
        n = chance.choice([1, 1, 1, 2, 3])
        most, penalty = chance.randint(1, 24 // n), chance.choice([1.0, 1.2])
        params = SamplingParams(n=n, max_tokens=most, repetition_penalty=penalty)
        try:
            self.scheduler.submit(Request(name, None, prompt, params, client=client(self.asked, 3)))
        except RequestError:  # more than all memory holds
            return
        self.live.add(name)

    def end(self, name: str) -> None:
        self.ended[name] += 1
        self.live.remove(name)

    def abort(self, name: str) -> None:
        self.scheduler.abort(name)
        self.end(name)

    def draw(self, group: Group, completion: Completion) -> None:
        name = group.request.request_id
        assert name in self.live and not completion.finished, "a token for a request that has ended"
        completion.generated.append(7)
        assert len(completion.generated) <= group.max_tokens
        if len(completion.generated) == group.max_tokens or self.chance.random() < 0.05:
            self.scheduler.end_completion(group, completion)
            if not group.alive:
                self.end(name)

    # -- steps

    def answer(self) -> None:
        """Any step in flight ends, whichever began first."""
        if not self.unanswered:
            return
        plan = self.unanswered.pop(self.chance.choice(list(self.unanswered)))
        rows = sum(len(step.tokens) for step in plan.sequences)
        busy_s, waited_s = 0.1 * self.chance.random(), 0.1 * self.chance.random()
        early = StepDone(plan.step, [], rows=rows, busy_s=busy_s, waited_s=waited_s)
        for done in self.turn.in_order(early):
            for owner in self.turn.complete(done).values():
                self.draw(*owner)

    def plan(self) -> None:
        self.now += self.chance.choice([0.1, 0.1, RELEASE_S]) * self.chance.random()
        for plan in self.turn.plan(self.now):
            self.unanswered[plan.step] = plan
            running = {step.sequence for one in self.turn.in_flight.values() for step in one.sequences}
            assert running.isdisjoint(plan.released), "slots of a step in flight are released"
            self.send(plan)
            self.moves += [move.number for move in plan.moves]
        for name, sequences in self.recipients.overdue(self.now):
            self.workers[name].release(sequences)

    def send(self, plan: StepPlan) -> None:
        """Let all workers concerned apply their parts, and compare both ends of each message."""
        self.sent.append(plan)
        check_placements(plan, self.shards)
        order, computes = self.topology.pipeline, self.topology.computes
        runs = {computes[number] for number in order.workers_of(plan.lane, plan.rotates)}
        ranks = order.shape_of(plan.lane % order.replicas).ranks
        parts = [(name, part) for names, part in self.recipients.select(plan, self.now) for name in names]
        found = {name: self.workers[name].apply(part, ranks, name in runs, self.lends) for name, part in parts}
        assert len(found) == len(parts) and (found.keys() >= runs or not plan.runs)
        if self.one_way:
            self.check_one_way(plan, runs)
        for name in runs if plan.runs else ():
            known, rank = self.workers[name].sequences, self.topology.ranks_of(name).index(name)
            assert known is not None
            for holder in {segment.worker for step in plan.sequences for segment in known.segments[step.sequence]}:
                rows = message_rows(plan, known.segments, holder, self.shards, rank, ranks)
                for each in () if rows.empty else self.topology.holders(holder):
                    same(rows, found[each][rank].rows)

    def check_one_way(self, plan: StepPlan, runs: set[str]) -> None:
        """Check that KV of a sequence is on one replica: the one that runs the step, unless that only runs prompts."""
        alone = not runs.isdisjoint(self.topology.prefills)
        for step in plan.sequences if plan.runs else ():
            known = self.workers[next(iter(runs))].sequences
            assert known is not None
            holders = {segment.worker for segment in known.segments[step.sequence]}
            assert holders in [{*replica} for replica in self.topology.replicas]
            assert alone or holders == runs

    # -- members

    def lose(self) -> None:
        lost = self.topology.whole_replicas([self.chance.choice([one.name for one in self.topology.members])])
        if self.topology.lacks(lost) is not None:
            return
        for name in lost & set(self.leaves.names):
            self.leaves.on_worker_lost(name)
        self.topology = self.topology.without(lost)
        self.unanswered.clear()
        self.moves.clear()
        remains = self.turn.end_epoch(self.topology)
        self.leaves.apply_topology(self.topology)
        self.recipients.end_epoch(self.topology, remains.kept)
        self.workers = {name: worker for name, worker in self.workers.items() if name not in lost}
        held = {one: kept for name, kept in remains.kept.items() for one in self.topology.holders(name)}
        for name, worker in self.workers.items():
            worker.end_epoch(held.get(name, {}))
        for group in self.scheduler.stranded:
            self.abort(group.request.request_id)
        self.turn.begin_epoch()

    def adopt(self, topology: Topology) -> None:
        self.topology = topology
        self.turn.change_members(topology)
        self.recipients.change_members(topology)

    def join(self, role: str) -> None:
        again = self.one_way and not self.topology.prefills
        slots = 0 if again else max(self.topology.capacities.values()) if self.first.most_ranks > 1 else None
        pipeline, prefill = self.topology.pipeline, self.topology.pipeline.prefill
        if role == "compute":
            more = again if self.one_way else (self.lends or not self.local) and self.chance.random() < 0.3
            shape = self.first.shapes[not more]
            members = self._replica(shape, slots)
            self.workers |= self._workers(members, shape)
            pipeline = self.first.with_replicas(len(self.topology.replicas) + 1, prefill + more)
        else:
            members = [self._member(role)]
            self.workers |= self._workers(members)
        self.adopt(self.topology.joined(members, pipeline))

    def turn_role(self) -> None:
        replica, prefill = self.chance.choice(self.topology.replicas), self.topology.pipeline.prefill
        to = prefill - 1 if replica[0] in self.topology.prefills else prefill + 1
        may_turn = (self.lends or not self.local) and not self.one_way and self.first.is_uniform
        if to < len(self.topology.replicas) and may_turn:
            self.adopt(self.topology.turned(replica, self.first.with_replicas(len(self.topology.replicas), to)))

    def change(self) -> None:
        what = self.chance.choice(["compute", "memory", "role", "leave"])
        if what == "memory" and 0 < len(self.topology.memories) < 4:
            self.join("memory")
        elif what == "compute" and not self.turn.in_flight and len(self.topology.replicas) < 3:
            self.join("compute")
        elif what == "role" and not self.turn.in_flight:
            self.turn_role()
        elif what == "leave" and self.topology.memories and self.topology.memories[-1] not in self.leaves.names:
            name = self.topology.memories[-1]
            try:
                if self.topology.lacks([*self.leaves.names, name]) is None:
                    self.leaves.validate_leave([name], self.topology)
                    self.leaves.begin_leave(name, self.topology)
            except ConfigError:  # the others have too little room
                pass

    def part(self) -> None:
        for name in self.leaves.draining:
            if self.leaves.are_drained([name]) and self.topology.lacks([name]) is None:
                self.adopt(self.topology.left([name], self.topology.pipeline))
                self.leaves.on_worker_lost(name)
                del self.workers[name]

    # -- all of it

    def turn_once(self) -> None:
        for _ in range(self.chance.randint(0, 3)):
            self.answer()
        if self.moves and self.chance.random() < 0.5:
            self.scheduler.on_move_done(self.moves.pop(0))
        if self.turn.reviews_lanes:
            self.turn.note_attention(self.chance.choice(list(self.workers)), self.now * self.chance.random())
        if self.chance.random() < 0.2:
            self.move()
        if self.chance.random() < 0.02 * self.changes:
            self.lose()
        if self.chance.random() < 0.05 * self.changes:
            self.change()
        self.part()
        self.plan()

    def move(self) -> None:
        groups = [group for lane in self.scheduler._lanes for group in lane.running]
        if groups and len(places := list(self.scheduler.placement.capacities)) > 1:
            source, target = self.chance.sample(places, 2)
            self.scheduler.moves.try_move(self.chance.choice(groups), source, target, self.chance.randint(1, 20))

    def check_rest(self) -> None:
        assert not self.live and all(count == 1 for count in self.ended.values())
        kept = self.scheduler.placement
        assert not any(kept.reserved.values()) and not any(kept.sequences.values())
        for name, sequences in self.recipients.overdue(float("inf")):
            self.workers[name].release(sequences)
        moved, ranks = self.scheduler.moves.counts, self.first.most_ranks
        assert 0 <= sum(moved.by_worker.values()) - moved.tokens <= (ranks - 1) * moved.moves, "each is rounded up"
        idle = kept.on_workers(kept.idle)
        for worker in self.workers.values():
            assert worker.store is None or worker.store.used_tokens == idle.get(worker.store.worker, 0)
            assert worker.sequences is None or not (len(worker.sequences) or worker.sequences.segments)


def same(sent: MessageRows, expected: MessageRows) -> None:
    """Check that the sender of a request and its receiver derive the same rows."""
    assert sent.kept == expected.kept and len(sent.further) == len(expected.further)
    assert [msgspec.structs.replace(one, row=0) for one in sent.attends] == [
        msgspec.structs.replace(one, row=0) for one in expected.attends
    ]
    assert [msgspec.structs.replace(one, row=0) for one in sent.pulled] == [
        msgspec.structs.replace(one, row=0) for one in expected.pulled
    ]


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    turns=st.integers(5, 60),
    changes=st.sampled_from([0, 1, 3]),
)
def test_all_workers_follow_the_plans_whatever_happens_to_the_members(
    kind: str, seed: int, turns: int, changes: int
) -> None:
    live(World(kind, random.Random(seed), changes), turns)


@given(
    kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), turns=st.integers(5, 40), changes=st.sampled_from([0, 1])
)
def test_a_step_that_only_decodes_is_planned_as_any_other(kind: str, seed: int, turns: int, changes: int) -> None:
    quickly, fully = World(kind, random.Random(seed), changes), World(kind, random.Random(seed), changes)
    with patch.object(fully.scheduler, "_only_decodes", lambda lane: False):
        live(fully, turns)
    live(quickly, turns)
    assert quickly.sent == fully.sent


def live(world: World, turns: int) -> None:
    """Let callers come and go for some turns, and then all requests end."""
    for _ in range(turns):
        if world.chance.random() < 0.6:
            world.come()
        if world.live and world.chance.random() < 0.1:
            world.abort(world.chance.choice(sorted(world.live)))
        world.turn_once()
    world.changes = 0
    for _ in range(ENOUGH):
        if not world.live and not world.turn.in_flight and not world.moves:
            break
        world.turn_once()
    for _ in range(20):
        world.turn_once()
    world.check_rest()
