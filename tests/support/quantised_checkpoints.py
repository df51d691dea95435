"""Small quantised checkpoints of every format that Lamina reads, written by their specifications, and what they mean.

Nothing here uses Lamina's own reading: codes are packed element by element, and weights computed in float64.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Floats = npt.NDArray[np.float64]
GROUP = 16


@dataclass(frozen=True)
class Written:
    """One weight [outputs, inputs]: the tensors that store it, by suffix, and its values."""

    tensors: Mapping[str, Tensor]
    values: Floats


@dataclass(frozen=True)
class Format:
    """``write`` draws and stores a weight of (outputs, inputs), as ``config``, the quantization_config, says."""

    config: Mapping[str, Any]
    write: Callable[[np.random.Generator, int, int], Written]
    ignored: tuple[str, ...] = field(default=("lm_head", "down_proj"))


def words(codes: npt.NDArray[np.int64], bits: int) -> Tensor:
    """int32 [rows, columns / n]: n codes in a word, the first in the lowest bits."""
    rows, columns = codes.shape
    each = 32 // bits
    packed = np.zeros((rows, -(-columns // each)), np.uint32)
    for row in range(rows):
        for column in range(columns):
            packed[row, column // each] |= np.uint32(int(codes[row, column]) << (bits * (column % each)))
    return torch.from_numpy(packed.view(np.int32).copy())


def scales_of(draw: np.random.Generator, *shape: int, bits: int = 4) -> Tensor:
    """For weights of about 0.1."""
    return torch.from_numpy(draw.uniform(0.16, 0.48, shape) / (1 << bits)).to(torch.float16)


def gptq(bits: int, symmetric: bool, ordered: bool, group: int, version: str = "gptq") -> Format:
    def write(draw: np.random.Generator, outputs: int, inputs: int) -> Written:
        size = inputs if group == -1 else group
        groups = -(-inputs // size)
        codes = draw.integers(0, 1 << bits, (inputs, outputs))
        zeros = np.full((groups, outputs), 1 << (bits - 1))
        if not symmetric:
            zeros = draw.integers(1, 1 << bits, (groups, outputs))
        scales = scales_of(draw, groups, outputs, bits=bits)
        group_of = np.arange(inputs) // size
        if ordered:
            group_of = draw.permutation(group_of)
        values = (codes - zeros[group_of]) * scales.double().numpy()[group_of]
        tensors = {
            "qweight": words(codes.T, bits).T.contiguous(),
            "qzeros": words(zeros - (version == "gptq"), bits),  # the first version stores one less
            "scales": scales,
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return Written(tensors, values.T)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": symmetric}
    return Format(config | {"checkpoint_format": version}, write)


def awq() -> Format:
    def write(draw: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes, zeros = draw.integers(0, 16, (inputs, outputs)), draw.integers(0, 16, (inputs // GROUP, outputs))
        scales = scales_of(draw, inputs // GROUP, outputs)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # which of 8 outputs is in which four bits of a word

        def packed(each: npt.NDArray[np.int64]) -> Tensor:
            turned = each.reshape(len(each), -1, 8)[:, :, order].reshape(each.shape)
            return words(turned, 4)

        of = np.arange(inputs) // GROUP
        values = (codes - zeros[of]) * scales.double().numpy()[of]
        return Written({"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, values.T)

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Format(config | {"modules_to_not_convert": ["lm_head", "down_proj"]}, write)


def auto_round(form: Format, packing: str) -> Format:
    """The format ``form`` under the name that AutoRound gives it; its config names the modules that are not rounded."""
    given = {key: form.config[key] for key in ("bits", "group_size", "sym") if key in form.config}
    given |= {"quant_method": "auto-round", "packing_format": packing, "data_type": "int", "autoround_version": "0.9"}
    kept = {name: {"bits": 16, "data_type": "float"} for name in form.ignored}
    return Format(given | {"extra_config": kept}, form.write, form.ignored)


def compressed(form: str, weights: Mapping[str, Any], write: Callable[..., Written], dynamic: bool = False) -> Format:
    activations = {"num_bits": weights["num_bits"], "type": weights["type"], "dynamic": True} if dynamic else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*down_proj"],
    }
    return Format(config, write)


def pack_quantized(bits: int, symmetric: bool, group: int) -> Format:
    def write(draw: np.random.Generator, outputs: int, inputs: int) -> Written:
        size = inputs if group == -1 else group
        half = 1 << (bits - 1)
        codes = draw.integers(-half, half, (outputs, inputs))
        zeros = np.zeros((outputs, inputs // size), np.int64)
        if not symmetric:
            zeros = draw.integers(-half, half, zeros.shape)
        scales = scales_of(draw, outputs, inputs // size, bits=bits).to(torch.bfloat16)
        of = np.arange(inputs) // size
        tensors = {
            "weight_packed": words(codes + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T + half, bits).T.contiguous()
        return Written(tensors, (codes - zeros[:, of]) * scales.double().numpy()[:, of])

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return compressed("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}, write)


def int_quantized() -> Format:
    def write(draw: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes = torch.from_numpy(draw.integers(-128, 128, (outputs, inputs))).to(torch.int8)
        scales = scales_of(draw, outputs, 1, bits=8).float()
        return Written({"weight": codes, "weight_scale": scales}, codes.double().numpy() * scales.double().numpy())

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return compressed("int-quantized", weights, write, dynamic=True)


def fp8_codes(draw: np.random.Generator, outputs: int, inputs: int) -> Tensor:
    return torch.from_numpy(draw.normal(0, 8, (outputs, inputs))).to(torch.float8_e4m3fn)


def float_quantized(strategy: str) -> Format:
    def write(draw: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes = fp8_codes(draw, outputs, inputs)
        scales = scales_of(draw, 1) if strategy == "tensor" else scales_of(draw, outputs, 1)
        return Written({"weight": codes, "weight_scale": scales}, codes.double().numpy() * scales.double().numpy())

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return compressed("float-quantized", weights, write, dynamic=True)


def fp8_blocks(rows: int = 24, columns: int = 20) -> Format:
    """By default, of blocks that do not divide the weight's sides."""

    def write(draw: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes = fp8_codes(draw, outputs, inputs)
        scales = scales_of(draw, -(-outputs // rows), -(-inputs // columns)).float()
        each = scales.double().numpy().repeat(rows, 0).repeat(columns, 1)[:outputs, :inputs]
        return Written({"weight": codes, "weight_scale_inv": scales}, codes.double().numpy() * each)

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Format(config | {"weight_block_size": [rows, columns], "modules_to_not_convert": ["lm_head"]}, write)


FORMATS = {
    "gptq-4": gptq(4, symmetric=True, ordered=False, group=GROUP),
    "gptq-4-asymmetric": gptq(4, symmetric=False, ordered=False, group=GROUP),
    "gptq-4-ordered": gptq(4, symmetric=False, ordered=True, group=GROUP),
    "gptq-8": gptq(8, symmetric=True, ordered=False, group=-1),
    "gptq-8-asymmetric": gptq(8, symmetric=False, ordered=True, group=GROUP),
    "gptq-v2": gptq(4, symmetric=False, ordered=False, group=GROUP, version="gptq_v2"),
    "awq": awq(),
    "auto-round": auto_round(gptq(4, symmetric=False, ordered=False, group=GROUP), "auto_round:auto_gptq"),
    "auto-round-awq": auto_round(awq(), "auto_round:auto_awq"),
    "pack-4": pack_quantized(4, symmetric=True, group=GROUP),
    "pack-4-asymmetric": pack_quantized(4, symmetric=False, group=GROUP),
    "pack-8": pack_quantized(8, symmetric=True, group=-1),
    "int-8": int_quantized(),
    "fp8-tensor": float_quantized("tensor"),
    "fp8-channel": float_quantized("channel"),
    "fp8-blocks": fp8_blocks(),
}


def quantise(folder: Path, form: Format, model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Make the checkpoint in ``folder`` one of ``form``, and give ``model`` its weights. Returns these, by name.

    Quantised are the weights of all linear layers but those in ``ignored``, which stay as they are.
    """
    draw = np.random.default_rng(seed)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        kept = any(part in name for part in form.ignored)
        if not isinstance(module, torch.nn.Linear) or kept:
            continue
        written = form.write(draw, *module.weight.shape)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in written.tensors.items()}
        found[f"{name}.weight"] = torch.from_numpy(written.values)
        module.weight.data = found[f"{name}.weight"].to(module.weight.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(form.config)}))
    return found
