"""Beam search by the whole runtime against Hugging Face, beside other requests, with KV dropped and workers lost."""

import dataclasses
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import RequestError
from lamina.core.outputs import FinishReason
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED, SERVED_VOCABULARY, best_beams, served
from tests.support.running import Killable, Streams, wait_for_recoveries
from tests.support.sweep import sweep
from tests.support.waiting import wait_until

ENDS = list(range(3, 63))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def searches(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with parameters of each kind; some have the same first tokens."""
    draw = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"n": 2},
        {"n": 4, "length_penalty": 0.0, "early_stopping": "never"},
        {"n": 3, "length_penalty": 2.0, "early_stopping": True, "min_tokens": 5, "max_tokens": 30},
        {"n": 5, "length_penalty": -0.5, "early_stopping": "never"},
        {"n": 8, "length_penalty": 0.7},
        {"n": 4, "stop_token_ids": []},
    ]
    alike = [draw.randrange(3, SERVED_VOCABULARY) for _ in range(20)]
    requests = []
    for number, kind in enumerate(kinds):
        more = [draw.randrange(3, SERVED_VOCABULARY) for _ in range(draw.choice([1, 7, 30]))]
        prompt = alike + more if number % 2 else more
        base = SamplingParams(
            n=2, use_beam_search=True, max_tokens=draw.choice([1, 14, 20]), ignore_eos=True, stop_token_ids=ENDS
        )
        requests.append((prompt, dataclasses.replace(base, **kind)))
    return requests


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    """What the requests give beside others that decode."""
    others = [([7, 8, 9 + number], GREEDY) for number in range(3)]
    results = Streams(engine, [*requests, *others]).results()
    for (_, params), outputs in zip(requests, results, strict=False):
        for output in outputs:
            ended = output.token_ids[-1] in params.stop_token_ids
            assert output.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert output.stop_reason == (output.token_ids[-1] if ended else None)
    return [[output.token_ids for output in outputs] for outputs in results[: len(requests)]]


@pytest.mark.parametrize("family", sweep(SERVED, ["gemma2"]))
def test_beams_are_those_of_best_beams(family: str, tmp_path: Path) -> None:
    reference = write_prepared(served(family), tmp_path)
    workers = Killable()
    config = EngineConfig(
        model=str(tmp_path),
        compute="cpu:2",
        memory="cpu:2",
        dtype=DType.FLOAT32,
        max_num_seqs=24,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=2_000_000,
    )
    requests = searches(3)
    expected = [
        [tokens for tokens, _ in best_beams(reference, prompt, params, params.stop_token_ids)]
        for prompt, params in requests
    ]
    assert len({len(tokens) for found in expected for tokens in found}) > 3  # answers that end at different lengths
    engine = launch(config, workers=workers)
    try:
        with pytest.raises(RequestError, match="n is 11 beams, but only 10 of the model's 160 tokens end no answer"):
            many = SamplingParams(n=11, use_beam_search=True, ignore_eos=True, stop_token_ids=list(range(150)))
            engine.submit("many", [5], many, lambda update: None)
        assert answers(engine, requests) == expected
        assert answers(engine, requests) == expected  # now with cached prefixes
        with Dropping(engine):
            assert answers(engine, requests) == expected
        assert engine.stats().preempted > 3
        streams = Streams(engine, [*requests, ([5, 6], GREEDY)])
        streams.wait_for_tokens(5)
        workers.signal("memory1", signal.SIGKILL)
        found = [[output.token_ids for output in outputs] for outputs in streams.results()]
        wait_for_recoveries(engine, 1)
        assert found[: len(requests)] == expected
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots in use")
        assert not any(engine._scheduler.placement.reserved.values())
    finally:
        engine.close()


class Dropping:
    """Drops the KV of requests at random while others decode."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._chance = random.Random(1)
        self._ended = threading.Event()

    def __enter__(self) -> None:
        forever = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        self._engine.submit("dropping", [5, 6], forever, self._drop)

    def _drop(self, update: RequestUpdate) -> None:
        engine = self._engine
        holders = [
            group for worker in engine.cluster.capacities for group in engine._scheduler._residents.holders(worker)
        ]
        beams = [group for group in holders if group.searches]
        if beams and self._chance.random() < 0.3:
            engine._scheduler.preempt(self._chance.choice(beams))
        if update.finished:
            self._ended.set()

    def __exit__(self, *_: object) -> None:
        assert self._ended.wait(120)
