"""The minimum cut, compared with a brute-force search over all placements of the free nodes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import UnsupportedModelError
from lamina.splitter.cut import minimum_cut

Graph = dict[int, list[int]]  # node -> its users, all of them later nodes


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, set[int], set[int], list[float]]:
    """A small random graph whose first node must come before the cut and whose last must come after."""
    size = draw(st.integers(3, 9))
    users = {
        node: sorted(draw(st.sets(st.integers(node + 1, size - 1), min_size=1, max_size=3))) for node in range(size - 1)
    }
    users[size - 1] = []
    before = {0} | draw(st.sets(st.integers(1, size - 2), max_size=2))
    before = {node for node in range(size) if reaches(users, node, before)}
    after = {node for node in range(size) if reaches(users, size - 1, {node}) or node == size - 1}
    costs = [draw(st.sampled_from([1.0, 2.0, 4.0, 8.0, math.inf])) for _ in range(size)]
    return users, before, after, costs


def reaches(users: Graph, start: int, goals: set[int]) -> bool:
    return start in goals or any(reaches(users, user, goals) for user in users[start])


def cost_of(users: Graph, before: set[int], costs: list[float]) -> float:
    return sum(costs[node] for node in before if any(user not in before for user in users[node]))


def closed(users: Graph, before: set[int]) -> bool:
    """Whether nothing before the cut depends on anything after it."""
    return all(node in before for node in users for user in users[node] if user in before)


def cheapest(users: Graph, before: set[int], after: set[int], costs: list[float]) -> list[set[int]]:
    free = [node for node in users if node not in before | after]
    placements = [
        before | set(chosen)
        for count in range(len(free) + 1)
        for chosen in itertools.combinations(free, count)
        if closed(users, before | set(chosen))
    ]
    best = min(cost_of(users, placement, costs) for placement in placements)
    return [placement for placement in placements if cost_of(users, placement, costs) == best]


@given(graphs())
def test_equals_brute_force_and_is_the_latest(case: tuple[Graph, set[int], set[int], list[float]]) -> None:
    users, before, after, costs = case
    candidates = cheapest(users, before, after, costs)
    if math.isinf(cost_of(users, candidates[0], costs)):
        with pytest.raises(UnsupportedModelError, match="one row per token"):
            minimum_cut(list(users), users.__getitem__, before, after, costs.__getitem__)
        return
    found = minimum_cut(list(users), users.__getitem__, before, after, costs.__getitem__)
    assert found in candidates
    assert all(other <= found for other in candidates)


def test_a_value_used_twice_is_sent_once() -> None:
    users = {0: [1, 2], 1: [3], 2: [3], 3: []}
    costs = [3.0, 2.0, 2.0, 1.0]
    assert minimum_cut([0, 1, 2, 3], users.__getitem__, {0}, {3}, costs.__getitem__) == {0}
