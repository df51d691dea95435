"""Which chunks attend to scratch memory of their replica, and when its tokens are free again."""

import pytest

from lamina.control.messages import StepDone
from lamina.core.pipeline import Arrangement, Pipeline, Shape
from lamina.core.requests import Group
from lamina.core.steps import SequenceStep, StepPlan
from lamina.core.topology import Epoch, Member, Topology
from lamina.kv.placement import Placement
from lamina.schedule.limits import Limits
from lamina.schedule.scratch import Rooms
from lamina.schedule.turn import Turn
from tests.support.schedules import ATTENTIONS, request

ROWS, PROMPT, TOKENS = 16, 100, 150
TWO = Pipeline(2, 2)


def turn(pipeline: Pipeline = TWO, tokens: int = TOKENS) -> Turn:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=ROWS, max_model_len=200)
    replicas = [(f"compute{number}", tokens) for number in range(pipeline.replicas)]
    placement = Placement({"memory0": 900})
    return Turn(limits, placement, pipeline, attentions=ATTENTIONS, kv_heads=2, scratch=replicas)


def begin(made: Turn, name: str = "0", prompt: int = PROMPT, n: int = 1) -> Group:
    return made.scheduler.submit(request(name, prompt, max_tokens=4, n=n))


def run(made: Turn, plans: list[StepPlan] | None = None, steps: int = 1000) -> list[StepPlan]:
    """Complete at most ``steps`` steps in order. Returns ``plans`` and those that were planned meanwhile."""
    planned = list(made.plan(0.0)) if plans is None else plans
    for _ in range(steps):
        if not made.in_flight:
            break
        for answer in made.in_order(StepDone(min(made.in_flight), [])):
            for group, completion in made.complete(answer).values():
                completion.generated.append(5)
                if len(completion.generated) == group.max_tokens:
                    made.scheduler.end_completion(group, completion)
        planned += made.plan(0.0)
    return planned


def chunks(plans: list[StepPlan], sequence: int) -> list[tuple[int, SequenceStep]]:
    return [(plan.lane, one) for plan in plans for one in plan.chunks if one.sequence == sequence]


