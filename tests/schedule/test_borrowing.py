"""Lanes run chunks of other lanes' prompts in the rows that their own sequences leave."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from lamina.control.messages import StepDone
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.requests import Group
from lamina.core.segments import by_worker
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Epoch, Member, Topology
from lamina.core.types import Partition
from lamina.kv.placement import LEAST_SEGMENT, Placement
from lamina.kv.stripes import placement
from lamina.schedule.limits import Limits
from lamina.schedule.pace import LEAST
from lamina.schedule.policy import find_policy
from lamina.schedule.turn import Turn
from tests.support.schedules import ATTENTIONS, request

ROWS, PROMPT = 16, 100
PIPELINE = Pipeline(2, 2)


def turn(
    local: bool = False, pipeline: Pipeline = PIPELINE, longest: int | None = None, partition: Partition = "auto"
) -> Turn:
    members = [Member("memory0", "memory", "cpu", "", 400)]
    if local:
        slots = [0 if number % pipeline.shape.stages else 400 for number in range(pipeline.stage_count)]
        members = [Member(f"compute{number}", "compute", "cpu", "", each) for number, each in enumerate(slots)]
    topology = Topology(FIRST, tuple(members), pipeline)
    placement = Placement(topology.capacities, longest, partition, topology)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=ROWS, max_model_len=1200)
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


def run_round(
    made: Turn, plans: list[StepPlan], busy_s: Callable[[StepPlan], float] = lambda plan: 0.0
) -> list[StepPlan]:
    """Complete these steps, and return the next ones."""
    for plan in plans:
        rows = sum(len(step.tokens) for step in plan.sequences)
        for answer in made.in_order(StepDone(plan.step, [], rows=rows, busy_s=busy_s(plan))):
            for _, completion in made.complete(answer).values():
                completion.generated.append(7)
    return list(made.plan(0.0))


def beside_decoding(pipeline: Pipeline, busy_s: Callable[[StepPlan], float] | None = None) -> Iterator[list[StepPlan]]:
    """Yield the steps that run at once, without and then with a long prompt, while a sequence decodes in every lane.

    ``busy_s``: seconds of a step, which must take 0.1 s at most with those of other lanes.
    """
    limits = Limits(max_num_seqs=4 * pipeline.lanes, max_num_batched_tokens=ROWS, max_model_len=900)
    placed, bound_s = Placement({"memory0": 10_000}), None if busy_s is None else 0.1
    made = Turn(limits, placed, pipeline, attentions=1, kv_heads=2, plan_ahead=False, step_bound_s=bound_s)
    for number in range(pipeline.lanes):
        made.scheduler.submit(request(f"decoding {number}", 2, max_tokens=500))
    plans = list(made.plan(0.0))
    for step in range(30):
        if step == 10:
            made.scheduler.submit(request("0", 800, max_tokens=4))
        plans = run_round(made, plans, busy_s or no_time)
        yield plans


def test_lanes_that_decode_borrow_in_the_rows_that_are_left() -> None:
    first, second = [*beside_decoding(Pipeline(2, 1, shape=Shape(stages=2)))][15]
    assert len(first.decoding.sequences) == len(second.decoding.sequences) == 1
    assert sorted(spans([first, second]))[0][2] == sorted(spans([first, second]))[1][1]
    assert all(len(chunk.tokens) == ROWS - 1 for plan in (first, second) for chunk in plan.chunks)


def no_time(plan: StepPlan) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("pipeline", "unbounded", "bounded"),
    [
        (Pipeline(2, 1), 1, 1),
        (Pipeline(4, 2), 1, 2),
        (Pipeline(3, 1, shape=Shape(stages=2)), 2, 2),
        (Pipeline(4, 1, shape=Shape(stages=4)), 4, 4),
        (Pipeline(3, 2, rotates=True), 2, 2),
    ],
)
def test_no_more_lanes_that_decode_run_chunks_than_there_are_stages(
    pipeline: Pipeline, unbounded: int, bounded: int
) -> None:
    """And without a bound of steps, none of another replica."""
    for busy_s, lanes in ((None, unbounded), (no_time, bounded)):
        for plans in [*beside_decoding(pipeline, busy_s)][13:20]:
            with_chunks = {plan.lane for plan in plans if plan.chunks}
            assert len(plans) == pipeline.lanes and len(with_chunks) == lanes
            replicas = {lane % pipeline.replicas for lane in with_chunks}
            assert pipeline.rotates or len(replicas) == (pipeline.replicas if lanes > 1 else 1)


def rows_of_chunks(plan: StepPlan) -> int:
    return sum(len(chunk.tokens) for chunk in plan.chunks)


def test_a_lane_that_decodes_borrows_what_its_pace_leaves_time_for() -> None:
    def busy_s(plan: StepPlan) -> float:
        return 0.005 + 0.004 * rows_of_chunks(plan)

    for plans in [*beside_decoding(PIPELINE, busy_s)][20:]:
        assert all(LEAST < rows_of_chunks(plan) < ROWS - 1 for plan in plans)
        first_s, second_s = map(busy_s, plans)
        assert max(first_s + second_s / 2, second_s + first_s / 2) <= 0.1  # replicas run them at once


def test_a_lane_that_decodes_borrows_nothing_if_its_pace_leaves_no_time() -> None:
    for plans in [*beside_decoding(PIPELINE, lambda plan: 0.09)][12:]:
        assert sorted(rows_of_chunks(plan) for plan in plans) == [0, LEAST]


def test_a_lanes_own_prompts_come_first() -> None:
    made = turn()
    group = begin(made)
    made.scheduler.submit(request("1", 4, max_tokens=4))
    first, second, *_ = made.plan(0.0)
    assert spans([first]) == [(0, 0, ROWS)] and group.lane == 0
    assert spans([second]) == [(1, 0, 4), (1, ROWS, 2 * ROWS - 4)]


def test_steps_of_a_lane_that_may_borrow_next_are_not_taken_for_the_last_one_again() -> None:
    made = turn(pipeline=Pipeline(3, 1, shape=Shape(stages=2)))
    for number in range(3):
        made.scheduler.submit(request(f"decoding {number}", 2, max_tokens=50))
    plans = list(made.plan(0.0))
    for _ in range(4):
        plans = run_round(made, plans)
    assert made.scheduler.unchanged_steps(2) > 0
    made.scheduler.submit(request("0", PROMPT, max_tokens=4))
    plans = run_round(made, plans)
    assert not any(plan.chunks for plan in made.in_flight.values() if plan.lane == 2)
    assert made.scheduler.unchanged_steps(2) == 0


@pytest.mark.parametrize(
    ("pipeline", "longest", "lanes"),
    [
        (Pipeline(2, 2), 40, {0}),
        (Pipeline(2, 2, lends=True), 40, {0, 1}),
        (Pipeline(2, 2, lends=True), None, {0}),
        (Pipeline(4, 2, lends=True), 40, {0, 1}),
        (Pipeline(4, 2, shape=Shape(stages=2)), None, {0, 2}),
        (Pipeline(6, 1, shape=Shape(stages=3)), None, {0, 1, 2}),
    ],
)
def test_with_local_memory_one_lane_of_each_stage_of_replicas_that_hold_kv_of_a_prompt_runs_its_chunks(
    pipeline: Pipeline, longest: int | None, lanes: set[int]
) -> None:
    made = turn(local=True, pipeline=pipeline, longest=longest)
    begin(made)
    assert {lane for lane, _, _ in spans(list(made.plan(0.0)))} == lanes


FOUR, LONG = Pipeline(4, 4, lends=True), 300


def test_half_of_the_empty_replicas_share_a_long_prompt_and_its_attention() -> None:
    """Their chunks together fill one step, and each holds as many tokens in turn."""
    made = turn(local=True, pipeline=FOUR)
    group = made.scheduler.submit(request("0", LONG, max_tokens=4))
    plans = list(made.plan(0.0))
    assert {lane for lane, _, _ in spans(plans)} == {0, 1}
    assert {stop - start for _, start, stop in spans(plans)} == {ROWS // 2}
    assert group.workers == {"compute0", "compute1"}
    held = by_worker(group.completions[0].segments, 0, LONG)
    assert sum(held.values()) == LONG and max(held.values()) - min(held.values()) <= LEAST_SEGMENT
    while plans:
        plans = run_round(made, plans)
    assert len(group.completions[0].generated) == 4


def test_a_lane_runs_one_chunk_of_a_divided_prompt_at_a_time() -> None:
    """So a chunk goes to the lane that is free first, and the chunks behind it in other lanes wait least."""
    made = turn(local=True, pipeline=FOUR)
    group = made.scheduler.submit(request("0", 900, max_tokens=4))
    plans = list(made.plan(0.0))
    assert [lane for lane, _, _ in spans(plans)] == [0, 1, 2]
    while plans:
        lanes = [plan.lane for plan in made.in_flight.values() if plan.chunks]
        assert len(lanes) == len(set(lanes))
        plans = run_round(made, plans)
    assert len(group.completions[0].generated) == 4


def test_the_next_request_runs_where_no_kv_is() -> None:
    made = turn(local=True, pipeline=FOUR)
    made.scheduler.submit(request("0", LONG, max_tokens=4))
    list(made.plan(0.0))
    later = [made.scheduler.submit(request(f"{number}", ROWS, max_tokens=4)) for number in (1, 2, 3)]
    list(made.plan(0.0))
    assert [group.lane for group in later] == [2, 3, 1]  # 0 and 1 hold half of the long prompt each
    assert all(len(group.workers) == 1 for group in later)


@pytest.mark.parametrize(
    ("pipeline", "busy", "prompt", "replicas"),
    [
        (FOUR, 0, ROWS, 1),  # one chunk
        (FOUR, 0, 2 * LEAST_SEGMENT - 1, 1),
        (FOUR, 0, 2 * LEAST_SEGMENT, 2),
        (FOUR, 2, LONG, 1),  # two empty replicas: one of them is left to others
        (Pipeline(2, 2, lends=True), 0, LONG, 1),
        (FOUR, 0, 900, 3),  # as many as its KV needs
        (FOUR, 2, 700, 2),
        (Pipeline(4, 4), 0, LONG, 1),  # they do not attend for each other
    ],
)
def test_replicas_that_share_a_prompt(pipeline: Pipeline, busy: int, prompt: int, replicas: int) -> None:
    made = turn(local=True, pipeline=pipeline)
    for number in range(busy):
        made.scheduler.submit(request(f"busy {number}", 4, max_tokens=50))
    plans = list(made.plan(0.0))
    group = made.scheduler.submit(request("0", prompt, max_tokens=4))
    plans += made.plan(0.0)
    assert len(group.workers) == replicas
    assert len({plan.lane for plan in plans for chunk in plan.chunks if len(chunk.tokens) > 4}) == replicas


def test_all_replicas_that_hold_a_prompt_too_long_for_one_run_its_chunks() -> None:
    """Also beside other requests; each holds as many tokens in turn."""
    made = turn(local=True, pipeline=FOUR)
    for number in range(3):
        made.scheduler.submit(request(f"busy {number}", 4, max_tokens=50))
    plans = list(made.plan(0.0))
    group = made.scheduler.submit(request("0", 700, max_tokens=4))
    lanes = set[int]()
    while plans := run_round(made, plans):
        lanes |= {plan.lane for plan in plans for one in plan.chunks if one.sequence == group.completions[0].sequence}
    assert len(group.workers) == len(lanes) == 4
    held = by_worker(group.completions[0].segments, 0, 700)
    assert max(held.values()) - min(held.values()) <= LEAST_SEGMENT


@pytest.mark.parametrize(
    ("longest", "partition", "replicas"), [(None, "request", 1), (None, "token", 4), (LEAST_SEGMENT, "auto", 4)]
)
def test_a_setting_that_divides_kv_or_keeps_it_together_counts_before_that(
    longest: int | None, partition: Partition, replicas: int
) -> None:
    made = turn(local=True, pipeline=FOUR, longest=longest, partition=partition)
    group = made.scheduler.submit(request("0", LONG, max_tokens=4))
    plans = list(made.plan(0.0))
    assert len(group.workers) == len({lane for lane, _, _ in spans(plans)}) == replicas
    assert {stop - start for _, start, stop in spans(plans)} == {ROWS // replicas}


@pytest.mark.parametrize("prefill", [1, 2])
def test_replicas_that_only_run_prompts_fill_their_steps_with_a_divided_prompt(prefill: int) -> None:
    made = turn(local=True, pipeline=Pipeline(4, 4, lends=True, prefill=prefill), longest=LEAST_SEGMENT)
    group = made.scheduler.submit(request("0", LONG, max_tokens=4))
    plans = list(made.plan(0.0))
    assert len(group.workers) > 1 and {lane for lane, _, _ in spans(plans)} == {*range(prefill)}
    assert {stop - start for _, start, stop in spans(plans)} == {ROWS}


@pytest.mark.parametrize(("own", "lanes"), [(400, {0}), (0, {0, 1})])
def test_lanes_borrow_nothing_if_local_memory_holds_some_of_the_heads(own: int, lanes: set[int]) -> None:
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
    plans = [first, second, third, fourth]
    for plan in itertools.islice(plans, 8):  # a preempted request runs again meanwhile
        assert sequence not in released or plan.step > fourth.step
        for answer in made.in_order(done(plan)):
            made.complete(answer)
        planned = list(made.plan(0.0))
        released += [one for later in planned for one in later.released]
        plans += planned
    assert sequence in released


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


def test_a_policy_admits_a_request_where_its_cached_prefix_leaves_room() -> None:
    """No replica has room for all of its tokens, and both have as many sequences."""
    members = tuple(Member(f"compute{number}", "compute", "cpu", "", 400) for number in range(2))
    topology = Topology(FIRST, members, PIPELINE)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=400)
    placed = Placement(topology.capacities, topology=topology)
    made = Turn(limits, placed, PIPELINE, attentions=1, kv_heads=2, policy=find_policy("loongserve"), prefix_cache=True)
    running, plans = list[Group](), list[StepPlan]()
    for salt in "ab":
        running.append(made.scheduler.submit(request(salt, 300, max_tokens=50, cache_salt=salt)))
        plans += made.plan(0.0)
        for _ in range(4):
            plans = run_round(made, plans)
    assert sorted(group.lane for group in running) == [0, 1]
    last = next(group for group in running if group.lane == 1).request
    later = made.scheduler.submit(request("0", 310, max_tokens=4, cache_salt=last.params.cache_salt))
    for _ in range(8):
        plans = run_round(made, plans)
    assert later.lane == 1 and later.hit == 300
