"""Replicas with KV in their own memory, which attend for each other, in the simulator."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lamina.core.pipeline import ONE, Shape
from lamina.core.types import PromptAttention
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.workload import TracedRequest
from lamina.planning.simulate import Arrivals, Deployment, Result, State, replay, simulate
from lamina.planning.simulate.step_times import Lent
from lamina.planning.simulate.virtual_runtime import Simulation

CATALOGUE = hardware.load()
LLAMA = model_shapes.find("Llama-2-7B")
KEPT, ASKED = 2 * LLAMA.kv_heads * LLAMA.head_size * 2, LLAMA.query_heads * LLAMA.head_size * 2


def replicas(count: int, **changes: Any) -> Deployment:
    return Deployment(model=LLAMA, compute=CATALOGUE["a100"], compute_workers=count, local=True, **changes)


def arriving(*requests: tuple[float, int, int]) -> Arrivals:
    return replay(TracedRequest(*request) for request in requests)


def gaps_of(result: Result) -> list[float]:
    values, counts = result.log.gaps
    return sorted(np.repeat(values, counts).tolist())


def dense(deployment: Deployment, rows: int) -> float:
    cost = deployment.compute_cost
    return float(LLAMA.layers * cost.slice_seconds(rows) + cost.ends_seconds(1))


def test_requests_that_fit_their_replica_are_what_they_are_on_one() -> None:
    one, two = (simulate(replicas(count), arriving((0.0, 700, 5))) for count in (1, 2))
    assert one.ttft_s == two.ttft_s and gaps_of(one) == gaps_of(two)


def test_a_request_longer_than_one_memory_is_served_by_several_replicas() -> None:
    room = replicas(1).kv_tokens
    requests = arriving((0.0, int(1.5 * room), 3), (0.0, 100, 3))
    assert simulate(replicas(1), requests).log.states == [State.REFUSED, State.FINISHED]
    assert simulate(replicas(2), requests).log.states == [State.FINISHED, State.FINISHED]
    alone = replicas(4, shape=Shape(2))  # on GPUs: ranks that wait for each other serve no request of others
    long = arriving((0.0, int(1.5 * alone.kv_tokens), 3))
    assert simulate(alone, long).log.states == [State.REFUSED]


def test_a_step_waits_for_the_longer_of_both_attentions() -> None:
    """By the formulas of the cost model: attention to the first 2,048 tokens here, messages and attention elsewhere."""
    deployment = replicas(2, kv_tokens_per_worker=2048)
    result = simulate(deployment, arriving((0.0, 4000, 4)))
    cost = deployment.compute_cost
    wire, kept = float(cost.wire_seconds(ASKED)), float(cost.wire_seconds(KEPT))
    round_trip = cost.fits.runtime.round_trip_s

    def gap(step: int) -> float:
        here, elsewhere = (float(cost.attention_seconds(tokens, 1)) for tokens in (2048, 1952 + step))
        elsewhere += 3 * wire + 2 * kept + round_trip
        assert elsewhere > here
        return dense(deployment, 1) + LLAMA.layers * elsewhere

    assert gaps_of(result) == pytest.approx([gap(step) for step in range(1, 4)], rel=1e-9)


def test_a_replica_that_attends_for_another_decodes_more_slowly() -> None:
    """Two short requests decode on a replica each, and a long one borrows from one of them."""
    deployment = replicas(2, kv_tokens_per_worker=8192, max_num_batched_tokens=16_384)
    short, long = [(0.0, 100, 300), (0.0, 100, 300)], (0.5, 16_000, 200)
    without, beside = simulate(deployment, arriving(*short)), simulate(deployment, arriving(*short, long))
    assert beside.log.count(State.FINISHED) == 3
    helped = LLAMA.layers * float(deployment.compute_cost.attention_seconds(7808, 1))
    longer = sorted((beside.log.end_s[:2] - without.log.end_s[:2]).tolist())
    prompt_s = beside.log.first_s[2] - 0.5  # the other replica computes the prompt meanwhile
    assert 0.5 * 150 * helped < longer[0] < 2 * 200 * helped + prompt_s


def test_a_lender_pays_once_for_each_step_that_borrows_whenever_its_own_steps_are_planned() -> None:
    """Steps of replica 2 borrow 1 s in all from replica 0, whose steps are planned before, during and after them."""
    for planned in ("before", "during", "after"):
        lent, paid = Lent(), 0.0
        for step in range(10):
            if planned == "before":
                paid += lent.pay(0, 30.0)
                lent.begin(2 * step, 0, 0, {}, 30.0)
            lent.begin(2 * step + 1, 1, 2, {0: 1.0}, 4.0)
            if planned == "during":
                paid += lent.pay(0, 30.0)
                lent.begin(2 * step, 0, 0, {}, 30.0)
            lent.end(2 * step + 1)
            if planned == "after":
                lent.begin(2 * step, 0, 0, {}, 30.0)
                paid += lent.pay(0, 30.0)
            lent.end(2 * step)
        assert paid + lent.pay(0, 30.0) == (10.0 if planned != "after" else 0.0), planned
        assert not lent


def test_only_the_first_step_of_a_lane_borrows() -> None:
    lent = Lent()
    lent.begin(1, 0, 0, {1: 0.25}, 4.0)
    lent.begin(2, 0, 0, {1: 0.5}, 4.0)  # planned ahead
    lent.begin(3, 2, 2, {1: 1.0, 3: 2.0}, 4.0)
    assert [lent.pay(lender, 90.0) for lender in (0, 1, 3)] == [0.0, 1.25, 2.0]
    assert lent.pay(1, 90.0) == 0.0, "each second is paid for once"
    lent.end(1)
    assert lent.pay(1, 90.0) == 0.5
    lent.end(2)
    lent.end(3)
    assert lent.pay(1, 90.0) == lent.pay(3, 90.0) == 0.0 and not lent


def test_a_lender_pays_in_every_step_beside_a_longer_one() -> None:
    """By hand: a step of 10 s borrows 1 s; in the other 9 s, its lender runs 9 steps of 1 s."""
    lent = Lent()
    lent.begin(1, 0, 1, {0: 1.0}, 10.0)
    assert [lent.pay(0, 1.0) for _ in range(9)] == pytest.approx([1 / 9] * 9)
    lent = Lent()
    lent.begin(2, 1, 1, {0: 1.0}, 10.0)
    lent.begin(3, 2, 2, {0: 2.0}, 10.0)  # 3 s of 10 for both, and 7 steps
    assert [lent.pay(0, 1.0) for _ in range(7)] == pytest.approx([3 / 7] * 7)


def test_a_prompt_apart_sends_its_kv_to_the_replica_that_decodes_while_it_runs() -> None:
    """One request takes what the formulas say of the kind that runs each part."""
    deployment = replicas(1, prefill=CATALOGUE["h100"], prefill_workers=1)
    result = simulate(deployment, arriving((0.0, 700, 5)))
    first, second = deployment.prompts_alone, deployment
    pulling = max(float(one.compute_cost.wire_seconds(700 * KEPT)) for one in (first, second))
    chunk = float(first.compute_cost.chunk_attention_seconds(700, 0))
    later = max(0.0, pulling - float(first.compute_cost.slice_seconds(700)) - chunk)
    waits = max(chunk, later + second.compute_cost.fits.runtime.round_trip_s)
    assert result.ttft_s.p50 == pytest.approx(dense(first, 700) + LLAMA.layers * waits, rel=1e-9)
    attention = [float(second.compute_cost.attention_seconds(700 + step, 1)) for step in range(1, 5)]
    assert gaps_of(result) == pytest.approx([dense(second, 1) + LLAMA.layers * each for each in attention], rel=1e-9)
    assert [(pool.name, pool.kind) for pool in result.pools] == [("prefill", "h100"), ("compute", "a100-80g")]


def test_chunks_of_a_prompt_apart_attend_in_scratch_memory_which_leaves_less_for_kv() -> None:
    """By hand: the replica that decodes only pulls K and V. By default too, since one replica runs all prompts."""
    deployment = replicas(1, prefill=CATALOGUE["h100"], prefill_workers=1, max_num_batched_tokens=512)
    first, second = deployment.prompts_alone.compute_cost, deployment.compute_cost
    pulling = max(float(one.wire_seconds(512 * KEPT)) for one in (first, second))

    def step(start: int) -> float:
        chunk = float(first.chunk_attention_seconds(512, start))
        later = max(0.0, pulling - float(first.slice_seconds(512)) - chunk)
        waits = max(chunk, later + second.fits.runtime.round_trip_s)
        return dense(deployment.prompts_alone, 512) + LLAMA.layers * waits

    requests = arriving((0.0, 1024, 2))
    named: tuple[PromptAttention, ...] = ("auto", "compute", "memory")
    ways = {way: replace(deployment, prompt_attention=way) for way in named}
    times = {way: simulate(one, requests).ttft_s.p50 for way, one in ways.items()}
    assert times["compute"] == times["auto"] == pytest.approx(step(0) + step(512), rel=1e-9)
    assert times["memory"] != pytest.approx(times["compute"], rel=1e-3)
    for way, held in zip(named, (2 * 1027, 2 * 1027, 0), strict=True):
        topology = Simulation(ways[way], requests, [], 0)._topology
        assert [member.scratch for member in topology.members] == [held, 0]
        assert topology.capacities["compute1"] == deployment.kv_tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cached_prefix_is_attended_to_where_it_lies_and_the_rest_in_scratch_memory(ranks: int) -> None:
    """By hand: the first 512 tokens of the second prompt are in the memory of the replica that decodes."""
    late, early = Shape(ranks), None if ranks == 1 else ONE
    pools = replicas(ranks, shape=late, prefill=CATALOGUE["h100"], prefill_workers=1, prefill_shape=early)
    deployment = replace(pools, max_num_batched_tokens=512)
    assert deployment.one_way == (ranks > 1)
    first, second = deployment.prompts_alone.compute_cost, deployment.compute_cost
    asking = [float(first.wire_seconds(512 * ASKED)), float(second.wire_seconds(512 * ASKED)) / ranks]
    pulling = max(float(first.wire_seconds(512 * KEPT)), float(second.wire_seconds(512 * KEPT)) / ranks)
    prefix = float(second.prefix_attention_seconds(512, 512)) / ranks

    def step(start: int) -> float:
        chunk = float(first.chunk_attention_seconds(512, start - 512))
        later = max(0.0, pulling - float(first.slice_seconds(512)) - chunk)
        asked = sum(asking) + later + prefix + max(asking) + second.fits.runtime.round_trip_s
        return dense(deployment.prompts_alone, 512) + LLAMA.layers * max(chunk, asked)

    shared = (1, 512)
    trace = [
        TracedRequest(0.0, 512 + 1, 2, (shared, (2, 1)), 3),
        TracedRequest(10.0, 3 * 512, 2, (shared, (4, 1024)), 5),
    ]
    result = simulate(deployment, replay(trace))
    assert result.log.first_s[1] - 10.0 == pytest.approx(step(512) + step(1024), rel=1e-9)
