"""Weights held as codes: what devices take, and the logits of slices that run with them, on CPUs and emulated GPUs."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lamina import _native
from lamina.compute.device import make
from lamina.compute.device.base import Device, Rows, Runner
from lamina.core.errors import ConfigError, ModelError
from lamina.core.types import ActivationDType, DType, Quantization
from lamina.lowering import LoweredModel, lower
from lamina.lowering.weight_forms import (
    PlacedForm,
    expert_weights,
    head_weights,
    linear_weights,
    router_weights,
    turned_weights,
)
from lamina.models import pretrained, tensors
from lamina.models.directory import find
from lamina.models.pretrained import load_config
from lamina.models.quantisation.codes import Codes, ExpertCodes, StackedCodes, Weight, plain
from lamina.splitter import split
from lamina.splitter.parts import ONLY, Rank
from lamina.splitter.split_model import SplitModel, cut
from tests.support import quantised_checkpoints as checkpoints
from tests.support.quantised_checkpoints import FORMATS
from tests.support.random_models import variant, write_checkpoint
from tests.support.sweep import sweep

DEVICES = ("cpu", "emulated")
WAYS: dict[str, tuple[str, Quantization]] = {
    "cpu-int8": ("cpu", "int8"),
    "cpu-int4": ("cpu", "int4"),
    "emulated-int8": ("emulated", "int8"),
    "emulated-fp8": ("emulated", "fp8"),
}
needs_byte_rows = pytest.mark.skipif(
    not _native.linear_takes_byte_rows(), reason="this processor has no AVX-512 with bfloat16 and VNNI"
)
needs_kernels = pytest.mark.skipif(not _native.linear_available(), reason="this processor has no AVX2")


_SPLIT: dict[tuple[str, DType, Rank], SplitModel] = {}


def lowered(path: Path, name: str, dtype: DType = DType.BFLOAT16, rank: Rank = ONLY) -> LoweredModel:
    """The model in ``path``, lowered for a device; equal configurations are split once."""
    config = load_config(find(path, tokenizer=False))
    key = config.to_json_string(), dtype, rank
    if key not in _SPLIT:
        _SPLIT[key] = split(config, dtype, rank)
    return lower(_SPLIT[key], make(name).target)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write(path)
    return path


def load(path: Path, device: Device, model: LoweredModel, to: Quantization = "none") -> dict[str, Weight]:
    directory = find(path, tokenizer=False)
    plan = pretrained.plan(directory, load_config(directory), model.dtype)
    form = device.form(model, to)
    return tensors.load(directory, model.weights, plan, device=device.place, shards=model.shards, form=form)


def write(path: Path, **sizes: int) -> PreTrainedModel:
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, **sizes}
    config = variant("llama")
    config.update(wide | {"head_dim": 16})
    return write_checkpoint(config, path)


def codes_of(held: Mapping[str, Weight]) -> dict[str, Weight]:
    return {name: weight for name, weight in held.items() if not isinstance(weight, Tensor)}


def dense(weight: Weight) -> Tensor:
    """What a device's codes of a linear layer mean, in float64."""
    if isinstance(weight, StackedCodes):
        return dense_experts(weight)[0]
    assert isinstance(weight, Codes)
    zeros = 0.0 if weight.zeros is None else weight.zeros[weight.rows][:, weight.columns].double()
    return (weight.values.double() - zeros) * weight.scales[weight.rows][:, weight.columns].double()


@pytest.mark.parametrize(("error", "warned"), [(None, False), (0, False), (errno.EPERM, True)])
def test_a_worker_whose_matrix_tiles_are_refused_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int | None, warned: bool
) -> None:
    monkeypatch.setattr(_native, "linear_tiles_error", lambda: error)
    device, model = make("cpu"), lowered(folder, "cpu")
    device.runner(model, load(folder, device, model))
    assert ("refuses (Operation not permitted)" in caplog.text) == warned


