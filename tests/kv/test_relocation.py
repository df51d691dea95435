"""Sequences that the scheduler moves to another memory worker, so that a request fits."""

from typing import Any

import pytest

from lamina.core.steps import Migration
from lamina.core.types import Segment
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler
from tests.support.schedules import plan_of, request, scheduler

pytestmark = pytest.mark.usefixtures("impatient")


def draw(under_test: Scheduler, ends: str = "") -> None:
    """The oldest step of lane 0 ends, and with it the request called ``ends``."""
    for group, completion in under_test.complete(0).values():
        completion.generated.append(7)
        if group.request.request_id == ends:
            under_test.finish(group, completion)


def fragmented() -> Scheduler:
    """Two workers of 120 tokens: "c" is alone on one, "b" on the other, and "large" waits for more than either has."""
    under_test = scheduler({"memory0": 120, "memory1": 120}, limits=Limits(4, 128, 128))
    for name in "ab":
        under_test.add(request(name, 60, max_tokens=21))
    under_test.plan(0)
    draw(under_test)
    for name in "cd":
        under_test.add(request(name, 12, max_tokens=21))
    under_test.plan(0)
    draw(under_test)
    assert under_test.placement.reserved == {"memory0": 73, "memory1": 73}
    under_test.plan(0)
    draw(under_test, ends="a")
    under_test.plan(0)
    draw(under_test, ends="d")
    under_test.add(request("large", 95, max_tokens=11))
    under_test.plan(0)
    draw(under_test)
    return under_test


def test_a_sequence_moves_to_make_room_decodes_meanwhile_and_pauses_for_the_tail_alone() -> None:
    under_test = fragmented()
    plan = plan_of(under_test)  # "c" can join "b": then all of memory0 is free
    (migration,) = plan.migrations
    moves: dict[str, Any] = {"number": 1, "sequence": 2, "source": "memory0", "target": "memory1", "start": 0}
    assert migration == Migration(**moves, stop=plan.sequences[1].start)
    assert [step.sequence for step in plan.sequences] == [1, 2] and not plan.admitted
    ahead = plan_of(under_test)
    assert [step.sequence for step in ahead.sequences] == [1, 2] and not ahead.migrations
    under_test.migrated(1)
    paused = plan_of(under_test)
    assert [step.sequence for step in paused.sequences] == [1] and not paused.migrations
    draw(under_test)
    draw(under_test)
    tail = plan_of(under_test)
    stop = migration.stop + 2
    assert tail.migrations == [Migration(2, 2, "memory0", "memory1", migration.stop, stop)] and not tail.moved
    under_test.migrated(1)  # heard already
    assert not plan_of(under_test).moved
    under_test.migrated(2)
    switch = plan_of(under_test)
    assert switch.moved == [Segment(2, "memory1", (0, 2), (0, None))]
    assert [(step.sequence, step.start) for step in switch.sequences][1] == (2, stop)
    assert [admission.segments[0].worker for admission in switch.admitted] == ["memory0"]
    starts = {step.sequence: step.start for step in switch.sequences}
    assert under_test.placement.reserved == {"memory0": 95, "memory1": starts[1] + 1 + starts[2] + 1}
    assert under_test.placement.sequences == {"memory0": 1, "memory1": 2}


@pytest.mark.parametrize("when", ["at once", "paused", "tail"])
def test_a_request_that_ends_while_it_moves_gives_back_both_reservations(when: str) -> None:
    under_test = fragmented()
    plan_of(under_test)
    if when != "at once":
        plan_of(under_test)
        under_test.migrated(1)
    if when == "tail":
        draw(under_test)
        draw(under_test)
        assert plan_of(under_test).migrations
    under_test.abort("c")
    while under_test.in_flight(0):
        draw(under_test)
    plan = plan_of(under_test)
    assert plan.released == [2] and not plan.moved and not plan.migrations
    under_test.migrated(2 if when == "tail" else 1)  # too late: the worker had said so already
    assert [admission.segments[0].worker for admission in plan.admitted] == ["memory0"]
    start = next(step.start for step in plan.sequences if step.sequence == 1)
    assert under_test.placement.reserved == {"memory0": 95, "memory1": start + 1}
    assert under_test.placement.returning == {"memory0": 0, "memory1": 0}


def test_a_sequence_whose_target_runs_out_of_slots_is_dropped_and_computed_again() -> None:
    under_test = fragmented()
    plan_of(under_test)
    under_test.migrated(1)
    while under_test.in_flight(0):
        draw(under_test)
    left = under_test.placement.left("memory1")
    under_test.placement.reserve_on("memory1", left)  # as if others had come
    plan = plan_of(under_test)
    assert not plan.migrations and under_test.dropped == 1
    (again,) = plan.admitted  # before "large": what is left of memory0 is enough for "c"
    assert again.sequence == 5
    under_test.placement.will_release("memory1", left)
    under_test.placement.release("memory1", left)
    draw(under_test)
    plan = plan_of(under_test)
    assert plan.released == [2] and plan.chunks[0].tokens == [*range(12), *[7] * 5]
    assert under_test.placement.returning == {"memory0": 0, "memory1": 0}
