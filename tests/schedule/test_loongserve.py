"""LoongServe's four steps: the equations of its section 5 against brute force and by hand."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.steps import DecodeRows, SequenceStep, StepPlan
from lamina.schedule.loongserve import (
    UNBOUNDED,
    FourSteps,
    LaneLoad,
    PrefillTime,
    Rates,
    allocate,
    batches,
    dispatch,
    lane_to_decode,
    until_tipping,
)

LINEAR = PrefillTime(alpha=1.0, beta=0.1, gamma=0.0, chunk=10)

times = st.builds(
    PrefillTime,
    alpha=st.sampled_from([0.0, 0.5, 3.0]),
    beta=st.sampled_from([0.01, 0.3]),
    gamma=st.sampled_from([0.0, 1e-3]),
    chunk=st.sampled_from([1, 8, 64]),
    parking_s=st.sampled_from([0.0, 0.05, 2.0]),
)
prompts = st.lists(st.integers(1, 200), min_size=1, max_size=5).map(lambda one: sorted(one, reverse=True))
rooms = st.lists(st.sampled_from([20, 100, 300, UNBOUNDED]), min_size=1, max_size=4).map(sorted)


def seconds(time: PrefillTime, batch: Sequence[int], lanes: int) -> float:
    """Equation 7 on the best degree of parallelism, one chunk after another."""
    chunks = [min(time.chunk, length - at) for length in batch for at in range(0, length, time.chunk)]
    work = len(chunks) * time.alpha + sum(chunks) * time.beta
    work += time.gamma * sum(at + 1 for length in batch for at in range(length))
    most = min(lanes, 1 + len(chunks) - len(batch))
    return min(work / degree + time.parking_s * (degree - 1) for degree in range(1, most + 1))


def plans(
    lengths: Sequence[int], rooms: Sequence[int], prompt: int = 0, lane: int = 0
) -> Iterator[list[tuple[range, range]]]:
    """All ways to divide the prompts from ``prompt`` on among the lanes from ``lane`` on, both in order."""
    if prompt == len(lengths):
        yield []
        return
    for start, stop in itertools.combinations(range(lane, len(rooms) + 1), 2):
        for end in range(prompt + 1, len(lengths) + 1):
            if sum(lengths[prompt:end]) <= sum(rooms[start:stop]):
                for others in plans(lengths, rooms, end, stop):
                    yield [(range(prompt, end), range(start, stop)), *others]


def total(time: PrefillTime, lengths: Sequence[int], plan: Sequence[tuple[range, range]]) -> float:
    return sum(len(some) * seconds(time, [lengths[one] for one in some], len(lanes)) for some, lanes in plan)


@given(time=times, batch=prompts, lanes=st.integers(1, 6))
def test_equation_7_is_the_time_on_the_best_degree(time: PrefillTime, batch: list[int], lanes: int) -> None:
    assert time.of(batch, lanes) == pytest.approx(seconds(time, batch, lanes))


@given(time=times, lengths=prompts, rooms=rooms)
def test_equation_5_equals_brute_force(time: PrefillTime, lengths: list[int], rooms: list[int]) -> None:
    found = [(one.prompts, one.lanes) for one in batches(lengths, rooms, time)]
    every = list(plans(lengths, rooms))
    if not every:
        assert found == []
        return
    assert found in every
    assert total(time, lengths, found) == pytest.approx(min(total(time, lengths, plan) for plan in every))


def rates(tipping_s: float = 2.0, output: float = 20.0) -> Rates:
    return Rates(LINEAR, 4, tipping_s, 0.5, output)


def test_prompts_are_dispatched_until_their_batch_passes_the_tipping_point() -> None:
    """Each prompt of five tokens takes 1.5 seconds; one step of a lane has ten."""
    assert until_tipping([5] * 4, 4, rates()) == 2
    assert until_tipping([5] * 4, 4, rates(tipping_s=1.4)) == 1
    assert until_tipping([5] * 4, 1, rates(tipping_s=9.0)) == 2
    assert until_tipping([5] * 4, 0, rates()) == 0
    assert until_tipping([500, 1], 1, rates()) == 1


def test_a_prompt_joins_a_lane_that_decodes_if_the_gain_exceeds_the_cost() -> None:
    """Both prompts take 3.5 seconds. Beside a sequence with four tokens, which 16 half seconds are expected to end, the
    second gains 8 / 5 and costs 3.5 / 4; beside one with 19, it gains 0.5 / 5 and costs 3.5 / 19."""
    idle, young, old = LaneLoad(0), LaneLoad(1, outputs=[4]), LaneLoad(2, outputs=[19])
    assert dispatch([10, 5], [young, idle], rates()) == (2, [idle, young])
    assert dispatch([10, 5], [old, idle], rates()) == (1, [idle])
    assert dispatch([10, 5], [old, idle], rates(output=math.inf)) == (2, [idle, old])
    assert dispatch([100], [young], rates()) == (0, [])


def test_a_short_prompt_joins_a_lane_with_a_long_one_and_a_long_one_waits() -> None:
    """Behind 1,000 tokens in 200 seconds: 200 / 5 against 1.5 / 1000, and 200 / 2000 against 400 / 100."""
    assert dispatch([5], [LaneLoad(0, prompts=[1000])], rates())[0] == 1
    assert dispatch([2000], [LaneLoad(0, prompts=[100])], rates())[0] == 0


def test_lanes_that_decode_are_allocated_while_the_prompt_gains_more_than_they_lose() -> None:
    """40 tokens take 8 seconds on one lane and 4 on two: 4 / 40 against 4 / 100 and 4 / 10."""
    idle, old, young = LaneLoad(0), LaneLoad(1, outputs=[100]), LaneLoad(2, outputs=[10, 10])
    assert allocate([40], [idle], [young, old], LINEAR) == [idle, old]
    assert allocate([40], [idle], [young], LINEAR) == [idle]
    assert allocate([40], [idle], [LaneLoad(1, prompts=[9])], LINEAR) == [idle]
    parked = PrefillTime(alpha=1.0, beta=0.1, gamma=0.0, chunk=10, parking_s=4.0)
    assert allocate([40], [idle], [old], parked) == [idle], "the second lane saves four seconds and begins four later"


def test_requests_decode_where_others_do_while_steps_stay_memory_bound() -> None:
    assert lane_to_decode(0, [(0, 0), (1, 2), (2, 3), (3, 0)], rows=1, most=4) == 2
    assert lane_to_decode(0, [(0, 0), (1, 2), (2, 4)], rows=1, most=4) == 1
    assert lane_to_decode(0, [(0, 0), (1, 4), (2, 4)], rows=1, most=4) == 0
    assert lane_to_decode(0, [(0, 0), (1, 0)], rows=1, most=4) == 0
    assert lane_to_decode(1, [(0, 2), (1, 2)], rows=1, most=4) == 0, "of two lanes, always the same is filled"


class Known(FourSteps):
    """The steps with rates that are given, not measured."""

    def __init__(self, known: Rates) -> None:
        super().__init__(chunk=10, attentions=4)
        self._known = known

    def rates(self) -> Rates:
        return self._known


def test_a_request_that_waited_in_vain_for_a_lane_runs_beside_what_is_there() -> None:
    steps, lanes = Known(rates()), [LaneLoad(0, outputs=[4, 9]), LaneLoad(1, outputs=[4])]
    assert steps.deal([100], lanes, now=1.0) == []
    assert steps.deal([100], lanes, now=6.4) == []  # the sequence with nine tokens is expected to end at 6.5
    assert [one.home for one in steps.deal([100, 100], lanes, now=9.0)] == [1]
    assert steps.deal([100], lanes, now=9.1) == [], "the next request waits for as long"


def test_long_prompts_get_more_lanes_than_short_ones() -> None:
    """No tipping point: 9 and 5 tokens get a lane each, and 100 the other two."""
    spreads = Known(rates(tipping_s=99.0)).deal([9, 5, 100], [LaneLoad(lane) for lane in range(4)], now=0.0)
    assert [len(one.lanes) for one in spreads] == [1, 1, 2]
    assert len({one.home for one in spreads}) == len(spreads)
    assert all(one.home in one.lanes for one in spreads)


def step(chunks: Sequence[tuple[int, int]], rows: int = 0) -> StepPlan:
    """A step with chunks of these starts and lengths, and so many sequences that decode."""
    made = [SequenceStep(7, start, [0] * tokens, []) for start, tokens in chunks]
    return StepPlan(1, 0, 0, [], [], [], made, DecodeRows(list(range(rows)), [9] * rows, []))


def test_times_are_learned_from_steps() -> None:
    """Steps take one second, which hides the slices of eight rows, and as long as their rows take beyond."""
    steps = FourSteps(64, attentions=4)
    assert steps.rates().time.of([50], 1) == 0
    for rows in (1, 2, 4, 8, 16):
        steps.note_step(step([], rows), rows, max(1.0, rows / 8), 0.0)
    for start, tokens in itertools.product((0, 64, 640), (32, 64)):
        steps.note_step(step([(start, tokens)]), tokens, 1 + tokens / 10, tokens * (start + (tokens + 1) / 2) * 1e-4)
    steps.note_output(30)
    found = steps.rates()
    assert found.time.of([64], 1) == pytest.approx(1 + 6.4 + 64 * 65 / 2 * 1e-4, rel=0.1)
    assert found.time.of([640], 1) == pytest.approx(10 * 7.4 + 640 * 641 / 2 * 1e-4, rel=0.1)
    assert 8 <= steps.memory_bound_rows <= 16
    assert found.output == 30 and found.token_s > 0
    steps.note_output(40)
    assert 30 < steps.rates().output < 40


@pytest.mark.parametrize("unit_s", [0.1, 10.0])
def test_a_step_is_memory_bound_up_to_twice_the_time_of_one_row_in_any_unit(unit_s: float) -> None:
    """Steps take 1 + rows / 64: 64 rows take less than twice as long as one row, and 128 rows take longer."""
    steps = FourSteps(1024, attentions=4)
    for rows in (2**power for power in range(11)):
        steps.note_step(step([], rows), rows, unit_s * (1 + rows / 64), 0.0)
    assert steps.memory_bound_rows == 64


def test_no_lane_joins_a_prompt_that_it_does_not_speed_up() -> None:
    steps = Known(rates())
    assert steps.worth(LaneLoad(1), frozenset({0, 1}), left=40, degree=1) == 2
    assert steps.worth(LaneLoad(2), frozenset({0, 1}), left=40, degree=1) == 1
    assert steps.worth(LaneLoad(2), frozenset({0, 1}), left=10, degree=1) == 0
    assert steps.worth(LaneLoad(2, outputs=[10]), frozenset({0, 1}), left=40, degree=1) == 0
    assert steps.worth(LaneLoad(2, outputs=[100]), frozenset({0, 1}), left=40, degree=1) == 1


@given(time=times, lengths=prompts, lanes=st.integers(1, 6), data=st.data())
def test_the_quadrangle_inequality_holds_along_prompts_and_along_lanes(
    time: PrefillTime, lengths: list[int], lanes: int, data: st.DataObject
) -> None:
    """Each alone, if there is room: what Equation 6 is derived from (Yao 1980)."""
    some = sorted(data.draw(st.lists(st.integers(0, len(lengths)), min_size=4, max_size=4)))

    def along_prompts(first: int, last: int) -> float:
        return (last - first) * time.of(lengths[first:last], lanes)

    def along_lanes(first: int, last: int) -> float:
        return time.of(lengths, last - first)

    def holds(cost: Callable[[int, int], float], a: int, b: int, c: int, d: int) -> bool:
        return cost(a, c) + cost(b, d) <= cost(a, d) + cost(b, c) + 1e-9

    assert holds(along_prompts, *some)
    a, b, c, d = sorted(data.draw(st.lists(st.integers(0, 6), min_size=4, max_size=4, unique=True)))
    assert holds(along_lanes, a, b, c, d)


def test_equation_6_does_not_hold_for_prompts_and_lanes_together() -> None:
    """So splits cannot be searched between those of the neighbours, and ``batches`` searches them all."""
    time = PrefillTime(alpha=0.0, beta=1.0, gamma=1.0, chunk=1)

    def best(lengths: list[int], lanes: int, prompt: int = 0, lane: int = 0) -> tuple[float, int, int]:
        """The least sum of seconds if the last batch begins at this prompt and lane or behind, and where it begins."""
        every = [
            plan
            for plan in plans(lengths, [UNBOUNDED] * lanes)
            if plan[-1][0].start >= prompt and plan[-1][1].start >= lane
        ]
        last = min(every, key=lambda plan: total(time, lengths, plan))
        return total(time, lengths, last), last[-1][0].start, last[-1][1].start

    four, five = best([5, 4, 3], 4), best([5, 4, 3], 5)
    assert (four[1], five[1]) == (2, 1)  # Equation 6: with more lanes, the last batch does not begin sooner
    assert best([5, 4, 3], 5, prompt=four[1])[0] == pytest.approx(26) and five[0] == pytest.approx(25 + 1 / 3)
    three, all_four = best([8, 3, 3], 3), best([8, 3, 3, 2], 3)
    assert (three[2], all_four[2]) == (2, 1)  # nor on an earlier lane with more prompts
    assert best([8, 3, 3, 2], 3, lane=three[2])[0] == pytest.approx(81) and all_four[0] == pytest.approx(78.5)
