"""The choice of lanes against the truth it is to find out: times that a test made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.pipeline import Arrangement, Pipeline, Shape
from lamina.schedule.lane_choice import STEPS_BETWEEN_LOOKS, LaneChooser, StepTable, chooser


def choices(replicas: int, stages: int = 1) -> Pipeline:
    """Two, one or three fixed lanes for each stage of each replica."""
    computes = replicas * stages
    fixed = tuple(Arrangement(each * computes) for each in (2, 1, 3))
    return Pipeline(3 * computes, replicas, choices=fixed, shape=Shape(stages=stages))


def settle(
    chooser: LaneChooser, sequences: int, constant: float, per_row: float, wait_per_row: float, prompts: int = 0
) -> int:
    """Run until the choice stands: slices of constant + per_row x rows and a wait in proportion to the rows, in steps
    of all sequences that decode, or of ``prompts`` rows of prompts that are all that runs. A lane waits for attention
    or for the other lanes' slices, whichever takes longer."""
    now = 0.0
    for _ in range(60 * STEPS_BETWEEN_LOOKS * chooser.active.lanes):
        lanes = chooser.active.lanes
        decoding = 0 if prompts else -(-sequences // lanes)
        rows = decoding + prompts
        busy, wait = constant + per_row * rows, wait_per_row * rows
        now += max(busy, busy + wait if lanes == 1 else 0.0) / lanes
        chooser.note_step(rows, decoding, busy, max(wait, (lanes - 1) * busy))
        chooser.choose(sequences, now)
    return chooser.active.lanes


def round_s(lanes: int, sequences: int, constant: float, per_row: float, wait_per_row: float) -> float:
    rows = sequences / lanes
    slices = constant + per_row * rows
    return max(lanes * slices, slices + wait_per_row * rows)


@given(
    sequences=st.integers(6, 200),
    constant=st.floats(0.1, 10),
    per_row=st.floats(0, 1),
    wait_per_row=st.floats(0.001, 1),
)
def test_decoding_takes_few_lanes_where_weights_bound_it_and_more_where_it_waits(
    sequences: int, constant: float, per_row: float, wait_per_row: float
) -> None:
    chosen = settle(LaneChooser(choices(1)), sequences, constant, per_row, wait_per_row)
    times = {lanes: round_s(lanes, sequences, constant, per_row, wait_per_row) for lanes in (1, 2, 3)}
    # A slope that no other number of rows has shown is not known, nor how much of a wait is constant.
    assert times[chosen] <= min(times.values()) * 1.5


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("constant", "per_row", "wait_per_row", "each"), [(10.0, 0.01, 0.01, 1), (0.1, 0.5, 2.0, 3)])
def test_stages_get_more_lanes_than_one_each_where_steps_wait_for_attention(
    stages: int, constant: float, per_row: float, wait_per_row: float, each: int
) -> None:
    """With one lane each, stages are never idle where weights bound steps; waits as long as all slices need more."""
    chooser = LaneChooser(choices(1, stages))
    sequences, now = 24 * stages, 0.0
    for _ in range(60 * STEPS_BETWEEN_LOOKS * 3 * stages):
        lanes = chooser.active.lanes
        rows = sequences // lanes
        busy, wait = constant + per_row * rows, wait_per_row * rows
        now += max(busy / stages, (busy + wait) / lanes)
        chooser.note_step(rows, rows, busy, wait)
        chooser.choose(sequences, now)
    assert chooser.active.lanes == each * stages


def test_prompts_alone_use_lanes_though_nothing_decodes() -> None:
    """Steps are full whatever the number of lanes: one lane would leave its replica idle while it waits."""
    assert settle(LaneChooser(choices(1)), 100, 0.01, 0.001, 0.0007, prompts=2048) >= 2


def test_prompts_use_a_second_lane_that_makes_them_a_third_faster() -> None:
    """Slices take a second and waits a third of one, in steps of 60 rows of prompts."""
    assert settle(LaneChooser(choices(1)), 8, 0.1, 0.015, 1 / 180, prompts=60) > 1


@pytest.mark.parametrize(("spread", "lanes"), [(0.0, 2), (0.95, 3)])
def test_steps_that_take_unequal_times_get_more_lanes(spread: float, lanes: int) -> None:
    """A lane that waits for attention while another one runs a long step leaves the replica idle later."""
    chooser, now = LaneChooser(choices(1)), 0.0
    for step in range(60 * STEPS_BETWEEN_LOOKS * 3):
        rows = 120 // chooser.active.lanes
        mean, wait = 1 + 0.1 * rows, 0.05 * rows
        now += 1.3 * max(mean, (mean + wait) / chooser.active.lanes)
        chooser.note_step(rows, rows, mean * (1 + spread * (-1) ** (step // chooser.active.lanes)), wait)
        chooser.choose(120, now)
    assert chooser.active.lanes == lanes


def test_it_changes_its_mind_when_the_load_does() -> None:
    chooser = LaneChooser(choices(1))
    assert settle(chooser, 128, constant=0.1, per_row=0.01, wait_per_row=0.01) >= 2
    assert settle(chooser, 2, constant=0.1, per_row=0.01, wait_per_row=0.001) == 1
    assert settle(chooser, 128, constant=0.1, per_row=0.01, wait_per_row=0.01) >= 2


def test_one_lucky_look_changes_nothing() -> None:
    chooser = LaneChooser(choices(1))
    for step in range(2 * STEPS_BETWEEN_LOOKS):
        chooser.note_step(2, 2, 1.0, 0.01)
        assert chooser.choose(4, float(step)) == Arrangement(2)


def test_arrangements_are_evaluated_once_every_lane_has_run_its_steps() -> None:
    chooser = LaneChooser(choices(1))
    for step in range(1, STEPS_BETWEEN_LOOKS * 2 + 1):
        chooser.note_step(2, 2, 1.0, 0.01)
        assert chooser.due is (step == STEPS_BETWEEN_LOOKS * 2)
    assert chooser.choose(4, 0.0) == Arrangement(2) and not chooser.due


def test_attention_of_a_memory_worker_that_has_left_does_not_count() -> None:
    chooser = LaneChooser(choices(1))
    chooser.note_step(4, 4, 1.0, 0.5)
    for worker, seconds in (("leaves", 9.0), ("stays", 2.0)):
        chooser.note_attention(worker, seconds)
    assert chooser._busiest() == 9.0
    chooser.set_memory_workers({"stays"})
    assert chooser._busiest() == 2.0


def test_nothing_running_changes_nothing() -> None:
    assert LaneChooser(choices(1)).choose(0, 0.0) == Arrangement(2)


def test_where_lanes_were_asked_for_nothing_chooses() -> None:
    assert chooser(Pipeline(3, 2, rotates=True)) is None
    assert chooser(choices(2)) is not None


@given(
    rows=st.lists(st.integers(1, 500), min_size=2, max_size=40), constant=st.floats(0.1, 10), per_row=st.floats(0, 1)
)
def test_times_on_a_line_are_interpolated_to_that_line(rows: list[int], constant: float, per_row: float) -> None:
    table = StepTable()
    for one in rows:
        table.note(one, constant + per_row * one)
    known = [mean for mean, _ in table._means.values()]
    for between in (min(known), max(known), (min(known) + max(known)) / 2):
        assert min(rows) <= between <= max(rows)
        assert table.at(between) == pytest.approx(constant + per_row * between)
