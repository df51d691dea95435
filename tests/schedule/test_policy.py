"""Policies: the order in which requests are admitted, preempted and computed."""

import importlib.metadata
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.control.messages import StepDone
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Pipeline
from lamina.core.requests import Completion, Group
from lamina.kv.placement import Placement
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, State, simulate
from lamina.schedule.growth import victims
from lamina.schedule.limits import Limits
from lamina.schedule.loongserve import FourSteps, LaneLoad, Spread
from lamina.schedule.policy import (
    FIFO,
    POLICIES,
    LoongServe,
    Policy,
    Priority,
    RankedQueue,
    Shortest,
    Slo,
    Targets,
    find_policy,
    keep_deadlines,
    rank_of,
)
from lamina.schedule.turn import Turn
from tests.support.clusters import Course
from tests.support.lossy_clusters import LOSSES, Caching
from tests.support.lossy_clusters import shared_prefix_requests as mixed
from tests.support.schedules import request, scheduler
from tests.support.sweep import MANY_EXAMPLES

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")

CATALOGUE = hardware.load()


def group(number: int, prompt: int = 4, priority: int = 0) -> Group:
    return Group(request(str(number), prompt, priority=priority), 4, [Completion(number, 0)], number)


@given(
    jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(-3, 3)), min_size=1, max_size=12),
    policy=st.sampled_from([Shortest(), Priority(), Slo(10.0), LoongServe()]),
    events=st.lists(st.tuples(st.sampled_from(["enqueue", "pop", "remove", "advance"]), st.integers(0, 11))),
)
def test_a_ranked_queue_serves_the_smallest_rank_and_late_requests_last(
    jobs: list[tuple[int, int]], policy: Policy, events: list[tuple[str, int]]
) -> None:
    groups = [group(number, *job) for number, job in enumerate(jobs)]
    queue, late, start_by, now = RankedQueue(policy), set[Group](), dict[Group, float](), 0.0
    waiting: list[Group] = []
    for what, number in events:
        one = groups[number % len(groups)]
        if what == "enqueue" and one not in waiting:
            queue.enqueue(one)
            waiting.append(one)
        elif what == "advance":
            now += number
            queue.expire(now, 0.5)
            for each in waiting:
                start_by.setdefault(each, now + policy.due_s(each) - 2 * each.prompt_length * 0.5)
            late |= {each for each in waiting if start_by[each] < now}
        elif waiting and what in ("pop", "remove"):
            one = queue.first() if what == "pop" else waiting[number % len(waiting)]
            (queue.pop if what == "pop" else queue.remove)(one)
            waiting.remove(one)
            groups = [each for each in groups if each is not one] or [group(99)]
        expected = sorted(waiting, key=lambda each: (each in late, rank_of(policy, each)))
        assert list(queue) == expected and len(queue) == len(expected)
        assert list(queue.firsts()) == expected[:1]
        assert queue.upcoming(number) == expected[:number]


@settings(max_examples=60, deadline=None)
@given(requests=mixed, course=LOSSES, policy=st.sampled_from([Shortest(), Priority(), Slo(3.0)]))
def test_every_request_ends_and_every_slot_comes_back_with_every_policy(
    requests: list, course: Course, policy: Policy
) -> None:
    class Ordered(Caching):
        """The clock advances with every turn, so that requests become late."""

        def arrive(self, turn: int) -> None:
            super().arrive(turn)
            self.scheduler.set_time(float(turn))

    Ordered.policy = policy
    prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
    cluster = Ordered(others, prompts, *course.sizes)
    cluster.play(course, 40)
    cluster.leave()
    cluster.check_rest()
    cluster.check_ends()


