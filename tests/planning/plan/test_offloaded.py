"""Steps of offloaded attention in the closed form, against the simulator's: chunks whose prefix is cached, by band."""

import dataclasses

import numpy as np
import pytest

from lamina.core.pipeline import Shape
from lamina.core.types import PromptAttention
from lamina.planning.crossover_map import trace
from lamina.planning.plan import hardware, model_shapes, prices, workload
from lamina.planning.plan.closed_form import Prompts, scratch_tokens
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.offloaded_steps import OffloadedSteps
from lamina.planning.plan.serving import Server
from lamina.planning.plan.ways import Kind, Slo, Way
from lamina.planning.plan.workload import Sessions, TracedRequest
from lamina.planning.simulate import Deployment, replay, simulate
from lamina.planning.simulate.trial import Course

CATALOGUE = hardware.load()
SHAPE = model_shapes.find("Llama-3-70B")
COSTS = {kind: CostModel(SHAPE, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}
WAY = Way(
    kind=Kind.OFFLOADED,
    chunk=8192,
    compute=CATALOGUE["h100"],
    compute_workers=8,
    memory=CATALOGUE["h20"],
    memory_workers=2,
    shape=Shape(8),
    lanes=1,
)


DEPLOYMENT = Deployment(
    model=SHAPE,
    compute=WAY.compute,
    compute_workers=8,
    memory=WAY.memory,
    memory_workers=2,
    shape=Shape(8),
    lanes=1,
    max_num_batched_tokens=WAY.chunk,
)


def closed_form(prompt: int, shared: int, decoding: int = 0, live: float = 1.0) -> float:
    """Seconds of a step with one prompt's chunk behind ``shared`` cached tokens, beside ``decoding`` rows."""
    served = workload.of_lengths(prompt, 1, Sessions(shared=shared) if shared else None)
    compute, memory = COSTS["h100"], COSTS["h20"]
    attends = Prompts(served).attention(compute, memory, WAY, np.array([float(shared)]))
    tokens, rows = np.array([float(prompt - shared)]), np.array([float(decoding)])
    dense = compute.decode_seconds(rows, 8) if decoding else np.zeros(1)
    steps = OffloadedSteps(
        way=WAY, compute=compute, memory=memory, rows=rows, live=live, dense_s=dense, attends=attends
    )
    added = compute.decode_seconds(rows + tokens, 8) + tokens * attends.own_s - dense
    return float(steps.step_seconds(tokens, added, 1)[0])


def simulated(requests: list[TracedRequest]) -> float:
    """The time to the first token of the last request."""
    log = simulate(DEPLOYMENT, replay(requests)).log
    return float(log.first_s[-1] - requests[-1].arrival_s)


def prompts(prompt: int, shared: int) -> list[TracedRequest]:
    """Two requests that begin with the same tokens, the second long after the first."""
    return [
        TracedRequest(
            1000.0 * place, prompt, 1, tuple(run for run in ((9, shared), (place, prompt - shared)) if run[1])
        )
        for place in range(2)
    ]


@pytest.mark.parametrize(
    ("prompt", "shared"), [(400, 0), (4000, 0), (512, 384), (4096, 3686), (4096, 512), (8000, 7950), (60_000, 55_000)]
)
def test_a_chunk_behind_a_cached_prefix_takes_what_the_simulator_says(prompt: int, shared: int) -> None:
    """q of every row goes to the memory worker that has the prefix, and its answer comes back."""
    assert closed_form(prompt, shared) == pytest.approx(simulated(prompts(prompt, shared)), rel=0.1)


def test_other_lanes_chunks_load_the_memory_workers_too() -> None:
    """Four replicas share two memory workers: all of their chunks are read there, not only those of one replica."""
    served = workload.of_lengths(4096, 128, Sessions(shared=3686))
    way = dataclasses.replace(WAY, compute_workers=16, shape=Shape(4), lanes=4, chunk=512)
    found = Server(SHAPE, served, COSTS, prices.load("paper"), Slo(tbt_s=1.0)).evaluate(way)
    assert found is not None and found.memory_busy <= 1.0
    layers, h20 = SHAPE.layers, COSTS["h20"]
    prefix_s = layers * float(h20.prefix_attention_seconds(410, 3686))
    decoding_s = layers * 128 * float(h20.attention_seconds(100 * 4160, 100)) / 100
    assert found.requests_s < 2 / (prefix_s + decoding_s)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "shared"), [(1000, 0), (1000, 900), (4000, 3600), (4000, 2000)])
