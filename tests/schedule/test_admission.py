"""Who is admitted, when and to which lane: nobody starves, others pass meanwhile, lanes fill evenly."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.types import Client, Request
from lamina.schedule import admission
from lamina.schedule.limits import Limits
from lamina.schedule.policy import LoongServe
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.suspects import Hold
from tests.support.schedules import request, scheduler


class Turns:
    """A cluster that ends every step in the turn after it was planned."""

    def __init__(self, under_test: Scheduler, lanes: int) -> None:
        self.scheduler = under_test
        self.lanes = lanes
        self.turn = 0
        self.admitted: dict[int, tuple[int, str]] = {}  # by sequence: the turn, and the memory worker
        self.drew: dict[str, int] = {}  # by request: the turn of its first token
        self.steps = [0] * lanes

    def plan(self) -> list[StepPlan]:
        plans = []
        for lane in self.scheduler.plannable(2):
            while self.scheduler.in_flight(lane) < 2 and (plan := self.scheduler.plan(lane)) is not None:
                plans.append(plan)
                self.steps[lane] += plan.runs
                for admitted in plan.admitted:
                    self.admitted[admitted.sequence] = self.turn, admitted.segments[0].worker
        return plans

    def go_on(self) -> None:
        self.plan()
        for lane in range(self.lanes):
            for group, completion in self.scheduler.complete(lane).values() if self.scheduler.in_flight(lane) else ():
                completion.generated.append(7)
                self.drew.setdefault(group.request.request_id, self.turn)
                if len(completion.generated) == group.max_tokens:
                    self.scheduler.end_completion(group, completion)
        self.turn += 1

    def taken(self) -> list[int]:
        return [
            sum(group.seats for group in lane.running)
            for lane in self.scheduler._lanes[: self.scheduler._dealer.active]
        ]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(admission, "PAUSE", 4)
    monkeypatch.setattr(admission, "PATIENCE", 20)
    yield 20


def asked(name: str, account: str, prompt: int, **params: Any) -> Request:
    return Request(name, None, [0] * prompt, SamplingParams(**params), client=Client(account, account))


def test_small_requests_pass_one_that_does_not_fit() -> None:
    under_test = scheduler({"memory0": 1000}, limits=Limits(64, 512, 1000))
    turns = Turns(under_test, 1)
    under_test.submit(request("long", 700, max_tokens=200))
    turns.go_on()
    under_test.submit(request("large", 300, max_tokens=300))
    for number in range(15):
        under_test.submit(request(f"small{number}", 5, max_tokens=6))
    for _ in range(admission.PAUSE + 3):
        turns.go_on()
    assert {f"small{number}" for number in range(15)} <= turns.drew.keys() and "large" not in turns.drew


@given(
    large=st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 8)),
    memories=st.integers(1, 3),
    lanes=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_request_is_admitted_within_a_bound_however_many_others_come(
    large: tuple[int, int, int], memories: int, lanes: int, seed: int
) -> None:
    """Small requests of others arrive without end and fill all room and all seats, also once the large one waits."""
    life = 12  # steps that a small request's lane runs it in, at most, prompts of others in between included
    random, numbers = Random(seed), itertools.count()
    prompt, max_tokens, n = large
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "PAUSE", 4)
        patch.setattr(admission, "PATIENCE", 20)
        under_test = scheduler(dict.fromkeys([f"memory{i}" for i in range(memories)], 200), lanes, Limits(8, 16, 64))
        turns = Turns(under_test, lanes)

        def others() -> None:
            while under_test.waiting < 40:
                name = f"small{next(numbers)}"
                under_test.submit(
                    asked(name, f"c{random.randrange(3)}", random.randint(1, 4), max_tokens=random.randint(1, 8))
                )

        for _ in range(10):
            others()
            turns.go_on()
        group = under_test.submit(asked("large", "large", prompt, max_tokens=max_tokens, n=n))
        added = turns.turn
        while group.completions[0].sequence not in turns.admitted:
            others()
            turns.go_on()
            assert turns.turn - added <= 20 + 8 * life
        admitted = len(turns.admitted)
        for _ in range(max_tokens + 10):  # and others go on afterwards
            others()
            turns.go_on()
        assert len(turns.admitted) > admitted


def test_others_are_admitted_elsewhere_while_room_is_kept(patience: int) -> None:
    under_test = scheduler({"memory0": 100, "memory1": 100}, limits=Limits(64, 64, 128))
    turns = Turns(under_test, 1)
    for name in "ab":
        under_test.submit(request(name, 40, max_tokens=60))
    for _ in range(3):
        turns.go_on()
    large = under_test.submit(request("large", 45, max_tokens=50))
    for _ in range(patience + 2):
        turns.go_on()
    begun = turns.turn
    small = [under_test.submit(request(f"small{i}", 2, max_tokens=30)) for i in range(2)]
    for _ in range(admission.PAUSE + 2):
        turns.go_on()
    places = [turns.admitted[group.completions[0].sequence] for group in small if group.lane >= 0]
    assert len(places) == 2 and all(begun <= place[0] < turns.turn for place in places)
    assert places[0][1] == places[1][1]  # one worker's room is left for the large one
    while large.lane < 0:
        turns.go_on()
    assert turns.turn < 80


def test_a_policy_of_lanes_deals_the_request_that_slots_are_reserved_for(patience: int) -> None:
    """Slots are reserved for a long request while shorter ones that came before it wait."""
    random = Random(0)
    under_test = scheduler({"memory0": 200}, 2, Limits(8, 32, 200), policy=LoongServe())
    turns = Turns(under_test, 2)
    for number in range(40):
        prompt, drawn = random.choice([1, 5, 39, 73, 101]), random.randint(1, 40)
        under_test.submit(request(f"r{number}", prompt, max_tokens=drawn, n=random.choice([1, 2])))
    while len(turns.drew) < 40:
        assert turns.turn < 3000, f"{under_test.waiting} requests wait"
        turns.go_on()


def test_a_policy_of_lanes_admits_no_beam_search_before_an_earlier_request() -> None:
    """A beam search that came first could hold up a request that slots are reserved for, and nothing would run."""
    under_test = scheduler({"memory0": 200}, 1, Limits(4, 32, 200), policy=LoongServe())
    first = under_test.submit(request("first", 5, max_tokens=2))
    search = under_test.submit(request("search", 5, max_tokens=2, n=4, use_beam_search=True))
    under_test.plan(0)
    assert (first.lane, search.lane) == (0, -1)


def test_a_request_with_many_completions_gets_its_seats_from_a_flood_of_single_ones(patience: int) -> None:
    under_test = scheduler({"memory0": 10_000}, limits=Limits(16, 64, 128))
    turns = Turns(under_test, 1)
    random = Random(0)
    for number in range(400):
        under_test.submit(asked(f"flood{number}", "flood", 4, max_tokens=random.randint(5, 15)))
    for _ in range(5):
        turns.go_on()
    under_test.submit(asked("one", "newcomer", 4, max_tokens=1))
    under_test.submit(asked("many", "newcomer", 4, max_tokens=2, n=16))
    begun = turns.turn
    while "many" not in turns.drew:
        turns.go_on()
    assert turns.drew["one"] - begun <= 15 + 2
    assert turns.turn - begun <= patience + 15 + 4
    assert under_test.waiting > 100


def test_the_seats_of_a_request_are_given_back_one_by_one() -> None:
    under_test = scheduler({"memory0": 10_000}, limits=Limits(8, 64, 128))
    turns = Turns(under_test, 1)
    group = under_test.submit(request("many", 4, max_tokens=100, n=8))
    turns.go_on()
    for completion in group.completions[1:]:
        under_test.end_completion(group, completion)
    under_test.submit(request("next", 4, max_tokens=2))
    for _ in range(4):
        turns.go_on()
    assert "next" in turns.drew and not group.completions[0].finished


@pytest.mark.parametrize("prompt", [4, 32])
def test_lanes_fill_as_fast_as_one_would_and_evenly(prompt: int) -> None:
    def fill(lanes: int) -> int:
        turns = Turns(scheduler({"memory0": 10**6}, lanes, Limits(128, 128, 128)), lanes)
        for number in range(128):
            turns.scheduler.submit(request(str(number), prompt, max_tokens=10))
        while turns.scheduler.waiting:
            turns.go_on()
            assert max(turns.taken()) - min(turns.taken()) <= 1 or turns.turn > 9  # before any has ended
        while turns.scheduler.running:
            turns.go_on()
        return max(turns.steps)

    alone = fill(1)
    assert all(fill(lanes) <= 1.2 * alone for lanes in range(2, 9))


@given(
    lanes=st.integers(1, 8),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=60),
    depth=st.integers(0, 60),
)
def test_lanes_differ_by_no_more_than_one_requests_sequences(
    lanes: int, sizes: list[tuple[int, int]], depth: int
) -> None:
    turns = Turns(scheduler({"memory0": 10**6}, lanes, Limits(10**4, 32, 128)), lanes)
    for number, (prompt, n) in enumerate(sizes):
        turns.scheduler.submit(request(str(number), prompt, max_tokens=90, n=n))
        if number == depth:
            turns.go_on()
    largest = max(n for _, n in sizes)
    for _ in range(40):
        turns.go_on()
        assert max(turns.taken()) - min(turns.taken()) <= largest


def test_no_worker_hears_of_a_request_that_ends_between_its_lane_and_its_plan() -> None:
    under_test = scheduler({"memory0": 100}, lanes=2)
    for name in "ab":
        under_test.submit(request(name, 4, max_tokens=4))
    plan = under_test.plan(0)  # deals "b" to lane 1
    assert plan is not None and len(plan.admitted) == 1
    assert under_test.running == 2 and under_test.placement.reserved == {"memory0": 8}
    under_test.abort("b")
    assert under_test.running == 1 and under_test.placement.reserved == {"memory0": 4}
    assert under_test.plan(1) is None


def test_a_suspect_is_admitted_while_only_it_may_run_wherever_it_waits() -> None:
    """A request that gave way waits in the queue, and may be a suspect: a step in flight ran it."""
    under_test = scheduler({"memory0": 100})
    for name in "ab":
        under_test.submit(request(name, 4, max_tokens=4))
    under_test.hold_back(Hold(only=frozenset("b")))
    plan = under_test.plan(0)
    assert plan is not None and [chunk.sequence for chunk in plan.chunks] == [1] and under_test.waiting == 1


def test_a_newcomer_gets_a_seat_from_clients_that_hold_all_of_them_for_long() -> None:
    """Others, with as many sequences each, wait before it."""
    under_test = scheduler({"memory0": 10_000}, 2, Limits(32, 64, 512))
    turns = Turns(under_test, 2)
    hogs = [under_test.submit(asked(f"hog{i}", f"hog{i}", 4, max_tokens=200, n=8)) for i in range(12)]
    for _ in range(10):
        turns.go_on()
    assert sum(group.lane >= 0 for group in hogs) == 4
    for number in range(3):
        under_test.submit(asked(f"new{number}", f"new{number}", 4, max_tokens=1))
        begun = turns.turn
        while f"new{number}" not in turns.drew:
            turns.go_on()
        assert turns.turn - begun <= 16
    assert under_test.dropped <= 3
    while under_test.running or under_test.waiting or any(under_test.placement.reserved.values()):
        turns.go_on()
        assert turns.turn < 5_000
    assert {f"hog{i}" for i in range(12)} <= turns.drew.keys()


def test_clients_with_equal_shares_do_not_disturb_each_other() -> None:
    under_test = scheduler({"memory0": 10_000}, 1, Limits(8, 64, 512))
    turns = Turns(under_test, 1)
    for number in range(24):
        under_test.submit(asked(str(number), f"client{number % 12}", 4, max_tokens=40))
    while under_test.running or under_test.waiting:
        turns.go_on()
    assert under_test.dropped == 0


@given(seed=st.integers(0, 2**16), lanes=st.integers(1, 3))
def test_a_request_with_many_completions_ends_though_newcomers_never_stop(seed: int, lanes: int) -> None:
    random, numbers = Random(seed), itertools.count()
    under_test = scheduler({"memory0": 4_000}, lanes, Limits(16, 32, 512))
    turns = Turns(under_test, lanes)
    group = under_test.submit(asked("many", "many", 4, max_tokens=20, n=8))
    while under_test._requests.get("many") is not None:
        while under_test.waiting < random.randrange(1, 10):
            name = f"new{next(numbers)}"
            under_test.submit(asked(name, name, 4, max_tokens=random.randint(1, 60)))
        turns.go_on()
        assert turns.turn < 3_000
    assert all(len(one.generated) == 20 for one in group.completions)
