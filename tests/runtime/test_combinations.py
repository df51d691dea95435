"""Combinations of ranks, stages, lanes and memory on real workers: refused before any starts, or the right tokens."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from lamina.cluster import pool
from lamina.cluster.refusals import refusals
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import greedy, served
from tests.support.running import run_all
from tests.support.sweep import sweep

DRAWN = 3000  # of some 30,000 combinations
TOKENS = 10
LENGTHS = (1, 6, 21, 34, 14)
VALUES: dict[str, tuple[Any, ...]] = {
    "tensor_parallel": (1, 2),
    "pipeline_parallel": (1, 2),
    "compute": ("cpu:1", "cpu:2", "cpu:4"),
    "lanes": (None, 3, 5),
    "pipelining": ("auto", "fixed", "rotational"),
    "partition": ("auto", "request", "head", "token"),
    "balance": ("auto", "bandwidth", "throughput", "ledger"),
    "kv_overcommit": (1.0, 2.0),
    "autoscale": (None, "memory=2:3", "compute=1:4"),
    "memory": ("cpu:2", "local", "local,cpu:1"),
}
Settings = dict[str, Any]


def configured(settings: Settings, folder: Path | None = None) -> EngineConfig:
    return EngineConfig(
        model=None if folder is None else str(folder),
        dtype=DType.FLOAT32,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=4 << 20,
        kv_spill_dir=str(folder) if settings.get("kv_overcommit", 1.0) > 1 else None,
        **settings,
    )


def starts(settings: Settings) -> bool:
    config = configured(settings, Path("/tmp"))
    kinds = [pool.kinds(pool.parse(text)) for text in (config.compute, str(config.memory))]
    return next(refusals(config, *kinds), None) is None


def pairwise(values: dict[str, tuple[Any, ...]]) -> list[Settings]:
    """Return combinations that start, which contain every pair of values that any of those drawn contains."""
    draw = random.Random(0)
    drawn = [{name: draw.choice(each) for name, each in values.items()} for _ in range(DRAWN)]
    valid = [settings for settings in drawn if starts(settings)]
    pairs = [set(itertools.combinations(settings.items(), 2)) for settings in valid]
    left, chosen = set[Any]().union(*pairs), list[Settings]()
    while left:
        best = max(range(len(valid)), key=lambda one: len(pairs[one] & left))
        chosen.append(valid[best])
        left -= pairs[best]
    return chosen


def named(every: Sequence[Settings]) -> dict[str, Settings]:
    return {" ".join(str(value) for value in settings.values()): settings for settings in every}


ORDINARY: Settings = {
    "ranks x stages": {"tensor_parallel": 2, "pipeline_parallel": 2, "compute": "cpu:4", "memory": "cpu:2", "lanes": 5},
    "lanes on local memory": {"compute": "cpu:1", "memory": "local,cpu:1", "lanes": 5, "pipelining": "fixed"},
    "instances": {"compute": "cpu:2", "memory": "local,cpu:1", "lanes": 4, "partition": "token"},
    "ranks with local memory": {"tensor_parallel": 2, "compute": "cpu:4", "memory": "local", "lanes": 4},
    "stages with local memory": {"pipeline_parallel": 2, "compute": "cpu:4", "memory": "local", "lanes": 5},
    "lanes on ranks": {"tensor_parallel": 2, "compute": "cpu:2", "memory": "cpu:1", "lanes": 6},
}
OTHERS: Settings = {
    "ranks x stages with local memory": {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "compute": "cpu:4",
        "memory": "local",
    },
    "stages with both": {"pipeline_parallel": 2, "compute": "cpu:2", "memory": "local,cpu:1", "lanes": 4},
    "ranks with both": {"tensor_parallel": 2, "compute": "cpu:2", "memory": "local,cpu:2", "lanes": 3},
    "rotating over ranks": {"tensor_parallel": 2, "compute": "cpu:4", "memory": "cpu:2", "pipelining": "rotational"},
    "ranks over tcp": {"tensor_parallel": 2, "compute": "cpu:2", "memory": "cpu:2", "lanes": 7, "transport": "tcp"},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    model = served("llama", layers=4)  # enough slices to rotate over four replicas
    write_prepared(model, folder)
    return folder, write_prepared(model, folder, ranks=2)


@pytest.mark.parametrize("settings", sweep({**ORDINARY, **OTHERS, **named(pairwise(VALUES))}, ORDINARY))
def test_what_starts_gives_the_tokens_of_hugging_face(
    settings: Settings, reference: tuple[Path, PreTrainedModel]
) -> None:
    """Greedy tokens of one and of two completions, of more requests than decode at once."""
    folder, model = reference
    draw = random.Random(7)
    prompts = [[draw.randrange(3, model.config.vocab_size) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-2][:30] + prompts[-1])  # begins like another one
    engine = launch(configured(settings, folder))
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
    finally:
        engine.close()
    expected = [greedy(model, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[one] for one in expected] + [[one] * 2 for one in expected]
