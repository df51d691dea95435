"""Requests whose KV is dropped while they run: computed again, they give what an undisturbed run gives."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams, StructuredOutputs
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate, UpdateSum
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, served
from tests.support.schedules import client
from tests.support.sweep import sweep
from tests.support.waiting import wait_until

LETTERS = StructuredOutputs(regex="( ?[\u4e03-\u4e20]){20,40}")  # tokens of the test model begin with a space
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True),
    SamplingParams(n=2, seed=6, max_tokens=20, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=15),
    SamplingParams(seed=7, max_tokens=30, frequency_penalty=0.8, logprobs=0, ignore_eos=True),
    SamplingParams(n=2, seed=8, max_tokens=30, stop=["e", "1"], min_tokens=3),
    SamplingParams(n=3, seed=9, max_tokens=30, stop_token_ids=list(range(3, 40)), min_tokens=6, temperature=1.5),
    SamplingParams(n=2, seed=10, max_tokens=30, structured_outputs=LETTERS),
]
SWITCHES: dict[str, dict[str, Any]] = {
    "one replica, two lanes": {"lanes": 2},
    "lanes that rotate": {"compute": "cpu:2", "lanes": 3},
    "two stages": {"compute": "cpu:2", "pipeline_parallel": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    write_prepared(served("llama", max_position_embeddings=256), place)
    return place


def generate(
    engine: Engine, params: list[SamplingParams], on_each: Callable[[RequestUpdate], None] = lambda update: None
) -> list[RequestOutput]:
    """Outputs of as many requests, submitted at once. ``on_each`` runs on the engine's thread."""
    draw = random.Random(3)
    wholes = [UpdateSum(engine.tokenizer) for _ in params]
    left, ended = set(range(len(params))), threading.Event()

    def on_update(update: RequestUpdate) -> None:
        index, finished = int(update.request.request_id), update.finished
        wholes[index].append_update(update)
        on_each(update)
        left.difference_update([index] if finished else [])
        if not left:
            ended.set()

    for index, each in enumerate(params):
        prompt = [draw.randrange(3, SERVED_VOCABULARY) for _ in range(draw.choice([1, 5, 40, 70]))]
        engine.submit(str(index), prompt, each, on_update, client(index, 3))
    assert ended.wait(120), f"{sorted(left)} have not ended; {engine.stats()}"
    return [whole.output() for whole in wholes]


def comparable(output: RequestOutput) -> tuple[object, ...]:
    parts = [(part.text, part.token_ids, part.finish_reason, part.stop_reason) for part in output.outputs]
    return output.error, parts


@pytest.mark.parametrize("switches", sweep(SWITCHES, ["two stages"]))
def test_what_is_dropped_and_computed_again_gives_the_same_tokens(model: Path, switches: dict[str, Any]) -> None:
    seats = sum(params.n for params in PARAMS)  # with fewer, a request may give its seats to another client
    settings: dict[str, Any] = {"memory": "cpu:2", "max_num_seqs": seats, "max_num_batched_tokens": 32} | switches
    engine = launch(EngineConfig(model=str(model), dtype=DType.FLOAT32, kv_cache_memory_bytes=10**6, **settings))
    chance = random.Random(1)

    def drop(update: RequestUpdate) -> None:
        holders = [
            group for worker in engine.cluster.capacities for group in engine._scheduler._residents.holders(worker)
        ]
        if holders and chance.random() < 0.1:
            engine._scheduler.preempt(chance.choice(holders))

    try:
        undisturbed = generate(engine, PARAMS)
        assert engine.stats().preempted == 0
        disturbed = generate(engine, PARAMS, drop)
        assert engine.stats().preempted >= 5
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use", 10)
        assert not any(engine._scheduler.placement.reserved.values())
    finally:
        engine.close()
    assert [*map(comparable, disturbed)] == [*map(comparable, undisturbed)]
    for part in undisturbed[-1].outputs:
        assert len(part.token_ids) >= 20 and set(part.token_ids) <= set(range(1, 0x21)), "the grammar was not followed"
    assert len({output.outputs[0].finish_reason for output in undisturbed}) == 2  # stops were met, and lengths
    for after, before in zip(disturbed, undisturbed, strict=True):
        for one, other in zip(after.outputs, before.outputs, strict=True):
            for entries, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert [replace(entry, logprob=0.0) for entry in entries] == [
                    replace(entry, logprob=0.0) for entry in expected
                ]
                assert [entry.logprob for entry in entries] == pytest.approx(
                    [entry.logprob for entry in expected], abs=1e-4
                )
