"""Lanes that only run prompts, and lanes that decode: a request goes from one to the other once, or not at all."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given

from lamina.core.pipeline import Pipeline
from lamina.core.requests import Group
from lamina.core.steps import LAST_DRAWN
from lamina.schedule.admission import _Preference
from lamina.schedule.lane import Lane
from lamina.schedule.limits import Limits
from tests.support.clusters import Course
from tests.support.lossy_clusters import LOSSES, Caching
from tests.support.lossy_clusters import shared_prefix_requests as mixed
from tests.support.schedules import request, scheduler
from tests.support.sweep import MANY_EXAMPLES

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes")

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)


class SomeBeside:
    """Stands for ``Load``: lets the prompt of every third request run in a lane that decodes."""

    has_room = True

    def __init__(self, decoding: Sequence[Lane]) -> None:
        self._decoding = [lane for lane in decoding if lane.allowance > 0]

    def lane_for(self, group: Group, found: Any) -> int | None:
        if not self._decoding or group.searches or group.arrival % 3 != 1:
            return None
        return self._decoding[group.arrival % len(self._decoding)].number

    def pass_over(self, group: Group) -> None:
        """Delay no request."""


class AllBeside(SomeBeside):
    """Lets the prompt of every request run in a lane that decodes."""

    def lane_for(self, group: Group, found: Any) -> int | None:
        return self._decoding[0].number


class Apart(Caching):
    """Every second lane runs prompts, as long as there are two compute workers; the others decode, and run the prompts
    of every third request."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        pipeline = dataclasses.replace(self.topology.pipeline, prefill=1)
        self.topology = msgspec.structs.replace(self.topology, pipeline=pipeline)
        self.scheduler.change_members(self.topology, deal_again=True)
        self._in_flight = [[] for _ in range(len(self.scheduler._lanes))]
        self._turns = [0] * len(self._in_flight)
        self.handed_over = 0
        self.scheduler._dealer._short.load = self.load  # type: ignore[method-assign, assignment]

    def load(self, prompts: Sequence[int], decoding: Sequence[int], *_: Any) -> SomeBeside | None:
        lanes = self.scheduler._lanes
        return None if lanes[prompts[0]].role == "both" else SomeBeside([lanes[lane] for lane in decoding])

    def use_lanes(self, active: int) -> None:
        """A cluster whose replicas have roles uses all its lanes."""

    def plan(self, lane: int) -> None:
        for _ in self.scheduler.plannable(self._depth):
            pass
        before = len(self._in_flight[lane])
        super().plan(lane)
        role = self.topology.pipeline.role(lane)
        for plan in self._in_flight[lane][before:]:
            assert not (role == "prefill" and plan.decoding.sequences)
            self.handed_over += role == "decode" and bool(plan.decoding.sequences)


@MANY_EXAMPLES
@given(requests=mixed, course=LOSSES)
def test_every_request_ends_and_every_slot_comes_back_with_prompts_apart(requests: list, course: Course) -> None:
    """Whatever is shared, evicted, moved, dropped or lost meanwhile."""
    prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
    cluster = Apart(others, prompts, *dataclasses.replace(course, lanes=max(2, course.lanes)).sizes)
    cluster.play(dataclasses.replace(course, lanes=max(2, course.lanes)), 40)
    cluster.leave()
    cluster.check_rest()
    cluster.check_ends()


