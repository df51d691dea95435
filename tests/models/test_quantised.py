"""Quantised checkpoints: every format against its specification, what is refused, and what is held as codes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina.core.errors import ConfigError, ModelError, UnsupportedModelError
from lamina.core.types import DType, Quantization
from lamina.models import pretrained, tensors
from lamina.models.directory import find
from lamina.models.pretrained import load_config, torch_dtype
from lamina.models.quantisation.codes import Codes, group_size, plain, quantise
from lamina.models.quantisation.formats import scheme
from lamina.splitter.split_model import Shard, cut
from tests.support import quantised_checkpoints as checkpoints
from tests.support.quantised_checkpoints import FORMATS
from tests.support.random_models import variant, write_checkpoint
from tests.support.sweep import sweep


def write(path: Path, name: str) -> dict[str, Tensor]:
    """A checkpoint of this format; returns the weights that it means, in float64."""
    model = write_checkpoint(variant("llama"), path)
    return checkpoints.quantise(path, FORMATS[name], model)


@pytest.mark.parametrize(
    "name", sweep([*FORMATS], ["gptq-4-ordered", "awq", "auto-round", "pack-4-asymmetric", "fp8-blocks"])
)
def test_weights_are_what_the_format_says(tmp_path: Path, name: str) -> None:
    exact = write(tmp_path, name)
    assert len(exact) == 12 + 2 * ("down_proj" not in FORMATS[name].ignored)
    directory = find(tmp_path, tokenizer=False)
    config = load_config(directory)
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        plan = pretrained.plan(directory, config, dtype)
        loaded = pretrained.load(directory, list(plan.expected), config, dtype)
        for weight, values in exact.items():
            assert torch.equal(loaded[weight], values.float().to(torch_dtype(dtype))), weight


@pytest.mark.parametrize("name", sweep(["gptq-4-ordered", "awq", "pack-4-asymmetric", "fp8-blocks"], ["awq"]))
def test_ranks_get_parts_of_weights(tmp_path: Path, name: str) -> None:
    """Also where a group is cut."""
    exact = write(tmp_path, name)
    directory = find(tmp_path, tokenizer=False)
    plan = pretrained.plan(directory, load_config(directory), DType.FLOAT32)
    shards: dict[str, Shard] = {
        "model.layers.0.self_attn.q_proj.weight": {0: ((2, 5), (8, 16))},
        "model.layers.1.self_attn.o_proj.weight": {1: ((12, 30),)},
    }
    loaded = tensors.load(directory, list(shards), plan, shards=shards)
    for weight, shard in shards.items():
        assert torch.equal(plain(loaded[weight]), cut(exact[weight].float(), shard))


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gptq-4", {"quant_method": "mxfp4"}, "the method 'mxfp4' is not known"),
        ("gptq-4", {"bits": 3}, "it has 3 bits"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "its checkpoint_format is marlin"),
        ("gptq-4", {"checkpoint_format": None, "format": "marlin"}, "its checkpoint_format is marlin"),
        ("gptq-4", {"pack_dtype": "int16"}, "packed into int16, not int32"),
        ("gptq-4", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "settings of their own"),
        ("awq", {"version": "gemv"}, "its version is gemv"),
        ("awq", {"zero_point": False}, "no zero points"),
        ("auto-round", {"packing_format": "auto_round:fp8"}, "its packing_format is auto_round:fp8"),
        ("auto-round", {"data_type": "mx_fp"}, "its data_type is mx_fp"),
        ("auto-round", {"extra_config": {"lm_head": {"bits": 8}}}, r"settings of their own \(extra_config: lm_head\)"),
        ("auto-round", {"bits": 3}, "it has 3 bits"),
        ("fp8-blocks", {"activation_scheme": "static"}, "activations have fixed scales"),
        ("fp8-tensor", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "it is sparse"),
        ("fp8-tensor", {"format": "nvfp4-pack-quantized"}, "its format is nvfp4-pack-quantized"),
        ("fp8-tensor", {"config_groups": {}}, "it quantises no weights"),
        ("fp8-tensor", {"config_groups": None}, "it quantises no weights"),
        ("fp8-tensor", {"config_groups": {"W8A8": ["Linear"]}}, r"one of its config_groups is \['Linear'\]"),
        (
            "fp8-tensor",
            {"config_groups": {"kv": {"targets": ["Attention"]}}},
            "quantises Attention without their weights",
        ),
        ("gptq-4", {"group_size": "many"}, "its group_size is many"),
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], why: str) -> None:
    write(tmp_path, name)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    with pytest.raises((UnsupportedModelError, ModelError), match=why):
        find(tmp_path, tokenizer=False)


@pytest.mark.parametrize("zero", [7, 8, 0])
def test_symmetric_codes_have_their_middle_as_zero_point(tmp_path: Path, zero: int) -> None:
    """Whatever is stored: writers differ in that, and kernels for symmetric codes do not read it."""
    exact = write(tmp_path, "gptq-4")
    file = tmp_path / "model.safetensors"
    word = int.from_bytes(bytes([zero | zero << 4] * 4), "little", signed=True)
    stored = load_file(file)
    save_file({key: torch.full_like(each, word) if "qzeros" in key else each for key, each in stored.items()}, file)
    directory = find(tmp_path, tokenizer=False)
    loaded = pretrained.load(directory, list(exact), load_config(directory), DType.FLOAT32)
    assert all(torch.equal(loaded[name], values.float()) for name, values in exact.items())


def _configure(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


def test_a_block_may_be_written_as_text() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    found = scheme("model", {"quantization_config": config})
    assert found is not None and found.blocks == ((128, 64),)


@pytest.mark.parametrize("status", ["frozen", "initialized", "calibration"])
def test_what_is_stored_counts_not_its_label(tmp_path: Path, status: str) -> None:
    exact = write(tmp_path, "pack-4-asymmetric")
    _configure(tmp_path, quantization_status=status)
    directory = find(tmp_path, tokenizer=False)
    config = load_config(directory)
    plan = pretrained.plan(directory, config, DType.FLOAT32)
    loaded = pretrained.load(directory, list(exact), config, DType.FLOAT32)
    assert set(exact) <= set(plan.expected)
    assert all(torch.equal(loaded[name], values.float()) for name, values in exact.items())


def test_weights_that_are_yet_to_be_rounded_are_refused(tmp_path: Path) -> None:
    """Saved without compression: transformers rounds them at every use."""
    write(tmp_path, "pack-4-asymmetric")
    _configure(tmp_path, quantization_status="frozen")
    (file,) = tmp_path.glob("*.safetensors")
    stored = load_file(file)
    name = next(name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed"))
    outputs, inputs = stored[f"{name}_shape"].tolist()
    del stored[f"{name}_packed"]
    save_file(stored | {name: torch.zeros(outputs, inputs)}, file)
    with pytest.raises(ModelError, match=r"F32 with scales beside it.*save_compressed=True"):
        find(tmp_path, tokenizer=False)


def test_a_scheme_of_the_text_model_is_read(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    assert scheme(tmp_path, {"text_config": config}) == scheme(tmp_path, config)
    assert scheme(tmp_path, {"text_config": {}}) is None


def test_fixed_scales_of_activations_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "fp8-channel")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"activations have fixed scales.*Lamina reads GPTQ"):
        find(tmp_path, tokenizer=False)


@pytest.mark.parametrize(
    ("name", "lost", "why"),
    [("awq", ".qzeros", "no model.layers.0.*q?zeros"), ("int-8", ".weight_scale", "I8 without a scale")],
)
def test_missing_parts_of_weights(tmp_path: Path, name: str, lost: str, why: str) -> None:
    write(tmp_path, name)
    file = tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if not key.endswith(lost)}
    save_file(kept, file)
    with pytest.raises(ModelError, match=why):
        find(tmp_path, tokenizer=False)


def test_scales_that_do_not_fit_the_config(tmp_path: Path) -> None:
    write(tmp_path, "gptq-4")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["group_size"] = 8
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"which do not fit groups of \(1, 8\)"):
        find(tmp_path, tokenizer=False)


def dense(codes: Codes) -> Tensor:
    """In float64, by the definition."""
    zeros = torch.zeros_like(codes.scales) if codes.zeros is None else codes.zeros
    rows, columns = codes.rows.tolist(), codes.columns.tolist()
    each = [[(zeros[r, c].double(), codes.scales[r, c].double()) for c in columns] for r in rows]
    shift, scale = (torch.tensor([[pair[part] for pair in row] for row in each]) for part in (0, 1))
    return (codes.values.double() - shift) * scale


@pytest.mark.parametrize(("to", "most"), [("int8", 0.5 / 127), ("int4", 0.5 / 15), ("fp8", 1 / 16)])
def test_quantised_weights_are_the_nearest(to: Quantization, most: float) -> None:
    """Half a code, of the largest weight of an output (int8) or of the range of a group (int4); half a unit (fp8)."""
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight[2] = 0
    weight[3] = 1.5
    codes = quantise("w", weight, to, {})
    values = dense(codes)
    exact = weight.double()
    grouped = exact.view(5, -1, 32)
    if to == "fp8":
        error, bound = (values - exact).abs(), exact.abs() * most + 1e-3
    else:
        span = grouped.amax(2).clamp_min(0) - grouped.amin(2).clamp_max(0)
        error, bound = (values - exact).abs(), span.amax(1, keepdim=True) * most * (2 if to == "int8" else 1) + 1e-6
    assert (error <= bound).all()
    assert torch.equal(codes.dense(torch.float32), values.float()) or to == "int4"
    assert (codes.dense(torch.float32) - values).abs().max() < 1e-6
    assert (values[2] == 0).all() and values[3].sub(1.5).abs().max() < 1e-6
    shard: Shard = {0: ((1, 2), (3, 5))} if to == "int4" else {0: ((1, 2), (3, 5)), 1: ((32, 64),)}
    assert torch.equal(dense(quantise("w", weight, to, shard)), cut(values, shard))


def test_groups_divide_inputs_and_are_not_cut() -> None:
    assert group_size("w", 256, {}) == 128 and group_size("w", 96, {}) == 32
    assert group_size("w", 384, {1: ((192, 384),)}) == 64
    with pytest.raises(ConfigError, match="w has 40 inputs, which cannot be divided into groups of 128, 64, 32"):
        group_size("w", 40, {})
    with pytest.raises(ConfigError, match="where ranks cut them"):
        group_size("w", 96, {1: ((0, 48),)})


def test_groups_are_runs_of_inputs() -> None:
    codes = quantise("w", torch.randn(4, 64), "int4", {})
    assert codes.group == 64
    assert codes.shard({1: ((0, 40),)}).group == 40
    assert quantise("w", torch.randn(4, 96), "int4", {}).shard({1: ((16, 96),)}).group == 16  # of 16, 32 and 32
    uneven = dataclasses.replace(codes, columns=(torch.arange(64) > 16).long())
    assert uneven.group == 1
