"""Workers that are lost, join and leave at any point of a schedule: only what had not completed is lost with them, and
no token is drawn twice."""

import dataclasses
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.core.errors import RequestError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Request
from lamina.schedule.admission import SHARE
from lamina.schedule.limits import Limits
from lamina.schedule.recipients import Recipients
from lamina.schedule.suspects import Hold
from tests.support.clusters import MANY, Cluster, MemoryModel, requests
from tests.support.schedules import LIMITS, plan_of, request, scheduler

NOBODY = Hold()

pytestmark = pytest.mark.usefixtures("impatient")


class Losing(Cluster):
    """A cluster whose epochs end, with or without a memory worker."""

    def __init__(
        self,
        requests: list,
        memories: int,
        lanes: int,
        depth: int,
        limits: Limits,
        capacity: int,
        longest: int | None,
    ) -> None:
        super().__init__(requests, memories, lanes, depth, limits, capacity, longest)
        workers = [Member("compute0", "compute", "cpu", ""), Member("compute1", "compute", "cpu", "")]
        workers += [Member(memory.name, "memory", "cpu", "", capacity) for memory in self.memories]
        self.hold = NOBODY
        self._numbers = itertools.count()
        self.topology = Topology(FIRST, tuple(workers), Pipeline(lanes, 2) if lanes > 1 else Pipeline(2, 2))
        self.recipients = Recipients(self.topology.computes, self.topology.pipeline)

    def submit(self, index: int, made: Request) -> None:
        try:
            super().submit(index, made)
        except RequestError:  # too long for the workers that are left
            self.unservable.add(index)

    def plan(self, lane: int) -> None:
        """As ever, but nothing that is held runs, and nothing new is placed on a worker that leaves."""
        closed, before = set(self.scheduler.placement.closed), len(self._in_flight[lane])
        super().plan(lane)
        for plan in self._in_flight[lane][before:]:
            self.recipients.select(plan, 0.0)  # it knows all sequences that the plan names
            forked = {fork.child for fork in plan.forks}  # what admission has planned for them
            assert not closed & {one.worker for one in plan.grown if one.sequence not in forked}
        for step in itertools.chain.from_iterable(plan.sequences for plan in self._in_flight[lane]):
            assert self.hold.may_run(str(self._owners[step.sequence][0]))

    def release(self) -> None:
        """Nobody is held any more."""
        self.hold = NOBODY
        self.scheduler.hold_back(self.hold)

    def end_epoch(self, number: int, hold: Hold = NOBODY) -> None:
        """Memory worker ``number`` is lost, if it is not the last one; else a compute worker is, and no KV."""
        self.hold = dataclasses.replace(hold, held=frozenset(filter(self.scheduler.alive, hold.held)))
        self.scheduler.hold_back(self.hold)
        lost = [memory.name for memory in self.memories[number : number + 1] if self._is_dispensable(memory.name)]
        computes = self.topology.computes
        self.topology = self.topology.without(lost or computes[1:])
        self._in_flight = [[] for _ in self._in_flight]
        remains = self.scheduler.end_epoch(self.topology)
        self.recipients.end_epoch(self.topology, remains.kept)
        self.memories = [memory for memory in self.memories if memory.name not in lost]
        for memory in self.memories:
            kept = remains.kept[memory.name]
            assert kept.keys() <= memory.here.keys()
            for sequence in {sequence for sequence, _ in memory.slab.segments}.difference(kept):
                memory.forget(sequence)
            for sequence, tokens in kept.items():
                self.check_kept(sequence, tokens)
                for start, stop in memory.here[sequence].items():
                    memory.slab.truncate((sequence, start), max(0, min(tokens, stop) - start))
        for group in self.scheduler.stranded:
            self.unservable.add(int(group.request.request_id))
            self.scheduler.abort(group.request.request_id)

    def check_kept(self, sequence: int, tokens: int) -> None:
        """What has been computed of a sequence is kept."""
        index, _ = self._owners[sequence]
        shared = 0 if sequence in self._firsts else self.requests[index][0]
        assert tokens == max(self._computed.get(sequence, 0), shared)

    def join(self, capacity: int) -> None:
        """Another memory worker takes part from now on."""
        name = f"later{next(self._numbers)}"
        self.memories.append(MemoryModel(name, capacity))
        self.topology = self.topology.joined(Member(name, "memory", "cpu", "", capacity), self.topology.pipeline)
        self._change()

    def _change(self, deal_again: bool = False) -> None:
        self.scheduler.change_members(self.topology, deal_again)
        self.recipients.change_members(self.topology)

    def drain(self, number: int) -> None:
        """A memory worker is to leave, if another one can hold any request."""
        name = self.memories[number % len(self.memories)].name
        if self._is_dispensable(name):
            self.scheduler.drain(name)

    def _is_dispensable(self, name: str) -> bool:
        """True if another memory worker that does not leave can hold any request."""
        capacities, closed = self.topology.capacities, self.scheduler.placement.closed
        return any(size >= 60 for other, size in capacities.items() if other != name and other not in closed)

    def leave(self) -> None:
        """Those that leave do, once they are empty."""
        for memory in [one for one in self.memories if one.name in self.scheduler.placement.closed]:
            if self.scheduler.is_drained(memory.name):
                assert memory.slab.used == 0 and not memory.here
                self.memories.remove(memory)
                self.topology = self.topology.left(memory.name, self.topology.pipeline)
                self._change()

    def deal_again(self) -> bool:
        """The replicas change, if no step is in flight."""
        if any(self._in_flight):
            return False
        self._change(deal_again=True)
        return True

    @property
    def _firsts(self) -> set[int]:
        return {group.completions[0].sequence for group in self.scheduler._requests.values()}


