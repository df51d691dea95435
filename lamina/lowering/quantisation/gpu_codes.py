"""Quantised weights on a GPU: Lamina's product of codes (``grouped``), for linear layers and experts.

Linear layers that are quantised to int4 have torchao's product instead, in bfloat16 and on CUDA alone, which reads the
codes too. Outside of compiled graphs, torchao multiplies int8 and fp8 weights by making each dense first.
"""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.core.errors import ConfigError
from lamina.core.types import DType, Quantization
from lamina.lowering.cpu_slices import LoweredModel
from lamina.lowering.expert_operators import linear_stacked
from lamina.lowering.quantisation.choice import chosen, expert_weights, linear_weights, turned_weights
from lamina.models.quantisation.codes import (
    Codes,
    ExpertCodes,
    Held,
    StackedCodes,
    group_size,
    quantise,
    quantise_experts,
    stacked_group,
    turned,
)
from lamina.splitter.split_model import Shard, cut


@dataclass(frozen=True)
class PlacedForm:
    """A ``Form`` of weights on a GPU, or on an emulated one.

    Codes that a checkpoint stores stay as they are if Lamina's product keeps their values (``stacked_group``): with a
    scale for each output, or in groups of 32 inputs or more, which may be scattered (``desc_act``).
    """

    held: frozenset[str]
    experts: frozenset[str]
    names: frozenset[str]
    inputs_first: frozenset[str]
    to: Quantization

    @classmethod
    def for_model(cls, model: LoweredModel, to: Quantization, place: torch.device) -> "PlacedForm":
        """Return the form of a model lowered for ``Target.GPU``. Raises ConfigError: ``to`` does not run on
        ``place``."""
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
        if to == "int4" and importlib.util.find_spec("torchao") is None:
            raise ConfigError("--quantization int4 on a GPU needs torchao: run pip install torchao")
        linear, experts, inputs_first = linear_weights(model), expert_weights(model), turned_weights(model)
        names = chosen(model, linear, to) | (frozenset() if to == "none" else experts)
        return cls(linear, experts - inputs_first, names, inputs_first, to)

    def quantise(self, name: str, weight: Tensor, shard: Shard) -> Held | StackedCodes:
        if name in self.inputs_first:
            weight, shard = turned(weight, shard)
        if weight.dim() == 3:
            experts = cut(weight, {0: shard[0]} if 0 in shard else {})
            return StackedCodes.stack(quantise_experts(name, weight, self.to, shard), len(experts))
        if self.to == "int4":
            from torchao.quantization import Int4TilePackedTo4dTensor

            block = [1, group_size(name, weight.shape[1], shard)]
            return Held(Int4TilePackedTo4dTensor.from_hp(cut(weight, shard).contiguous(), block))
        return StackedCodes.stack([quantise(name, weight, self.to, shard)], 1)

    def keep_codes(self, name: str, codes: Codes, dtype: torch.dtype) -> StackedCodes | None:
        fits = name in self.held and stacked_group(codes) is not None
        return StackedCodes.stack([codes], 1) if fits else None

    def hold_experts(self, codes: ExpertCodes, dtype: torch.dtype) -> StackedCodes | None:
        groups = set(map(stacked_group, codes.each))
        return StackedCodes.stack(codes.each, len(codes.each)) if len(groups) == 1 and None not in groups else None


def linear_held(x: Tensor, held: Held | StackedCodes, bias: Tensor | None, _: int | None = None) -> Tensor:
    """x [..., inputs] times a weight that ``PlacedForm`` made, plus bias: [..., outputs]."""
    if isinstance(held, StackedCodes):
        out = linear_stacked(x.reshape(-1, x.shape[-1]), held).view(*x.shape[:-1], held.values.shape[1])
        return out if bias is None else out + bias
    return torch.nn.functional.linear(x, held.weight, bias)