def test_the_highest_load_by_share_of_the_prompt_that_is_cached(prompt: int, shared: int) -> None:
    """Within a fifth of the simulator's, whatever of the prompts is shared."""
    shape = model_shapes.find("Llama-2-13B")
    costs = {kind: CostModel(shape, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}
    served, slo = workload.of_lengths(prompt, 100, Sessions(shared=shared) if shared else None), Slo(tbt_s=0.3)
    way = dataclasses.replace(WAY, compute_workers=2, shape=Shape(1), lanes=4, chunk=512)
    market = prices.load("paper")
    found = Server(shape, served, costs, market, slo).evaluate(way)
    assert found is not None
    trial = Course(shape, served, trace(served), market, slo).highest_load(found)
    assert trial is not None and found.requests_s == pytest.approx(trial.requests_s, rel=0.2)


@pytest.mark.parametrize("attention", ["memory", "compute"])
def test_the_chunks_of_a_long_prompt_take_what_the_simulator_says(attention: PromptAttention) -> None:
    """Wherever they attend to the chunks before them; on the replica, memory workers only store K and V."""
    way, prompt = dataclasses.replace(WAY, chunk=2048, scratch=attention == "compute"), 16 * 2048
    compute, memory, none, tokens = COSTS["h100"], COSTS["h20"], np.zeros(1), np.full(1, 2048.0)
    attends = Prompts(workload.of_lengths(prompt, 1)).attention(compute, memory, way, none)
    steps = OffloadedSteps(way=way, compute=compute, memory=memory, rows=none, live=1.0, dense_s=none, attends=attends)
    added = compute.decode_seconds(tokens, 8) + tokens * attends.own_s
    deployment = dataclasses.replace(DEPLOYMENT, max_num_batched_tokens=2048, prompt_attention=attention)
    result = simulate(deployment, replay([TracedRequest(0.0, prompt, 1)]))
    assert result.log.first_s[0] == pytest.approx(16 * float(steps.step_seconds(tokens, added, 1)[0]), rel=0.1)
    assert (result.pools[1].busy > 0) == (attends.prefix_s[0] > 0) == (attention == "memory")


def test_memory_workers_attend_to_cached_prefixes_and_prompts_too_long_for_scratch_memory() -> None:
    compute, memory, way = COSTS["h100"], COSTS["h20"], dataclasses.replace(WAY, chunk=2048, scratch=True)
    shared = workload.of_lengths(16_384, 1, Sessions(shared=2048))
    cached = np.full(1, shared.reuse.most)
    attends = Prompts(shared).attention(compute, memory, way, cached)
    layers, chunks = compute.shape.layers, np.arange(0, 16_384 - 2048, 2048)  # computed before each chunk
    own = layers * compute.chunk_attention_seconds(2048, chunks, way.shape.ranks)
    assert attends.own_s[0] * 2048 == pytest.approx(own.mean()) and attends.asked[0] == 1
    prefix = layers * float(memory.prefix_attention_seconds(2048, 2048))
    assert attends.prefix_s[0] * 2048 == pytest.approx(prefix)
    assert Prompts(shared).attention(compute, memory, way, np.zeros(1)).asked[0] == 0
    large = dataclasses.replace(way, shape=Shape(2))  # two devices that the weights nearly fill
    held = scratch_tokens(compute, 2, 10**6, beside_kv=False)
    for length, asks in ((held - 1, False), (held + 1, True)):
        asked = Prompts(workload.of_lengths(length, 1)).attention(compute, memory, large, np.zeros(1)).asked
        assert (asked[0] > 0) == asks
