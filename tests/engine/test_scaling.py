"""Scaling by load: within bounds, following the load, and at rest while the load does not change."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.engine.scaling import HIGH, LOW, Autoscaler, Load, Windows, compute_load, memory_load
from lamina.schedule.limits import Limits
from tests.support.schedules import plan_of, request, scheduler

LOOK_S = 0.5
WINDOWS = Windows(grow_s=2.0, shrink_s=6.0)


def run(
    scaler: Autoscaler, workers: int, demand: float, seconds: float, begin: float, beside: float = 0.0
) -> list[int]:
    """The sizes of a pool under a constant demand. Joiners serve a while after they were asked for."""
    sizes, joining = [workers], list[float]()
    for look in range(int(seconds / LOOK_S)):
        now = begin + look * LOOK_S
        joining = [at for at in joining if at > now]
        serving = workers - len(joining)
        load = Load(serving, workers, demand, "", beside, starved=demand > serving + beside)
        change = scaler.decide(load, now)
        workers += change
        joining += [now + 1.2] * max(change, 0)
        sizes.append(workers)
    return sizes


@given(
    st.integers(0, 6).flatmap(lambda least: st.tuples(st.just(least), st.integers(max(least, 1), 12))),
    st.integers(1, 14),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.lists(st.floats(0, 15), min_size=1, max_size=4),
)
def test_a_pool_stays_within_bounds_follows_the_load_and_comes_to_rest(
    bounds: tuple[int, int], workers: int, beside: float, demands: list[float]
) -> None:
    least, most = bounds = (bounds[0] if beside else max(bounds[0], 1), bounds[1])  # one of its own, if it is alone
    scaler, begin = Autoscaler(bounds, WINDOWS), 0.0
    for demand in demands:
        seconds = WINDOWS.shrink_s + 15 * LOOK_S
        sizes = run(scaler, workers, demand, seconds, begin, beside)
        begin += seconds
        inside = [size for size in sizes if least <= size <= most]
        assert sizes[-len(inside) :] == inside, "once within its bounds, it stays there"
        assert inside in (sorted(inside), sorted(inside, reverse=True)), "it goes one way under a constant load"
        workers = sizes[-1]
        assert workers == most or demand <= HIGH * (workers + beside) + 1e-5
        assert workers <= least or demand > LOW * (workers - 1 + beside) - 1e-5
        assert set(run(scaler, workers, demand, 2 * WINDOWS.shrink_s, begin, beside)) == {workers}
        begin += 2 * WINDOWS.shrink_s


def test_a_short_peak_or_lull_changes_nothing_and_a_long_one_brings_what_is_needed_at_once() -> None:
    full, idle = Load(2, 2, 5.0, "", starved=True), Load(2, 2, 0.1, "")
    scaler = Autoscaler((1, 8), WINDOWS)
    for second in range(100):
        assert scaler.decide(full if second % 2 else idle, float(second)) == 0
    assert scaler.decide(idle, 999.0) == 0
    assert [scaler.decide(full, 1000.0 + second) for second in range(3)] == [0, 0, math.ceil(5.0 / HIGH) - 2]


def topology(*members: Member) -> Topology:
    return Topology(FIRST, members, Pipeline(lanes=1, replicas=1))


C, C_LOCAL = Member("compute0", "compute", "cpu", "h"), Member("compute0", "compute", "cpu", "h", 100)
M0, M1 = Member("memory0", "memory", "cpu", "h", 100), Member("memory1", "memory", "cpu", "h", 100)


def test_what_waits_for_room_counts_and_what_waits_for_a_seat_or_its_turn_does_not() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=90)
    under_test = scheduler({"memory0": 100}, limits=limits)
    before = memory_load(under_test, topology(C, M0), 0, 0)
    assert (before.demand, before.starved, before.enough, before.plenty) == (0.0, False, 0, 0)
    for name in "abcdef":
        under_test.submit(request(name, 40, max_tokens=10))
    assert not memory_load(under_test, topology(C, M0), 0, 0).starved, "there is room for the first one"
    plan_of(under_test)
    load = memory_load(under_test, topology(C, M0), 0, 1)
    assert load.starved and load.demand == pytest.approx(1.6), "of four seats, one has its room"
    assert (load.serving, load.units, load.enough) == (1, 2, 2)
    assert "40 of 100 KV slots are in use, and requests wait for 120" in load.why


def test_local_memory_carries_a_part_of_the_load() -> None:
    under_test = scheduler({"compute0": 100, "memory0": 100, "memory1": 100})
    under_test.placement.reserve_on("memory0", 90)
    under_test.placement.reserve_on("memory1", 90)
    load = memory_load(under_test, topology(C_LOCAL, M0, M1), 0, 0)
    assert (load.demand, load.beside, load.enough, load.plenty) == (1.8, 1.0, 2, 2)


def test_compute_workers_are_too_few_only_if_they_are_busy_and_requests_wait_for_them() -> None:
    under_test = scheduler({"memory0": 1000})
    assert compute_load(under_test, 0.99, 1, 0).enough == 1, "always busy, but nobody waits"
    under_test.submit(request("a", 8))
    assert compute_load(under_test, 0.99, 1, 0).enough == 2
    assert compute_load(under_test, 0.30, 1, 0).enough == 1
    assert compute_load(under_test, 0.30, 2, 0).plenty == 1
