"""Runs of models on the ranks of tensor-parallel replicas."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from lamina.lowering import Target
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import greedy
from tests.support.running import run_all

TOKENS = 12
LENGTHS = (1, 6, 7, 8, 21, 34, 45, 14)


def check_ranks(
    folder: Path,
    model: PretrainedConfig,
    ranks: int,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = TOKENS,
    **settings: Any,
) -> None:
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 24}
    given: dict[str, Any] = {"compute": f"cpu:{ranks}", "memory": "cpu:2", "dtype": DType.FLOAT32} | sizes | settings
    target = Target.CPU if given["compute"].startswith("cpu") else Target.GPU
    reference = write_prepared(model, folder, target=target, ranks=ranks)
    draw = random.Random(model.model_type)
    prompts = [[draw.randrange(3, model.vocab_size) for _ in range(length)] for length in lengths]
    prompts.append(prompts[-2][:30] + prompts[-1])  # begins like another one
    config = EngineConfig(
        model=str(folder),
        tensor_parallel=ranks,
        max_num_seqs=6,
        kv_cache_memory_bytes=4 << 20,
        **given,
    )
    engine = launch(config)
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=tokens, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
    finally:
        engine.close()
    expected = [greedy(reference, prompt, tokens) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[one] for one in expected] + [[one] * 2 for one in expected]
