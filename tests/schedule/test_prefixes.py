"""The scheduler with cached prefixes, against what every slot of its memory workers holds."""

import pytest
from hypothesis import given

from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from tests.support.clusters import Course
from tests.support.lossy_clusters import LOSSES, Caching, shared_prefix_requests
from tests.support.schedules import LIMITS, plan_of, request, scheduler
from tests.support.sweep import MANY_EXAMPLES

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")

COMPUTES = [Member(name, "compute", "cpu", "") for name in ("compute0", "compute1")]
MEMORIES = [Member(name, "memory", "cpu", "", 60) for name in ("memory0", "memory1")]
TOPOLOGY = Topology(FIRST, (*COMPUTES, *MEMORIES), Pipeline(2, 2))


@pytest.mark.parametrize("second", [0, 1])
def test_a_request_whose_forks_were_undone_is_released_before_the_next_epoch_ends(second: int) -> None:
    prompts = [(1, 0, 0, 0)] * 7
    others: list = [(1, 1, [0, 0, 0], None, 0)] * 4
    others += [(2, 2, [0, 0, 0], None, 18), (4, 1, [0, 0, 0], None, 10), (5, 1, [0, 0, 0], None, 5)]
    course = Course(3, 1, 3, LIMITS, 60, None, 1, {"end_epoch": {24: 2, 25: second}, "drain": {0: 0, 24: 0}})
    cluster = Caching(others, prompts, *course.sizes)
    cluster.play(course, 40)
    cluster.check_rest()
    cluster.check_ends()


@MANY_EXAMPLES
@given(requests=shared_prefix_requests, course=LOSSES)
def test_rows_attend_to_their_own_tokens_and_every_slot_is_free_or_cached_in_the_end(
    requests: list, course: Course
) -> None:
    """Whatever is shared, evicted, split, moved, dropped or lost meanwhile, and whoever joins or leaves."""
    prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
    cluster = Caching(others, prompts, *course.sizes)
    cluster.play(course, 40)
    cluster.leave()
    assert not cluster.scheduler.placement.closed
    cluster.check_rest()
    cluster.check_ends()


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_dropped_request_shares_what_it_had_but_generated_tokens_run_again_for_penalties(penalty: float) -> None:
    """Replicas learn the tokens that count for penalties from the chunks that run them."""
    under_test = scheduler({"memory0": 60}, prefix_cache=True)
    under_test.submit(request("0", 6, max_tokens=20, frequency_penalty=penalty))
    for _ in range(5):
        plan_of(under_test)
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
    (group,) = under_test._residents.holders("memory0")
    under_test.preempt(group)
    while not (plan := plan_of(under_test)).admitted:
        under_test.complete(0)
    (chunk,) = plan.chunks
    assert chunk.start == (6 if penalty else 10) and chunk.stop == 11
    assert plan.forks[-1].child == chunk.sequence and plan.forks[-1].tokens == chunk.start


def test_tokens_of_admitted_prompts_are_counted_and_those_that_were_found() -> None:
    under_test = scheduler({"memory0": 60}, prefix_cache=True)
    found = []
    for name, prompt in (("0", 14), ("1", 14), ("2", 6), ("3", 20)):
        under_test.submit(request(name, prompt, max_tokens=1))
        starts = []
        while (plan := under_test.plan(0)) is not None:
            starts += [chunk.start for chunk in plan.chunks]
            for _, completion in under_test.complete(0).values():
                completion.generated.append(99)
        found.append(starts[0])
    assert found == [0, 13, 5, 14]
    assert (under_test.prefixes.queried, under_test.prefixes.hit) == (14 + 14 + 6 + 20, sum(found))


def test_what_a_leaving_worker_has_dropped_is_not_cached_if_the_worker_stays() -> None:
    """An epoch ends while a worker leaves that holds a request that has just ended."""
    under_test = scheduler({"memory0": 60, "memory1": 60}, prefix_cache=True)
    group = under_test.submit(request("0", 14, max_tokens=9))
    (home,) = {segment.worker for segment in plan_of(under_test).admitted[0].segments}
    under_test.complete(0)
    plan_of(under_test)
    under_test.drain(home)
    under_test.abort("0")
    remains = under_test.end_epoch(TOPOLOGY.without(["compute1"]))
    assert remains.kept == {"memory0": {}, "memory1": {}}
    under_test.resume(home)
    plan = plan_of(under_test)
    assert plan.released == [group.completions[0].sequence] and not plan.forks
    assert not under_test.placement.idle[home] and not under_test.placement.reserved[home]


@pytest.mark.parametrize("sharers", [0, 1])
def test_a_preempted_request_frees_the_slots_that_no_other_request_shares(sharers: int) -> None:
    under_test = scheduler({"memory0": 60}, prefix_cache=True)
    group = under_test.submit(request("0", 6, max_tokens=20))
    for turn in range(4):
        if turn == 2 and sharers:
            under_test.submit(request("1", 6, max_tokens=20))
        plan_of(under_test)
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
    holders = under_test._residents.holders("memory0")
    assert len(holders) == 1 + sharers
    under_test.preempt(group)
    assert holders[group] == under_test.placement.returning["memory0"] == (4 if sharers else 9)
