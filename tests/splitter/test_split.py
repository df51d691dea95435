"""Guarantees of a split model: names, sizes, order, shared graphs; and which models are rejected."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from lamina.core.errors import UnsupportedModelError
from lamina.core.types import DType
from lamina.splitter import Cut, SplitModel, describe, split
from lamina.splitter.verify import verify
from tests.support.random_models import variant
from tests.support.sweep import sweep


def _rope(kind: str, **values: Any) -> dict[str, object]:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **values}
    return {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, "rope_parameters": rope}


_LONGROPE = {"original_max_position_embeddings": 32, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.fixture(scope="module")
def llama_70b() -> SplitModel:
    """Llama 3 70B from its configuration; its weights would take 141 GB."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    return split(config, DType.BFLOAT16)


def test_70b_is_three_graphs(llama_70b: SplitModel) -> None:
    assert len(llama_70b.slices) == 81
    assert len({id(part.graph) for part in llama_70b.slices}) == 3
    weights = sum(weight.nbytes for weight in llama_70b.weights.values())
    assert weights == 2 * 70_553_706_496


def test_residual_stream_is_all_that_crosses(llama_70b: SplitModel) -> None:
    assert {cut.bytes_per_token for cut in llama_70b.cuts} == {8192 * 2}
    assert llama_70b.attentions[7].kv_bytes_per_token(DType.BFLOAT16) == 8 * (128 + 128) * 2


def test_q_comes_before_k_and_v(llama_70b: SplitModel) -> None:
    before, after = describe.run_order(llama_70b.slices[40])
    assert before[-1] == "model.layers.40.self_attn.q_proj.weight"
    assert after == ["model.layers.40.self_attn.k_proj.weight", "model.layers.40.self_attn.v_proj.weight"]
    assert llama_70b.slices[40].linears_before_q == (5, 7)


def test_constants_equal_those_of_a_real_model() -> None:
    config = variant("llama3-rope")
    model = AutoModelForCausalLM.from_config(config)
    (name, value), *others = split(config, DType.BFLOAT16).constants.items()
    assert not others
    assert value.dtype == torch.float32
    assert torch.equal(value, model.get_buffer(name))


@pytest.mark.parametrize("name", sweep(["llama-tied", "gpt_oss", "qwen2_moe"], ["gpt_oss"]))
def test_weights_are_the_state_dict_without_ties(name: str) -> None:
    config = variant(name, layers=4) if name == "gpt_oss" else variant(name)
    model = split(config)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    assert set(model.weights) | set(model.ties) == set(state)
    assert {key: weight.shape for key, weight in model.weights.items()} == {
        key: state[key].shape for key in model.weights
    }
    assert ("lm_head.weight" in model.ties) == config.tie_word_embeddings


def test_sinks_stay_out_of_slices() -> None:
    model = split(variant("gpt_oss"))
    assert model.sinks == tuple(f"model.layers.{layer}.self_attn.sinks" for layer in range(2))
    assert not {name for part in model.slices for name in part.weights} & set(model.sinks)


def test_the_configuration_is_left_alone() -> None:
    config = variant("qwen3")
    before = config.to_dict()
    split(config)
    assert config.to_dict() == before


def test_low_precision_weights_give_low_precision_q() -> None:
    config = variant("mixtral")
    model = split(config, DType.BFLOAT16)
    weights = {name: torch.randn(weight.shape).to(weight.dtype) for name, weight in model.weights.items()}
    rows = torch.arange(3)
    out = model.slices[0].run(rows, rows, None, (), {**weights, **model.constants})
    assert {tensor.dtype for tensor in out.results} == {torch.bfloat16}
    attention = torch.zeros_like(out.q)
    out = model.slices[1].run(rows, rows, attention, out.context, {**weights, **model.constants})
    assert out.q.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("qwen3_next", {}, "found 1 attentions, expected 4"),
        ("gpt_neox_japanese", {}, "found 0 attentions, expected 4.* needs an adapter, as bloom, falcon"),
        ("jamba", {}, "jamba"),
        ("falcon_h1", {}, "'hybrid'"),
        ("bert", {"num_attention_heads": 4}, "not causal"),
        ("doge", {}, "mask or bias of its own"),
        ("llama", {"num_attention_heads": 4, "is_causal": False}, "is_causal is false"),
        ("bloom", {"n_head": 4, "is_causal": False}, "is_causal is false"),
        ("deepseek_v32", {"num_attention_heads": 4, "num_key_value_heads": 4}, "only the 2048 tokens that an indexer"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, "no cut exists at an attention"),
        ("llama", _rope("dynamic", factor=2.0), "rotary embedding, of type 'dynamic'"),
        ("phi3", _rope("longrope", **_LONGROPE), "rotary embedding, of type 'longrope'"),
    ],
)
def test_refused(model_type: str, values: dict[str, Any], reason: str) -> None:
    make: Any = CONFIG_MAPPING[model_type]
    config = make(num_hidden_layers=4, hidden_size=64, vocab_size=96, **values)
    with pytest.raises(UnsupportedModelError, match=reason):
        split(config)


@pytest.mark.parametrize("model_type", ["t5", "gemma3", "llava"])
def test_more_than_a_text_decoder_is_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="text model"):
        split(CONFIG_MAPPING[model_type]())


def test_verify_notices_broken_slices() -> None:
    model = split(variant("llama"))
    first, second, *others = model.slices
    twice = dataclasses.replace(second, weights=(first.weights[0], *second.weights[1:]))
    broken = [
        dataclasses.replace(model, slices=model.slices[:-1]),
        dataclasses.replace(model, cuts=(Cut(0, ()), *model.cuts[1:])),
        dataclasses.replace(model, slices=(first, twice, *others)),
        dataclasses.replace(model, constants={}),
    ]
    verify(model)
    for wrong in broken:
        with pytest.raises(UnsupportedModelError):
            verify(wrong)