holds = st.one_of(
    st.just(NOBODY),
    st.sets(st.integers(0, 5)).map(lambda held: Hold(frozenset(map(str, held)))),
    st.sets(st.integers(0, 5), max_size=2).map(lambda only: Hold(only=frozenset(map(str, only)))),
)


@given(
    requests=requests,
    memories=st.integers(1, 3),
    lanes=st.integers(1, 3),
    depth=st.integers(1, 3),
    limits=st.sampled_from([LIMITS, MANY]),
    capacity=st.sampled_from([60, 60, 27]),
    longest=st.sampled_from([None, None, 5, 11]),
    migration_turns=st.integers(1, 6),
    ends=st.dictionaries(st.integers(0, 30), st.tuples(st.integers(0, 2), holds), max_size=6),
    releases=st.sets(st.integers(0, 40), max_size=4),
    joins=st.dictionaries(st.integers(0, 30), st.integers(20, 60), max_size=4),
    leaves=st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=4),
    deals=st.sets(st.integers(0, 30), max_size=3),
    drops=st.dictionaries(st.integers(0, 30), st.integers(0, 20), max_size=3),
    clients=st.integers(1, 5),
    share=st.sampled_from([0, SHARE]),
)
@example(  # the first of three completions has ended, and the request is held before the others have been forked
    requests=[(1, 7, 3, [1, 5, 13], None, 9)],
    memories=3,
    lanes=1,
    depth=1,
    limits=MANY,
    capacity=60,
    longest=5,
    migration_turns=4,
    ends={12: (2, Hold(only=frozenset("13"))), 21: (1, NOBODY)},
    releases=set(),
    joins={},
    leaves={},
    deals={10},
    drops={},
    clients=1,
    share=SHARE,
)
def test_whenever_workers_join_leave_and_are_lost_every_request_ends_with_the_same_tokens(
    requests: list,
    memories: int,
    lanes: int,
    depth: int,
    limits: Limits,
    capacity: int,
    longest: int | None,
    migration_turns: int,
    ends: dict[int, tuple[int, Hold]],
    releases: set[int],
    joins: dict[int, int],
    leaves: dict[int, int],
    deals: set[int],
    drops: dict[int, int],
    clients: int,
    share: int,
) -> None:
    cluster = Losing(requests, memories, lanes, depth, limits, capacity, longest)
    cluster.clients = clients
    paused = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.schedule.admission.SHARE", share)
        for turn in itertools.count():
            assert turn < 2000, "the scheduler does not come to rest"
            cluster.arrive(turn)
            if turn % migration_turns == 0:
                cluster.migrate()
            if turn in drops:
                cluster.drop(drops[turn])
            if turn in ends:
                cluster.end_epoch(*ends[turn])
            if turn in releases or turn == 41:
                cluster.release()
            if turn in joins:
                cluster.join(joins[turn])
            if turn in leaves:
                cluster.drain(leaves[turn])
            cluster.leave()
            paused = paused or turn in deals
            paused = paused and not cluster.deal_again()
            for lane in range(lanes):
                if cluster.scheduler.in_flight(lane) and (turn + lane) % 2:
                    cluster.complete(lane)
                if not paused:
                    cluster.plan(lane)
            if turn > 41 and not cluster.busy:
                break
    cluster.leave()
    assert not cluster.scheduler.placement.closed
    assert all(memory.slab.used == 0 and not memory.here for memory in cluster.memories)
    assert not any(cluster.scheduler.placement.reserved.values())
    cluster.check_ends()


def test_a_penalized_request_that_is_aborted_while_an_epoch_ends_is_in_no_plan_any_more() -> None:
    topology = Topology(
        FIRST,
        (
            Member("compute0", "compute", "cpu", ""),
            Member("compute1", "compute", "cpu", ""),
            Member("memory0", "memory", "cpu", "", 60),
        ),
        Pipeline(2, 2),
    )
    under_test = scheduler({"memory0": 60})
    gone, stays = (
        under_test.submit(request(name, 3, max_tokens=9, presence_penalty=1.0)).completions[0] for name in ("0", "1")
    )
    plan_of(under_test)
    for group, completion in under_test.complete(0).values():
        assert group.alive
        completion.generated += [7]
    under_test.end_epoch(topology.without(["compute1"]))
    under_test.abort("0")
    plan = plan_of(under_test)
    assert plan.histories == {stays.sequence: []} and plan.released == [gone.sequence]
    assert plan.decoding.sequences == [stays.sequence] and plan.decoding.tokens == [7]
