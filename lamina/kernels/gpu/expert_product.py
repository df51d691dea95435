"""Launches the product of experts for tensors of PyTorch on a GPU."""

import numpy as np
import torch
from torch import Tensor

from lamina.core.types import Quantization
from lamina.kernels.gpu.specialize import GroupedWeights, grouped_program, grouped_tile

ELEMENTS = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16}
"""The types of arrays that hold the elements of tensors."""

CODES: dict[torch.dtype, Quantization] = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""What the types of ``StackedCodes.values`` hold."""


def multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply sorted rows by the weights of their experts (``lowering.expert_operators.multiply``). Raises ValueError
    for weights that are not contiguous, nor when turned."""
    _, inputs, outputs = weight.shape
    inner = weight.mT.is_contiguous()
    if not inner and not weight.is_contiguous():
        raise ValueError(f"weights of experts {tuple(weight.shape)} with strides {weight.stride()} are not contiguous")
    return _launch(x, weight, ends, None, ends, GroupedWeights(len(ends), inputs, outputs, inner))


def multiply_codes(x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, group: int) -> Tensor:
    held, inputs = CODES[values.dtype], x.shape[1]
    weights = GroupedWeights(len(ends), inputs, values.shape[1], True, held, group, zeros is not None)
    values = values.view(torch.uint8) if held == "fp8" else values
    return _launch(x, values, scales, zeros, ends, weights)


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, weights: GroupedWeights
) -> Tensor:
    """``scales`` of weights without codes are not read, nor are missing ``zeros``."""
    from lamina.kernels.gpu.triton_grouped import multiply as kernel  # needs Triton

    x, rows = x.contiguous(), len(x)
    out = x.new_empty(rows, weights.outputs)
    if not rows:
        return out
    tile = grouped_tile(rows, x.element_size(), weights)
    major, minor = torch.cuda.get_device_capability(x.device)
    program = grouped_program(ELEMENTS[x.dtype], weights, tile, 10 * major + minor)
    options = {"num_warps": program.warps, "num_stages": program.stages}
    arguments = x, weight, scales, scales if zeros is None else zeros, ends, out, weights.experts
    kernel[tile.grid(rows, weights)](*arguments, **dict(program.constants), **options)
    return out