@pytest.mark.parametrize(("reason", "admitted"), [("skipped", [0, 0, 3, 3, 5]), ("preferred", [0, 0, 0, 0, 0])])
def test_prompts_beside_decoding_pass_a_request_that_does_not_fit_as_rarely_as_others(
    reason: str, admitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped request is passed after each pause; a preferred request is not passed."""
    monkeypatch.setattr("lamina.schedule.admission.PAUSE", 8)
    under_test = scheduler({"memory0": 160}, 2, LIMITS, pipeline=Pipeline(2, 2, prefill=1))
    under_test.placement.reserve_on("memory0", 82)
    under_test.placement.sequences["memory0"] += 1
    lanes, admissions = under_test._lanes, under_test._admissions
    under_test._dealer._short.load = lambda *_: AllBeside(lanes[1:])  # type: ignore[method-assign, assignment]
    under_test.submit(request("large", 60, max_tokens=1))
    large = admissions._queue.first()
    admissions._skip(large)
    if reason == "preferred":
        admissions._preferred = _Preference(large, 0)
    found = []
    for number in range(len(admitted)):
        under_test.submit(request(str(number), 4, max_tokens=1))
        lanes[0].allowance, lanes[1].allowance = 0, 16
        under_test._dealer.deal()
        found.append(len(lanes[1].running))
        admissions.steps_completed(4)
    assert found == admitted


def test_a_request_decodes_in_another_lane_one_step_after_its_prompt() -> None:
    under_test = scheduler({"memory0": 200}, 2, LIMITS, pipeline=Pipeline(2, 2, prefill=1))
    under_test.submit(request("r", 20, max_tokens=5, n=2, repetition_penalty=1.2))
    assert [*under_test.plannable(2)] == [0, 1]
    first, second = under_test.plan(0), under_test.plan(0)
    assert first is not None and second is not None and under_test.plan(1) is None
    assert [chunk.start for plan in (first, second) for chunk in plan.chunks] == [0, 16]
    under_test.complete(0)
    assert under_test.plan(1) is None
    for _, completion in under_test.complete(0).values():
        completion.generated.append(7)
    assert 1 in under_test.plannable(2)
    plan = under_test.plan(1)
    assert plan is not None and [fork.tokens for fork in plan.forks] == [20]
    assert plan.decoding.tokens == [7, 7] and plan.decoding.starts == [20, 20], "tokens drawn elsewhere are sent"
    assert plan.histories == {0: [], 1: []}
    ahead = under_test.plan(1)
    assert ahead is not None and [step.tokens for step in ahead.sequences] == [[LAST_DRAWN]] * 2
    assert under_test.plan(0) is None
    under_test.abort("r")
    for _ in range(2):
        under_test.complete(1)
    released = under_test.plan(1)
    assert released is not None and sorted(released.released) == [0, 1]
    assert under_test.placement.reserved == {"memory0": 0} and under_test._dealer.seats.taken == [0, 0]


def test_only_the_lane_that_decodes_sends_what_was_drawn_and_adds_the_prompt_to_the_cache() -> None:
    """Also if all requests were dealt out again before that: the prompt's lane would name a request that has ended."""
    under_test = scheduler({"memory0": 200}, 2, LIMITS, prefix_cache=True, pipeline=Pipeline(2, 2, prefill=1))
    under_test.submit(request("r", 20, max_tokens=2, repetition_penalty=1.2))
    for _ in range(2):
        assert under_test.plan(0) is not None
    drawn = [completion for _ in range(2) for _, completion in under_test.complete(0).values()]
    drawn[0].generated.append(7)
    under_test._deal_again()
    assert 1 in under_test.plannable(2)
    assert under_test.prefixes.changes() == ([], []), "what no plan has: switches of the next plan would name it"
    plan = under_test.plan(1)
    assert plan is not None and plan.histories == {0: []} and [fork.parent for fork in plan.forks] == [0]
    under_test.submit(request("s", 20, max_tokens=2))
    plan = under_test.plan(0)
    assert plan is not None and plan.histories == {}


def test_one_replica_decodes_however_few_are_left() -> None:
    apart = Pipeline(6, 3, prefill=2)
    assert [apart.role(lane) for lane in range(6)] == ["prefill", "prefill", "decode"] * 2
    assert [apart.with_replicas(2, 2).role(lane) for lane in range(2)] == ["prefill", "decode"]
    assert apart.with_replicas(1, 1).role(0) == apart.with_replicas(2, 0).role(1) == "both"
    assert apart.with_replicas(1, 1).with_replicas(3, 2).role(1) == "prefill", "once the lost ones are replaced"
    with pytest.raises(ValueError, match="fixed"):
        Pipeline(4, 3, rotates=True, prefill=1)
