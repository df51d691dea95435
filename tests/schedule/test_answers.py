"""Answers to steps are used in the order of each lane's steps, however they arrive."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.control.messages import StepDone
from lamina.core.steps import DecodeRows, StepPlan
from lamina.schedule.turn import Answers


def plan(step: int, lane: int, *, runs: bool = True) -> StepPlan:
    rows = DecodeRows([7], [step], []) if runs else DecodeRows([], [], [])
    return StepPlan(step, lane, 0, [], [], [], [], rows)


@given(st.data(), st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
def test_a_lane_hears_of_its_steps_in_order_and_of_all(data: st.DataObject, planned: list[tuple[int, bool]]) -> None:
    answers = Answers()
    plans = [plan(step, lane, runs=runs) for step, (lane, runs) in enumerate(planned)]
    for each in plans:
        answers.expect(each)
    heard: list[int] = []
    for step in data.draw(st.permutations(range(len(plans)))):
        ready = [done.step for done in answers.pop_ready(plans[step], StepDone(step, []))]
        if not plans[step].runs:
            assert ready == [step]
        heard += ready
    assert sorted(heard) == list(range(len(plans)))
    for lane in range(3):
        of_lane = [step for step in heard if plans[step].lane == lane and plans[step].runs]
        assert of_lane == sorted(of_lane)


def test_an_answer_waits_for_none_but_those_before_it_in_its_lane() -> None:
    answers = Answers()
    first, other, second = plan(1, 0), plan(2, 1), plan(3, 0)
    for each in (first, other, second):
        answers.expect(each)
    assert answers.pop_ready(second, StepDone(3, [])) == []
    assert [done.step for done in answers.pop_ready(other, StepDone(2, []))] == [2]
    assert [done.step for done in answers.pop_ready(first, StepDone(1, []))] == [1, 3]
