"""Language models inside of multimodal checkpoints: sizes, weights and logits against the whole model's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from lamina import Lamina, SamplingParams
from lamina.cluster.model_checks import least_weight_nbytes
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import UnsupportedModelError
from lamina.core.types import DType
from lamina.models.directory import find, stated_tie
from lamina.models.pretrained import load, load_config, resolve_dtype
from lamina.planning.plan import model_shapes
from tests.support.random_models import STD, greedy, served, variant, write_checkpoint

SEEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SEEN |= {"image_size": 28, "patch_size": 14}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", SEEN),
    "mistral3": ("mistral", SEEN | {"head_dim": 8}),
    "llama4": ("llama4_text", SEEN | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}),
    "llava": ("llama", SEEN),
}
PROMPT = [5, 9, 12, 17, 33, 8, 4, 11]


def config_of(family: str, text: PretrainedConfig | None = None, **changes: Any) -> PretrainedConfig:
    name, vision = FAMILIES[family]
    kind: Any = CONFIG_MAPPING[family]
    config: PretrainedConfig = kind(text_config=(text or variant(name)).to_dict(), vision_config=vision, **changes)
    return config


def save(config: PretrainedConfig, place: Path) -> Any:
    """Write a random multimodal model as transformers does, and return it."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, STD)
    model.save_pretrained(place)
    return model


@pytest.mark.parametrize("names", ["as written", "of transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_language_model_is_that_of_the_whole_model(family: str, names: str, tmp_path: Path) -> None:
    """Checkpoints have two kinds of names: ``language_model.model.`` and ``model.language_model.``."""
    model = save(config_of(family, tie_word_embeddings=family == "gemma3"), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert any(name.startswith("language_model.model.layers.") for name in stored)
    if names != "as written":
        renamed = {name.replace("language_model.model.", "model.language_model."): one for name, one in stored.items()}
        save_file({name.replace("language_model.lm", "lm"): one for name, one in renamed.items()}, file)
    directory = find(tmp_path, tokenizer=False)
    config = load_config(directory)
    assert config.model_type == FAMILIES[family][0]
    text = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    text.load_state_dict(load(directory, list(text.state_dict()), config, DType.FLOAT32))
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(text(tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_counts_the_language_model_alone(family: str, tmp_path: Path) -> None:
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    save(config_of(family, tie_word_embeddings=family == "gemma3"), whole)
    text = variant(FAMILIES[family][0], dtype="float32")
    text.save_pretrained(alone)
    shape, expected = (model_shapes.find(str(place)) for place in (whole, alone))
    assert shape == dataclasses.replace(expected, name="whole") and shape.unread == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lower_bound_of_weights_leaves_out_what_is_not_loaded(family: str, tmp_path: Path) -> None:
    model = save(config_of(family, tie_word_embeddings=family == "gemma3"), tmp_path)
    language = model.model.language_model.parameters() if hasattr(model, "model") else model.language_model.parameters()
    head = 0 if family == "gemma3" else model.get_output_embeddings().weight.numel()
    least = least_weight_nbytes(EngineConfig(), find(tmp_path, tokenizer=False))
    assert 0 < least <= 2 * (sum(one.numel() for one in language) + head)


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_whole_model_states_holds_for_its_language_model(tied: bool, tmp_path: Path) -> None:
    """transformers follows the whole model's tie_word_embeddings, and writes its element type once."""
    model = save(config_of("mistral3", tie_word_embeddings=tied), tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text()) | {"dtype": "bfloat16"}
    written["text_config"].pop("dtype", None)
    file.write_text(json.dumps(written))
    directory = find(tmp_path, tokenizer=False)
    config = load_config(directory)
    assert config.tie_word_embeddings is tied is stated_tie(directory.config)
    assert ("language_model.lm_head.weight" in directory.tensors) is not tied
    assert resolve_dtype(config, "auto") is DType.BFLOAT16
    shape = model_shapes.find(str(tmp_path))
    file.write_text(json.dumps(written | {"tie_word_embeddings": not tied}))
    other = model_shapes.find(str(tmp_path))
    assert abs(shape.parameters - other.parameters) == model.get_input_embeddings().weight.numel()
    assert shape.dtype is DType.BFLOAT16


def test_a_family_without_a_language_model_of_its_own_is_refused(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    text = variant("qwen2").to_dict() | {"model_type": "qwen2_5_vl_text"}
    CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=vision).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'qwen2_5_vl_text', the text part of 'qwen2_5_vl', is not"):
        load_config(find(tmp_path, weights=False, tokenizer=False))
    assert model_shapes.find(str(tmp_path)).unread == "models of the family qwen2_5_vl"


def test_a_multimodal_checkpoint_is_served(tmp_path: Path) -> None:
    write_checkpoint(served("llama"), tmp_path)  # for its tokenizer
    (tmp_path / "model.safetensors").unlink()
    expected = greedy(save(config_of("llava", served("llama")), tmp_path), PROMPT, 6)
    with Lamina(str(tmp_path), compute="cpu:1", memory="cpu:1", dtype="float32") as lamina:
        (answer,) = lamina.generate([PROMPT], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert list(answer.outputs[0].token_ids) == expected
