"""Ranges that move while their sequences decode, against what every slot of the memory workers holds."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.schedule import moves
from lamina.schedule.limits import Limits
from lamina.types import StepPlan
from tests.schedule.schedules import LIMITS, plan_of, request, scheduler
from tests.schedule.test_prefixes import Caching, requests, short_prefixes
from tests.schedule.test_scheduler import MANY

__all__ = ["short_prefixes"]

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")


class Moving(Caching):
    """Ranges of requests move at random. What a step reads must be there until it has completed."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.read: dict[int, list[tuple[str, int, tuple[int, ...]]]] = {}  # by step
        self._reading: list[tuple[str, int, tuple[int, ...]]] = []

    def move(self, number: int, tokens: int) -> int:
        """One of the requests moves some tokens from one worker to another, if it can."""
        names = [memory.name for memory in self.memories]
        pairs = list(itertools.permutations(names, 2))
        groups = [group for lane in self.scheduler._lanes for group in lane.running]
        if not groups or not pairs:
            return 0
        source, target = pairs[number % len(pairs)]
        return self.scheduler.moves.try_move(groups[number % len(groups)], source, target, tokens)

    def arrive_out_of_order(self, number: int) -> None:
        """One of the migrations is done."""
        if self._migrations:
            self.scheduler.migrated(self._migrations.pop(number % len(self._migrations)).number)

    def _check(self, plan: StepPlan) -> None:
        self._reading = []
        super()._check(plan)
        self.read[plan.step] = self._reading

    def _attend(self, name: str, slots: list[int], sequence: int, first: int, old: int) -> None:
        super()._attend(name, slots, sequence, first, old)
        self._reading += [(name, slot, self.contents[name][slot]) for slot in slots]

    def complete(self, lane: int) -> None:
        """The oldest step of a lane ends, and has read what it was to read."""
        for name, slot, key in self.read.pop(self._in_flight[lane][0].step):
            if name in self.scheduler.placement.capacities:
                assert self.contents[name][slot] == key
        super().complete(lane)


def run(cluster: Moving, lanes: int, events: dict[str, dict[int, Any]], migration_turns: int) -> None:
    for turn in itertools.count():
        assert turn < 2000, "the scheduler does not come to rest"
        if turn in events["switches"]:
            cluster.scheduler.use_lanes(min(events["switches"][turn], lanes))
        cluster.arrive(turn)
        for number, tokens in events["moves"].get(turn, ()):
            cluster.move(number, tokens)
        if turn % migration_turns == 0:
            cluster.arrive_out_of_order(turn)
        if turn in events["drops"]:
            cluster.drop(events["drops"][turn])
        if turn in events["ends"]:
            cluster.end_epoch(events["ends"][turn])
        if turn in events["leaves"]:
            cluster.drain(events["leaves"][turn])
        cluster.leave()
        for lane in range(lanes):
            if cluster.scheduler.in_flight(lane) and (turn + lane) % 2:
                cluster.complete(lane)
            cluster.plan(lane)
        if turn > 40 and not cluster.busy:
            break
    cluster.leave()
    cluster.check_rest()
    assert not cluster.scheduler.moves.in_progress
    for index, (_, _, n, stops, aborted, _) in enumerate(cluster.requests):
        if aborted is None and index not in cluster.unservable:
            most = cluster.groups[index].max_tokens
            assert sorted(cluster.lengths[str(index)]) == sorted(min(stop or most, most) for stop in stops[:n])


turns = st.integers(0, 40)


@settings(max_examples=60, deadline=None)
@given(
    requests=requests,
    memories=st.integers(2, 4),
    lanes=st.integers(1, 3),
    depth=st.integers(1, 3),
    limits=st.sampled_from([LIMITS, MANY]),
    capacity=st.sampled_from([60, 60, 27]),
    longest=st.sampled_from([None, None, 5, 11]),
    migration_turns=st.integers(1, 3),
    events=st.fixed_dictionaries(
        {
            "moves": st.dictionaries(
                turns, st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 20)), min_size=1, max_size=4), max_size=25
            ),
            "switches": st.dictionaries(turns, st.integers(1, 3), max_size=2),
            "drops": st.dictionaries(turns, st.integers(0, 20), max_size=3),
            "ends": st.dictionaries(turns, st.integers(0, 2), max_size=2),
            "leaves": st.dictionaries(turns, st.integers(0, 5), max_size=1),
        }
    ),
)
def test_whatever_moves_rows_attend_to_their_own_tokens_and_every_slot_comes_back(
    requests: list,
    memories: int,
    lanes: int,
    depth: int,
    limits: Limits,
    capacity: int,
    longest: int | None,
    migration_turns: int,
    events: dict[str, dict[int, Any]],
) -> None:
    """Forks and cached prefixes share what moves; requests end, are dropped or aborted, workers are lost and leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "TOKENS_PER_STEP", 1000)
        prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
        cluster = Moving(others, prompts, memories, lanes, depth, limits, capacity, longest)
        cluster.scheduler.moves._tokens_per_step = 1000
        run(cluster, lanes, events, migration_turns)
