"""Chunks beside sequences that decode, against workers whose steps take a known time."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.control.messages import StepDone
from lamina.core.pipeline import Pipeline
from lamina.core.steps import DecodeRows, SequenceStep, StepPlan
from lamina.kv.placement import Placement
from lamina.schedule.batches import PromptBatch
from lamina.schedule.limits import Limits
from lamina.schedule.pace import FIRST_RESERVE, FURTHER, LEAST, MISSED, MOST_RESERVE, STEP, Pace, Reserve, StepTimes
from lamina.schedule.turn import Turn
from tests.support.schedules import request

BOUND_S = 0.1
LIMITS = Limits(64, 2048, 200_000)
ALONE = [request(f"running {number}", 16, max_tokens=4000) for number in range(4)]


def linear(row_s: float, pair_s: float) -> Callable[[int, float], float]:
    """Seconds of a step by rows of prompts and pairs of these with tokens; half the bound without."""
    return lambda rows, pairs: BOUND_S / 2 + rows * row_s + pairs * pair_s


def step_times(
    prompts: list[int], seconds: Callable[[int, float], float], bound_s: float | None, lanes: int = 1
) -> list[tuple[float, list[int]]]:
    """Times of the steps from when all of ``ALONE`` decode and prompts arrive until the last has been computed, with
    the tokens of each prompt in the step."""
    turn = Turn(
        LIMITS,
        Placement({"memory0": 10**7}),
        Pipeline(lanes, 1),
        attentions=1,
        kv_heads=1,
        plan_ahead=False,
        step_bound_s=bound_s,
    )
    for one in ALONE:
        turn.scheduler.submit(one)
    times: list[tuple[float, list[int]]] = []
    left, now = 0, 0.0

    def run(plan: StepPlan) -> None:
        nonlocal now
        rows = sum(len(chunk.tokens) for chunk in plan.chunks)
        pairs = sum(len(chunk.tokens) * (chunk.start + len(chunk.tokens) / 2) for chunk in plan.chunks)
        took = seconds(rows, pairs)
        now += took
        times.append((took, [len(chunk.tokens) for chunk in plan.chunks]))
        for done in turn.in_order(StepDone(plan.step, [], rows=rows + 1, busy_s=took)):
            for _, completion in turn.complete(done).values():
                completion.generated.append(7)

    def rounds(until: Callable[[], bool]) -> None:
        while not until():
            for plan in list(turn.plan(now)):
                run(plan)

    rounds(lambda: len(times) >= 10 * lanes)
    for number, prompt in enumerate(prompts):
        turn.scheduler.submit(request(str(number), prompt, max_tokens=1))
        left += prompt
    begun = len(times)
    rounds(lambda: sum(sum(chunks) for _, chunks in times[begun:]) >= left)
    return times[begun:]


@given(
    row_s=st.floats(1e-6, 1e-3),
    pair_s=st.floats(0, 1e-9),
    prompts=st.lists(st.integers(2, 30_000), min_size=1, max_size=3),
)
def test_steps_stay_within_the_bound_once_their_times_are_known(
    row_s: float, pair_s: float, prompts: list[int]
) -> None:
    """But for chunks of the least size. And they use the bound: most come close to it."""
    times = step_times(prompts, linear(row_s, pair_s), BOUND_S)
    late = [took for took, chunks in times[2:] if sum(chunks) > LEAST and took > 1.02 * BOUND_S]
    assert not late
    most = LIMITS.max_num_batched_tokens - len(ALONE)
    full = [took for took, chunks in times[10:-10] if sum(chunks) < most]
    assert len(full) < 20 or sorted(full)[len(full) // 2] > 0.9 * (1 - FIRST_RESERVE) * BOUND_S


@given(st.lists(st.floats(1e-3, MOST_RESERVE - STEP), min_size=1, max_size=40), st.integers(0, 2**32))
def test_the_share_of_errors_above_the_reserve_is_the_wanted_one_for_any_errors(values: list[float], seed: int) -> None:
    """Drawn from any values, then in any order that repeats: it is off by a constant number of errors."""
    draw, reserve, above = random.Random(seed), Reserve(), 0
    errors = [*draw.choices(values, k=1500), *(values * 1500)[:1500]]
    for error in errors:
        above += error > reserve.share
        reserve.note_error(error)
    assert abs(above - MISSED * len(errors)) <= MOST_RESERVE / STEP + 1


@pytest.mark.parametrize(("usual", "rare", "share"), [(0.05, 0.0, 0.0), (0.3, 1.0, 0.02)])
def test_few_steps_take_longer_than_the_bound_however_much_they_vary(usual: float, rare: float, share: float) -> None:
    """``share`` of the steps take longer by ``rare`` of themselves, and all vary by ``usual``."""
    draw = random.Random(3)

    def seconds(rows: int, pairs: float) -> float:
        more = rare if draw.random() < share else 0.0
        return (0.03 + rows * 4e-4) * (1 + abs(draw.gauss(0.0, usual / 2)) + more)

    with_chunks = [took for took, chunks in step_times([70_000], seconds, BOUND_S) if sum(chunks) > LEAST]
    missed = [took > BOUND_S for took in with_chunks]
    assert len(missed) > 500
    assert sum(missed[250:]) <= 0.01 * len(missed[250:]) + 1
    assert sum(with_chunks) / len(with_chunks) > 0.45 * BOUND_S


def test_chunks_shrink_as_the_prefix_grows() -> None:
    times = step_times([100_000], linear(1e-6, 2e-9), BOUND_S)
    sizes = [sum(chunks) for _, chunks in times]
    assert max(sizes) > 4 * sizes[-2] > 4 * LEAST
    assert max(took for took, _ in times[2:]) <= BOUND_S
    unbounded = step_times([100_000], linear(1e-6, 2e-9), None)
    assert max(took for took, _ in unbounded) > 2 * BOUND_S


def test_a_short_prompt_gets_on_beside_a_long_one_with_small_chunks() -> None:
    times = step_times([150_000, 40], linear(1e-6, 5e-9), BOUND_S)
    first = next(place for place, (_, chunks) in enumerate(times) if len(chunks) == 1)
    assert first <= 3


def test_where_nothing_decodes_chunks_fill_the_step() -> None:
    turn = Turn(LIMITS, Placement({"memory0": 10**7}), Pipeline(1, 1), attentions=1, kv_heads=1, step_bound_s=BOUND_S)
    turn.scheduler.submit(request("long", 9000, max_tokens=1))
    sizes = [sum(len(chunk.tokens) for chunk in plan.chunks) for plan in turn.plan(0.0)]
    assert sizes == [2048, 2048]


def test_chunks_in_one_lane_leave_time_for_the_other() -> None:
    """Two lanes on one replica: the next tokens of each come after a step of both."""
    times = step_times([20_000], lambda rows, pairs: BOUND_S / 4 + rows * 1e-5, BOUND_S, lanes=2)
    with_chunks = [took for took, chunks in times if chunks]
    assert max(with_chunks[3:]) + BOUND_S / 4 <= BOUND_S


@pytest.mark.parametrize(("steps", "bounded"), [(3, True), (4, False)])
def test_a_lane_is_in_use_until_other_lanes_have_run_twice_as_many_steps_as_there_are_lanes(
    steps: int, bounded: bool
) -> None:
    pace = Pace(BOUND_S)
    for lane, decoding in [(1, [7]), *[(0, list[int]())] * steps]:
        plan = StepPlan(1, lane, 0, [], [], [], [], DecodeRows(decoding, [9] * len(decoding), []))
        pace.on_step_done(plan, BOUND_S, 0.0)
    assert (pace.budget(0, decodes=False, prompts=PromptBatch(), most=2048) < 2048) is bounded


def test_steps_of_few_tokens_do_not_predict_a_long_chunk() -> None:
    """What a row takes is forgotten after many steps of few prompt tokens, which take as long as steps without."""
    pace = Pace(BOUND_S)
    for rows in [2048, *[LEAST, 0] * 200]:
        chunks = [SequenceStep(1, 0, [5] * rows, [])] if rows else []
        plan = StepPlan(1, 0, 0, [], [], [], chunks, DecodeRows([7], [9], []))
        pace.on_step_done(plan, 5.0 if rows > LEAST else BOUND_S / 2, 0.0)
    assert pace.budget(0, decodes=True, prompts=PromptBatch(), most=2048) <= FURTHER * LEAST


@given(st.floats(0, 1e-2), st.floats(0, 1e-4), st.floats(0, 1e-8))
def test_times_that_are_linear_are_predicted(constant: float, row: float, pair: float) -> None:
    times = StepTimes()
    for tokens, pairs in [(0, 0), (64, 1e4), (128, 5e5), (64, 2e6), (256, 1e6)]:
        times.add_sample(tokens, pairs, constant + row * tokens + pair * pairs)
    assert times.predict(200, 1.5e6) == pytest.approx(constant + row * 200 + pair * 1.5e6, rel=1e-3, abs=1e-7)


def test_predictions_follow_steps_without_prompts() -> None:
    """A lane that decodes may run no prompt for a long time, while its sequences get longer."""
    times = StepTimes()
    assert times.predict(0, 0) == 0
    for seconds in (1e-2, 3e-2):
        for _ in range(50):
            times.add_sample(0, 0, seconds)
        assert times.predict(0, 0) == pytest.approx(seconds, rel=1e-3)


def test_a_prediction_has_no_negative_parts() -> None:
    """Noise must not make a longer chunk look faster."""
    times = StepTimes()
    times.add_sample(0, 0, 1e-3)
    for tokens, pairs, seconds in [(100, 1e5, 5e-3), (200, 1e6, 4e-3), (100, 2e6, 5.5e-3), (300, 3e6, 4.5e-3)]:
        times.add_sample(tokens, pairs, seconds)
    assert times.predict(100, 1e6) <= times.predict(200, 1e6) and times.predict(100, 1e6) <= times.predict(100, 2e6)
