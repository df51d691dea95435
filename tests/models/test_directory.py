"""Finding and checking a model directory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.models.checkpoint import INDEX
from lamina.models.directory import BUNDLED, find, max_model_len, sampling_defaults


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sharded checkpoint with a tokenizer."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    return tmp_path


def shard(model: Path) -> Path:
    return sorted(model.glob("model-*.safetensors"))[1]


def test_describes_the_model(model: Path) -> None:
    found = find(str(model))
    assert found.path == model and found.name == model.name
    assert (found.max_model_len, found.eos_token_ids) == (64, frozenset({2}))
    assert found.tensors["model.norm.weight"].shape == (32,)
    assert found.tensors["model.norm.weight"].dtype == "F32"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f", "meta-llama/Llama-3.1-8B"),
        ("models--gpt2/snapshots/main", "gpt2"),
        ("models--org--name", "models--org--name"),
        ("snapshots/0e9e39f", "0e9e39f"),
        ("datasets--org--name/snapshots/0e9e39f", "0e9e39f"),
    ],
)
def test_the_name_of_a_snapshot_is_its_repository(tmp_path: Path, path: str, name: str) -> None:
    folder = tmp_path / path
    shutil.copytree(BUNDLED, folder)
    assert find(folder).name == name
    link = tmp_path / "current"
    link.symlink_to(folder)
    assert find(link).name == name


def test_the_bundled_model_needs_no_path() -> None:
    found = find(None)
    assert found.name == "lamina-bundled"
    assert found.max_model_len == 1024


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from lamina.models.directory import find; from lamina.text.tokenizer import Tokenizer;"
        "Tokenizer(find(None)).encode('x'); sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"directory .*org/name does not exist.*OWNER/NAME of a model to download"):
        find(tmp_path / "org/name")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("weights")
    with pytest.raises(ModelError, match=r"model\.gguf is a file. Give the directory"):
        find(file)


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find(model)


@pytest.mark.parametrize(("text", "fact"), [("{", "is not JSON"), ("[1]", "a JSON list, not an object")])
def test_config_that_is_no_json_object(model: Path, text: str, fact: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ModelError, match=fact):
        find(model)


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no tokenizer\.json \(only tokenizer\.model\).*AutoTokenizer"):
        find(model)
    assert not find(model, tokenizer=False).eos_token_ids.isdisjoint({2})


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("given", "found"),
    [(5, {5}), ([5, 6], {5, 6}), (5.0, {5}), (-1, set()), ([-1, 5], {5}), ([], set()), (None, {2})],
)
def test_tokens_that_end_a_text(model: Path, given: object, found: set[int]) -> None:
    """-1 stands for none in the configs of early Llama models."""
    change(model / "generation_config.json", eos_token_id=given)
    assert find(model).eos_token_ids == found


@pytest.mark.parametrize("given", ["5", [[5]], [None], {"a": 1}, 1.5])
def test_what_is_no_token_is_refused_by_name(model: Path, given: object) -> None:
    change(model / "generation_config.json", eos_token_id=given)
    with pytest.raises(ModelError, match=r"eos_token_id is .*; give a token id or a list of them"):
        _ = find(model).eos_token_ids


def test_a_default_out_of_range_has_the_name_that_it_has_in_the_file(model: Path) -> None:
    change(model / "generation_config.json", max_new_tokens=0)
    with pytest.raises(ModelError, match=r"generation_config\.json: max_new_tokens is 0; give an integer from 1"):
        sampling_defaults(find(model), "auto")


def test_links_of_a_cache_whose_files_are_gone(model: Path) -> None:
    for file in model.glob("model*"):
        file.unlink()
    (model / "model.safetensors").symlink_to("../../blobs/abc")
    with pytest.raises(ModelError, match=r"model\.safetensors is a link to \.\./\.\./blobs/abc, which does not exist"):
        find(model)


def test_an_adapter_is_no_model(model: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    with pytest.raises(ModelError, match="holds a LoRA adapter, not a model"):
        find(model)


def test_no_safetensors(model: Path) -> None:
    for file in model.glob("model*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"found pytorch_model\.bin instead.*save_pretrained"):
        find(model)
    assert find(model, weights=False).tensors == {}


@pytest.mark.parametrize("stale", [0, -1])
def test_a_tensor_that_several_shards_hold_is_that_of_the_shard_in_the_index(model: Path, stale: int) -> None:
    files = sorted(model.glob("model-*.safetensors"))
    name, wanted = "model.norm.weight", find(model).tensors["model.norm.weight"].file
    other = [file for file in files if file != wanted][stale]
    save_file(load_file(other) | {name: torch.full((32,), 7.0)}, other)
    assert find(model).tensors[name].file == wanted


def test_a_tensor_in_another_shard_than_the_index_says_is_found(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    wanted = find(model).tensors["model.norm.weight"].file
    index["weight_map"]["model.norm.weight"] = next(
        name for name in sorted(index["weight_map"].values()) if name != wanted.name
    )
    (model / INDEX).write_text(json.dumps(index))
    assert find(model).tensors["model.norm.weight"].file == wanted


def test_missing_shard(model: Path) -> None:
    shard(model).unlink()
    with pytest.raises(ModelError, match=rf"1 of the \d+ shards .* are missing: {shard(model).name[:6]}"):
        find(model)


@pytest.mark.parametrize("kept", ["all but the last byte", "half of the header", "the length only"])
def test_truncated_shard(model: Path, kept: str) -> None:
    whole = shard(model).read_bytes()
    size = {"all but the last byte": len(whole) - 1, "half of the header": 100, "the length only": 8}[kept]
    shard(model).write_bytes(whole[:size])
    with pytest.raises(ModelError, match=rf"{shard(model).name} is truncated: .*{size}.* Copy it again"):
        find(model)


def test_shard_with_bytes_to_spare(model: Path) -> None:
    with shard(model).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match="longer than its header says"):
        find(model)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64])
def test_shard_that_is_no_safetensors_file(model: Path, content: bytes) -> None:
    shard(model).write_bytes(content)
    with pytest.raises(ModelError, match=rf"\({len(content)} bytes\) is not a safetensors file"):
        find(model)


def test_shard_with_a_broken_header(model: Path) -> None:
    shard(model).write_bytes((4).to_bytes(8, "little") + b"[12]")
    with pytest.raises(ModelError, match="broken safetensors header"):
        find(model)


def test_tensor_whose_size_is_not_its_shapes(model: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    shard(model).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match=r"tensor x is F32 \[3\] but its data has 8 bytes"):
        find(model)


def test_git_lfs_pointer(model: Path) -> None:
    shard(model).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=r"Git LFS pointer of .* bytes.*git lfs pull"):
        find(model)


def test_index_that_promises_too_much(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    parts = json.loads(index.read_text())
    parts["weight_map"]["model.extra"] = shard(model).name
    index.write_text(json.dumps(parts))
    with pytest.raises(ModelError, match=r"names 1 tensors that its shards do not hold, model\.extra"):
        find(model)
    index.write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        find(model)


def test_quantised_weights(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(UnsupportedModelError, match=r"quantised with mxfp4, and the method .* is not known"):
        find(model)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"model_type": "bloom"}, None),
        ({"text_config": {"max_position_embeddings": 77}, "max_position_embeddings": 3}, 77),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_parameters": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_longest_sequence(config: dict, length: int | None) -> None:
    assert max_model_len(config) == length
