"""Replicas of several ranks, on real workers, against Hugging Face."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from lamina.config import EngineConfig
from lamina.errors import ConfigError
from lamina.launch import launch
from lamina.types import DType, SamplingParams
from tests.random_models import NAMES, SERVED, greedy, served, variant
from tests.runtime.checkpoints import write_prepared
from tests.runtime.test_parity import run_all

pytestmark = pytest.mark.slow
TOKENS = 12
LENGTHS = (1, 6, 7, 8, 21, 34, 45, 14)


def check(folder: Path, model: PretrainedConfig, ranks: int, **settings: Any) -> None:
    reference = write_prepared(model, folder, ranks=ranks)
    draw = random.Random(model.model_type)
    prompts = [[draw.randrange(3, model.vocab_size) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-2][:30] + prompts[-1])  # begins like another one
    given: dict[str, Any] = {"compute": f"cpu:{ranks}", "memory": "cpu:2", "dtype": DType.FLOAT32} | settings
    config = EngineConfig(
        model=str(folder),
        tensor_parallel=ranks,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=4 << 20,
        **given,
    )
    engine = launch(config)
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]


@pytest.mark.parametrize("family", NAMES)
def test_two_ranks_equal_hugging_face(family: str, tmp_path: Path) -> None:
    model = served(family) if family in SERVED else variant(family)
    if family in ("falcon-mqa", "gpt_bigcode"):
        with pytest.raises(ConfigError, match="1 KV heads, which 2 ranks cannot share"):
            check(tmp_path, model, 2)
    else:
        check(tmp_path, model, 2)
