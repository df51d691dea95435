"""Requests that make workers die, among others: they are found, nobody else is ended, and few workers die for it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lamina.schedule.suspects import Hold, Positions, Suspects

DEPTH = 2  # steps in flight


class World:
    """Requests that decode, one token a step; a poison one kills its worker once it runs its last token."""

    def __init__(self, requests: int, fatal: dict[int, int], workers: int) -> None:
        self.suspects = Suspects()
        self.done = {str(number): 0 for number in range(requests)}  # tokens run
        self.fatal = {str(number): position for number, position in fatal.items()}
        self.workers = workers
        self.convicted: list[str] = []
        self.deaths = 0

    def arrive(self) -> None:
        self.done[f"later{len(self.done)}"] = 0

    def step(self, victims: int, length: int) -> None:
        """All that may run do, spread over workers, each of which dies of a fatal row."""
        hold = self.suspects.hold
        running = [one for one in self.done if hold.may_run(one)]
        assert running, "somebody may run"
        deadly = [one for one in running if self.fatal.get(one, math.inf) <= self.done[one] + 1]
        if deadly:
            place = self._worker(deadly[victims % len(deadly)])
            exposed = {one: self._in_flight(one) for one in running if self._worker(one) == place}
            self.deaths += 1
            if (poison := self.suspects.note_death(exposed, running)) is not None:
                self.convicted.append(poison)
                del self.done[poison]
            return
        for one in running:
            self.done[one] += 1
            if self.done[one] >= length and one not in self.fatal:
                del self.done[one]
        self.suspects.note_run([(one, 0, self.done[one]) for one in running if one in self.done])
        self.suspects.prune(lambda one: [0] if one in self.done else [])

    def _in_flight(self, one: str) -> Positions:
        return {0: self.done[one] + DEPTH}

    def _worker(self, one: str) -> int:
        return sum(one.encode()) % self.workers


@given(
    requests=st.integers(1, 300),
    poison=st.integers(0, 299),
    position=st.integers(1, 9),
    workers=st.integers(1, 3),
)
def test_a_poison_request_is_found_with_few_deaths_and_nobody_else_is_ended(
    requests: int, poison: int, position: int, workers: int
) -> None:
    world = World(requests, {poison % requests: position}, workers)
    while world.done:
        world.step(0, 12)
    assert world.convicted == [str(poison % requests)]
    assert world.deaths <= math.ceil(math.log2(requests)) + 4
    assert not world.suspects.searching and world.suspects.hold == Hold()


@given(
    requests=st.integers(1, 60),
    fatal=st.dictionaries(st.integers(0, 59), st.integers(1, 9), max_size=5),
    workers=st.integers(1, 3),
    arrivals=st.sets(st.integers(0, 60), max_size=20),
    victims=st.lists(st.integers(0, 5), min_size=1),
    accidents=st.dictionaries(st.integers(0, 60), st.integers(0, 2), max_size=4),
)
def test_several_poison_requests_are_found_whoever_comes_and_whatever_else_dies(
    requests: int,
    fatal: dict[int, int],
    workers: int,
    arrivals: set[int],
    victims: list[int],
    accidents: dict[int, int],
) -> None:
    """Accidents strike requests that make progress between them: two in a row, of one that runs alone, look like
    poison."""
    fatal = {number: position for number, position in fatal.items() if number < requests}
    world = World(requests, fatal, workers)
    for turn in range(5000):
        if turn in arrivals:
            world.arrive()
        if turn in accidents and world.done and not world.suspects.searching:
            running = list(world.done)
            exposed = {one: world._in_flight(one) for one in running if world._worker(one) == accidents[turn]}
            assert world.suspects.note_death(exposed, running) is None
        if world.done:
            world.step(victims[turn % len(victims)], 12)
        elif turn > 60:
            break
    assert not world.done
    assert sorted(world.convicted) == sorted(map(str, fatal))
    most = requests + len(arrivals)
    assert world.deaths <= len(fatal) * (math.ceil(math.log2(most)) + 4) + len(accidents)


def test_a_suspect_is_cleared_by_running_what_was_in_flight_and_only_then() -> None:
    suspects = Suspects()
    assert suspects.note_death({"a": {0: 10, 1: 12}, "b": {0: 5}, "c": {0: 5}}, ["a", "b", "c"]) is None
    assert suspects.hold == Hold(frozenset("c"))
    suspects.note_run([("a", 0, 10), ("a", 1, 11), ("b", 0, 6), ("x", 0, 99)])
    assert suspects.hold == Hold(frozenset("c"))
    suspects.prune(lambda one: [0])  # the second completion of a has ended
    assert suspects.hold == Hold()
    assert suspects.searching
    suspects.note_run([("c", 0, 5)])
    assert not suspects.searching


def test_deaths_before_a_request_was_cleared_do_not_count() -> None:
    suspects = Suspects()
    for _ in range(3):
        assert suspects.note_death({"a": {0: 1}}, ["a"]) is None
        suspects.note_run([("a", 0, 1)])
        assert not suspects.searching


def test_a_death_while_others_run_too_proves_nothing() -> None:
    suspects = Suspects()
    assert suspects.note_death({"a": {0: 1}}, ["a", "b"]) is None
    assert suspects.hold == Hold()
    for _ in range(2):
        assert suspects.note_death({"a": {0: 1}}, ["a", "b"]) is None
        assert suspects.hold == Hold(only=frozenset("a"))
    assert suspects.note_death({"a": {0: 1}}, ["a"]) is None
    assert suspects.note_death({"a": {0: 1}}, ["a"]) == "a"
    assert not suspects.hold.active
