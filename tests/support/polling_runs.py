"""Runs of models whose memory workers' devices wait for messages themselves."""

import dataclasses
import random
from pathlib import Path
from typing import Any

from lamina.config.engine_config import EngineConfig
from lamina.control.timeline import Span
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import run_all

LENGTHS = (1, 3, 13, 30, 2, 9)  # of prompts: of several chunks, some of one token
TOKENS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "one lane": {"lanes": 1},
    "two lanes": {"lanes": 2},
    "three lanes": {"lanes": 3},
    "lanes that rotate": {"compute": "cpu:2", "lanes": 3},
    "lanes that stay": {"compute": "cpu:2", "lanes": 4, "pipelining": "fixed"},
    "two ranks": {"compute": "cpu:2", "tensor_parallel": 2},
    "two stages": {"compute": "cpu:2", "pipeline_parallel": 2},
    "two workers": {"memory": "emulated:2", "partition": "token", "kv_tokens_per_worker": 16},
    "by heads": {"memory": "emulated:2", "partition": "head"},
    "over TCP": {"transport": "tcp"},
}
BY_HOST = ("three lanes", "lanes that rotate", "two stages", "over TCP")
"""More lanes than a link has slots, steps of several compute workers, and no shared memory."""


def settings(place: Path, **others: Any) -> EngineConfig:
    wanted = EngineConfig(
        model=str(place),
        compute="cpu:1",
        memory="emulated:1",
        dtype=DType.FLOAT32,
        polling="device",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=4 << 20,
    )
    return dataclasses.replace(wanted, **others)


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in LENGTHS]


def params(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def by_device(spans: dict[str, list[Span]]) -> int:
    """Attentions that a device has answered itself: the host sends no message for them."""
    own = [span.stage for name, each in spans.items() if name.startswith("memory") for span in each]
    return own.count("attention") - own.count("send")


def check_polling(place: Path, family: str, **others: Any) -> int:
    """Run all prompts; how many attentions the devices have answered themselves."""
    reference = write_prepared(served(family), place)
    spans: dict[str, list[Span]] = {}
    engine = launch(settings(place, **others), on_trace=spans.update)
    try:
        outputs = run_all(engine, prompts(), params())
    finally:
        engine.close()
    assert [one.outputs[0].token_ids for one in outputs] == [greedy(reference, each, TOKENS) for each in prompts()]
    return by_device(spans)
