"""The scheduler against a brute-force account of the workers it drives: slabs, page tables and drawn tokens."""

import dataclasses
import sys
from collections.abc import Iterable
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import RequestError
from lamina.core.sampling import SamplingParams
from lamina.core.segments import by_worker
from lamina.core.steps import StepPlan
from lamina.core.types import Request
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler
from tests.support.clusters import MANY, Cluster, Course, courses, requests, turns
from tests.support.schedules import LIMITS, client, plan_of, request, scheduler
from tests.support.sweep import MANY_EXAMPLES

pytestmark = pytest.mark.usefixtures("impatient")


@MANY_EXAMPLES
@given(requests=requests, course=courses(drop=turns(st.integers(0, 20), 8)), spare=st.sampled_from([0, 3, 100]))
def test_every_request_ends_and_every_slot_comes_back(requests: list, course: Course, spare: int) -> None:
    """Whatever is planned ahead, grows or moves to other memory workers, or is dropped and computed again, and however
    often the number of lanes changes. The longest request may need all slots."""
    course = dataclasses.replace(course, capacity=-(-53 // course.memories) + spare)
    cluster = Cluster(requests, *course.sizes)
    cluster.play(course, 20)
    assert all(memory.slab.used == 0 and not memory.here for memory in cluster.memories)
    assert all(reserved == 0 for reserved in cluster.scheduler.placement.reserved.values())
    cluster.check_ends()


def test_what_was_dropped_leaves_the_room_to_what_goes_on_there() -> None:
    """The last sequence goes on where it needs the slots of the one that was dropped, and only of that one."""
    many = [(17, 4, 3, [0, 14, 0], None, 8), (8, 2, 3, [14, 0, 0], None, 8), (17, 7, 3, [14, 14, 2], None, 0)]
    many += [(4, 3, 2, [0, 0, 0], None, 0), (9, 10, 1, [7, 13, 14], None, 0), (14, 11, 1, [11, 0, 0], None, 5)]
    shortest = [(1, 1, 1, [0, 0, 0], None, 0)]
    many += [*shortest, (17, 7, 3, [0, 0, 2], None, 0), (20, 12, 1, [0, 0, 0], None, 0), *3 * shortest]
    course = Course(2, 3, 1, LIMITS, 27, None, 1, {"drop": {15: 0}})
    cluster = Cluster(many, *course.sizes)
    cluster.play(course, 20)
    cluster.check_ends()


def test_what_was_dropped_leaves_the_room_to_a_sequence_that_goes_on_from_another_worker() -> None:
    """Two requests fill a worker each. The later one is dropped, and is not admitted before the other has its slots."""
    short = (1, 1, 1, [0, 0, 0], None, 0)
    many = [*2 * [(1, 1, 1, [0, 0, 0], None, 1)], (17, 7, 2, [0, 0, 0], None, 0), (1, 2, 2, [0, 0, 0], None, 0), short]
    many += [(1, 6, 1, [6, 0, 0], None, 0), *5 * [short], (15, 7, 2, [0, 0, 0], None, 0)]
    course = Course(2, 2, 1, MANY, 27, None, 1, {"drop": {0: 0, 6: 0, 10: 0, 2: 0}})
    cluster = Cluster(many, *course.sizes)
    cluster.play(course, 20)
    cluster.check_ends()


def test_the_only_request_on_a_worker_grows_onto_the_last_slot_of_another_one() -> None:
    under_test = scheduler({"memory0": 30, "memory1": 30})
    group = under_test.submit(request("0", 25, max_tokens=7))
    plan_of(under_test)
    (home,) = group.workers
    (other,) = {"memory0", "memory1"} - {home}
    under_test.placement.reserve_on(other, 29)  # as if for another
    while group.alive:
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
            if len(completion.generated) == 7:
                under_test.end_completion(group, completion)
        if group.alive:
            plan_of(under_test)
    assert by_worker(group.completions[0].segments, 0, 31) == {home: 30, other: 1}


def test_a_completion_that_ended_goes_to_another_lane_with_those_to_be_forked_from_it() -> None:
    larger, smaller = (4, 8, 3, [0, 0, 0], None, 0), (4, 8, 2, [1, 0, 0], None, 0)
    cluster = Cluster([larger, smaller], memories=1, lanes=2, depth=1, limits=MANY)
    cluster.scheduler.use_lanes(1)
    cluster.arrive(0)
    cluster.plan(0)
    cluster.scheduler.use_lanes(2)  # the larger request goes to lane 0, the other, with its first completion, to lane 1
    cluster.complete(0)
    cluster.plan(0)
    cluster.plan(1)
    assert cluster.groups[0].lane == 0 and cluster.groups[1].lane == 1
    assert [len(memory.here) for memory in cluster.memories] == [4]


def test_no_plan_names_a_request_whose_deal_is_undone_while_lanes_change() -> None:
    """Draws of the request depend on its earlier tokens, which a plan has for requests that changed their lane."""
    under_test = scheduler({"memory0": 14, "memory1": 13}, lanes=2)
    under_test.submit(request("first", 4, max_tokens=4))
    waiting = under_test.submit(request("second", 4, max_tokens=4, presence_penalty=0.5))
    plan_of(under_test)
    assert waiting.lane == 1 and waiting.workers == {"memory1"}
    under_test.use_lanes(1)
    under_test.drain("memory1")  # requests that are dealt to it, and not admitted, wait again
    for _, completion in under_test.complete(0).values():
        completion.generated.append(7)
    plan = plan_of(under_test)
    assert not plan.admitted and not plan.histories


def turn_of(under_test: Scheduler, lanes: Iterable[int], depth: int) -> list[StepPlan]:
    plans = []
    for lane in lanes:
        while under_test.in_flight(lane) < depth and (plan := under_test.plan(lane)) is not None:
            plans.append(plan)
    return plans


def draw_all(under_test: Scheduler, lane: int, requests: list) -> None:
    """The oldest step of a lane ends."""
    for group, completion in under_test.complete(lane).values():
        completion.generated.append(7)
        stops = requests[int(group.request.request_id)][3]
        if len(completion.generated) in (group.max_tokens, stops[completion.index]):
            under_test.end_completion(group, completion)


@MANY_EXAMPLES
@given(
    requests=requests,
    lanes=st.integers(1, 5),
    depth=st.integers(1, 3),
    switches=st.dictionaries(st.integers(0, 20), st.integers(1, 5), max_size=4),
    random=st.randoms(use_true_random=False),
    clients=st.integers(1, 5),
)
@mock.patch("lamina.schedule.admission.SHARE", 10**6)
def test_lanes_that_are_not_plannable_have_nothing_to_plan(
    requests: list, lanes: int, depth: int, switches: dict[int, int], random: Random, clients: int
) -> None:
    """Asking only those gives the plans that asking every lane in every turn gives.

    But for seats that are shared between clients: whichever lane is planned first preempts a request for that.
    """
    asked, all_asked = (scheduler({"memory0": 60, "memory1": 40}, lanes) for _ in range(2))
    pair = (asked, all_asked)
    for turn in range(120):
        for index, (prompt, max_tokens, n, _, aborted, arrival) in enumerate(requests):
            for one in pair:
                if arrival == turn:
                    one.submit(request(str(index), prompt, client(index, clients), max_tokens=max_tokens, n=n))
                if aborted is not None and aborted == turn - arrival:
                    one.abort(str(index))
        lane = random.randrange(lanes)
        if asked.moves.numbers and random.random() < 0.3:
            number = asked.moves.numbers[0]
            for one in pair:
                one.on_move_done(number)
        if asked.in_flight(lane):
            for one in pair:
                draw_all(one, lane, requests)
        if turn in switches:
            for one in pair:
                one.use_lanes(min(switches[turn], lanes))
        assert turn_of(asked, asked.plannable(depth), depth) == turn_of(all_asked, range(lanes), depth)


def test_a_step_without_sequences_may_end_before_the_one_it_was_planned_behind() -> None:
    """A compute worker answers a plan that only releases at once, while the step before still runs."""
    under_test = scheduler({"memory0": 100})
    for name, tokens in (("short", 2), ("long", 3)):
        under_test.submit(request(name, 2, max_tokens=tokens))
    plans = [under_test.plan(0), under_test.plan(0)]
    last = plans[0]
    for plan in plans:  # both draw twice, and "short" ends; meanwhile the last token of "long" is being drawn
        assert plan is not None
        behind = under_test.plan(0)
        for group, completion in under_test.complete(0, plan.step).values():
            completion.generated.append(7)
            if len(completion.generated) == group.max_tokens:
                under_test.end_completion(group, completion)
        last = last if behind is None else behind
    release = under_test.plan(0)
    assert release is not None and release.released and not release.sequences
    assert under_test.complete(0, release.step) == {}
    assert last is not None
    (drawn,) = under_test.complete(0, last.step).values()
    assert drawn[0].request.request_id == "long"


def test_a_step_with_sequences_does_not_complete_before_an_earlier_one() -> None:
    under_test = scheduler({"memory0": 1000})
    under_test.submit(request("a", 3, max_tokens=5))
    first = plan_of(under_test)
    second = plan_of(under_test)
    with pytest.raises(AssertionError, match="before an earlier one"):
        under_test.complete(0, second.step)
    assert first.runs and second.runs


def test_a_long_prompt_is_cut_into_chunks_and_decoding_goes_on_beside_it() -> None:
    under_test = scheduler({"memory0": 100})
    under_test.submit(request("short", 2, max_tokens=9))
    under_test.plan(0)
    for _, completion in under_test.complete(0).values():
        completion.generated.append(7)
    under_test.submit(request("long", 20, max_tokens=2))
    chunks = []
    for _ in range(3):
        plan = under_test.plan(0)
        assert plan is not None
        decode, prompt = plan.sequences
        assert decode.tokens == [7] and decode.draws == [decode.sequence]
        chunks.append((prompt.start, len(prompt.tokens), bool(prompt.draws)))
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
    assert chunks == [(0, 7, False), (7, 7, False), (14, 6, True)]


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        (0, {}, "empty"),
        (32, {}, "32 tokens; this runtime takes at most 31"),
        (4, {"n": 5}, "n is 5"),
        (20, {"n": 3, "max_tokens": 8}, "may need 41 KV tokens; 2 memory workers hold 40 in all"),
    ],
)
def test_what_can_never_be_served_is_refused_with_figures(prompt: int, params: dict, says: str) -> None:
    under_test = scheduler({"memory0": 30, "memory1": 10})
    with pytest.raises(RequestError, match=says):
        under_test.submit(request("r", prompt, **params))
    assert under_test.plan(0) is None


