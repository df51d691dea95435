"""What is on a memory worker that leaves goes elsewhere while its requests run, or is computed again."""

import pytest

from lamina.core.segments import by_worker
from lamina.core.steps import StepPlan
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler
from tests.support.schedules import plan_of, request, scheduler

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2048)


def step(under_test: Scheduler) -> StepPlan:
    """Run a step. What it begins to move arrives at once."""
    plan = plan_of(under_test)
    for _, completion in under_test.complete(0).values():
        completion.generated.append(7)
    for move in plan.moves:
        under_test.on_move_done(move.number)
    return plan


def steps_until_drained(under_test: Scheduler, worker: str) -> list[StepPlan]:
    """Drain a worker. Every plan runs all sequences that decode: nothing pauses."""
    under_test.drain(worker)
    plans: list[StepPlan] = []
    while not under_test.is_drained(worker):
        plans.append(step(under_test))
        assert len(plans) < 20
    return plans


def moved(plans: list[StepPlan]) -> int:
    """Tokens that these plans move."""
    return sum(move.stop - move.start for plan in plans for move in plan.moves)


def places(under_test: Scheduler, name: str = "0") -> list[dict[str, int]]:
    """By completion of a request, its tokens on each worker."""
    group = next(one for one in under_test.requests if one.request.request_id == name)
    kept = [group.stored_tokens(one) for one in group.alive]
    return [by_worker(one.segments, 0, tokens) for one, tokens in zip(group.alive, kept, strict=True)]


@pytest.mark.parametrize("leaves", ["memory0", "memory1"])
@pytest.mark.parametrize("n", [1, 2])
def test_sequences_with_several_segments_move_off_a_worker_that_leaves_while_they_decode(leaves: str, n: int) -> None:
    under_test = scheduler(dict.fromkeys(("memory0", "memory1", "memory2"), 400), limits=LIMITS, longest=60)
    under_test.submit(request("0", 100, max_tokens=200, n=n))
    for _ in range(30):
        step(under_test)
    before, (group,) = places(under_test), under_test.requests
    assert all(leaves in held and len(held) > 1 for held in before)
    shared = by_worker(group.completions[0].segments, 0, 100).get(leaves, 0)
    plans = steps_until_drained(under_test, leaves)
    assert under_test.dropped == 0
    assert all(len(plan.decoding.sequences) == n for plan in plans)
    after = places(under_test)
    assert all(leaves not in held and sum(held.values()) == 100 + 30 + len(plans) - 1 for held in after)
    assert moved(plans) == sum(held[leaves] for held in before) - (n - 1) * shared, "each range once"


def test_tokens_that_a_sequence_grew_by_on_another_worker_move_off_it() -> None:
    under_test = scheduler(dict.fromkeys(("memory0", "memory1"), 400), limits=LIMITS, longest=60)
    under_test.submit(request("0", 50, max_tokens=200))
    (grown,) = [segment.worker for _ in range(40) for segment in step(under_test).grown]
    (before,) = places(under_test)
    plans = steps_until_drained(under_test, grown)
    assert under_test.dropped == 0 and moved(plans) == before[grown] < 50


def test_requests_that_share_a_prefix_take_it_along_once() -> None:
    under_test = scheduler(dict.fromkeys(("memory0", "memory1"), 1000), limits=LIMITS, prefix_cache=True)
    under_test.submit(request("0", 300, max_tokens=200))
    step(under_test)
    for name in "123":
        under_test.submit(request(name, 300, max_tokens=200))
    for _ in range(3):
        step(under_test)
    assert places(under_test)[0].keys() == places(under_test, "3")[0].keys() == {"memory0"}
    plans = steps_until_drained(under_test, "memory0")
    assert under_test.dropped == 0 and all(len(plan.decoding.sequences) == 4 for plan in plans)
    assert 300 < moved(plans) < 330
    assert [segment.worker for group in under_test.requests for segment in group.completions[0].segments] == [
        "memory1"
    ] * 4, "they follow to where the sequences grow, and each has one segment again"


@pytest.mark.parametrize(("prompt", "dropped"), [(20, 1), (100, 0), (150, 1)])
def test_what_is_cheaper_to_compute_again_or_fits_nowhere_is_dropped(prompt: int, dropped: int) -> None:
    under_test = scheduler({"memory0": 1000, "memory1": 250}, limits=LIMITS)
    under_test.submit(request("0", prompt, max_tokens=50))
    step(under_test)
    under_test.placement.reserve_on("memory1", 100)  # as if for another
    assert places(under_test)[0].keys() == {"memory0"}
    under_test.drain("memory0")
    plan = under_test.plan(0)
    assert under_test.dropped == dropped
    if prompt == 150:
        assert plan is None, "it waits for room"
    else:
        assert plan is not None and len(plan.moves) == 1 - dropped
        assert [segment.worker for one in plan.admitted for segment in one.segments] == ["memory1"] * dropped


def test_a_range_that_no_worker_has_room_for_is_divided() -> None:
    under_test = scheduler({"memory0": 600, "memory1": 300, "memory2": 300}, limits=LIMITS)
    under_test.submit(request("0", 400, max_tokens=100))
    step(under_test)
    assert places(under_test)[0].keys() == {"memory0"}
    steps_until_drained(under_test, "memory0")
    assert under_test.dropped == 0 and places(under_test)[0].keys() == {"memory1", "memory2"}


def test_a_full_worker_s_sequence_does_not_grow_onto_one_that_leaves() -> None:
    """That one has the most slots left, but what went there would have to move at once, or be computed again."""
    under_test = scheduler({"memory0": 70, "memory1": 200, "memory2": 80}, limits=LIMITS)
    under_test.drain("memory1")
    under_test.submit(request("fills memory2", 60, max_tokens=60))
    under_test.submit(request("leaves few slots", 40, max_tokens=25))
    grown, ended = list[str](), list[str]()
    for _ in range(200):
        plan = under_test.plan(0)
        if plan is None:
            continue
        grown += [segment.worker for segment in plan.grown]
        for group, completion in [*under_test.complete(0).values()]:
            completion.generated.append(7)
            if len(completion.generated) == group.max_tokens:
                under_test.end_completion(group, completion)
                ended.append(group.request.request_id)
    assert sorted(ended) == ["fills memory2", "leaves few slots"]
    assert set(grown) == {"memory0"}
