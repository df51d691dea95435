"""Sequences whose heads are on several workers, on real workers, against Hugging Face."""

import itertools
import random
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import NAMES, SERVED, greedy, served, variant
from tests.support.running import run_all
from tests.support.sweep import sweep

TOKENS = 12
LENGTHS = (1, 6, 7, 8, 21, 34, 45, 14)


def check_owned_once(output: RequestOutput, heads: int, prompt: int) -> None:
    """Every head of every token of a completion is on one worker."""
    for sequence in {segment.sequence for segment in output.placement}:
        owned = [
            (head, token)
            for segment in output.placement
            if segment.sequence == sequence
            for head in range(*segment.heads)
            for token in range(segment.tokens[0], segment.tokens[1] or 0)
        ]
        assert sorted(owned) == list(itertools.product(range(heads), range(prompt + TOKENS - 1)))


def check(folder: Path, model: PretrainedConfig, memory: str, longest: int | None, nbytes: int) -> None:
    reference = write_prepared(model, folder)
    draw = random.Random(model.model_type)
    prompts = [[draw.randrange(3, model.vocab_size) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-2][:30] + prompts[-1])  # begins like another one
    config = EngineConfig(
        model=str(folder),
        memory=memory,
        partition="head",
        dtype=DType.FLOAT32,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        kv_tokens_per_worker=longest,
        kv_cache_memory_bytes=nbytes,
    )
    engine = launch(config)
    try:
        heads = engine.cluster.shards.heads
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]
    for output, prompt in zip(outputs, prompts * 2, strict=True):
        check_owned_once(output, heads, len(prompt))
        assert len({segment.worker for segment in output.placement}) > 1
        assert all(segment.heads != (0, heads) for segment in output.placement)
    assert longest or any(output.cached_tokens for output in outputs)


# Sinks and windows. Multi-query attention has one head.
@pytest.mark.parametrize("family", sweep(NAMES, []))
def test_heads_of_a_sequence_on_several_workers_equal_hugging_face(family: str, tmp_path: Path) -> None:
    model = served(family) if family in SERVED else variant(family)
    if family in ("falcon-mqa", "gpt_bigcode"):
        with pytest.raises(ConfigError, match="1 KV heads, which memory workers cannot share"):
            check(tmp_path, model, "cpu:4", None, 4 << 20)
    else:
        check(tmp_path, model, "cpu:4", None, 4 << 20)


def test_heads_that_do_not_divide_evenly_and_runs_of_tokens_in_a_full_pool(tmp_path: Path) -> None:
    """Six heads, with a bias by position, on three workers and in local memory, with room for some of the requests."""
    check(tmp_path, variant("bloom-6-heads"), "local,cpu:3", 16, 75 * 2 * 2 * 6 * 8 * 4)