def test_more_completions_than_a_step_has_rows_are_refused_though_all_lanes_together_have_room() -> None:
    under_test = scheduler({"memory0": 1000}, lanes=2, limits=Limits(64, 32, 32))
    under_test.submit(request("most", 4, n=32, max_tokens=2))
    with pytest.raises(RequestError, match="n is 33; this runtime decodes 32 sequences of a request"):
        under_test.submit(request("more", 4, n=33, max_tokens=2))


def test_requests_spread_over_lanes_and_memory_workers() -> None:
    under_test = scheduler({"memory0": 100, "memory1": 100}, lanes=2)
    for name in "abcd":
        under_test.submit(request(name, 2, max_tokens=4))
    seen = []
    for _ in range(3):
        for lane in (0, 1):
            plan = under_test.plan(lane)
            if plan is None:
                continue
            seen += [(lane, admission.segments[0].worker) for admission in plan.admitted]
            for _, completion in under_test.complete(lane).values():
                completion.generated.append(1)
    assert sorted(lane for lane, _ in seen) == [0, 0, 1, 1]
    assert sorted(memory for _, memory in seen) == ["memory0", "memory0", "memory1", "memory1"]


def test_the_id_of_an_aborted_request_is_free_at_once_even_while_its_step_runs() -> None:
    under_test = scheduler({"memory0": 20})
    under_test.submit(request("same", 2, max_tokens=4))
    under_test.plan(0)
    under_test.abort("same")
    under_test.submit(request("same", 3, max_tokens=1))
    assert under_test.complete(0) == {}
    plan = under_test.plan(0)
    assert plan is not None and len(plan.released) == 1 and len(plan.admitted) == 1
    ((group, completion),) = under_test.complete(0).values()
    under_test.end_completion(group, completion)
    assert under_test.plan(0) is not None
    under_test.complete(0)
    assert under_test.plan(0) is None and under_test.placement.reserved == {"memory0": 0}


