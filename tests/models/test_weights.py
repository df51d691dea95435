"""Loaded weights against transformers, and what happens when they cannot be had."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.core.types import DType, LoadFormat
from lamina.models import pretrained, tensors
from lamina.models.directory import ModelDirectory, find
from lamina.models.pretrained import load_config, meta_model, resolve_dtype, torch_dtype
from lamina.models.quantisation.codes import Weight, plain
from lamina.splitter.split_model import Shard, cut
from tests.support.random_models import random_model, with_experts, write_checkpoint

FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "phi3", "opt", "gpt2", "gpt_neox", "bloom", "falcon"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "phimoe", "granitemoe", "olmoe"),
    *("ernie4_5_moe", "hunyuan_v1_moe", "gpt_oss", "llama4_text"),
)


def small_config(family: str) -> PretrainedConfig:
    """Twelve experts: their order must be that of numbers, not of names."""
    ties = {"tie_word_embeddings": True} if family == "qwen2" else {}
    return with_experts(family, 12, vocab_size=64, **ties)


def save(path: Path, family: str, max_shard_size: str = "50GB") -> PreTrainedModel:
    """A checkpoint with every tensor random, norms and biases too."""
    return write_checkpoint(small_config(family), path, max_shard_size=max_shard_size)


def load(directory: ModelDirectory, *names: str, dtype: DType = DType.FLOAT32) -> dict[str, torch.Tensor]:
    return pretrained.load(directory, names, load_config(directory), dtype)


def plain_tensors(loaded: Mapping[str, Weight]) -> dict[str, torch.Tensor]:
    return {name: plain(weight) for name, weight in loaded.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_what_transformers_loads(tmp_path: Path, family: str) -> None:
    model = save(tmp_path, family, max_shard_size="20KB")
    directory = find(tmp_path, tokenizer=False)
    assert len({entry.file for entry in directory.tensors.values()}) > 1
    names = list(model.state_dict())
    exact = load(directory, *names)
    assert all(torch.equal(exact[name], tensor) for name, tensor in model.state_dict().items())
    for dtype in DType:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch_dtype(dtype)).state_dict()
        ours = load(directory, *names, dtype=dtype)
        assert ours.keys() == theirs.keys()
        assert {name: tensor.dtype for name, tensor in ours.items()} == {n: t.dtype for n, t in theirs.items()}
        assert all(torch.equal(ours[name], theirs[name]) for name in names)


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "qwen3_moe", "gpt2"])
def test_only_files_of_the_named_tensors_are_opened(tmp_path: Path, family: str) -> None:
    model = save(tmp_path, family, max_shard_size="4KB")
    directory = find(tmp_path, tokenizer=False)
    name = next(name for name in model.state_dict() if ".0.mlp" in name)
    kept = {".0.mlp", ".0.block_sparse_moe"}
    for key, entry in directory.tensors.items():
        if not any(part in key for part in kept) and entry.file.exists():
            others = [k for k, e in directory.tensors.items() if e.file == entry.file]
            if not any(part in k for k in others for part in kept):
                entry.file.unlink()
    assert sum(entry.file.exists() for entry in directory.tensors.values()) < len(directory.tensors)
    assert torch.equal(load(directory, name)[name], model.state_dict()[name])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_parts_of_tensors(tmp_path: Path, load_format: LoadFormat) -> None:
    """Rows in two ranges, columns, and a part of converted experts, in memory that has room for them alone."""
    save(tmp_path, "mixtral")
    directory = find(tmp_path, tokenizer=False)
    names = [name for name in load(directory, *weights_of("mixtral")) if ".1." in name or "embed" in name]
    plan = pretrained.plan(directory, load_config(directory), DType.FLOAT32)
    shards: dict[str, Shard] = {
        "model.layers.1.self_attn.q_proj.weight": {0: ((2, 5), (8, 16))},
        "model.layers.1.self_attn.o_proj.weight": {1: ((16, 32),)},
        "model.layers.1.mlp.experts.gate_up_proj": {1: ((0, 24), (48, 72))},
        "model.embed_tokens.weight": {0: ((32, 64),)},
    }
    assert shards.keys() <= set(names)
    whole = plain_tensors(tensors.load(directory, names, plan, load_format))
    told: list[tuple[int, int]] = []
    held = plain_tensors(
        tensors.load(directory, names, plan, load_format, on_progress=lambda *at: told.append(at), shards=shards)
    )
    for name in names:
        assert torch.equal(held[name], cut(whole[name], shards.get(name, {}))), name
        assert held[name].is_contiguous() and held[name].untyped_storage().nbytes() == held[name].nbytes
    assert told[-1] == (sum(tensor.nbytes for tensor in held.values()),) * 2
    there = torch.device("meta")  # nothing can be read on it: only the parts come there
    sent = plain_tensors(tensors.load(directory, names, plan, load_format, device=there, shards=shards))
    assert {name: (part.shape, part.device) for name, part in sent.items()} == {
        name: (part.shape, there) for name, part in held.items()
    }


def weights_of(family: str) -> list[str]:
    return list(random_model(small_config(family)).state_dict())


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    directory = find(tmp_path, tokenizer=False)
    names = list(random_model(small_config("llama")).state_dict())
    maps = Path("/proc/self/maps")
    before = maps.read_text().count(str(tmp_path))
    loaded = load(directory, *names)
    assert maps.read_text().count(str(tmp_path)) == before == 0
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 for tensor in loaded.values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3_moe"])
def test_checkpoint_of_the_base_model(tmp_path: Path, family: str) -> None:
    model: Any = save(tmp_path / "whole", family)
    model.base_model.save_pretrained(tmp_path)
    directory = find(tmp_path, tokenizer=False)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    assert names[0] not in directory.tensors
    loaded = load(directory, *names)
    assert all(torch.equal(loaded[name], model.state_dict()[name]) for name in names)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_names_share_one_tensor_whichever_is_stored(tmp_path: Path, stored: str) -> None:
    model: Any = save(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[stored] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(find(tmp_path, tokenizer=False), "lm_head.weight", "model.embed_tokens.weight")
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]
    assert torch.equal(loaded["lm_head.weight"], model.get_input_embeddings().weight)


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]])
def test_tied_names_stored_with_different_values(tmp_path: Path, names: list[str]) -> None:
    """transformers gives each its own then, against config.json; equal ones are one tensor to both."""
    save(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load(find(tmp_path, tokenizer=False), *names)[names[-1]], tensors["lm_head.weight"])
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert not torch.equal(theirs["lm_head.weight"], theirs["model.embed_tokens.weight"])
    with pytest.raises(ModelError, match=r'ties lm_head\.weight .* they differ.*"tie_word_embeddings": false'):
        load(find(tmp_path, tokenizer=False), *names)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    model = save(tmp_path, "mixtral")
    names, calls = list(model.state_dict()), []
    directory = find(tmp_path, tokenizer=False)
    config = load_config(directory)
    pretrained.load(
        directory, names, config, DType.BFLOAT16, on_progress=lambda done, total: calls.append((done, total))
    )
    total = sum(tensor.numel() for tensor in model.state_dict().values()) * DType.BFLOAT16.itemsize
    assert len(calls) == len(names) and calls == sorted(calls)
    assert calls[-1] == (total, total)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "gpt_oss"])
def test_dummy_weights_depend_on_seed_and_name_alone(tmp_path: Path, family: str) -> None:
    config = small_config(family)
    config.save_pretrained(tmp_path)
    directory = find(tmp_path, weights=False, tokenizer=False)
    shapes = meta_model(config, DType.BFLOAT16).state_dict()

    def dummy(names: list[str], seed: int = 3) -> dict[str, torch.Tensor]:
        return pretrained.load(directory, names, config, DType.BFLOAT16, "dummy", seed)

    everything = dummy(list(shapes))
    some = list(shapes)[::-3]
    assert all(torch.equal(tensor, everything[name]) for name, tensor in dummy(some).items())
    assert {name: tensor.shape for name, tensor in everything.items()} == {n: t.shape for n, t in shapes.items()}
    matrix = "model.layers.0.self_attn.o_proj.weight"
    assert abs(everything[matrix].float().std() - 0.02) < 0.002
    assert not torch.equal(everything[matrix], everything[matrix.replace(".0.", ".1.")])
    assert not torch.equal(everything[matrix], dummy([matrix], seed=4)[matrix])
    assert torch.equal(everything["model.norm.weight"], torch.ones_like(everything["model.norm.weight"]))


def drop(path: Path, *names: str) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in names}, path / "model.safetensors")


def test_missing_tensor(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    drop(tmp_path, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(
        ModelError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight among the 20 in model\."
    ):
        load(find(tmp_path, tokenizer=False), "model.layers.1.mlp.up_proj.weight")


def test_codes_without_their_settings_are_said_to_be_codes(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    codes = {name.replace("_proj.weight", "_proj.qweight"): tensor for name, tensor in tensors.items()}
    save_file(codes, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds quantised weights .*qweight.*config.json has no quantization_config"):
        load(find(tmp_path, tokenizer=False), "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("part", ["w1", "w2"])
def test_missing_expert(tmp_path: Path, part: str) -> None:
    save(tmp_path, "mixtral")
    drop(tmp_path, f"model.layers.0.block_sparse_moe.experts.2.{part}.weight")
    name = "model.layers.0.mlp.experts.gate_up_proj" if part == "w1" else "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ModelError, match=name + r".*(requires \[12, |incomplete)"):
        load(find(tmp_path, tokenizer=False), name)


def test_wrong_shape(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(ModelError, match=r"shape \[64, 32\], but config.json requires \[65, 32\]"):
        load(find(tmp_path, tokenizer=False), "model.embed_tokens.weight")


def test_unreadable_element_type(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is F8_E4M3"):
        load(find(tmp_path, tokenizer=False), "model.norm.weight")


def test_header_that_the_safetensors_library_refuses(tmp_path: Path) -> None:
    """Of the right sizes, but one tensor begins where another does."""
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    layer = "model.layers.{}.mlp.up_proj.weight"
    header[layer.format(0)]["data_offsets"] = header[layer.format(1)]["data_offsets"]
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(ModelError, match=r"model\.safetensors has a broken safetensors header .*copy it again"):
        load(find(tmp_path, tokenizer=False), "model.norm.weight")


def test_unknown_name(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"llama model has no tensor model\.nowhere"):
        load(find(tmp_path, tokenizer=False), "model.nowhere")


def write_config(path: Path, **values: Any) -> ModelDirectory:
    (path / "config.json").write_text(json.dumps(values))
    return find(path, weights=False, tokenizer=False)


@pytest.mark.parametrize(
    ("values", "error", "fact"),
    [
        ({"model_type": "warp9"}, UnsupportedModelError, "does not know the family 'warp9'"),
        ({"model_type": "vit"}, UnsupportedModelError, "not a causal language model"),
        ({"hidden_size": 32}, ModelError, "no model_type"),
        ({"model_type": "llama", "hidden_size": "wide"}, ModelError, "not valid for the family 'llama'"),
        (
            {"model_type": "warp9", "auto_map": {"AutoConfig": "configuration_warp9.Warp9Config"}},
            UnsupportedModelError,
            "runs no code",
        ),
    ],
)
def test_configs_that_cannot_be(tmp_path: Path, values: dict, error: type[ModelError], fact: str) -> None:
    with pytest.raises(error, match=fact):
        load_config(write_config(tmp_path, **values))


def test_dtype_is_the_requested_or_the_configs_own(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, model_type="llama", dtype="bfloat16"))
    assert resolve_dtype(config, "auto") is DType.BFLOAT16
    assert resolve_dtype(config, DType.FLOAT16) is DType.FLOAT16
    assert resolve_dtype(load_config(write_config(tmp_path, model_type="llama")), "auto") is DType.FLOAT32
    with pytest.raises(UnsupportedModelError, match="dtype is float64; choose one"):
        resolve_dtype(load_config(write_config(tmp_path, model_type="llama", dtype="float64")), "auto")
