"""The whole runtime against Hugging Face: processes, two memory workers, more requests than fit in one batch."""

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED, SERVED_VOCABULARY, greedy, served
from tests.support.running import check_greedy, run_all
from tests.support.sweep import sweep


# test_switches.py runs gpt_oss, test_moves.py llama.
@pytest.mark.parametrize("family", sweep(SERVED, ["deepseek_v3"]))
def test_greedy_tokens_equal_hugging_face(family: str, tmp_path: Path) -> None:
    check_greedy(family, tmp_path, memory="cpu:2")


@pytest.mark.slow  # test_launch_gpus.py starts such workers too
@pytest.mark.parametrize("family", SERVED)
def test_the_code_for_gpus_gives_the_tokens_of_hugging_face(family: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    check_greedy(family, tmp_path, compute="emulated:1", memory="emulated:1,cpu:1", lengths=(1, 3, 13, 30), tokens=3)


@pytest.mark.slow  # test_pools.py has two replicas too
def test_several_compute_workers_share_slots_without_touching_each_others_tokens(tmp_path: Path) -> None:
    """Requests that end at once give their slots to others while both replicas run; every token must still be right."""
    reference = write_prepared(served("llama"), tmp_path)
    draw = random.Random(7)
    config = EngineConfig(
        model=str(tmp_path),
        compute="cpu:2",
        memory="cpu:1",
        dtype=DType.FLOAT32,
        max_num_seqs=4,
        kv_cache_memory_bytes=200_000,  # few slots, so that freed ones are used again at once
    )
    engine = launch(config)
    try:
        prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(draw.choice([2, 9, 30]))] for _ in range(60)]
        lengths = [draw.choice([1, 1, 8]) for _ in prompts]
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        outputs = run_all(engine, prompts, params)
    finally:
        engine.close()
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [greedy(reference, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, pytest.param(DType.FLOAT16, marks=pytest.mark.slow)])
def test_half_precision_log_probabilities_are_close_to_hugging_face(dtype: DType, tmp_path: Path) -> None:
    """Against float32 arithmetic on the same rounded weights, no worse than Hugging Face in this precision."""
    model = write_prepared(served("llama"), tmp_path, dtype)
    prompts = [[5, 6, 7], list(range(3, 60))]
    engine = launch(EngineConfig(model=str(tmp_path), compute="cpu:1", memory="cpu:2", dtype=dtype))
    try:
        outputs = run_all(engine, prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0))
    finally:
        engine.close()
    half = model.to(getattr(torch, dtype.value))
    theirs = [log_probabilities(half, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    exact = [log_probabilities(half.float(), prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    ours = [torch.tensor([entries[0].logprob for entries in output.outputs[0].logprobs or []]) for output in outputs]
    error = (torch.cat(ours) - torch.cat(exact)).abs().mean()
    their_error = (torch.cat(theirs) - torch.cat(exact)).abs().mean()
    assert 0 < error <= 1.5 * their_error, f"mean error {error:.4f}, Hugging Face's in {dtype.value} {their_error:.4f}"


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, prompt: list[int], output: RequestOutput) -> torch.Tensor:
    """Log-probability that ``model`` gives each token of ``output`` after the prompt and the tokens before it."""
    tokens = output.outputs[0].token_ids
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
