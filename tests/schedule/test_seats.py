"""Seats by lane and by client, and lanes that rest."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.types import NOBODY, Client
from lamina.schedule.admission import Seats
from lamina.schedule.dealing import Readiness


@given(lanes=st.integers(1, 6), changes=st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), max_size=100))
def test_the_emptiest_lane_is_the_first_of_those_with_fewest(lanes: int, changes: list[tuple[int, int]]) -> None:
    seats, taken = Seats(lanes), [0] * lanes
    for lane, change in changes:
        lane, change = lane % lanes, max(change, -taken[lane % lanes])  # noqa: PLW2901
        seats.add_sequences(lane, change, NOBODY)
        taken[lane] += change
        assert seats.emptiest == taken.index(min(taken))
        assert (seats.taken, seats.total) == (taken, sum(taken))


CLIENTS = [Client(account, f"{account}{number}") for account in "ab" for number in range(3)]


@given(taken=st.lists(st.integers(0, 6), min_size=6, max_size=6), wants=st.integers(0, 5), wanted=st.integers(1, 6))
def test_an_exchange_of_seats_is_never_undone(taken: list[int], wants: int, wanted: int) -> None:
    seats = Seats(1)
    for client, sequences in zip(CLIENTS, taken, strict=True):
        seats.add_sequences(0, sequences, client)
    accounts = {name: sum(n for one, n in zip(CLIENTS, taken, strict=True) if one.account == name) for name in "ab"}
    client = CLIENTS[wants]
    other = next(name for name in "ab" if name != client.account)
    siblings = [n for one, n in zip(CLIENTS, taken, strict=True) if one.account == client.account and one != client]
    fair = accounts[other] <= accounts[client.account] + wanted and max(siblings) <= taken[wants] + wanted
    holders = seats.holders(client, wanted)
    assert (not holders) == fair
    for holder in holders[:1]:  # whatever the holder had, it wants all of it back
        given_up = taken[CLIENTS.index(holder)]
        seats.add_sequences(0, -given_up, holder)
        seats.add_sequences(0, wanted, client)
        assert client not in seats.holders(holder, given_up)


def test_seats_of_ended_sequences_leave_until_no_step_runs_them() -> None:
    seats = Seats(1)
    seats.add_sequences(0, 3, NOBODY)
    seats.note_ended()
    seats.note_ended()
    assert (seats.total, seats.leaving) == (3, 2)
    seats.free_ended(0, NOBODY)
    assert (seats.total, seats.leaving, seats.taken) == (2, 1, [2])


def test_a_lane_with_nothing_to_plan_is_not_asked_again_until_something_changes() -> None:
    ready = Readiness(2)
    ready.note_nothing(0)
    assert set(ready.candidates(moving=False, dealing=False)) == {1}
    assert set(ready.candidates(moving=False, dealing=True)) == {0, 1}, "a request may be dealt to it"
    ready.note_change(0)
    assert set(ready.candidates(moving=False, dealing=False)) == {0, 1}