def test_the_id_of_a_finished_request_is_free_at_once_even_while_a_step_planned_ahead_runs() -> None:
    under_test = scheduler({"memory0": 20})
    under_test.submit(request("same", 2, max_tokens=4))
    assert under_test.plan(0) is not None and under_test.plan(0) is not None
    ((group, completion),) = under_test.complete(0).values()
    under_test.end_completion(group, completion)  # by a stop string, say: the next token is being drawn in vain
    again = under_test.submit(request("same", 3, max_tokens=1))
    assert under_test.complete(0) == {}
    assert under_test.plan(0) is not None
    ((group, completion),) = under_test.complete(0).values()
    assert group is again
    under_test.end_completion(group, completion)
    assert under_test.plan(0) is not None
    under_test.complete(0)
    assert under_test.plan(0) is None and under_test.placement.reserved == {"memory0": 0}


def test_without_max_tokens_a_request_gets_what_memory_workers_hold() -> None:
    under_test = scheduler({"memory0": 20, "memory1": 12})
    group = under_test.submit(Request("r", None, [1] * 10, SamplingParams(max_tokens=None, n=2)))
    assert (group.max_tokens, group.tokens) == (12, 32)
    alone = under_test.submit(Request("s", None, [1] * 10, SamplingParams(max_tokens=None)))
    assert (alone.max_tokens, alone.tokens) == (22, 31)


