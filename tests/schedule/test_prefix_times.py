"""Which cached prefixes a prompt in scratch memory uses: those that cost less than to compute them again."""

import pytest

from lamina.control.messages import StepDone
from lamina.core.pipeline import Pipeline
from lamina.core.requests import Completion, Group
from lamina.core.steps import DecodeRows, SequenceStep, StepPlan
from lamina.kv.placement import Placement
from lamina.schedule.limits import Limits
from lamina.schedule.prefix_times import EVERY, LEAST_STEPS, PrefixTimes
from lamina.schedule.turn import Turn
from tests.support.schedules import ATTENTIONS, request

TOKEN_S, PAIR_S = 1e-3, 1e-6  # of a prompt token, and of a token that it attends to, on its replica
ROW_S, THERE_S = 4e-4, 3e-6  # of a row that asks for attention to a prefix, and of a token of the prefix


def step(start: int, tokens: int, prefix: int) -> StepPlan:
    chunk = SequenceStep(0, start, [1] * tokens, [], scratch=prefix)
    return StepPlan(1, 0, 0, [], [], [], [chunk], DecodeRows([], [], []))


def measured(steps: int = 4 * LEAST_STEPS) -> PrefixTimes:
    """Steps with and without prefixes, of several lengths."""
    times = PrefixTimes()
    for number in range(steps):
        tokens, prefix = (100, 300, 500)[number % 3], (0, 64, 512, 4096)[number % 4]
        start = prefix + 1000 * (number % 2)
        busy_s = 0.01 + TOKEN_S * tokens + PAIR_S * tokens * (start + (tokens + 1) / 2)
        waited_s = 0.002 + (ROW_S * tokens + THERE_S * tokens * prefix if prefix else 0.0)
        times.note_step(step(start, tokens, prefix), busy_s, waited_s)
    return times


def after(hit: int, tokens: int, arrival: int = 1) -> Group:
    return Group(request("0", hit + tokens), 4, [Completion(0, 0)], arrival)


@pytest.mark.parametrize("hit", [16, 64, 512, 4096])
@pytest.mark.parametrize("tokens", [1, 20, 100, 500, 3000])
def test_a_prefix_is_used_if_asking_takes_less_than_computing_it(hit: int, tokens: int) -> None:
    """By hand: the prefix attends to itself, and the tokens behind it attend to the prefix, here or there."""
    computing_s = TOKEN_S * hit + PAIR_S * hit * (hit / 2 + tokens)
    asking_s = ROW_S * tokens + THERE_S * tokens * hit
    assert abs(computing_s / asking_s - 1) > 0.05, "too close to call"
    assert measured().pays(after(hit, tokens), hit) == (asking_s < computing_s)


def test_prefixes_are_used_until_their_time_is_known_and_now_and_then() -> None:
    dear = after(64, 3000)
    assert not measured().pays(dear, 64)
    assert measured(4).pays(dear, 64) and PrefixTimes().pays(dear, 64)
    assert measured().pays(after(64, 3000, arrival=7 * EVERY), 64)


def test_steps_in_which_sequences_decode_are_not_measured() -> None:
    times = PrefixTimes()
    for _ in range(2 * LEAST_STEPS):
        plan = step(64, 100, 64)
        times.note_step(StepPlan(1, 0, 0, [], [], [], plan.chunks, DecodeRows([9], [5], [1])), 0.1, 9.0)
    assert times.pays(after(64, 3000), 64)


@pytest.mark.parametrize("room", [0, 100, 400])
@pytest.mark.parametrize("waited_s", [0.0, 5.0])
def test_a_prompt_computes_a_prefix_again_that_others_take_long_to_attend_to(room: int, waited_s: float) -> None:
    """Only a prompt that fits scratch memory: the chunks of another ask memory workers in any case."""
    cached, prompt, rows = 40, 200, 16
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=rows, max_model_len=400)
    made = Turn(
        limits,
        Placement({"memory0": 9000}),
        Pipeline(1, 1),
        attentions=ATTENTIONS,
        kv_heads=2,
        prefix_cache=True,
        scratch=[("compute0", room)] if room else [],
    )
    starts = []
    for number in range(4):
        one = made.scheduler.submit(request(str(number), cached if number == 0 else prompt, max_tokens=1))
        one.request.prompt_token_ids[cached:] = [100 + number] * (prompt - cached) * (number > 0)
        plans = list(made.plan(0.0))
        while made.in_flight:
            plan = made.in_flight[min(made.in_flight)]
            asks = any(chunk.before_scratch for chunk in plan.chunks)
            (done,) = made.in_order(StepDone(plan.step, [], rows=rows, busy_s=1.0, waited_s=waited_s * asks))
            for owner, completion in made.complete(done).values():
                completion.generated.append(5)
                made.scheduler.end_completion(owner, completion)
            plans += made.plan(0.0)
        starts.append(min(chunk.start for plan in plans for chunk in plan.chunks))
    again = waited_s > 0 and room >= prompt
    assert starts == [0, cached, *([0, 0] if again else [cached, cached])]
    assert made.scheduler.placement.left("memory0") == 9000, "no slot is reserved any more"
