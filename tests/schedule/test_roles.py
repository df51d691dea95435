"""Which replicas change their role: both targets are met if any division meets them, and then nothing changes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lamina.schedule.roles import HOLD_S, ROOM, RoleBalance, Times

LOOK_S = 0.25


def run(balance: RoleBalance, work: tuple[float, float], prefill: int, replicas: int, seconds: float) -> list[int]:
    """Return the replicas for prompts after each look, under constant work that the replicas of a role share."""
    seen = [prefill]
    for look in range(int(seconds / LOOK_S)):
        times = Times(work[0] / max(1, prefill), work[1] / (replicas - prefill))
        prefill += balance.decide(times, prefill, replicas - prefill, look * LOOK_S)
        seen.append(prefill)
    return seen


@given(st.data(), st.integers(2, 8), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_constant_work_ends_in_a_division_that_meets_both_targets_if_one_does_with_room(
    data: st.DataObject, replicas: int, first_of_each: float, between_of_each: float
) -> None:
    least = data.draw(st.integers(1, replicas - 1))
    most = data.draw(st.integers(least, replicas - 1))
    begin = data.draw(st.integers(0, replicas - 1))
    division = data.draw(st.integers(least, most))
    first, between = first_of_each * division, between_of_each * (replicas - division)
    seen = run(RoleBalance(least, most), (first, between), begin, replicas, (replicas + 2) * HOLD_S)
    last = seen[-1]
    assert least <= last <= most
    inside = [one for one in seen if least <= one <= most]
    assert inside in (sorted(inside), sorted(inside, reverse=True)), "it goes one way under constant work"
    met = [one for one in range(least, most + 1) if max(first / one, between / (replicas - one)) <= ROOM]
    if met:
        assert first / last <= 1 and between / (replicas - last) <= 1


@given(st.floats(0.0, 4.0), st.floats(0.0, 4.0), st.floats(0.0, HOLD_S - LOOK_S))
def test_a_target_missed_for_a_moment_changes_nothing(first: float, between: float, moment_s: float) -> None:
    balance = RoleBalance(1, 3)
    looks = int(moment_s / LOOK_S)
    decided = [balance.decide(Times(first, between), 2, 2, look * LOOK_S) for look in range(looks)]
    decided.append(balance.decide(Times(0.0, 0.0), 2, 2, looks * LOOK_S))
    decided += [balance.decide(Times(first, between), 2, 2, (looks + 1 + look) * LOOK_S) for look in range(looks)]
    assert not any(decided)


def test_another_replica_changes_its_role_only_once_the_target_was_missed_as_long_again() -> None:
    seen = run(RoleBalance(1, 7), (6.0, 0.1), 1, 8, 8 * HOLD_S)
    changes = [look for look, (before, after) in enumerate(itertools.pairwise(seen)) if before != after]
    assert seen[-1] == 6
    assert all(later - earlier >= HOLD_S / LOOK_S for earlier, later in itertools.pairwise([0, *changes]))


def test_no_replica_changes_its_role_if_both_targets_are_missed() -> None:
    assert set(run(RoleBalance(1, 3), (9.0, 9.0), 2, 4, 10 * HOLD_S)) == {2}
