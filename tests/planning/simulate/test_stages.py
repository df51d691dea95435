"""Pipeline stages in the simulator: what they compute, how prompts use them, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lamina.core.errors import ConfigError
from lamina.core.pipeline import ONE, Shape
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.cost import NETWORK_SHARE
from lamina.planning.plan.stages import stage_starts
from lamina.planning.simulate import Arrivals, Deployment, System, simulate

A100 = hardware.load()["a100"]
LLAMA = model_shapes.find("Llama-2-7B")


def seconds(stages: int, prompt: int, output: int = 1, local: bool = False, **settings: Any) -> float:
    """One request on one copy of the weights in ``stages`` stages, beside memory that is hardly ever busy, or with
    ``local`` memory."""
    times = 32
    memory = replace(
        A100,
        kind="fast",
        like=A100.kind,
        processors=times * A100.processors,
        flops={dtype: times * flops for dtype, flops in A100.flops.items()},
        memory_bytes_s=times * A100.memory_bytes_s,
        nic_bytes_s=times * A100.nic_bytes_s,
    )
    deployment = Deployment(
        model=LLAMA,
        compute=A100,
        compute_workers=stages,
        shape=Shape(stages=stages),
        local=local,
        memory=None if local else memory,
        memory_workers=0 if local else 1,
        max_num_batched_tokens=512,
        **settings,
    )
    return simulate(deployment, Arrivals(np.zeros(1), np.array([prompt]), np.array([output]))).seconds


@pytest.mark.parametrize("local", [False, True])
def test_stages_run_chunks_of_one_prompt_at_the_same_time(local: bool) -> None:
    """Four stages are nearly four times as fast, as the oldest chunk goes first. A single chunk gains nothing."""
    one, four = (seconds(stages, 32_768, 1, local, lanes=2 * stages, pipelining="fixed") for stages in (1, 4))
    assert 0.8 < one / four / 4 < 1
    for prompt, output in ((500, 1), (500, 20)):
        ratio = seconds(4, prompt, output, local) / seconds(1, prompt, output, local)
        assert 1 <= ratio < 1.05  # the context travels


@pytest.mark.parametrize("local", [False, True])
def test_each_rank_sends_the_whole_context_to_the_next_stage(local: bool) -> None:
    """By a slow NIC. With local memory, a rank also sends the partial of its heads."""
    slow, rows, took = replace(A100, nic_bytes_s=1e8), 500, {}
    for stages in (1, 2):
        deployment = Deployment(
            model=LLAMA,
            compute=slow,
            compute_workers=2 * stages,
            shape=Shape(2, stages),
            local=local,
            memory=None if local else A100,
            memory_workers=0 if local else 1,
            max_num_batched_tokens=512,
        )
        took[stages] = simulate(deployment, Arrivals(np.zeros(1), np.array([rows]), np.array([1]))).seconds
    partial = LLAMA.query_heads // 2 * (LLAMA.head_size + 1) * 4
    nbytes = 2 * LLAMA.hidden + (partial if local else 0)
    assert took[2] - took[1] == pytest.approx(rows * nbytes / (NETWORK_SHARE * 1e8), rel=0.03)


def test_stages_keep_kv_of_their_own_layers_and_serve_as_many_requests_as_one_worker_if_a_batch_is_on_each() -> None:
    """Two stages have room for more than twice the KV beside one copy of the weights. Decoding sequences on two lanes
    share the devices; a single sequence gains nothing."""
    pools: dict[str, Any] = {"model": LLAMA, "compute": A100, "local": True, "max_num_batched_tokens": 512}
    one = Deployment(**pools, compute_workers=1)
    two = Deployment(**pools, compute_workers=2, shape=Shape(stages=2))
    assert not two.lends and 2 < two.kv_tokens / one.kv_tokens < 3
    took = {}
    for requests in (1, 64):
        arrivals = Arrivals(np.zeros(requests), np.full(requests, 100), np.full(requests, 50))
        took[requests] = [simulate(each, arrivals).seconds for each in (one, two)]
    assert 1 <= took[1][1] / took[1][0] < 1.05
    assert 0.5 < took[64][1] / took[64][0] < 0.95


@pytest.mark.parametrize(
    ("early", "late"), [(Shape(2), ONE), (ONE, Shape(2)), (Shape(1, 2), Shape(2)), (ONE, Shape(1, 2))]
)
def test_each_pool_has_ranks_and_stages_of_its_own(early: Shape, late: Shape) -> None:
    """Prompts take as long as if both pools had the shape of the first, and decoding as if both had the second's."""

    def times(early: Shape, late: Shape) -> tuple[float, float]:
        deployment = Deployment(
            model=LLAMA,
            compute=A100,
            compute_workers=late.workers,
            shape=late,
            prefill=A100,
            prefill_workers=early.workers,
            prefill_shape=None if early == late else early,
            memory=A100,
            memory_workers=1,
            lanes=4,
            pipelining="fixed",
        )
        result = simulate(deployment, Arrivals(np.zeros(1), np.array([6000]), np.array([50])))
        assert [pool.workers for pool in result.pools] == [early.workers, late.workers, 1]
        assert min(pool.busy for pool in result.pools) > 0
        return result.ttft_s.p50, result.tbt_s.p50

    mixed, prompts, decoding = times(early, late), times(early, early), times(late, late)
    assert mixed == pytest.approx((prompts[0], decoding[1]), rel=0.01)
    assert prompts != pytest.approx(decoding, rel=0.05)


def test_stages_are_those_that_workers_load() -> None:
    """Stages have about equal bytes. The first has the embedding, which weighs less than a layer here; the last, the
    head."""
    assert stage_starts(LLAMA, 1) == (0,)
    assert stage_starts(LLAMA, 2) in {(0, 16), (0, 17)}
    starts = stage_starts(LLAMA, 8)
    sizes = np.diff((*starts, LLAMA.layers + 1))
    assert sizes.sum() == LLAMA.layers + 1 and sizes.max() - sizes.min() <= 2


def test_stages_that_the_runtime_refuses_are_refused() -> None:
    pools: dict[str, Any] = {"model": LLAMA, "compute": A100, "shape": Shape(stages=2)}
    with pytest.raises(ConfigError, match="3 compute workers do not divide into groups of 2"):
        Deployment(**pools, compute_workers=3)
    one = Arrivals(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    with pytest.raises(ConfigError, match="prefill with local memory of stages is not simulated"):
        Deployment(**pools, compute_workers=2, local=True, prefill=A100, prefill_workers=2)
    with pytest.raises(ConfigError, match="leave it out with --system chunked-prefill"):
        simulate(Deployment(**pools, compute_workers=2), one, System.CHUNKED_PREFILL)