@needs_kernels
@pytest.mark.parametrize("way", sweep(WAYS, ["cpu-int4", "emulated-int8"]))
def test_linear_layers_become_codes_and_nothing_else(folder: Path, way: tuple[str, Quantization]) -> None:
    name, to = way
    reference, device = AutoModelForCausalLM.from_pretrained(folder), make(name)
    held = codes_of(load(folder, device, lowered(folder, name), to))
    assert held.keys() == {
        f"{path}.weight"
        for path, module in reference.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }
    state = reference.state_dict()
    for weight, codes in held.items():
        exact = state[weight].to(torch.bfloat16).double()
        step = {"int8": 1 / 254, "int4": 1 / 15, "fp8": 1 / 14}[to] * exact.abs().amax(1, keepdim=True)
        assert ((dense(codes) - exact).abs() <= step * 1.01).all(), weight


def test_head_and_linear_weights(folder: Path) -> None:
    for name in DEVICES:
        model = lowered(folder, name)
        assert head_weights(model) == {"lm_head.weight"}
        assert linear_weights(model) >= {"lm_head.weight"}
        assert not any("norm" in each or "embed" in each for each in linear_weights(model))


def logits(
    device: Device, model: LoweredModel, held: Mapping[str, Weight], activations: ActivationDType = "auto"
) -> list[Tensor]:
    """Results of every slice for some rows of random inputs."""
    runner: Runner = device.runner(model, held, activations=activations)
    draw = torch.Generator().manual_seed(3)
    count = runner.padded(5)
    rows = Rows(torch.randint(3, 90, (count,), generator=draw), torch.arange(count))
    results: list[Tensor] = []
    attention: Tensor | None = None
    context: tuple[Tensor, ...] = ()
    for index in runner.slices:
        if index:
            spec = model.attentions[index - 1]
            attention = torch.randn(count, spec.query_heads, spec.v_dim, generator=draw)
            attention = attention.to(getattr(torch, model.dtype.value))
        if index == len(model.attentions):
            assert attention is not None
            results.append(runner.logits(rows, attention, context, torch.arange(5)).clone())
            break
        output = runner.run(index, rows, attention, context)
        results += [tensor.clone() for tensor in output.results]
        context = tuple(tensor.clone() for tensor in output.context)
    return results


@needs_kernels
@pytest.mark.parametrize("way", sweep(WAYS, ["cpu-int4", "emulated-int8"]))
def test_slices_compute_what_their_dense_weights_compute(folder: Path, way: tuple[str, Quantization]) -> None:
    """The same codes made dense in float32 and multiplied in float32: apart by bfloat16's rounding alone."""
    name, to = way
    device = make(name)
    model = lowered(folder, name)
    held = load(folder, device, model, to)
    actual = logits(device, model, held)
    wide = lowered(folder, name, DType.FLOAT32)
    exact = {
        key: dense(weight).float() if not isinstance(weight, Tensor) else weight.float() for key, weight in held.items()
    }
    wanted = logits(make(name), wide, exact)
    for ours, theirs in zip(actual, wanted, strict=True):
        assert (ours.float() - theirs).abs().max() <= 0.03 * theirs.abs().max()


