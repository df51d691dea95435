"""Ranges that move while their sequences decode, against what every slot of the memory workers holds."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Balance, Partition
from lamina.kv import balancing
from lamina.kv.balancing import POLICIES, HeldTokens, Load, Policy, Proposal, View
from lamina.schedule import balancing as looks
from lamina.schedule.balancing import Balancing
from lamina.schedule.limits import Limits
from tests.support.lossy_clusters import Moving, play_out, random_course, random_events, random_requests, settled, step
from tests.support.schedules import plan_of, request, scheduler

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")


def move_at_random(seeds: range, most: int = 25) -> int:
    """Schedules with moves at random; returns how many there were."""
    moved = 0
    for seed in seeds:
        draw = random.Random(seed)
        prompts, others = random_requests(draw)
        course = random_course(draw, draw.randint(1, 3), draw.choice([None, None, 5, 11]), random_events(draw, most))
        cluster = Moving(others, prompts, *course.sizes)
        play_out(cluster, course)
        moved += cluster.scheduler.moves.counts.moves
    return moved


@pytest.mark.usefixtures("unbounded_moves")
def test_whatever_moves_rows_attend_to_their_own_tokens_and_every_slot_comes_back() -> None:
    """Forks and cached prefixes share what moves; requests end, are dropped or aborted, workers are lost and leave."""
    assert move_at_random(range(150)) > 200


@pytest.mark.slow
@pytest.mark.usefixtures("unbounded_moves")
def test_ten_thousand_moves() -> None:
    assert move_at_random(range(1000, 3700), most=400) > 10_000


def test_what_is_kept_for_others_is_not_of_a_first_completion_that_was_released() -> None:
    """Its sequence is gone, and the worker that it was on may have left. ``test_ten_thousand_moves`` found both."""
    under_test = scheduler({"memory0": 100}, limits=Limits(4, 64, 100), prefix_cache=True)
    under_test.submit(request("one", 20, max_tokens=8, n=2))
    step(under_test)
    (group,) = under_test.requests
    first, second = group.completions
    first.released = True
    under_test.prefixes.keep_computed(0, [group], lambda one: 20)
    assert under_test.prefixes.changes() == ([], [])
    step(under_test)
    group.holders -= 1
    first.segments = [dataclasses.replace(segment, worker="gone") for segment in first.segments]
    under_test.prefixes.keep_completion(group, second)
    forks, _ = under_test.prefixes.changes()
    assert [fork.parent for fork in forks] == [second.sequence]


def noting_returns(policy: Policy, returning: set[tuple[str, str, str]]) -> Callable[[View], list[Proposal]]:
    """Return the policy's ``propose``, which adds moves of lent tokens to their home to ``returning``."""
    propose = policy.propose

    def noted(view: View) -> list[Proposal]:
        proposals = propose(view)
        returning.update((one.request, one.source, one.targets[0]) for one in proposals if one.returns)
        return proposals

    return noted


