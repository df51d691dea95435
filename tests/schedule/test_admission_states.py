"""``Admissions`` alone, under random operations, against a model that knows only who waits, who runs and where."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lamina.core.pipeline import Pipeline
from lamina.core.requests import Completion, Group
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Client
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule import admission
from lamina.schedule.admission import Admissions, Seats, request_to_preempt
from lamina.schedule.lane import Residents
from lamina.schedule.lane_times import LaneTimes
from lamina.schedule.limits import Limits
from lamina.schedule.policy import FIFO
from tests.support.schedules import client, request
from tests.support.sweep import MANY_EXAMPLES

PAUSE, PATIENCE = 3, 1
LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=6, max_model_len=64)
SMALLEST, LARGEST = 24, 120  # slots of a memory worker: each can hold any request
PIPELINE = Pipeline(2, 2)
WHICH = st.integers(0, 20)


def choose(among: Iterable[Any], which: int) -> Any:
    several = list(among)
    return several[which % len(several)]


@dataclass
class Model:
    """Every request, in order of arrival, in one of three lists.

    Attributes:
        waiting: requests to be admitted. The value is true for those whose turn follows from their arrival: they were
            never admitted, and all requests might be admitted since they came.
        running: with the slots of each memory worker.
        ended: with the number of times that each was admitted.
    """

    waiting: dict[Group, bool] = field(default_factory=dict)
    running: dict[Group, dict[str, int]] = field(default_factory=dict)
    ended: set[Group] = field(default_factory=set)

    def sequences(self, client: Client) -> int:
        return sum(len(one.completions) for one in self.running if one.request.client == client)

    def account(self, client: Client) -> int:
        return sum(len(one.completions) for one in self.running if one.request.client.account == client.account)


class Waiting(RuleBasedStateMachine):
    """Clients come and go, requests run, are preempted and end, memory workers join, close and are lost."""

    @initialize(memories=st.integers(1, 3), clients=st.integers(1, 5), reserved=st.booleans())
    def begin(self, memories: int, clients: int, reserved: bool) -> None:
        """``reserved``: with seats that are taken, and a reservation for a request that waits."""
        self.clients = clients
        self.numbers, self.names = itertools.count(), itertools.count()
        members = [Member(self._name(), "memory", "cpu", "", LARGEST) for _ in range(memories)]
        self.topology = Topology(FIRST, (Member("compute0", "compute", "cpu", ""), *members), PIPELINE)
        self.placement = Placement(self.topology.capacities)
        prefixes = PrefixCache(self.placement, itertools.count(), enabled=False)
        self.residents = Residents(self.placement, prefixes, [])
        self.admissions = Admissions(LIMITS, self.placement, self.residents, prefixes, FIFO, LaneTimes([]))
        self.seats = Seats(PIPELINE.lanes)
        self.model = Model()
        self.allowed: set[str] | None = None
        if reserved:
            self.add(1, [4, 1])
            self.deal(0, False, {0, 1})
            self.add(1, [2])
            self.deal(0, False, {0, 1})
            self.deal(PATIENCE, False, {0, 1})

    def _name(self) -> str:
        return f"memory{next(self.names)}"

    # -- requests ----------------------------------------------------------------------------------------------------

    @rule(prompt=st.sampled_from([1, 1, 1, SMALLEST]), several=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def add(self, prompt: int, several: list[int]) -> None:
        for n in several:
            self._add(prompt, n)

    def _add(self, prompt: int, n: int) -> None:
        number = next(self.numbers)
        made = request(str(number), prompt, client(number, self.clients), n=n, max_tokens=1)
        group = Group(made, 1, [Completion(10 * number + index, index) for index in range(n)], number, heads=(0, 1))
        self.model.waiting[group] = self.allowed is None
        self.admissions.enqueue(group)

    @precondition(lambda self: self.model.waiting)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        group = choose(self.model.waiting, which)
        self.admissions.remove(group)
        del self.model.waiting[group]
        self.model.ended.add(group)

    @precondition(lambda self: len(self.model.running) > 1)
    @rule(which=WHICH)
    def end(self, which: int) -> None:
        group = choose(self.model.running, which)
        self._release(group)
        self.model.ended.add(group)

    @precondition(lambda self: len(self.model.running) > 2)
    @rule(which=WHICH)
    def preempt(self, which: int) -> None:
        self._preempt(choose(self.model.running, which))

    def _preempt(self, group: Group) -> None:
        self._release(group)
        self.model.waiting[group] = False
        self.admissions.put_back(group)

    def _release(self, group: Group) -> None:
        for worker, tokens in self.model.running.pop(group).items():
            self.placement.will_release(worker, tokens)
            self.placement.free_slots(worker, tokens)
        self.placement.remove_growing(group.completions[0].worker, len(group.completions))
        self.seats.add_sequences(group.lane, -len(group.completions), group.request.client)
        self.residents.forget_request(group)
        self.admissions.note_freed()
        group.lane = -1

    # -- time and fairness -------------------------------------------------------------------------------------------

    @rule(
        steps=st.integers(0, PAUSE),
        shares=st.sampled_from([False, False, True]),
        open_lanes=st.sampled_from([{0, 1}, {0, 1}, {0}, {1}]),
    )
    def deal(self, steps: int, shares: bool, open_lanes: set[int]) -> None:
        """Admit what fits after so many steps. Nobody passes an earlier request of its own client that asks for the
        same."""
        for _ in range(steps):
            self.admissions.steps_completed(1)
        if shares and self.admissions.may_share:
            self._share()
        for group in self.admissions.deal(self.seats, open_lanes.__contains__):
            in_order = self.model.waiting.pop(group)  # KeyError: it did not wait
            assert self.allowed is None or group.request.request_id in self.allowed
            assert group not in self.model.running
            wanted = len(group.completions)
            if in_order:
                for other, others_turn in self.model.waiting.items():
                    own = others_turn and other.request.client == group.request.client and other.arrival < group.arrival
                    alike = (other.prompt_length, len(other.completions)) == (group.prompt_length, wanted)
                    assert not (own and alike), "out of turn"
            held = group.slots(group.completions[0], group.completions[0].own, alone=True)
            assert sum(held.values()) == group.prompt_length
            self.model.running[group] = held
            self.seats.add_sequences(group.lane, wanted, group.request.client)
            assert self.seats.total <= LIMITS.max_sequences
            assert max(self.seats.taken) <= LIMITS.max_num_batched_tokens

    def _share(self) -> None:
        """A client is asked for seats only if it has more of them than some other that waits would have then."""
        holders = self.admissions.share(self.seats)
        for holder in holders:
            assert any(
                self.model.sequences(holder) > self.model.sequences(asks) + len(one.completions)
                if asks.account == holder.account
                else self.model.account(holder) > self.model.account(asks) + len(one.completions)
                for one in self.model.waiting
                for asks in [one.request.client]
            )
        if holders and (group := request_to_preempt(holders, self.model.running)) is not None:
            self._release(group)
            group.gave_way = True
            self.model.waiting[group] = False
            self.admissions.enqueue(group)

    @rule(only=st.one_of(*[st.none()] * 3, st.sets(st.integers(0, 20))))
    def restrict(self, only: set[int] | None) -> None:
        """Only some requests may be admitted, wherever they wait."""
        self.allowed = None if only is None else set(map(str, only))
        self.model.waiting = dict.fromkeys(self.model.waiting, False)
        self.admissions.restrict(self.allowed)

    # -- memory workers ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.topology.capacities) > 1)
    @rule(which=WHICH)
    def lose(self, which: int) -> None:
        name = choose(self.topology.capacities, which)
        for group in [one for one, held in self.model.running.items() if name in held]:
            self._preempt(group)
        self.topology = self.topology.without([name])
        self.placement.apply_topology(self.topology)
        self.residents.on_places_changed()
        self.admissions.on_places_changed()

    @rule(capacity=st.integers(SMALLEST, LARGEST))
    def join(self, capacity: int) -> None:
        self.topology = self.topology.joined([Member(self._name(), "memory", "cpu", "", capacity)], PIPELINE)
        self.placement.apply_topology(self.topology)
        self.residents.on_places_changed()
        self.admissions.on_places_changed()

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        name = choose(self.topology.capacities, which)
        self.placement.close(name)
        self.admissions.close(name)

    @precondition(lambda self: self.placement.closed)
    @rule()
    def open(self) -> None:
        self.placement.open(min(self.placement.closed))
        self.admissions.note_freed()

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def each_waits_in_exactly_one_place(self) -> None:
        waits = Counter([*self.admissions._skipped, *self.admissions._queue])
        assert waits == Counter(list(self.model.waiting)) and len(self.admissions) == len(self.model.waiting)
        assert self.admissions._reserved is None or self.admissions._skipped
        if self.admissions._preferred is not None:
            assert self.admissions._preferred.group in self.admissions._skipped

    def teardown(self) -> None:
        """However it came to this, everybody is admitted once the others end, one at least with each round."""
        self.allowed = None
        self.admissions.restrict(None)
        for name in list(self.placement.closed):
            self.placement.open(name)
        while self.model.waiting or self.model.running:
            waiting = len(self.model.waiting)
            for group in list(self.model.running):
                self._release(group)
                self.model.ended.add(group)
            self.deal(PATIENCE + PAUSE, True, {0, 1})
            self.each_waits_in_exactly_one_place()
            assert not waiting or len(self.model.waiting) < waiting, "nobody is admitted although nothing runs"
        assert len(self.model.ended) == next(self.numbers)
        assert not any(self.placement.reserved.values()) and not self.seats.total


def test_each_request_waits_in_one_place_and_is_admitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAUSE", PAUSE), ("PATIENCE", PATIENCE), ("SHARE", 0), ("MOST_SKIPPED", 3)):
        monkeypatch.setattr(admission, name, value)
    run_state_machine_as_test(Waiting, settings=settings(MANY_EXAMPLES, stateful_step_count=60))
