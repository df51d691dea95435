"""The scheduler with cached prefixes, against what every slot of its memory workers holds."""

import collections
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.steps import StepPlan
from tests.schedule.test_epochs import Losing
from tests.support.clusters import Course, courses, turns
from tests.support.schedules import LIMITS, plan_of, request, scheduler

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")


class Caching(Losing):
    """Prompts begin alike, and some with what others generate; every slot is known by the tokens up to its own."""

    prefix_cache = True

    def __init__(self, requests: list, prompts: list, memories: int, *settings: Any) -> None:
        self.prompts = prompts
        requests = [(len(self.prompt(index)), *one) for index, one in enumerate(requests)]
        super().__init__(requests, memories, *settings)
        self.contents = collections.defaultdict[str, dict[int, tuple[int, ...]]](dict)
        self.hits = 0

    def prompt(self, index: int) -> list[int]:
        """The same first tokens, then those of a completion, then others."""
        alike, generated, other, number = self.prompts[index]
        return [*range(alike), *range(generated), *(1000 + number for _ in range(other))]

    def plan(self, lane: int) -> None:
        running = len(self._in_flight[lane])
        super().plan(lane)
        for plan in self._in_flight[lane][running:]:
            self._check(plan)

    def _check(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            if fork.child not in self._owners or fork.parent not in self._owners:  # else: of one request
                assert self._computed[fork.parent] >= fork.tokens
                self._computed[fork.child] = fork.tokens
                self.hits += fork.child in self._owners
        for migration in plan.migrations:
            part = slice(migration.start, migration.stop) if migration.parent is None else slice(None)
            slots = {
                memory.name: memory.slab.slots((migration.sequence, 0))[part].tolist()
                for memory in self.memories
                if memory.name in (migration.source, migration.target)
            }
            for source, target in zip(slots[migration.source], slots[migration.target], strict=True):
                self.contents[migration.target][target] = self.contents[migration.source][source]
        placement = self.scheduler.placement
        for memory in self.memories:
            for step in plan.sequences:
                for first in memory.here.get(step.sequence, ()):
                    slots = memory.slab.slots((step.sequence, first)).tolist()
                    self._attend(memory.name, slots, step.sequence, first, max(step.start - first, 0))
            used, capacity = memory.slab.used, placement.capacities[memory.name]
            assert used <= placement.reserved[memory.name] + placement.idle[memory.name] <= capacity

    def _attend(self, name: str, slots: list[int], sequence: int, first: int, old: int) -> None:
        """A sequence's next tokens attend to those before, whoever computed them: ``old`` ones of a segment."""
        tokens = self.tokens_of(sequence)
        keys = [tuple(tokens[: position + 1]) for position in range(first, first + len(slots))]
        contents = self.contents[name]
        assert [contents[slot] for slot in slots[:old]] == keys[:old]
        contents |= zip(slots[old:], keys[old:], strict=True)

    def tokens_of(self, sequence: int) -> list[int]:
        """The first tokens of a sequence, drawn already or not."""
        index, completion = self._owners[sequence]
        return [*self.prompt(index), *(100 * completion + number for number in range(40))]

    def check_kept(self, sequence: int, tokens: int) -> None:
        """A cached prefix is kept too: ``_attend`` and ``check_rest`` compare what it holds."""

    def check_rest(self) -> None:
        """All slots are free, or cached for others, and each counts once."""
        placement, prefixes = self.scheduler.placement, self.scheduler.prefixes
        assert not any(placement.reserved.values()) and not any(placement.returning.values())
        for memory in self.memories:
            assert memory.here.keys() == prefixes.sequences(memory.name).keys()
            assert (memory.slab.used, len(memory.here)) == prefixes.idle(memory.name)
        cached = {one: tokens for memory in self.memories for one, tokens in prefixes.sequences(memory.name).items()}
        for sequence, tokens in cached.items():
            path: dict[int, tuple[int, ...]] = {}
            for memory in self.memories:
                for start in memory.here.get(sequence, ()):
                    slots = memory.slab.slots((sequence, start)).tolist()
                    path |= {start + place: self.contents[memory.name][slot] for place, slot in enumerate(slots)}
            assert sorted(path) == list(range(tokens))
            assert all(path[tokens - 1][: position + 1] == key for position, key in path.items())


requests = st.lists(
    st.tuples(
        st.tuples(st.integers(1, 14), st.integers(0, 6), st.integers(0, 3), st.integers(0, 2)),
        st.integers(1, 10),  # max_tokens
        st.integers(1, 3),  # n
        st.lists(st.integers(0, 12), min_size=3, max_size=3),  # a completion stops by itself after that many tokens
        st.one_of(st.none(), st.none(), st.integers(0, 25)),  # aborted at this turn
        st.integers(0, 25),  # arrives at this turn
    ),
    max_size=14,
)


LOSSES = courses(
    drop=turns(st.integers(0, 20), 5),
    end_epoch=turns(st.integers(0, 2), 3, last=40),
    join=turns(st.integers(20, 60), 2),
    drain=turns(st.integers(0, 5), 3),
)


@pytest.mark.parametrize("second", [0, 1])
def test_a_request_whose_forks_were_undone_is_released_before_the_next_epoch_ends(second: int) -> None:
    prompts = [(1, 0, 0, 0)] * 7
    others: list = [(1, 1, [0, 0, 0], None, 0)] * 4
    others += [(2, 2, [0, 0, 0], None, 18), (4, 1, [0, 0, 0], None, 10), (5, 1, [0, 0, 0], None, 5)]
    course = Course(3, 1, 3, LIMITS, 60, None, 1, {"end_epoch": {24: 2, 25: second}, "drain": {0: 0, 24: 0}})
    cluster = Caching(others, prompts, *course.sizes)
    cluster.play(course, 40)
    cluster.check_rest()
    cluster.check_ends()


@settings(max_examples=200, deadline=None)
@given(requests=requests, course=LOSSES)
def test_rows_attend_to_their_own_tokens_and_every_slot_is_free_or_cached_in_the_end(
    requests: list, course: Course
) -> None:
    """Whatever is shared, evicted, split, moved, dropped or lost meanwhile, and whoever joins or leaves."""
    prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
    cluster = Caching(others, prompts, *course.sizes)
    cluster.play(course, 40)
    cluster.leave()
    assert not cluster.scheduler.placement.closed
    cluster.check_rest()
    cluster.check_ends()


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_dropped_request_shares_what_it_had_but_generated_tokens_run_again_for_penalties(penalty: float) -> None:
    """Replicas learn the tokens that count for penalties from the chunks that run them."""
    under_test = scheduler({"memory0": 60}, prefix_cache=True)
    under_test.submit(request("0", 6, max_tokens=20, frequency_penalty=penalty))
    for _ in range(5):
        plan_of(under_test)
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
    (group,) = under_test.holders("memory0")
    under_test.preempt(group)
    while not (plan := plan_of(under_test)).admitted:
        under_test.complete(0)
    (chunk,) = plan.chunks
    assert chunk.start == (6 if penalty else 10) and chunk.stop == 11
    assert plan.forks[-1].child == chunk.sequence and plan.forks[-1].tokens == chunk.start