@pytest.mark.usefixtures("unbounded_moves")
@pytest.mark.parametrize("name", POLICIES)
def test_whatever_a_policy_moves_every_slot_comes_back_and_nothing_returns_at_once(
    name: Balance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, what in ((balancing, "LEAST"), (balancing, "LEAST_SWAP"), (balancing, "UNEVEN"), (looks, "LOOK_STEPS")):
        monkeypatch.setattr(where, what, 1)
    moved = 0
    for seed in range(50):
        draw = random.Random(seed)
        prompts, others = random_requests(draw)
        course = random_course(draw, 2, None, random_events(draw) | {"move_several": {}})
        cluster = Moving(others, prompts, *course.sizes)
        scheduler = cluster.scheduler
        policy, returning = POLICIES[name](), set[tuple[str, str, str]]()
        monkeypatch.setattr(policy, "propose", noting_returns(policy, returning))
        scheduler.balancing = Balancing(policy, scheduler.moves, scheduler.placement)
        play_out(cluster, course)
        moved += cluster.scheduler.moves.counts.moves
        seen = set[tuple[str, str, str]]()
        for one in cluster.begun:
            request_id = one.group.request.request_id
            if (request_id, one.target, one.source) in seen:  # within so few steps
                assert (request_id, one.source, one.target) in returning, "it was not lent"
            seen.add((request_id, one.source, one.target))
    assert moved > 30


def test_speeds_that_balancing_has_learned_place_requests() -> None:
    """As long as a step of a worker is not known, and if an epoch ends, requests go where most room is."""
    under_test = settled()
    follows = Balancing(POLICIES["bandwidth"](), under_test.moves, under_test.placement)
    follows._looked = -looks.LOOK_STEPS
    for steps, (fast_s, slow_s) in enumerate([(0.0, 0.0), (1.0, 8.0), (2.0, 16.0)]):
        follows._reads = {"memory0": 100.0, "memory1": 100.0}
        for worker, seconds in (("memory0", fast_s), ("memory1", slow_s)):
            follows.note_attention(worker, seconds)
        assert not under_test.placement.token_s or steps == 2
        follows._looked = -looks.LOOK_STEPS
        follows.begin_moves()
        follows.note_step(0, 1, 0.1)
    speeds = under_test.placement.token_s
    assert speeds["memory1"] == pytest.approx(8 * speeds["memory0"])
    assert under_test.placement.fitting(10, 1) == [("memory0", 10)], "which holds 40 tokens already"
    members = tuple(Member(f"memory{index}", "memory", "cpu", "", 100) for index in range(2))
    under_test.placement.apply_topology(Topology(FIRST, members, Pipeline(1, 1)))
    assert under_test.placement.fitting(10, 1) == [("memory1", 10)]


class Script:
    """A policy that proposes what it was given, one proposal at a time."""

    def __init__(self, *proposals: Proposal) -> None:
        self.left = list(proposals)

    def propose(self, view: View) -> list[Proposal]:
        return [self.left.pop(0)]


def test_lent_tokens_return_when_the_policy_looks_next_and_are_not_lent_again_soon() -> None:
    under_test = settled()
    lend = Proposal("long", "memory0", ("memory1",), 10)
    back = Proposal("long", "memory1", ("memory0",), 10, returns=True)
    follows = Balancing(Script(lend, back, *[lend] * 20), under_test.moves, under_test.placement)
    begun = list[tuple[int, str]]()  # steps, and the source of each move
    for steps in range(0, looks.BACK_STEPS + 2 * looks.LOOK_STEPS + 1):
        follows.note_step(0, 1, 0.1)
        follows.begin_moves()
        for move in under_test.moves.in_progress:
            begun.append((steps, move.source))
            under_test.on_move_done(step(under_test).moves[0].number)
            while under_test.moves.in_progress:
                step(under_test)
    (lent, _), (returned, _), (again, _) = begun
    assert [source for _, source in begun] == ["memory0", "memory1", "memory0"]
    assert returned == lent + looks.LOOK_STEPS and again == returned + looks.BACK_STEPS


def test_times_of_steps_and_attention_bound_what_local_memory_lends() -> None:
    """By hand: attention takes 0.4 s of steps of 1 s, and reads 100 tokens. Others have no steps of their own."""
    under_test = settled()
    placement = under_test.placement
    placement.local, placement.others, placement.lends = frozenset({"memory0"}), lambda lane: frozenset(), True
    placement._moves_local = True
    follows = Balancing(POLICIES["ledger"](), under_test.moves, placement)
    assert follows.view([]).loads["memory0"].step_s == 0.0
    follows._reads = {"memory0": 100.0}
    for attention_s in (0.0, 0.4):
        follows.note_step(0, 1, 1.0)
        follows.note_attention("memory0", attention_s)
    loads = follows.view([]).loads
    assert loads["memory0"].token_s == pytest.approx(0.004)
    assert (loads["memory0"].step_s, loads["memory1"].step_s) == (1.0, 0.0)


def test_attention_to_tokens_that_a_worker_was_lent_is_not_that_of_its_own_requests() -> None:
    """By hand: it reads 100 tokens, of which 20 are read twice for another worker, in 0.01 s each."""
    under_test = settled()
    follows = Balancing(POLICIES["ledger"](), under_test.moves, under_test.placement)
    follows._step_s, follows._token_s = {"memory0": 1.0}, {"memory0": 0.01}
    loads = {"memory0": Load(200, 50, 1, 100, 0.01, True, 1.0)}
    follows._note_own_attention(View(loads, [HeldTokens("lent", "memory0", "memory1", 20, 2)], lambda rows: 1.0))
    assert follows._own_s["memory0"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("kinds", "partition", "wanted"),
    [
        (("rtx3090", "rtx3090", "cpu"), "auto", "bandwidth"),
        (("rtx3090", "rtx3090"), "auto", "off"),
        (("rtx3090", "cpu"), "request", "off"),
        (("rtx3090", "cpu"), "head", "off"),
    ],
)
def test_pools_of_several_kinds_are_balanced_by_bandwidth(
    kinds: tuple[str, ...], partition: Partition, wanted: Balance
) -> None:
    memories = [Member(f"memory{index}", "memory", kind, "", 10) for index, kind in enumerate(kinds)]
    topology = Topology(FIRST, (Member("compute0", "compute", "a100", ""), *memories), Pipeline(2, 1))
    assert balancing.policy_for("auto", topology, partition) == wanted
    assert balancing.policy_for("ledger", topology, partition) == "ledger"


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_range_moves_while_its_sequences_decode_and_all_that_share_it_switch_in_one_plan(prefix_cache: bool) -> None:
    under_test = settled(prefix_cache=prefix_cache)
    (group,) = under_test._residents.holders("memory0")
    assert under_test.moves.try_move(group, "memory0", "memory1", 30) == 30
    plan = step(under_test)
    (move,) = plan.moves
    assert (move.start, move.stop, len(plan.decoding.sequences)) == (0, 30, 2)
    assert under_test.placement.reserved["memory1"] == 30
    assert not step(under_test).switches, "nothing has arrived"
    ahead = plan_of(under_test)  # this one still reads at the source
    under_test.on_move_done(move.number)
    switching = plan_of(under_test)
    (switch,) = switching.switches
    of_requests = [one for one in switch.segments if one.sequence in switching.decoding.sequences]
    assert [one.worker for one in of_requests] == ["memory1"] * 2 and {one.tokens for one in of_requests} == {(0, 30)}
    assert len(switch.segments) == 2 + prefix_cache
    reserved = dict(under_test.placement.reserved)
    assert ahead.decoding.sequences == switching.decoding.sequences and not switching.released
    under_test.complete(0)
    release = plan_of(under_test)
    assert release.released == [switch.carrier]
    assert under_test.placement.reserved == {"memory0": reserved["memory0"] + 2 - 30, "memory1": 30}
    assert [one.tokens for one in group.completions[0].segments] == [(0, 30), (30, None)]


def test_a_target_without_room_refuses_and_the_bound_lets_few_tokens_move_per_step() -> None:
    under_test = settled()
    (group,) = under_test._residents.holders("memory0")
    under_test.placement.reserve_on("memory1", 90)
    plan_of(under_test)
    assert under_test.moves.try_move(group, "memory0", "memory1", 30) == 0 and under_test.moves.counts.refused == 1
    under_test.placement.will_release("memory1", 90)
    under_test.placement.free_slots("memory1", 90)
    assert under_test.moves.try_move(group, "memory0", "memory1", 30) == 30
    under_test.on_move_done(step(under_test).moves[0].number)
    assert step(under_test).switches
    plan_of(under_test)
    assert under_test.moves.try_move(group, "memory0", "memory1", 10) == (10 if 3 * 16 > 30 else 0)


def test_steps_that_are_repeated_let_tokens_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.schedule.moves.TOKENS_PER_STEP", 1)
    under_test = settled()
    (group,) = under_test._residents.holders("memory0")
    assert under_test.moves.try_move(group, "memory0", "memory1", 30) == 30
    under_test.on_move_done(step(under_test).moves[0].number)
    assert step(under_test).switches
    plan_of(under_test)
    assert under_test.moves.try_move(group, "memory0", "memory1", 5) == 0
    under_test.repeat(0, 30)
    assert under_test.moves.try_move(group, "memory0", "memory1", 5) == 5


def test_a_range_that_moves_for_a_request_that_has_ended_leaves_no_worker_with_negative_reads() -> None:
    under_test = settled(prefix_cache=True)
    (group,) = under_test._residents.holders("memory0")
    under_test.moves.try_move(group, "memory0", "memory1", 30)
    step(under_test)
    under_test.abort("long")
    assert under_test.moves.in_progress
    view = Balancing(POLICIES["throughput"](), under_test.moves, under_test.placement).view([])
    assert view.loads["memory0"].reads == 0


@pytest.mark.parametrize("when", ["at once", "while it is copied", "when it has arrived", "after the switch"])
def test_a_request_that_is_cancelled_at_any_moment_of_a_move_leaves_nothing(when: str) -> None:
    under_test = settled()
    (group,) = under_test._residents.holders("memory0")
    under_test.moves.try_move(group, "memory0", "memory1", 30)
    carriers, released = set[int](), set[int]()
    if when != "at once":
        (move,) = step(under_test).moves
        carriers.add(move.sequence)
        if when != "while it is copied":
            under_test.on_move_done(move.number)
        if when == "after the switch":
            switching = step(under_test)
            assert switching.switches
            released |= set(switching.released)
    under_test.abort("long")
    while (plan := under_test.plan(0)) is not None:
        released |= set(plan.released)
        under_test.complete(0)
    assert released == {*carriers, *(completion.sequence for completion in group.completions)}
    assert under_test.placement.reserved == {"memory0": 0, "memory1": 0} and not under_test.moves.in_progress