@MANY_EXAMPLES
@given(requests=mixed, course=LOSSES, draw=st.randoms(use_true_random=False))
def test_every_request_ends_and_every_slot_comes_back_whatever_lanes_a_policy_chooses(
    requests: list, course: Course, draw: random.Random
) -> None:
    class Chosen(FourSteps):
        """Some requests wait although lanes are idle; others run in any lane, and decode in any other."""

        memory_bound_rows = property(lambda _: draw.randint(0, 8))

        def deal(self, waiting: Sequence[int], lanes: Sequence[LaneLoad], now: float) -> list[Spread]:
            least = all(lane.idle for lane in lanes)
            count = draw.randint(int(least), len(waiting))
            return [Spread(draw.choice(lanes).number, frozenset()) for _ in range(count)]

        def worth(self, lane: LaneLoad, allocated: frozenset[int], left: int, degree: int) -> int:
            return draw.randint(0, 2)

    class Choosing(LoongServe):
        def lane_policy(self, rows: int, attentions: int) -> FourSteps:
            return Chosen(rows, attentions)

    class Handing(Caching):
        """Requests change lanes before steps are planned."""

        policy = Choosing()

        def plan(self, lane: int) -> None:
            for _ in self.scheduler.plannable(self._depth):
                pass
            super().plan(lane)

    prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
    cluster = Handing(others, prompts, *course.sizes)
    cluster.play(course, 40)
    cluster.leave()
    cluster.check_rest()
    cluster.check_ends()


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-3, 3)), min_size=1, max_size=10))
def test_requests_of_a_full_server_run_in_order_of_priority_then_of_arrival(jobs: list[tuple[int, int]]) -> None:
    """One seat: each request runs alone, and the others wait, of several clients."""
    under_test = scheduler({"memory0": 64}, limits=Limits(1, 8, 32), policy=Priority())
    for number, (prompt, priority) in enumerate(jobs):
        under_test.submit(request(str(number), prompt, max_tokens=1, priority=priority))
    served = []
    while under_test.waiting or under_test.running:
        under_test.plan(0)
        for one, completion in under_test.complete(0).values():
            completion.generated.append(7)
            served.append(int(one.request.request_id))
            under_test.end_completion(one, completion)
    assert served == sorted(range(len(jobs)), key=lambda number: (jobs[number][1], number))


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 30))
def test_the_lowest_priority_is_preempted_first_and_the_highest_never(jobs: list[tuple[int, int]], tokens: int) -> None:
    holders = {group(number, priority=priority): held for number, (priority, held) in enumerate(jobs)}
    chosen = victims(holders, tokens, rank=lambda one: rank_of(Priority(), one))
    order = sorted(holders, key=lambda one: (one.request.params.priority, one.arrival))
    assert chosen == order[::-1][: len(chosen)] and order[0] not in chosen
    freed = [holders[one] for one in chosen]
    assert sum(freed) >= tokens or len(chosen) == len(order) - 1
    assert sum(freed[:-1]) < tokens


