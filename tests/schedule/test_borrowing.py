"""Lanes without requests run chunks of other lanes' prompts."""

import pytest

from lamina.control.messages import StepDone
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Pipeline
from lamina.core.requests import Group
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Epoch, Member, Role, Topology
from lamina.kv.placement import Placement
from lamina.kv.stripes import placement
from lamina.schedule.limits import Limits
from lamina.schedule.turn import Turn
from tests.support.schedules import ATTENTIONS, request

ROWS, PROMPT = 16, 100
PIPELINE = Pipeline(2, 2)


def turn(local: bool = False, pipeline: Pipeline = PIPELINE) -> Turn:
    roles: tuple[Role, ...] = ("compute", "compute") if local else ("memory",)
    members = tuple(Member(f"{role}{number}", role, "cpu", "", 400) for number, role in enumerate(roles))
    topology = Topology(FIRST, members, pipeline)
    placement = Placement(topology.capacities, topology=topology)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=ROWS, max_model_len=200)
    return Turn(limits, placement, pipeline, attentions=ATTENTIONS, kv_heads=2)


def begin(made: Turn, n: int = 1) -> Group:
    return made.scheduler.submit(request("0", PROMPT, max_tokens=4, n=n))


def done(plan: StepPlan) -> StepDone:
    return StepDone(plan.step, [])


def spans(plans: list[StepPlan]) -> list[tuple[int, int, int]]:
    """Lane and tokens of every chunk."""
    return [(plan.lane, chunk.start, chunk.stop) for plan in plans for chunk in plan.chunks]


def test_chunks_alternate_between_lanes_and_the_last_one_draws_in_the_requests_own() -> None:
    made = turn()
    group = begin(made)
    plans = list(made.plan(0.0))
    assert spans(plans) == [(0, 0, 16), (1, 16, 32), (0, 32, 48), (1, 48, 64)]
    for plan in list(plans):
        for answer in made.in_order(done(plan)):
            made.complete(answer)
        plans += made.plan(0.0)
    assert [chunk[1:] for chunk in spans(plans)] == [(at, min(at + 16, PROMPT)) for at in range(0, PROMPT, 16)]
    drawing = [(plan.lane, chunk.draws) for plan in plans for chunk in plan.chunks if chunk.draws]
    assert drawing == [(group.lane, [group.completions[0].sequence])]


def test_a_chunk_completes_after_those_before_it() -> None:
    made = turn()
    begin(made)
    first, second, third, fourth = made.plan(0.0)
    assert made.in_order(done(second)) == []
    assert made.in_order(done(first)) == [done(first), done(second)]
    assert made.in_order(done(fourth)) == []
    assert made.in_order(done(third)) == [done(third), done(fourth)]


def test_lanes_with_requests_and_lanes_beside_local_memory_borrow_nothing() -> None:
    made = turn()
    begin(made)
    made.scheduler.submit(request("1", 4, max_tokens=4))
    assert {(plan.lane, chunk.sequence) for plan in made.plan(0.0) for chunk in plan.chunks} == {(0, 0), (1, 1)}
    alone = turn(local=True)
    begin(alone)
    assert {lane for lane, _, _ in spans(list(alone.plan(0.0)))} == {0}


@pytest.mark.parametrize(("own", "lanes"), [(400, {0}), (0, {0, 1})])
def test_lanes_borrow_nothing_if_local_memory_holds_some_of_the_heads(own: int, lanes: set[int]) -> None:
    """There no chunk waits for earlier chunks of other lanes."""
    compute = Member("compute0", "compute", "cpu", "host", own)
    memories = [Member(f"memory{number}", "memory", "cpu", "host", 400) for number in range(2)]
    topology = Topology(Epoch(0, 1), (compute, *memories), Pipeline(2, 1))
    placed = placement("head", topology.capacities, HeadShards(2, 2), None, topology)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=ROWS, max_model_len=200)
    made = Turn(limits, placed, topology.pipeline, attentions=ATTENTIONS, kv_heads=2)
    begin(made)
    assert {plan.lane for plan in made.plan(0.0)} == lanes


@pytest.mark.parametrize("preempts", [False, True])
def test_slots_are_freed_once_no_lane_runs_the_request(preempts: bool) -> None:
    made = turn()
    group = begin(made)
    first, second, third, fourth = made.plan(0.0)
    sequence = group.completions[0].sequence
    if preempts:
        made.scheduler.preempt(group)
    else:
        made.scheduler.abort("0")
    released: list[int] = []
    for plan in (first, second, third, fourth):
        for answer in made.in_order(done(plan)):
            made.complete(answer)
        planned = list(made.plan(0.0))
        released += [one for later in planned for one in later.released]
        assert (sequence in released) == (plan is fourth)


@pytest.mark.parametrize("completed", range(5))
def test_the_end_of_an_epoch_keeps_what_has_completed_without_a_gap(completed: int) -> None:
    made = turn()
    group = begin(made, n=2)
    plans = list(made.plan(0.0))
    for plan in plans[:completed]:
        for answer in made.in_order(done(plan)):
            made.complete(answer)
    for plan in plans[completed + 1 :]:  # answered, but not completed
        assert made.in_order(done(plan)) == []
    members = (
        Member("compute0", "compute", "cpu", "host"),
        Member("compute1", "compute", "cpu", "host"),
        Member("memory0", "memory", "cpu", "host", 400),
    )
    remains = made.end_epoch(Topology(Epoch(0, 2), members, PIPELINE))
    assert remains.kept == {"memory0": {group.completions[0].sequence: 16 * completed}}
    made.begin_epoch()
    chunks = spans(list(made.plan(0.0)))
    assert min(start for _, start, _ in chunks) == 16 * completed
