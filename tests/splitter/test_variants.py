"""Every supported family: slices composed with a reference attention compute what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from lamina.core.types import DType
from lamina.splitter import split
from tests.support.random_models import (
    FURTHER,
    NAMES,
    REPRESENTATIVES,
    variant,
    write_checkpoint,
)
from tests.support.split_oracle import Runner, assert_same_logits
from tests.support.sweep import sweep


@pytest.mark.parametrize("name", sweep([*NAMES, *FURTHER], [*REPRESENTATIVES, "laguna", "modernbert-decoder"]))
def test_variant(name: str) -> None:
    assert_same_logits(variant(name))


@pytest.mark.parametrize("name", sweep(["llama", "gemma3_text", "gptj", "deepseek_v3"], ["gemma3_text"]))
def test_deep_model_from_few_layers(name: str) -> None:
    """Nine layers, some of another kind, come from a capture of fewer and are still exact."""
    assert_same_logits(variant(name, layers=9))


def test_layers_that_differ_by_a_number_in_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward

    def scaled(self: LlamaAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, weights = original(self, *args, **kwargs)
        return out * torch.tensor(1.0 + 0.5 * self.layer_idx), weights

    monkeypatch.setattr(LlamaAttention, "forward", scaled)
    assert_same_logits(variant("llama", layers=5))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("ernie4_5_moe", DType.BFLOAT16), pytest.param("gpt_oss", DType.FLOAT16, marks=pytest.mark.slow)],
)
def test_tensors_that_a_family_keeps_in_float32(name: str, dtype: DType, tmp_path: Path) -> None:
    """Routers and norms, as transformers loads them."""
    write_checkpoint(variant(name), tmp_path)
    element = getattr(torch, dtype.value)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=element, attn_implementation="eager")
    state = model.state_dict()
    kept = {key for key, tensor in state.items() if tensor.dtype == torch.float32}
    part = split(AutoConfig.from_pretrained(tmp_path), dtype)
    assert kept and {key for key, weight in part.weights.items() if weight.dtype == torch.float32} == kept
    ids = torch.arange(3, 10)
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0, -1:].float()
        actual = Runner(part, state).step({0: ids}, last_rows_only=True).float()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05 * float(expected.abs().max()))
