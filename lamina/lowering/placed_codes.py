"""Quantised weights on a GPU, by torchao.

Outside of compiled graphs, torchao multiplies int8 and fp8 weights by making each dense first: they take half of the
memory, and no less time. Its int4 product, in bfloat16 and on CUDA alone, reads the codes themselves. Those of experts,
int8 and int4, are multiplied by Lamina's kernel (``grouped``), as are codes of 4 bits that a checkpoint stores.
"""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.errors import ConfigError
from lamina.lowering.grouped import linear_stacked
from lamina.lowering.lowered import LoweredModel
from lamina.lowering.quantised import chosen, expert_weights, linear_weights
from lamina.models.codes import (
    Codes,
    ExpertCodes,
    Held,
    StackedCodes,
    group_size,
    quantise,
    quantise_experts,
    stacked_group,
)
from lamina.splitter.split_model import Shard, cut
from lamina.types import DType, Quantization


@dataclass(frozen=True)
class PlacedForm:
    """A ``Form`` of weights on a GPU, or on an emulated one.

    Codes that a checkpoint stores stay as they are if a product keeps their values. torchao has those of int8 and fp8
    with a scale for each output or for all; Lamina has that of 4 and 8 bits with groups of 32 inputs or more, which may
    be scattered (``desc_act``), and that of experts in int8 with a scale for each output.
    """

    held: frozenset[str]
    installed: bool
    experts: frozenset[str]
    names: frozenset[str]
    to: Quantization

    @classmethod
    def of(cls, model: LoweredModel, to: Quantization, place: torch.device) -> "PlacedForm":
        """For a model lowered for ``Target.GPU``. Raises ConfigError: ``to`` does not run on ``place``."""
        installed = importlib.util.find_spec("torchao") is not None
        if to == "int4" and (place.type != "cuda" or model.dtype is not DType.BFLOAT16):
            raise ConfigError(
                f"int4 weights run on NVIDIA GPUs in bfloat16, not on {place.type} in {model.dtype.value}: give "
                "--dtype bfloat16, or --quantization int8"
            )
        if to == "int4" and torch.cuda.get_device_capability(place) < (8, 0):
            raise ConfigError(
                f"int4 weights need a GPU of compute capability 8.0 or later; {torch.cuda.get_device_name(place)} has "
                "less: give --quantization int8"
            )
        if to != "none" and not installed:
            raise ConfigError(f"--quantization {to} on a GPU needs torchao: run pip install torchao")
        linear = linear_weights(model)
        experts = expert_weights(model)
        names = chosen(model, linear, to) | (experts if to in ("int8", "int4") else frozenset())
        return cls(linear, installed, experts, names, to)

    def quantise(self, name: str, weight: Tensor, shard: Shard) -> Held | StackedCodes:
        """See ``Form``."""
        if weight.dim() == 3:
            experts = cut(weight, {0: shard[0]} if 0 in shard else {})
            return StackedCodes.of(quantise_experts(name, weight, self.to, shard), len(experts))
        if self.to == "int4":
            from torchao.quantization import Int4TilePackedTo4dTensor

            block = [1, group_size(name, weight.shape[1], shard)]
            return Held(Int4TilePackedTo4dTensor.from_hp(cut(weight, shard).contiguous(), block))
        return _held(quantise(name, weight, self.to, shard), weight.dtype)

    def hold(self, name: str, codes: Codes, dtype: torch.dtype) -> Held | StackedCodes | None:
        """See ``Form``."""
        if name not in self.held:
            return None
        of_outputs = codes.zeros is None and codes.scales.shape[1] == 1 and codes.values.dtype != torch.uint8
        if self.installed and of_outputs and codes.bits == 8:
            return _held(codes, dtype)
        return None if stacked_group(codes) is None else StackedCodes.of([codes], 1)

    def hold_experts(self, codes: ExpertCodes, dtype: torch.dtype) -> StackedCodes | None:
        """See ``Form``."""
        groups = set(map(stacked_group, codes.each))
        return StackedCodes.of(codes.each, len(codes.each)) if len(groups) == 1 and None not in groups else None


def _held(codes: Codes, dtype: torch.dtype) -> Held:
    """Codes with one scale for each output, as torchao has them."""
    from torchao.quantization import Float8Tensor, Int8Tensor

    scales, block = codes.scales[codes.rows].float().contiguous(), [1, codes.values.shape[1]]
    values = codes.values.contiguous()
    if values.dtype == torch.int8:
        return Held(Int8Tensor(values, scales, block, dtype))
    return Held(Float8Tensor(values, scales, block_size=block, dtype=dtype))


def linear_held(x: Tensor, held: Held | StackedCodes, bias: Tensor | None, _: int | None = None) -> Tensor:
    """x [..., inputs] times a weight that ``PlacedForm`` made, plus bias: [..., outputs]."""
    if isinstance(held, StackedCodes):
        out = linear_stacked(x.reshape(-1, x.shape[-1]), held).view(*x.shape[:-1], held.values.shape[1])
        return out if bias is None else out + bias
    return torch.nn.functional.linear(x, held.weight, bias)
