"""Shapes of models against published sizes and transformers' own count."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
)

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.core.types import DType
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.cost import CostModel, Fits
from tests.planning.plan.published_models import BILLION, PUBLISHED, REFUSED


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_configs_have_the_parameters_of_their_checkpoints(name: str) -> None:
    billions, config = PUBLISHED[name]
    assert model_shapes.from_config(name, config).parameters / BILLION == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_public_configs_without_formulas_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        model_shapes.from_config(name, REFUSED[name])


def test_experts_in_some_layers_only_and_sizes_by_layer_count() -> None:
    _, config = PUBLISHED["Qwen3-30B-A3B"]
    all_sparse, listed, some_dense = (
        model_shapes.from_config("qwen", {**config, **entries})
        for entries in ({}, {"num_experts_per_tok": [8] * 48}, {"mlp_only_layers": [0, 1]})
    )
    assert listed == all_sparse
    experts, dense = (3 * 2048 * width for width in (128 * 768, 6144))
    assert all_sparse.parameters - some_dense.parameters == pytest.approx(2 * (experts - dense), abs=48)


def test_a_config_of_another_architecture_than_the_formulas_is_refused_by_transformers_count(tmp_path: Path) -> None:
    """The second config has a key that means one KV head in Falcon and nothing in Llama."""
    file = tmp_path / "config.json"
    config = {"model_type": "persimmon", "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 100, "tie_word_embeddings": False}
    file.write_text(json.dumps(config))
    assert model_shapes.find(str(tmp_path)).parameters == 2 * (4 * 256 * 256 + 2 * 256 * 700) + 2 * 100 * 256
    file.write_text(json.dumps({**config, "model_type": "llama", "num_key_value_heads": 2, "multi_query": True}))
    with pytest.raises(UnsupportedModelError, match="billion weights in transformers"):
        model_shapes.find(str(tmp_path))


def test_a_multimodal_config_has_the_defaults_of_its_text_model(tmp_path: Path) -> None:
    """Gemma-3-4B's config leaves out what transformers has by default: heads, their size and the vocabulary."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shapes.find(str(tmp_path))
    assert shape.parameters == pytest.approx(3.88e9, rel=2e-3)  # the checkpoint's 4.30 without its vision tower
    assert (shape.kv_heads, shape.head_size, shape.window, shape.windowed) == (4, 256, 1024, 29)
    whole = {**text, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "sliding_window": 512, "sliding_window_pattern": 6}))
    again = model_shapes.find(str(tmp_path / "config.json"))
    assert (again.parameters, again.window, again.windowed) == (shape.parameters, 512, 29)


