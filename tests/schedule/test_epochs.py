"""Workers that are lost, join and leave at any point of a schedule: only what had not completed is lost with them, and
no token is drawn twice."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.schedule.admission import SHARE
from lamina.schedule.limits import Limits
from lamina.schedule.suspects import Hold
from tests.support.clusters import MANY, requests
from tests.support.lossy_clusters import NOBODY, Losing
from tests.support.schedules import LIMITS, plan_of, request, scheduler

pytestmark = pytest.mark.usefixtures("impatient")


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
    move_turns=st.integers(1, 6),
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
    move_turns=4,
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
    move_turns: int,
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
            if turn % move_turns == 0:
                cluster.finish_move()
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
