"""The placement against a plain search, and the lanes with fewest sequences against a plain count."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.placement.map import Placement
from lamina.schedule.seats import Seats


@given(
    capacities=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    calls=st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=200),
)
def test_a_request_goes_where_most_is_left(capacities: list[int], calls: list[tuple[bool, int]]) -> None:
    placement = Placement({f"memory{index}": capacity for index, capacity in enumerate(capacities)})
    left = list(capacities)
    held: list[tuple[int, int]] = []
    for gives_back, tokens in calls:
        if gives_back and held:
            place, amount = held.pop(tokens % len(held))
            placement.release(f"memory{place}", amount)
            left[place] += amount
            continue
        place = left.index(max(left))  # the first of several
        worker = placement.reserve(tokens)
        if left[place] < tokens:
            assert worker is None
        else:
            assert worker == f"memory{place}"
            left[place] -= tokens
            held.append((place, tokens))
    assert list(placement.reserved.values()) == [
        capacity - rest for capacity, rest in zip(capacities, left, strict=True)
    ]


@given(lanes=st.integers(1, 6), changes=st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), max_size=100))
def test_the_emptiest_lane_is_the_first_of_those_with_fewest(lanes: int, changes: list[tuple[int, int]]) -> None:
    seats, taken = Seats(lanes), [0] * lanes
    for lane, change in changes:
        lane, change = lane % lanes, max(change, -taken[lane % lanes])  # noqa: PLW2901
        seats.change(lane, change)
        taken[lane] += change
        assert seats.emptiest == taken.index(min(taken))
        assert (seats.taken, seats.total) == (taken, sum(taken))