def burst(count: int = 160) -> Arrivals:
    """Long and short prompts, in bursts that take longer to compute than the next one takes to come."""
    draw = np.random.default_rng(4)
    arrival = np.sort(np.concatenate([draw.uniform(start, start + 1.0, count // 4) for start in (0, 12, 24, 36)]))
    prompt = np.where(draw.random(count) < 0.2, 8000, draw.integers(100, 1500, count))
    return Arrivals(arrival - arrival[0], prompt, draw.integers(5, 60, count))


def waits(policy: str, **settings: Any) -> np.ndarray:
    deployment = Deployment(
        model=model_shapes.find("Llama-2-7B"),
        compute=CATALOGUE["a100"],
        compute_workers=1,
        memory=CATALOGUE["rtx3090"],
        memory_workers=2,
        lanes=1,
        max_num_seqs=16,
    )
    arrivals = burst()
    result = simulate(replace(deployment, policy=policy, **settings), arrivals)
    assert set(result.log.states) == {State.FINISHED}
    return np.asarray(result.log.first_s - arrivals.arrival_s)


def test_shortest_first_lowers_the_mean_wait_and_makes_long_prompts_wait() -> None:
    fifo, shortest = waits("fifo"), waits("shortest")
    long = burst().prompt == 8000
    assert shortest.mean() < 0.8 * fifo.mean()
    assert shortest[long].max() > fifo[~long].mean()


def test_slo_misses_fewer_deadlines_than_fifo_where_bursts_overload() -> None:
    target_s = 4.0
    fifo, slo = waits("fifo"), waits("slo", slo_ttft_ms=int(target_s * 1e3))
    assert (slo > target_s).sum() < 0.8 * (fifo > target_s).sum()


def in_order(prompts: Sequence[tuple[float, float]], share: float = 1.0) -> bool:
    """Return whether prompts meet their deadlines one after the other, the earliest first, in a share of the time."""
    ordered = sorted(prompts, key=lambda one: one[1])
    ends = itertools.accumulate(needed_s / share for needed_s, _ in ordered)
    return all(end <= left_s for end, (_, left_s) in zip(ends, ordered, strict=True))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(-5, 40)), min_size=1, max_size=7))
def test_the_shortest_prompt_delays_no_prompt_beyond_its_deadline(prompts: list[tuple[float, float]]) -> None:
    ahead, share = keep_deadlines(prompts)
    chosen = [prompts[place] for place in ahead]
    assert chosen == sorted(chosen, key=lambda one: one[1])
    if ahead:
        assert share <= 1 and in_order(chosen, share * (1 + 1e-9)) and not in_order(chosen, share * (1 - 1e-6))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(-5, 60)), min_size=1, max_size=6))
def test_as_many_prompts_are_in_time_as_can_be_while_short_ones_overtake(prompts: list[tuple[int, int]]) -> None:
    """Give those that must not be delayed their share of every moment, and the rest to the shortest prompt.

    Moments are not infinitely short: prompts may be late by one for each prompt, and need as much time to spare.
    """
    moment_s, now = 0.125, 0.0
    left, ends = {place: float(needed_s) for place, (needed_s, _) in enumerate(prompts)}, dict[int, float]()
    while left:
        places = [*left]
        ahead, share = keep_deadlines([(left[place], prompts[place][1] - now) for place in places])
        reserved, spent = share * moment_s, 0.0
        for place in [places[one] for one in ahead]:
            part = min(left[place], reserved - spent)
            left[place] -= part
            spent += part
        for place in sorted(places, key=left.__getitem__):
            part = min(left[place], moment_s - spent)
            left[place] -= part
            spent += part
        now += moment_s
        ends |= {place: now for place in places if left[place] < 1e-9}
        left = {place: seconds for place, seconds in left.items() if place not in ends}
    spare_s = len(prompts) * moment_s
    met = sum(end <= prompts[place][1] + spare_s for place, end in ends.items())
    early = [(needed_s, due_s - spare_s) for needed_s, due_s in prompts]
    subsets = (some for count in range(len(prompts) + 1) for some in itertools.combinations(early, count))
    assert met >= max(len(some) for some in subsets if in_order(some))