@needs_kernels
@pytest.mark.parametrize(
    "family",
    sweep(
        ["mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "gpt_oss", "llama4_text", "phimoe"],
        ["mixtral", "gpt_oss", "llama4_text", "phimoe"],
    ),
)
@pytest.mark.parametrize(("name", "to"), [("cpu", "int8"), ("emulated", "int8"), ("emulated", "fp8")])
def test_experts_compute_what_their_dense_weights_compute(
    tmp_path: Path, family: str, name: str, to: Quantization
) -> None:
    """In bfloat16 too: the same experts are chosen, but for a row between two that are nearly equal."""
    write_checkpoint(variant(family), tmp_path)
    device = make(name)
    model = lowered(tmp_path, name)
    held = load(tmp_path, device, model, to)
    codes = {key for key, weight in held.items() if not isinstance(weight, Tensor)}
    assert expert_weights(model) and codes >= expert_weights(model)
    assert router_weights(model) and not codes & router_weights(model)
    made_dense: dict[str, Weight] = dict(held)
    experts, inputs_first = expert_weights(model), turned_weights(model)
    for key, weight in held.items():
        if isinstance(weight, ExpertCodes) or (isinstance(weight, StackedCodes) and key in experts):
            found = dense_experts(weight).bfloat16()
            made_dense[key] = found.mT if key in inputs_first else found
        elif isinstance(weight, StackedCodes):
            made_dense[key] = dense(weight).bfloat16()
    for ours, theirs in zip(logits(device, model, held), logits(device, model, made_dense), strict=True):
        of_rows = (ours.float() - theirs.float()).abs().flatten(1).amax(1)
        undecided = 0 if name == "cpu" else 1
        assert (of_rows > 0.03 * theirs.float().abs().max()).sum() <= undecided


@needs_kernels
@pytest.mark.parametrize(
    ("name", "form", "kept"),
    [
        ("cpu", checkpoints.gptq(4, symmetric=False, ordered=False, group=32), True),
        ("cpu", checkpoints.gptq(4, symmetric=False, ordered=True, group=32), False),
        ("emulated", checkpoints.gptq(4, symmetric=False, ordered=False, group=32), True),
        ("emulated", checkpoints.gptq(4, symmetric=False, ordered=False, group=16), False),
        ("emulated", checkpoints.gptq(4, symmetric=False, ordered=False, group=-1), True),
        ("emulated", checkpoints.gptq(8, symmetric=False, ordered=False, group=32), True),
        ("emulated", checkpoints.fp8_blocks(48, 32), True),
        ("emulated", checkpoints.fp8_blocks(), False),
        ("emulated", checkpoints.gptq(4, symmetric=False, ordered=True, group=32), True),
        ("emulated", checkpoints.gptq(8, symmetric=True, ordered=True, group=32), True),
        ("emulated", checkpoints.pack_quantized(8, symmetric=True, group=32), True),
    ],
)
@pytest.mark.parametrize("family", sweep(["qwen3_moe", "mixtral", "deepseek_v3"], ["qwen3_moe"]))
def test_experts_that_are_stored_as_codes_stay_codes(
    tmp_path: Path, family: str, name: str, form: checkpoints.Format, kept: bool
) -> None:
    """Where the product keeps their values. They mean what they mean if they are made dense."""
    linear, ordered = write_codes(tmp_path, family, form), form.config.get("desc_act", False)
    device, model = make(name), lowered(tmp_path, name)
    held, names = load(tmp_path, device, model), expert_weights(model)
    assert names and all(isinstance(held[key], ExpertCodes | StackedCodes) == kept for key in names)
    assert all(isinstance(held[key], Codes | StackedCodes) == kept for key in linear)
    directory = find(tmp_path, tokenizer=False)
    exact = pretrained.load(directory, [*names, *linear], load_config(directory), DType.FLOAT32)
    for number in range(2):
        part = lowered(tmp_path, name, rank=Rank(number, 2))
        own = load(tmp_path, device, part)
        for key in names if kept else ():
            wanted = cut(exact[key], part.shards[key])
            if ordered and any(dim > 1 for dim in part.shards[key]):  # a rank has unequal parts of the groups
                assert torch.equal(plain(own[key]), wanted.bfloat16())
            else:
                torch.testing.assert_close(dense_experts(own[key]), wanted.double(), rtol=0, atol=1e-6)
    made_dense = dict(held)
    for key in (*names, *linear) if kept else ():
        found = dense_experts(held[key])
        found = found if key in names else found.view(exact[key].shape)
        torch.testing.assert_close(found, exact[key].double(), rtol=0, atol=1e-6)
        made_dense[key] = found.bfloat16()
    for ours, theirs in zip(logits(device, model, held), logits(device, model, made_dense), strict=True):
        of_rows = (ours.float() - theirs.float()).abs().flatten(1).amax(1)
        assert (of_rows > 0.03 * theirs.float().abs().max()).sum() <= 1  # that is undecided between experts


@needs_kernels
@pytest.mark.parametrize("missing", ["experts.2.up_proj.qweight", "experts.3."])
def test_missing_experts_are_reported(tmp_path: Path, missing: str) -> None:
    write_codes(tmp_path, "qwen3_moe", checkpoints.gptq(4, symmetric=False, ordered=False, group=32))
    file = tmp_path / "model.safetensors"
    stored = {key: tensor for key, tensor in load_file(file).items() if f"layers.0.mlp.{missing}" not in key}
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load(tmp_path, make("cpu"), lowered(tmp_path, "cpu"))


def write_codes(folder: Path, family: str, form: checkpoints.Format) -> list[str]:
    """A checkpoint whose experts, and some linear layers, are stored as codes. Returns the names of the latter."""
    config = variant(family)
    config.update({"hidden_size": 64, "moe_intermediate_size": 128, "intermediate_size": 128})
    write_checkpoint(config, folder)
    file, draw = folder / "model.safetensors", np.random.default_rng(0)
    stored = load_file(file)
    linear = [key for key in stored if key.endswith("self_attn.o_proj.weight") and stored[key].shape[1] % 64 == 0]
    for key in [*linear, *(key for key in stored if ".experts." in key)]:
        written = form.write(draw, *stored.pop(key).shape)
        stored |= {f"{key.removesuffix('.weight')}.{suffix}": each for suffix, each in written.tensors.items()}
    for key in [key for key in stored if key.endswith("up_proj.g_idx")]:  # of the same inputs
        stored[key] = stored[key.replace("up_proj", "gate_proj")].clone()
    save_file(stored, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": dict(form.config)}))
    return linear


def dense_experts(weight: Weight) -> Tensor:
    """What codes of experts mean, in float64."""
    if isinstance(weight, Codes | ExpertCodes):
        return torch.stack([dense(one) for one in (weight.each if isinstance(weight, ExpertCodes) else [weight])])
    assert isinstance(weight, StackedCodes)
    halves = weight.values.view(*weight.scales.shape, -1)
    values = torch.cat([halves & 15, halves >> 4], 3) if weight.values.dtype == torch.uint8 else halves
    zeros = 0.0 if weight.zeros is None else weight.zeros[..., None]
    in_order = ((values.double() - zeros) * weight.scales[..., None]).flatten(2)
    if weight.order is None:
        return in_order
    places = weight.order[:, None].expand_as(in_order)
    return torch.empty_like(in_order).scatter_(2, places, in_order)


@needs_kernels
def test_slices_with_codes_run_as_native_programs(folder: Path) -> None:
    device, model = make("cpu"), lower(split(load_config(find(folder, tokenizer=False)), DType.BFLOAT16))
    for to in ("int8", "int4"):
        slices = model.with_weights(load(folder, device, model, to))
        assert all(piece.program is not None for piece in slices)


@needs_byte_rows
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_slices_with_rounded_activations_run_as_native_programs(folder: Path, to: Quantization) -> None:
    """Their logits are near those with activations in bfloat16, and are others."""
    device, model = make("cpu"), lower(split(load_config(find(folder, tokenizer=False)), DType.BFLOAT16))
    held = load(folder, device, model, to)
    assert all(piece.program is not None for piece in model.with_weights(held, activations="int8"))
    results = zip(logits(device, model, held), logits(device, model, held, "int8"), strict=True)
    errors = [float((exact.float() - got.float()).abs().max() / exact.float().abs().max()) for exact, got in results]
    assert errors[-1] > 0 and max(errors) < 0.05


@needs_byte_rows
def test_rounded_activations_without_codes_or_on_gpus_are_refused(folder: Path) -> None:
    device, model = make("cpu"), lowered(folder, "cpu")
    with pytest.raises(ConfigError, match=r"of which this model has none among .*give --quantization int8 or int4"):
        device.runner(model, load(folder, device, model), activations="int8")
    device, model = make("emulated"), lowered(folder, "emulated")
    with pytest.raises(ConfigError, match="--activation-dtype int8 runs on CPUs with AVX-512 and VNNI, not on"):
        device.runner(model, load(folder, device, model, "int8"), activations="int8")


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("form", ["gptq-4", "gptq-4-ordered", "awq", "pack-4-asymmetric", "int-8", "fp8-channel"])
def test_stored_codes_stay_where_the_product_keeps_their_values(tmp_path: Path, name: str, form: str) -> None:
    model_of = write(tmp_path)
    exact = checkpoints.quantise(tmp_path, FORMATS[form], model_of)
    device = make(name)
    held = load(tmp_path, device, lowered(tmp_path, name))
    kept = codes_of(held)
    stays = form not in ("gptq-4-ordered", "fp8-channel") if name == "cpu" else form in ("int-8", "fp8-channel")
    assert kept.keys() == (exact.keys() if stays else set())
    for weight, values in exact.items():
        if weight in kept:
            assert (dense(kept[weight]) - values).abs().max() < 1e-12
        else:
            assert torch.equal(held[weight], values.float().to(torch.bfloat16))  # type: ignore[arg-type]


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("name", "to"), [("cpu", "int8"), ("cpu", "int4"), ("emulated", "fp8")])
def test_ranks_have_parts_of_the_same_codes(tmp_path: Path, name: str, to: Quantization) -> None:
    write(tmp_path, intermediate_size=128)
    device = make(name)
    whole = codes_of(load(tmp_path, device, lowered(tmp_path, name), to))
    for number in range(2):
        model = lowered(tmp_path, name, rank=Rank(number, 2))
        held = codes_of(load(tmp_path, device, model, to))
        assert held.keys() == whole.keys()
        for weight, codes in held.items():
            part = cut(dense(whole[weight]), model.shards[weight])
            if to == "int4" and 1 in model.shards[weight]:  # groups are half as long
                assert dense(codes).shape == part.shape
            else:
                assert torch.equal(dense(codes), part), weight


@needs_kernels
@pytest.mark.parametrize("name", DEVICES)
def test_ranks_have_parts_of_experts_whose_inputs_come_first(tmp_path: Path, name: str) -> None:
    write_checkpoint(variant("gpt_oss"), tmp_path)
    device = make(name)
    whole = load(tmp_path, device, lowered(tmp_path, name), "int8")
    for number in range(2):
        model = lowered(tmp_path, name, rank=Rank(number, 2))
        own = load(tmp_path, device, model, "int8")
        assert expert_weights(model) == turned_weights(model) and set(model.shards) >= turned_weights(model)
        for key in expert_weights(model):
            assert torch.equal(dense_experts(own[key]).mT, cut(dense_experts(whole[key]).mT, model.shards[key])), key


@pytest.mark.parametrize(
    ("name", "to", "dtype", "why"),
    [
        ("cpu", "fp8", DType.BFLOAT16, "no product of fp8 weights: give --quantization int8 or int4"),
        ("cpu", "int8", DType.FLOAT32, "bfloat16; this model has float32.*give --dtype bfloat16"),
        ("emulated", "int4", DType.BFLOAT16, "int4 weights run on NVIDIA GPUs"),
    ],
)
def test_what_does_not_run_is_refused(folder: Path, name: str, to: Quantization, dtype: DType, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make(name).form(lowered(folder, name, dtype), to)


def test_gpus_need_torchao_for_int4_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = make("emulated"), lowered(folder, "emulated")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert all(isinstance(weight, StackedCodes) for weight in codes_of(load(folder, device, model, "fp8")).values())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda place: (8, 0))
    with pytest.raises(ConfigError, match="pip install torchao"):
        PlacedForm(model, "int4", torch.device("cuda"))


def test_models_without_linear_layers_are_refused(tmp_path: Path) -> None:
    write_checkpoint(variant("gpt2"), tmp_path)
    with pytest.raises(ConfigError, match="no linear layers whose weights can be quantised"):
        make("cpu").form(lowered(tmp_path, "cpu"), "int8")
