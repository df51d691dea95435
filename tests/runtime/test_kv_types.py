"""The whole runtime with int8 and fp8 KV gives the tokens of Hugging Face's model with K and V rounded alike."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType, KvCacheDType, KvElement
from lamina.launch import launch
from tests.support.kernel_codes import rounded
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import PAD, SERVED_VOCABULARY, greedy, served
from tests.support.running import run_all

TOKENS = 16
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 7)
PER_TOKEN = 3 * 2 * (16 + 16) * 4  # layers, heads, K and V, float32


class RoundingCache(DynamicCache):  # type: ignore[misc]  # mypy reads no transformers: pyproject.toml
    """Keeps rounded K and V. A prompt's chunk attends to its own K and V unrounded; a single token's are rounded."""

    def __init__(self, element: KvElement) -> None:
        super().__init__()
        self._element = element

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        kept = super().update(self._rounded(key_states), self._rounded(value_states), *args, **kwargs)
        count = key_states.shape[-2]
        if count == 1:
            return kept
        pairs = zip(kept, (key_states, value_states), strict=True)
        return tuple(torch.cat((old[..., :-count, :], new), -2) for old, new in pairs)

    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(rounded(states.detach().numpy(), self._element))


def greedy_rounding(model: PreTrainedModel, prompt: list[int], tokens: int, element: KvElement) -> list[int]:
    """Like ``greedy``, with rounded K and V."""
    run: Any = model.generate
    cache = RoundingCache(element)
    settings = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": PAD}
    out = run(torch.tensor([prompt]), past_key_values=cache, **settings)
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation


@pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_greedy_tokens_equal_a_reference_that_rounds_alike(kv_cache_dtype: KvCacheDType, tmp_path: Path) -> None:
    reference = write_prepared(served("llama"), tmp_path)
    element = KvElement.from_setting(kv_cache_dtype, DType.FLOAT32)
    draw = random.Random(kv_cache_dtype)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in LENGTHS]
    nbytes = 300 * PER_TOKEN
    config = EngineConfig(
        model=str(tmp_path),
        memory="cpu:2",
        dtype=DType.FLOAT32,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=nbytes,
        max_num_batched_tokens=512,  # every prompt is one chunk, as the reference takes it
    )
    engine = launch(config)
    try:
        outputs = run_all(engine, prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
        capacities = set(engine.cluster.capacities.values())
    finally:
        engine.close()
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [greedy_rounding(reference, prompt, TOKENS, element) for prompt in prompts]
    assert got != [greedy(reference, prompt, TOKENS) for prompt in prompts], "rounding changes some token"
    assert capacities == {nbytes // (3 * 2 * 2 * (16 + 4))}  # codes and scales
