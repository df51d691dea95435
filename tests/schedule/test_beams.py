"""Beams in the scheduler: whatever is chosen, dropped, lost or moved meanwhile, they attend to their own tokens."""

import dataclasses
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.requests import Completion, Group
from lamina.core.steps import StepPlan
from lamina.core.types import Request, Segment
from lamina.schedule.beam_search import Changes
from tests.support.clusters import Course
from tests.support.lossy_clusters import LOSSES, Caching
from tests.support.lossy_clusters import shared_prefix_requests as mixed
from tests.support.schedules import plan_of, request, scheduler
from tests.support.sweep import MANY_EXAMPLES

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")


class Searching(Caching):
    """Requests with several completions search; their beams go on at random.

    Attributes:
        chosen: choices made so far.
    """

    def __init__(self, requests: list, prompts: list, random: Random, *settings: Any) -> None:
        super().__init__(requests, prompts, *settings)
        self.chosen = 0
        self._random = random
        self._texts: dict[int, list[list[int]]] = {}  # by request: what its beams have
        self._answered: dict[Group, set[Completion]] = {}

    def submit(self, index: int, made: Request) -> None:
        if made.params.n > 1:
            made = dataclasses.replace(made, params=dataclasses.replace(made.params, use_beam_search=True))
            self._texts[index] = [[]] * made.params.n
        super().submit(index, made)

    def take(self, group: Group, completion: Completion) -> None:
        index = int(group.request.request_id)
        if index not in self._texts:
            super().take(group, completion)
            return
        texts = self._texts[index]
        length = len(texts[0])
        completion.answered = True
        answered = self._answered.setdefault(group, set())
        assert completion not in answered
        answered.add(completion)
        if len(answered) < (len(texts) if length else 1):
            return
        answered.clear()
        if length + 1 in (group.max_tokens, self.requests[index][3][0]):
            for one in group.completions:
                self.lengths.setdefault(str(index), []).append(length + 1)
                self.scheduler.end_completion(group, one)
            return
        self.scheduler.beams.choose(group, self._choice(index, texts))

    def _choice(self, index: int, texts: list[list[int]]) -> list[tuple[int, int]]:
        """Some beams go on, at their own places, and others take the places of those that do not."""
        self.chosen += 1
        places = range(len(texts))
        kept = self._random.sample(places, self._random.randint(1, len(texts))) if texts[0] else places
        parents = [place if place in kept else self._random.choice(kept) for place in places]
        choice = [(parent, 1000 * self.chosen + place) for place, parent in enumerate(parents)]
        self._texts[index] = [[*texts[parent], token] for parent, token in choice]
        for place, text in enumerate(self._texts[index]):
            self._drawn[index, place] = text
        return choice

    def plan(self, lane: int) -> None:
        super().plan(lane)
        for memory in self.memories:
            placement = self.scheduler.placement
            assert placement.reserved[memory.name] >= 0 and placement.sequences[memory.name] >= 0

    def _check(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            self._computed[fork.child] = max(self._computed.get(fork.child, 0), fork.tokens)
        super()._check(plan)

    def tokens_of(self, sequence: int) -> list[int]:
        index, place = self._owners[sequence]
        if index not in self._texts:
            return super().tokens_of(sequence)
        return [*self.prompt(index), *self._texts[index][place]]


@MANY_EXAMPLES
@given(requests=mixed, random=st.randoms(use_true_random=False), course=LOSSES)
def test_beams_attend_to_their_own_tokens_and_every_slot_comes_back(
    requests: list, random: Random, course: Course
) -> None:
    prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
    cluster = Searching(others, prompts, random, *course.sizes)
    cluster.play(course, 40)
    cluster.leave()
    cluster.check_rest()
    for index, (_, _, n, stops, aborted, _) in enumerate(cluster.requests):
        if aborted is None and index not in cluster.unservable:
            most = cluster.groups[index].max_tokens
            expected = [stops[0] or most] * n if n > 1 else [stops[0] or most]
            assert cluster.lengths[str(index)] == [min(stop, most) for stop in expected]


def test_cached_tokens_give_way_where_a_beam_needs_one_more_slot() -> None:
    """The beam's next tokens, for which every step makes room, are stored elsewhere."""
    cluster, asked = scheduler({"memory0": 10, "memory1": 10}), request("0", 2, n=2, max_tokens=8, use_beam_search=True)
    beams = [Completion(10 + place, place, [5, 6], cached=2, goal=2, own=2, answered=True) for place in (0, 1)]
    group = Group(asked, 8, beams, lane=0, heads=(0, 2), forked=True)
    spans: list[list[tuple[str, int, int | None]]] = [
        [("memory1", 0, 2), ("memory0", 2, 3), ("memory1", 3, None)],
        [("memory1", 0, None)],
    ]
    for one, parts in zip(beams, spans, strict=True):
        one.segments = [Segment(one.sequence, worker, (0, 2), (first, stop)) for worker, first, stop in parts]
    for worker, tokens in (("memory0", 1), ("memory1", 5)):
        cluster.placement.reserve_on(worker, tokens)
    cluster.placement.add_idle("memory0", 9)
    cluster.beams.choose(group, [(0, 8), (0, 9)])
    changes = cluster.beams.join_step(cluster._lanes[0])
    assert len(changes.forks) == 1 and not changes.preempted
    assert cluster.placement.reserved == {"memory0": 2, "memory1": 4}
    assert cluster.placement.crowded == {"memory0"}, "one of its 9 cached tokens must be evicted"


def test_a_request_whose_beams_lack_slots_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    under_test = scheduler({"memory0": 60})
    group = under_test.submit(request("0", 6, n=2, max_tokens=8, use_beam_search=True))
    (first,) = plan_of(under_test).chunks
    under_test.complete(0)
    with monkeypatch.context() as patch:
        patch.setattr(under_test.beams, "join_step", lambda lane: Changes(preempted=[group]))
        (again,) = plan_of(under_test).chunks
    assert under_test.dropped == 1
    assert (again.start, again.stop) == (first.start, first.stop) and again.sequence != first.sequence
