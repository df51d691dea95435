"""Times of made-up clocks, read over made-up delays."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from lamina.control.timeline import Clock, ClockReading

S = 10**9
DELAYS = st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)), min_size=1, max_size=8)
"""Nanoseconds there and back, of each reading: any asymmetry."""


def read(at: int, delays: list[tuple[int, int]], shows: Callable[[int], int]) -> list[ClockReading]:
    """Readings one after the other, of the clock that ``shows`` a time at every moment here."""
    readings = []
    for there, back in delays:
        readings.append(ClockReading(at, shows(at + there), at + there + back))
        at += there + back
    return readings


@given(st.integers(-(10**15), 10**15), DELAYS, st.integers(0, 3600 * S))
def test_a_time_is_wrong_by_half_of_the_shortest_round_trip_at_most(
    ahead: int, delays: list[tuple[int, int]], moment: int
) -> None:
    clock = Clock()
    clock.add_reading(read(0, delays, lambda now: now + ahead))
    best = min(there + back for there, back in delays)
    assert abs(clock.to_local(moment + ahead) - moment) <= best + 1, "both halves, where no difference is seen"
    if 2 * abs(ahead) > 2 * best:
        assert abs(clock.to_local(moment + ahead) - moment) <= best / 2 + 1


@given(st.integers(10**12, 10**15), st.integers(-200, 200), DELAYS, DELAYS, st.integers(10, 86_400), st.floats(0, 1))
def test_a_drift_between_two_readings_is_taken_out(
    ahead: int, ppm: int, first: list[tuple[int, int]], last: list[tuple[int, int]], seconds: int, share: float
) -> None:
    def shows(now: int) -> int:
        return now + ahead + now * ppm // 10**6

    clock, end = Clock(), seconds * S
    clock.add_reading(read(0, first, shows))
    clock.add_reading(read(end, last, shows))
    best = max(min(there + back for there, back in each) for each in (first, last))
    begin = sum(map(sum, first))
    moment = begin + int(share * max(0, end - begin))
    assert abs(clock.to_local(shows(moment)) - moment) <= best / 2 + best * abs(ppm) / 10**6 + 3


@given(st.integers(-(10**15), 10**15), DELAYS, st.lists(st.integers(0, 3600 * S), min_size=2))
def test_what_happened_there_stays_in_order(ahead: int, delays: list[tuple[int, int]], moments: list[int]) -> None:
    clock = Clock()
    clock.add_reading(read(0, delays, lambda now: now + ahead))
    assert [clock.to_local(moment) for moment in sorted(moments)] == sorted(map(clock.to_local, moments))


def test_clocks_of_one_machine_are_not_moved_apart() -> None:
    clock = Clock()
    clock.add_reading(read(0, [(40_000, 10_000), (500_000, 3_000)], lambda now: now))
    assert clock.to_local(123) == 123