@pytest.mark.parametrize("fits", [False, True])
def test_a_request_that_has_outgrown_the_memory_left_ends_in_an_error_when_it_comes_again(fits: bool) -> None:
    """An earlier engine had more memory for a request without ``max_tokens``. It would never draw its last token."""
    under_test = scheduler({"memory0": 20})
    drawn = {0: [7] * (10 if fits else 11)}
    again = Request("r", None, [1] * 10, SamplingParams(max_tokens=None))
    if fits:
        assert under_test.submit(again, drawn).max_tokens == 11
        return
    with pytest.raises(RequestError, match="has generated 11 tokens, and a prompt of 10 tokens leaves room for 11"):
        under_test.submit(again, drawn)
    assert not under_test.waiting


def calls_a_row(lanes: int, memories: int) -> float:
    """Functions called, ours and the interpreter's, for every sequence planned and completed in a busy cluster."""
    limits = Limits(max_num_seqs=8 * lanes, max_num_batched_tokens=64, max_model_len=64, row_lanes=lanes)
    under_test = scheduler({f"memory{index}": 400 for index in range(memories)}, lanes, limits)
    random = Random(0)
    for index in range(24 * lanes):
        under_test.submit(request(str(index), random.randint(1, 8), max_tokens=random.randint(4, 24)))
    calls = rows = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    while under_test.waiting or under_test.running:
        sys.setprofile(count)
        for lane in under_test.plannable(2):
            while under_test.in_flight(lane) < 2 and (plan := under_test.plan(lane)) is not None:
                rows += len(plan.sequences)
        sys.setprofile(None)  # the looks over all lanes are this test's own
        done = random.choice([lane for lane in range(lanes) if under_test.in_flight(lane)])
        sys.setprofile(count)
        for group, completion in under_test.complete(done).values():
            completion.generated.append(7)
            if len(completion.generated) == group.max_tokens:
                under_test.end_completion(group, completion)
        sys.setprofile(None)
    return calls / rows


def test_sequences_that_go_on_are_not_looked_at_one_by_one() -> None:
    """The contract of ``complete``: while nobody joins or leaves, the same object says who has drawn."""
    under_test = scheduler({"memory0": 100})
    for name in "ab":
        under_test.submit(request(name, 2, max_tokens=6))
    drawn = []
    for _ in range(6):
        assert under_test.plan(0) is not None
        drawn.append(under_test.complete(0))
        for _, completion in drawn[-1].values():
            completion.generated.append(7)
    assert all(same is drawn[1] for same in drawn[1:4])
    for group, completion in drawn[-1].values():
        under_test.end_completion(group, completion)
    assert under_test.plan(0) is not None
    assert under_test.complete(0) == {}


def test_what_a_decision_costs_does_not_grow_with_the_cluster() -> None:
    small = calls_a_row(lanes=4, memories=4)
    assert calls_a_row(lanes=40, memories=40) < 1.2 * small


def test_a_lane_whose_slots_were_freed_by_others_ends_its_stall_although_its_sequences_only_decode() -> None:
    """While a lane is stalled, no worker counts as empty, and requests that need an empty one wait."""
    under_test = scheduler({"memory0": 200})
    under_test.submit(request("0", 4, max_tokens=20))
    for _ in range(3):
        plan_of(under_test)
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
    under_test.placement.stalled.add(0)  # as if its last plan had found no slots
    assert plan_of(under_test).decoding.sequences and not under_test.placement.stalled
