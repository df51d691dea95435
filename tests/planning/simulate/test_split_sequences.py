"""Sequences on several memory workers in the simulator: what each worker attends to and when."""

from typing import Any

import numpy as np
import pytest

from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, State, simulate

CATALOGUE = hardware.load()
LLAMA = model_shapes.find("Llama-2-7B")


def pools(**settings: Any) -> Deployment:
    return Deployment(
        model=LLAMA, compute=CATALOGUE["a100"], compute_workers=1, memory=CATALOGUE["rtx3090"], lanes=1, **settings
    )


def arriving(count: int, prompt: int, output: int) -> Arrivals:
    """Equal requests that come at once."""
    return Arrivals(np.zeros(count), np.full(count, prompt), np.full(count, output))


def test_a_worker_attends_to_all_segments_of_a_sequence_at_once() -> None:
    """Many short segments on two workers take no longer than two long ones, also if they outnumber a step's rows."""
    arrivals = arriving(12, 900, 60)
    many, two = (
        simulate(
            pools(memory_workers=2, kv_tokens_per_worker=size, max_num_seqs=12, max_num_batched_tokens=40), arrivals
        )
        for size in (70, 480)
    )
    assert many.log.count(State.FINISHED) == 12
    assert many.seconds == pytest.approx(two.seconds, rel=0.05)


def test_a_chunk_goes_to_the_workers_that_hold_its_tokens() -> None:
    """A prompt over three workers, in twelve chunks: each worker begins when the prompt reaches its part."""
    deployment = pools(memory_workers=3, kv_tokens_per_worker=1024, max_num_seqs=1, max_num_batched_tokens=256)
    spans = simulate(deployment, arriving(1, 3072, 1), recorded=10**6).spans
    begun = np.array([span.begin_ns for span in spans["compute0"]])
    first = sorted(min(span.begin_ns for span in spans[f"memory{index}"]) for index in range(3))
    assert [float((begun < at).mean()) for at in first] == pytest.approx([0, 1 / 3, 2 / 3], abs=0.02)
