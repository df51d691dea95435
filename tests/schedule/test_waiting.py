"""The waiting queue: fair between clients in tokens, in order within one; and the places of an engine."""

import contextlib
import itertools
from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import OverloadedError
from lamina.core.requests import Completion, Group
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client, Request
from lamina.schedule.limits import Places
from lamina.schedule.policy import WaitingQueue

NUMBERS = itertools.count()


def group(client: Client, tokens: int) -> Group:
    number = next(NUMBERS)
    request = Request(str(number), None, [0] * tokens, SamplingParams(), client=client)
    return Group(request, 1, [Completion(number, 0)])


def alone(name: str) -> Client:
    return Client(name, name)


def serve(queue: WaitingQueue) -> Group:
    first = queue.first()
    queue.pop(first)
    return first


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@given(st.lists(sizes, min_size=2, max_size=5))
def test_clients_that_wait_all_the_time_are_given_equal_tokens_up_to_one_request_each(clients: list[list[int]]) -> None:
    queue, given_to = WaitingQueue(), [0] * len(clients)
    cycles = [itertools.cycle(own) for own in clients]
    for name, cycle in enumerate(cycles):
        for _ in range(2):
            queue.enqueue(group(alone(str(name)), next(cycle)))
    for _ in range(100):
        served = serve(queue)
        name = int(served.request.client.account)
        given_to[name] += served.tokens
        queue.enqueue(group(served.request.client, next(cycles[name])))
        for one, other in itertools.combinations(range(len(clients)), 2):
            assert abs(given_to[one] - given_to[other]) <= max(clients[one]) + max(clients[other])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), min_size=1, max_size=60), st.data())
def test_a_newcomer_comes_before_anybodys_second_request(waiting: list[tuple[int, int]], data: st.DataObject) -> None:
    queue = WaitingQueue()
    for name, tokens in waiting:
        queue.enqueue(group(alone(str(name)), tokens))
    for _ in range(data.draw(st.integers(0, len(waiting) - 1))):
        serve(queue)
    queue.enqueue(group(alone("new"), 1000))
    before = []
    while (served := serve(queue)).request.client.account != "new":
        before.append(served.request.client.account)
    assert len(before) == len(set(before))


@pytest.mark.parametrize("seed", range(10))
def test_clients_pay_for_requests_that_overtake_those_of_others(seed: int) -> None:
    """Whoever's request is popped, the next is of a client that has had the fewest tokens of those that wait."""
    random, queue, had = Random(seed), WaitingQueue(), defaultdict[str, int](int)
    for number in range(200):
        queue.enqueue(group(alone(str(number % 20)), random.randint(1, 50)))
    while len(queue):
        firsts = list(queue.firsts())
        assert had[queue.first().request.client.account] == min(had[one.request.client.account] for one in firsts)
        popped = random.choice(firsts)
        queue.pop(popped)
        had[popped.request.client.account] += popped.tokens


ACTIONS = ("add", "add", "add", "pop the first", "pop one", "remove one")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9), st.sampled_from(ACTIONS)), max_size=80)
)
def test_every_request_comes_out_once_and_a_connections_in_order(actions: list[tuple[int, int, int, str]]) -> None:
    queue, inside = WaitingQueue(), defaultdict[Client, list[Group]](list)

    def pop() -> None:
        first = serve(queue)
        assert first is inside[first.request.client].pop(0)

    for account, connection, tokens, action in actions:
        own = inside[Client(str(account), str(connection))]
        if action == "add":
            own.append(group(Client(str(account), str(connection)), tokens))
            queue.enqueue(own[-1])
        elif action == "remove one" and own:
            queue.remove(own.pop(tokens % len(own)))
        elif action == "pop one" and own:
            queue.pop(own.pop(tokens % len(own)))
        elif action == "pop the first" and len(queue):
            pop()
        assert {*queue} == {one for each in inside.values() for one in each} and len([*queue]) == len(queue)
    while len(queue):
        pop()
    assert not any(inside.values())


def test_the_connections_of_an_account_share_what_it_gets() -> None:
    queue = WaitingQueue()
    for _ in range(30):
        queue.enqueue(group(Client("many", "flood"), 10))
        queue.enqueue(group(Client("one", "c"), 10))
    for _ in range(10):
        serve(queue)
    queue.enqueue(group(Client("many", "bystander"), 10))
    served = [serve(queue).request.client for _ in range(40)]
    assert "bystander" in [client.connection for client in served[:4]]
    assert abs(sum(client.account == "one" for client in served) - 20) <= 1


@given(st.integers(1, 20), st.integers(1, 20))
def test_a_client_gains_nothing_by_coming_and_going(mine: int, theirs: int) -> None:
    """One that has a single request waiting, and asks again only once it is served, beside one that always waits."""
    queue, given_to = WaitingQueue(), {"flood": 0, "single": 0}
    for _ in range(200):
        queue.enqueue(group(alone("flood"), theirs))
    queue.enqueue(group(alone("single"), mine))
    for _ in range(100):
        served = serve(queue)
        given_to[served.request.client.account] += served.tokens
        if served.request.client.account == "single":
            queue.enqueue(group(alone("single"), mine))
    assert abs(given_to["flood"] - given_to["single"]) <= mine + theirs


def test_a_request_that_is_served_out_of_turn_is_charged_as_well() -> None:
    queue = WaitingQueue()
    for name in "abab":
        queue.enqueue(group(alone(name), 10))
    queue.pop(next(one for one in queue if one.request.client == alone("b")))
    assert [serve(queue).request.client.account for _ in range(3)] == ["a", "a", "b"]
    with pytest.raises(KeyError):
        queue.pop(group(alone("b"), 10))


def test_clients_that_have_gone_are_forgotten_while_others_wait() -> None:
    queue = WaitingQueue()
    queue.enqueue(group(alone("stays"), 1))
    for number in range(1000):
        queue.enqueue(group(alone("stays"), 1))
        queue.enqueue(group(alone(str(number)), 1))
        serve(queue)
        serve(queue)
    assert len(queue) <= 1001 and len(queue._lines) < 10


def test_one_client_gets_half_of_the_places_and_others_still_find_some() -> None:
    places = Places(100)
    for number in range(100):
        places.reserve_place(f"flood{number}", alone("flood"))
    with pytest.raises(OverloadedError, match="100 of them from this client"):
        places.reserve_place("more", alone("flood"))
    for other in range(5):  # as greedy as the first
        with pytest.raises(OverloadedError):
            for number in range(100):
                places.reserve_place(f"{other}-{number}", alone(str(other)))
    places.reserve_place("one", alone("newcomer"))
    assert "one" in places and "more" not in places
    for number in range(100):
        places.free_place(f"flood{number}")
        places.free_place(f"flood{number}")  # again: nothing happens
    places.reserve_place("more", alone("flood"))


@given(st.permutations(range(3)))
def test_another_engine_takes_all_requests_that_the_last_one_had_in_whatever_order(order: list[int]) -> None:
    """Greedy clients that came one after another hold less and less; whoever is first now may not shut out others."""
    first, again, held = Places(64), Places(64), dict[int, list[str]]()
    for client in range(3):
        held[client] = []
        with contextlib.suppress(OverloadedError):
            for number in range(128):
                first.reserve_place(f"{client}-{number}", alone(str(client)))
                held[client].append(f"{client}-{number}")
    for client in order:
        for request_id in held[client]:
            again.reserve_place(request_id, alone(str(client)), again=True)
    assert len(again) == len(first)
    with pytest.raises(OverloadedError):
        again.reserve_place("more", alone("0"))
