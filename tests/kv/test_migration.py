"""Moves that make room, against a search through all of them."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lamina.kv.relocation import Movable, Move, make_room


def search(needed: int, left: dict[str, int], residents: dict[str, list[Movable]]) -> int | None:
    """Least cost of any moves away from one worker, to the others, after which ``needed`` fits it."""
    costs = []
    for source, movable in residents.items():
        others = [name for name in left if name != source]
        for choice in itertools.product([None, *others], repeat=len(movable)):
            room = dict(left)
            for one, target in zip(movable, choice, strict=True):
                if target is not None:
                    room[source] += one.reserved
                    room[target] -= one.reserved
            if room[source] >= needed and min(room.values()) >= 0:
                costs.append(sum(one.cost for one, to in zip(movable, choice, strict=True) if to is not None))
    return min(costs, default=None)


workers = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=4)),
    min_size=1,
    max_size=3,
)


@given(workers, st.integers(1, 40))
def test_moves_fit_and_make_room_and_one_is_the_cheapest_if_one_is_enough(
    cluster: list[tuple[int, list[tuple[int, int]]]], needed: int
) -> None:
    numbers = itertools.count()
    left = dict(sorted(((f"memory{i}", free) for i, (free, _) in enumerate(cluster)), key=lambda pair: -pair[1]))
    residents = {
        f"memory{i}": [Movable(next(numbers), max(tokens), min(tokens), max(tokens)) for tokens in movable]
        for i, (_, movable) in enumerate(cluster)
    }
    moves = make_room(needed, left, residents.__getitem__)
    best = search(needed, left, residents)
    if max(left.values()) >= needed:
        assert moves == ()
        return
    assert best is not None or moves == ()
    singles = [
        one.cost
        for source, movable in residents.items()
        for one in movable
        if left[source] + one.reserved >= needed and any(left[to] >= one.reserved for to in left if to != source)
    ]
    cost = sum(move.movable.cost for move in moves)
    if singles:
        assert moves and cost <= min(singles)
    if not moves:
        return
    assert best is not None and cost >= best
    (source,) = {move.source for move in moves}
    room = dict(left)
    for move in moves:
        assert move.movable in residents[source] and move.target != source
        room[source] += move.movable.reserved
        room[move.target] -= move.movable.reserved
    assert room[source] >= needed and min(room.values()) >= 0
    assert len({move.sequence for move in moves}) == len(moves)
    freed = room[source] - left[source]
    assert all(left[source] + freed - move.movable.reserved < needed for move in moves)  # none too many


def test_several_small_ones_move_where_no_single_one_is_enough() -> None:
    small = [Movable(number, 4, number, 4) for number in range(1, 5)]
    moves = make_room(18, {"memory0": 10, "memory1": 8}, {"memory0": small, "memory1": []}.__getitem__)
    assert moves == tuple(Move(one, "memory0", "memory1") for one in small[:2])


def test_as_many_stay_as_the_room_allows() -> None:
    one, another, large = Movable(1, 1, 1, 1), Movable(2, 1, 1, 1), Movable(3, 50, 100, 50)
    residents = {"memory0": [], "memory1": [one, another, large]}
    moves = make_room(61, {"memory0": 60, "memory1": 10}, residents.__getitem__)
    assert moves == (Move(another, "memory1", "memory0"), Move(large, "memory1", "memory0"))
