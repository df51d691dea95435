"""One request that takes nearly all of the pool's KV, against Hugging Face."""

import random
import threading
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import VOCABULARY, variant
from tests.support.whole_outputs import whole

WORKERS = 4
DRAWN = 8
CHUNK = 256
SHARP = 1.0  # scores differ by a few units: some hundred of 200,000 tokens take most of the attention
TIMEOUT_S = 400


@torch.inference_mode()
def continuation(model: PreTrainedModel, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Hugging Face's greedy tokens and their log-probabilities, with the prompt in chunks whose scores fit memory."""
    cache, drawn, logprobs = DynamicCache(), list[int](), list[float]()
    for start in range(0, len(prompt), CHUNK):
        ids = torch.tensor([prompt[start : start + CHUNK]])
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    for _ in range(tokens):
        chances = logits[0, -1].log_softmax(-1)
        drawn.append(int(chances.argmax()))
        logprobs.append(float(chances.max()))
        logits = model(torch.tensor([drawn[-1:]]), past_key_values=cache, use_cache=True).logits
    return drawn, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("length", [10_000, 200_000])
def test_one_request_takes_the_whole_pool(length: int, tmp_path: Path) -> None:
    """It fills 0.95 of the slots of all workers."""
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "intermediate_size": 32}
    config = variant("granite", 2, **sizes, max_position_embeddings=2 * length, attention_multiplier=SHARP)
    reference = write_prepared(config, tmp_path)
    reference.set_attn_implementation("sdpa")
    draw = random.Random(0)
    prompt = [draw.randrange(3, VOCABULARY) for _ in range(length)]
    token_nbytes = 2 * 2 * 16 * 4
    engine = launch(
        EngineConfig(
            model=str(tmp_path),
            memory=f"cpu:{WORKERS}",
            dtype=DType.FLOAT32,
            max_num_seqs=1,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=int(length / 0.955 / WORKERS) * token_nbytes,
            threads=1,
        )
    )
    try:
        capacity = sum(engine.cluster.capacities.values())
        params = SamplingParams(temperature=0.0, max_tokens=DRAWN, ignore_eos=True, logprobs=0)
        ended = threading.Event()
        outputs: list[RequestOutput] = []

        def note(output: RequestOutput) -> None:
            outputs.append(output)
            if output.finished:
                ended.set()

        engine.submit("long", prompt, params, whole(engine.tokenizer, note))
        assert ended.wait(TIMEOUT_S), engine.stats()
        output = outputs[-1]
    finally:
        engine.close()
    assert length >= 0.95 * capacity
    assert len({segment.worker for segment in output.placement}) == WORKERS
    tokens, logprobs = continuation(reference, prompt, DRAWN)
    assert output.outputs[0].token_ids == tokens
    ours = [entries[0].logprob for entries in output.outputs[0].logprobs or []]
    assert ours == pytest.approx(logprobs, abs=1e-3)