@pytest.mark.parametrize("pipeline", [TWO, Pipeline(2, 1, rotates=True)], ids=["two replicas", "rotating over one"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_of_several_chunks_stays_in_its_lane(n: int, pipeline: Pipeline) -> None:
    made = turn(pipeline)
    group = begin(made, n=n)
    planned = list(made.plan(0.0))
    assert made.scheduler.scratch.used == PROMPT
    while not group.completions[0].generated:
        assert made.scheduler.scratch.used == PROMPT
        planned = run(made, planned, steps=1)
    found = chunks(planned, group.completions[0].sequence)
    assert [(lane, one.start) for lane, one in found] == [(group.lane, start) for start in range(0, PROMPT, ROWS)]
    assert all(one.scratch == 0 for _, one in found)
    assert group.alive and made.scheduler.scratch.used == 0


def test_a_prompt_of_one_chunk_or_without_room_uses_memory_workers() -> None:
    made = turn(Pipeline(1, 1))
    groups = begin(made, "short", ROWS), begin(made, "first"), begin(made, "second", PROMPT - 1)
    planned = run(made)
    short, *long = ([one.scratch for _, one in chunks(planned, group.completions[0].sequence)] for group in groups)
    assert short == [None] and min(map(len, long)) > 1
    assert [{*kept} for kept in long] in ([{None}, {0}], [{0}, {None}]), "scratch memory holds all chunks of one prompt"
    assert made.scheduler.scratch.used == 0


@pytest.mark.parametrize(("spare", "keeps"), [(0, True), (-1, False)])
def test_a_prompt_keeps_what_follows_its_cached_prefix(spare: int, keeps: bool) -> None:
    cached = 40
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=ROWS, max_model_len=200)
    made = Turn(
        limits,
        Placement({"memory0": 900}),
        Pipeline(1, 1),
        attentions=ATTENTIONS,
        kv_heads=2,
        prefix_cache=True,
        scratch=[("compute0", PROMPT - cached + spare)],
    )
    begin(made, "first", cached)
    run(made)
    again = begin(made, "again")
    planned = list(made.plan(0.0))
    assert made.scheduler.scratch.used == keeps * (PROMPT - cached)
    found = [one for _, one in chunks(run(made, planned), again.completions[0].sequence)]
    assert [one.start for one in found] == [*range(cached, PROMPT, ROWS)]
    assert {one.scratch for one in found} == {cached if keeps else None}
    assert [one.before_scratch for one in found] == [cached if keeps else one.start for one in found]
    assert not made.scheduler.scratch.used


@pytest.mark.parametrize("preempts", [False, True])
def test_room_is_free_once_the_workers_have_forgotten_a_prompt(preempts: bool) -> None:
    made = turn()
    group = begin(made)
    planned = list(made.plan(0.0))
    if preempts:
        made.scheduler.preempt(group)
    else:
        made.scheduler.abort("0")
    sequence = group.completions[0].sequence
    assert made.scheduler.scratch.used == PROMPT
    for plan in list(planned):
        for answer in made.in_order(StepDone(plan.step, [])):
            made.complete(answer)
        released = [one for later in made.plan(0.0) for one in later.released]
        assert (made.scheduler.scratch.used == 0 or preempts) == (sequence in released or preempts)
    assert sequence in released


def topology(pipeline: Pipeline, tokens: int = TOKENS, number: int = 2) -> Topology:
    names = [f"compute{each}" for each in range(pipeline.replicas * pipeline.shape.workers)]
    members = [Member(name, "compute", "cpu", "host", scratch=tokens) for name in names]
    return Topology(Epoch(0, number), (*members, Member("memory0", "memory", "cpu", "host", 900)), pipeline)


def test_after_the_end_of_an_epoch_a_prompt_continues_without_scratch_memory() -> None:
    made = turn()
    group = begin(made)
    run(made, steps=2)
    made.end_epoch(topology(TWO))
    assert made.scheduler.scratch.used == 0
    made.begin_epoch()
    other = begin(made, "1", PROMPT - 1)
    planned = run(made)
    found = chunks(planned, group.completions[0].sequence)
    assert found[0][1].start > 0 and all(one.scratch is None for _, one in found)
    assert all(one.scratch == 0 for _, one in chunks(planned, other.completions[0].sequence))


def test_a_prompt_that_changes_its_replica_does_not_return_to_scratch_memory() -> None:
    """Its tokens stay reserved until it is released, since no plan tells its first replica to forget them."""
    pipeline = Pipeline(2, 2, choices=(Arrangement(2), Arrangement(3, rotates=True)))
    made = turn(pipeline)
    group = begin(made)
    planned = list(made.plan(0.0))
    for lanes, rotates in ((3, True), (2, False)):
        made.scheduler.use_lanes(lanes, rotates)
        for plan in list(made.in_flight.values()):
            for answer in made.in_order(StepDone(plan.step, [])):
                made.complete(answer)
        planned += made.plan(0.0)
    assert made.scheduler.scratch.used == PROMPT
    planned += run(made, list(made.in_flight.values()))
    kept = [one.scratch is not None for _, one in chunks(planned, group.completions[0].sequence)]
    assert kept[0] and not kept[-1] and kept == sorted(kept, reverse=True)
    assert made.scheduler.scratch.used == 0


def test_a_prompt_that_returns_to_its_replica_before_it_has_run_elsewhere_uses_memory_workers() -> None:
    """Workers that do not run a sequence may have forgotten it meanwhile."""
    rooms = Rooms([("compute0", TOKENS), ("compute1", TOKENS)])
    group = begin(turn())
    (completion,) = group.completions
    completion.cached = ROWS
    room = rooms.of_lane(0, rotates=False)
    assert room.add_chunk(group, completion, 0) == 0 and room.holds(group, completion)
    for lane in (1, 0):
        rooms.on_dealt(lambda _, lane=lane: rooms.of_lane(lane, rotates=False))  # type: ignore[misc]
    assert rooms.used == PROMPT and not room.holds(group, completion)
    completion.cached += ROWS
    assert room.add_chunk(group, completion, ROWS) is None
    rooms.end(group)
    assert rooms.used == 0


def test_a_replica_has_as_much_scratch_memory_as_the_worker_with_least() -> None:
    pipeline = Pipeline(2, 2, shape=Shape(2))
    members = [Member(f"compute{each}", "compute", "cpu", "host", scratch=9 - each) for each in range(4)]
    made = Topology(Epoch(0, 1), (*members, Member("memory0", "memory", "cpu", "host", 900)), pipeline)
    assert made.scratch == (("compute0", 8), ("compute2", 6))