@pytest.mark.parametrize(
    ("target_s", "share"), [(1000.0, 0.0), (10.0, 1.25 * 3.8 / 9.8), (8.2, 1.25 * 3.8 / 8.0), (5.5, 0.0)]
)
def test_a_long_prompt_gets_the_rows_that_its_deadline_needs_and_short_ones_the_others(
    target_s: float, share: float
) -> None:
    """Each step takes 0.1 s; the long prompt has 38,000 tokens left, and 3.8 s of steps, when the short ones come.

    In the last case, it would make them late and is left out.
    """
    turn = Turn(
        Limits(8, 1000, 50_000),
        Placement({"memory0": 100_000}),
        Pipeline(1, 1),
        attentions=1,
        kv_heads=2,
        policy=Slo(target_s),
    )
    turn.scheduler.submit(request("long", 41_000, max_tokens=1))
    long, short = list[int](), list[int]()
    for step in range(8):
        if step == 2:
            for number in range(4):
                turn.scheduler.submit(request(str(number), 10_000, max_tokens=1))
        for plan in list(turn.plan(step * 0.1)):
            tokens = [len(chunk.tokens) for chunk in plan.chunks]
            owners = turn.scheduler.owners
            mine = sum(len(one.tokens) for one in plan.chunks if owners[one.sequence][0].request.request_id == "long")
            long.append(mine)
            short.append(sum(tokens) - mine)
        done = min(turn.in_flight)
        turn.complete(StepDone(done, [], rows=1000, busy_s=0.1))
    assert set(map(sum, zip(long, short, strict=True))) == {1000}
    assert sum(long[4:]) / sum(long[4:] + short[4:]) == pytest.approx(share, abs=0.02)


def overtaking(policy: str, **settings: Any) -> tuple[float, np.ndarray]:
    """Return the seconds to the first token of a prompt of 100,000 tokens, and of 40 of 4,000 that come after it."""
    deployment = Deployment(
        model=model_shapes.find("Llama-3-8B"),
        compute=CATALOGUE["h100"],
        compute_workers=1,
        memory=CATALOGUE["h20"],
        memory_workers=2,
        lanes=1,
    )
    arrivals = Arrivals(
        np.concatenate([[0.0], np.arange(1.0, 21.0, 0.5)]), np.array([100_000, *[4000] * 40]), np.array([8] * 41)
    )
    log = simulate(replace(deployment, policy=policy, **settings), arrivals).log
    waits = np.asarray(log.first_s - arrivals.arrival_s)
    return float(waits[0]), waits[1:]


def test_short_prompts_overtake_a_long_one_that_keeps_its_deadline() -> None:
    """Medha's mix of long and short prompts, by their slack."""
    target_s = 1.3 * overtaking("priority")[0]
    long, short = overtaking("slo", slo_ttft_ms=int(target_s * 1e3))
    behind, beside = overtaking("priority")[1].mean(), overtaking("fifo")[1].mean()
    assert long <= target_s
    assert short.mean() < 0.1 * beside and beside < behind


def test_policies_are_found_by_name_or_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(find_policy("fifo"), type(FIFO)) and all(find_policy(name, 1000) for name in POLICIES)
    assert find_policy("slo", 2000).due_s(group(0, 10)) == 2.0
    assert find_policy("priority").due_s(group(0)) == math.inf
    with pytest.raises(ConfigError, match="slo_ttft_ms"):
        find_policy("slo")
    with pytest.raises(ConfigError, match="give one of fifo, shortest, priority, slo, loongserve"):
        find_policy("random")
    point = importlib.metadata.EntryPoint("mine", "tests.schedule.test_policy:made", "lamina.policies")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] * (group == "lamina.policies"))
    assert isinstance(find_policy("mine", 1000, 50), Shortest)
    assert asked_for == [Targets(1.0, 0.05)]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no.such.module:made", "policy 'mine' .*fails: ModuleNotFoundError.*give another policy"),
        ("tests.schedule.test_policy:without_targets", "fails: TypeError"),
        (
            "tests.schedule.test_policy:incomplete",
            "returns object, which lacks fair, first_share, rank, due_s, lane_",
        ),
    ],
)
def test_an_entry_point_that_makes_no_policy_is_a_clear_error(
    value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = importlib.metadata.EntryPoint("mine", value, "lamina.policies")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] * (group == "lamina.policies"))
    with pytest.raises(ConfigError, match=says):
        find_policy("mine")


def without_targets() -> Policy:
    return Shortest()


def incomplete(_targets: object) -> object:
    return object()


asked_for: list[Targets] = []  # what ``made`` was called with


def made(targets: Targets) -> Policy:
    asked_for[:] = [targets]
    return Shortest()