def test_weights_that_modelopt_quantised_are_refused(tmp_path: Path) -> None:
    """The config.json of such a model may say nothing of it, and its size would be twice the checkpoint's."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-70B"][1]))
    assert model_shapes.find(str(tmp_path)).parameters > 70e9
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(UnsupportedModelError, match="hf_quant_config"):
        model_shapes.find(str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            hidden_size=256, intermediate_size=700, num_attention_heads=8, num_key_value_heads=2, vocab_size=1000
        ),
        Qwen3Config(
            hidden_size=256,
            intermediate_size=700,
            head_dim=64,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
        ArceeConfig(hidden_size=256, intermediate_size=700, num_attention_heads=8, vocab_size=1000),
        GPT2Config(n_embd=256, n_layer=3, n_head=4, n_positions=8),
        OPTConfig(hidden_size=256, ffn_dim=900, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=8),
        FalconConfig(
            hidden_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            multi_query=True,
            new_decoder_architecture=False,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_any_config_has_the_weights_that_transformers_counts(config: object, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    shape = model_shapes.find(str(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert shape.parameters == pytest.approx(counted, rel=0.005)
    assert model_shapes.find(str(tmp_path / "config.json")) == shape


def test_bytes_of_a_token() -> None:
    assert model_shapes.find("Llama-3-70B").kv_bytes_per_token == 2 * 8 * 128 * 80 * 2
    assert model_shapes.find("Llama-3-70B").group == 8
    assert model_shapes.find("Llama-2-7B").dtype is DType.BFLOAT16


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean Llama-3-70B"):
        model_shapes.find("llama3-70b")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(ModelError, match="has none of num_hidden_layers, n_layer"):
        model_shapes.find(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "state_size": 8}))
    with pytest.raises(UnsupportedModelError, match="a state of their own"):
        model_shapes.find(str(tmp_path))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"num_experts": [8, 8]}, "a mixture of experts whose layers differ"),
        ({"ffn_config": {"moe_num_experts": 16}}, "a mixture of experts in a part of its config"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights quantised with hqq"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
        ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ({"mamba_d_state": 128}, "a state of their own"),
        ({"num_key_value_heads": 3}, "4 query heads, 3 key/value heads"),
        ({"num_key_value_heads": 8}, "4 query heads, 8 key/value heads"),
        ({"hidden_size": 3}, "a hidden size of 3"),
    ],
)
def test_a_config_that_the_formulas_say_nothing_of_is_refused(entries: dict[str, object], says: str) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    windowed = {**config, "num_experts": 1, "layer_types": ["sliding_attention", "full_attention"]}
    assert model_shapes.from_config("dense", windowed).kv_heads == 4
    with pytest.raises(ModelError, match=says):
        model_shapes.from_config("odd", {**config, **entries})


def test_kv_types_change_what_is_cached_and_nothing_else() -> None:
    """Heads of 128: 132 bytes a row as codes, with the scale, instead of 256."""
    plain, codes = model_shapes.KNOWN["llama-3-70b"], replace(model_shapes.KNOWN["llama-3-70b"], kv_cache_dtype="int8")
    assert codes.kv_bytes_per_token * 256 == plain.kv_bytes_per_token * 132
    assert codes.weight_bytes == plain.weight_bytes
    entry = hardware.load()["h20"]
    wide, narrow = (CostModel(shape, entry, Fits.load(entry)) for shape in (plain, codes))
    assert narrow.kv_tokens == pytest.approx(wide.kv_tokens * 256 / 132, rel=1e-4)
    assert narrow.exchange_bytes(8) == wide.exchange_bytes(8)  # messages stay in the model's type
    many = 2**24  # tokens, so that reading them is all
    ratio = float(narrow.attention_seconds(many, 100)) / float(wide.attention_seconds(many, 100))
    assert ratio == pytest.approx(132 / 256, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama-3-8B", 8.03), ("Llama-3-70B", 70.55), ("Qwen3-32B", 32.76), ("gpt-oss-120b", 116.8)]
)
def test_known_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert model_shapes.find(name).parameters == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    "key", ["hybrid_override_pattern", "layers_block_type", "linear_attn_config", "attn_type_list", "block_configs"]
)
def test_layers_of_several_kinds_are_refused_rather_than_sized_wrongly(key: str) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, key: ["M", "*"]}
    with pytest.raises(UnsupportedModelError, match=key):
        model_shapes.from_config("nemotron", config)


def test_windows_bound_what_is_attended_to() -> None:
    full = model_shapes.find("Llama-3-8B")
    half = replace(full, window=128, windowed=16)
    device = hardware.load()["h100"]
    all_tokens, near = (CostModel(shape, device, Fits.load(device)) for shape in (full, half))
    assert float(near.attention_seconds(64 * 4096, 64)) < 0.7 * float(all_tokens.attention_seconds(64 * 4096, 64))
    assert near.attention_seconds(64 * 100, 64) == pytest.approx(all_tokens.attention_seconds(64 * 100, 64))
    assert 0 < float(near.chunk_attention_seconds(2048, 8192)) < float(all_tokens.chunk_attention_seconds(2048, 8192))


@pytest.mark.parametrize(("tokens", "measured_us"), [(2048, 52), (4096, 100), (8192, 185)])
def test_a_chunk_with_a_window_attends_to_its_window(tokens: int, measured_us: float) -> None:
    """Layers of gpt-oss on an H200 with vLLM 0.24 (AIConfigurator); nothing is fitted to them: within a factor of 2."""
    device = hardware.load()["h200"]
    sizes = DType.BFLOAT16, tokens, 0, 64, 8, 64
    fit = Fits.load(device).prefill
    near, full = (float(fit.predict_prefill(device, *sizes, window=window)) for window in (128, tokens))
    assert full == float(fit.predict_prefill(device, *sizes))
    assert measured_us / 2 < near * 1e6 < 1.2 * measured_us and near < full
    twice = float(fit.predict_prefill(device, DType.BFLOAT16, 2 * tokens, *sizes[2:], window=128))
    assert 1.5 * near < twice < 2 * near
