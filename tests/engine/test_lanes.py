"""The choice of lanes against the truth it is to find out: times that a test made up."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.lanes import STEPS_BETWEEN_CHANGES, WORTH, LaneChooser
from lamina.engine.pipeline import Pipeline


def settle(chooser: LaneChooser, sequences: int, constant: float, per_row: float, attention: float) -> int:
    """Run until the choice stands: slices of constant + per_row x rows, attention so long for everybody's tokens."""
    spent = 0.0
    for _ in range(40 * STEPS_BETWEEN_CHANGES):
        lanes = chooser.active
        rows = -(-sequences // lanes)
        chooser.note_slices(rows, constant + per_row * rows)
        spent += attention / lanes
        chooser.note_attention("memory0", spent)
        chooser.choose(sequences)
    return chooser.active


def round_time(lanes: int, replicas: int, sequences: int, constant: float, per_row: float, attention: float) -> float:
    slices = constant + per_row * sequences / lanes
    return max(lanes * slices / replicas, attention, slices + attention / lanes)


@given(
    replicas=st.integers(1, 4),
    sequences=st.integers(1, 200),
    constant=st.floats(0.1, 10),
    per_row=st.floats(0, 1),
    attention=st.floats(0.01, 100),
)
def test_the_choice_is_near_the_best_there_is(
    replicas: int, sequences: int, constant: float, per_row: float, attention: float
) -> None:
    pipeline = Pipeline(replicas + 1, replicas, rotates=True)
    chosen = settle(LaneChooser(pipeline), sequences, constant, per_row, attention)
    times = {
        lanes: round_time(lanes, replicas, sequences, constant, per_row, attention)
        for lanes in range(1, min(pipeline.lanes, sequences) + 1)
    }
    # Where every lane had the same number of rows the slope is unknown, and more lanes look no worse than they are.
    assert times[chosen] <= min(times.values()) / WORTH * 1.35


def test_small_batches_want_one_lane_and_large_ones_two() -> None:
    pipeline = Pipeline(2, 1, rotates=True)
    assert settle(LaneChooser(pipeline), 2, constant=1.0, per_row=0.001, attention=0.1) == 1
    assert settle(LaneChooser(pipeline), 128, constant=0.1, per_row=0.01, attention=1.3) == 2


def test_it_changes_its_mind_when_the_load_does() -> None:
    chooser = LaneChooser(Pipeline(2, 1, rotates=True))
    assert settle(chooser, 128, constant=0.1, per_row=0.01, attention=1.3) == 2
    assert settle(chooser, 2, constant=0.1, per_row=0.01, attention=0.01) == 1
    assert settle(chooser, 128, constant=0.1, per_row=0.01, attention=1.3) == 2


def test_nothing_running_changes_nothing() -> None:
    chooser = LaneChooser(Pipeline(2, 1, rotates=True))
    assert chooser.choose(0) == 2
