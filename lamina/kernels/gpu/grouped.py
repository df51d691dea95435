"""Launches the product of experts for tensors of PyTorch on a GPU."""

import numpy as np
import torch
from torch import Tensor

from lamina.kernels.gpu.specialize import grouped_program, grouped_tile

ELEMENTS = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16}
"""The types of arrays that hold the elements of tensors."""


def multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """See ``lowering.grouped.multiply``. Raises ValueError for weights that are not contiguous, nor when turned."""
    _, inputs, outputs = weight.shape
    inner = weight.mT.is_contiguous()
    if not inner and not weight.is_contiguous():
        raise ValueError(f"weights of experts {tuple(weight.shape)} with strides {weight.stride()} are not contiguous")
    return _launch(x, weight, ends, ends, ends, outputs, inner, 0, inputs)


def multiply_codes(x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor, ends: Tensor, group: int) -> Tensor:
    """See ``models.codes.StackedCodes``."""
    return _launch(
        x, values, scales, zeros, ends, values.shape[1], True, 4 if values.dtype == torch.uint8 else 8, group
    )


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    ends: Tensor,
    outputs: int,
    inner: bool,
    bits: int,
    group: int,
) -> Tensor:
    from lamina.kernels.gpu.triton_grouped import multiply as kernel  # needs Triton

    x, (rows, inputs), experts = x.contiguous(), x.shape, len(ends)
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    tile = grouped_tile(rows, experts, x.element_size(), bits)
    program = grouped_program(ELEMENTS[x.dtype], experts, inputs, outputs, inner, bits, group, tile)
    options = {"num_warps": program.warps, "num_stages": program.stages}
    arguments = x, weight, scales, zeros, ends, out, experts
    kernel[tile.grid(rows, experts, outputs)](*arguments, **dict(program.constants), **options)
    return out
