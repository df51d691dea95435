"""Runs of requests on an engine whose prefix cache they share."""

import random
from dataclasses import replace
from pathlib import Path

from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.launch import launch
from tests.support.random_models import SERVED_VOCABULARY
from tests.support.running import Killable, Streams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def start(model: Path, workers: Killable | None = None, **settings: object) -> Engine:
    base = EngineConfig(
        model=str(model),
        compute="cpu:2",
        memory="cpu:2",
        dtype=DType.FLOAT32,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1_000_000,
    )
    return launch(replace(base, **settings), workers=workers)  # type: ignore[arg-type]


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, SERVED_VOCABULARY) for _ in range(count)]


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """Outputs of requests that run together."""
    streams = Streams(engine, requests)
    streams.results()
    return [streams.outputs[str(number)] for number in range(len(requests))]


def drawn(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]
