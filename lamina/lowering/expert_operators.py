"""The product of rows, sorted by expert, with the weights of their experts on a GPU, without the host in between.

It is an operator of PyTorch, so that it can be captured in CUDA graphs and compiled with others. On CUDA it is Lamina's
kernel; on the CPU, where GPUs are emulated, plain torch.
"""

import functools

import numpy as np
import torch
from torch import Tensor, fx

from lamina.core.types import Quantization
from lamina.kernels.gpu.specialize import GroupedWeights, grouped_program, grouped_tile
from lamina.models.quantisation.codes import LibraryWeight, StackedCodes

TORCHS = torch.ops.aten._grouped_mm.default  # of bfloat16; on some GPUs, the host reads the rows of each expert first
FALLBACK = "transformers.grouped_mm_fallback.default"  # what transformers runs for other types, expert by expert

ELEMENTS = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16}
"""The types of arrays that hold the elements of tensors."""

CODES: dict[torch.dtype, Quantization] = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""What the types of ``StackedCodes.values`` hold."""


def is_grouped(node: fx.Node) -> bool:
    """True for the product of rows x [T, inputs] with weights [experts, inputs, outputs] and ends of experts."""
    return (node.target is TORCHS or str(node.target) == FALLBACK) and len(node.args) == 3


def experts_stacked(x: Tensor, codes: StackedCodes, ends: Tensor) -> Tensor:
    """Multiply sorted rows by the weights of their experts, which are held as codes."""
    if codes.order is not None:
        x = _reordered(x, codes.order, ends)
    result: Tensor = _multiply_codes(x, codes.values, codes.scales, codes.zeros, ends, codes.group)
    return result


def linear_stacked(x: Tensor, codes: StackedCodes) -> Tensor:
    """Return rows x [T, inputs] times the only weight in ``codes``: [T, outputs]."""
    if codes.order is not None:
        x = x.index_select(1, codes.order[0])
    result: Tensor = _multiply_by_codes(x, codes.values, codes.scales, codes.zeros, codes.group)
    return result


def linear_held(x: Tensor, held: LibraryWeight | StackedCodes, bias: Tensor | None, _: int | None = None) -> Tensor:
    """Return x [..., inputs] times a quantised weight on a GPU, plus bias: [..., outputs]."""
    if isinstance(held, StackedCodes):
        out = linear_stacked(x.reshape(-1, x.shape[-1]), held).view(*x.shape[:-1], held.values.shape[1])
        return out if bias is None else out + bias
    return torch.nn.functional.linear(x, held.weight, bias)


def _reordered(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Return rows x, sorted by expert, with their inputs in the order of each one's expert, see ``StackedCodes``."""
    if len(order) == 1:
        return x.index_select(1, order[0])
    rows = torch.arange(len(x), dtype=ends.dtype, device=x.device)
    experts = torch.searchsorted(ends, rows, right=True).clamp_max(len(order) - 1)  # rows after all have none
    result, step = torch.empty_like(x), max(1, _GATHERED_AT_ONCE // x.shape[1])
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        torch.gather(x[part], 1, order[experts[part]], out=result[part])
    return result


_GATHERED_AT_ONCE = 1 << 23  # inputs of rows, for each of which there is an index of 8 bytes


@torch.library.custom_op("lamina::grouped_product", mutates_args=())
def multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return rows x [T, inputs], sorted by expert, each times its expert's of ``weight`` [experts, inputs, outputs].

    ends: int32 [experts], the row after the last one of each expert. Raises ValueError on a GPU unless weights are
    contiguous, or would be when turned.
    """
    return _one_by_one(x, weight, ends)


multiply.register_fake(lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]))


@multiply.register_kernel("cuda")
def _multiply_on_gpu(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    _, inputs, outputs = weight.shape
    inner = weight.mT.is_contiguous()
    if not inner and not weight.is_contiguous():
        raise ValueError(f"weights of experts {tuple(weight.shape)} with strides {weight.stride()} are not contiguous")
    return _launch(x, weight, ends, None, ends, GroupedWeights(len(ends), inputs, outputs, inner))


@torch.library.custom_op("lamina::grouped_product_of_codes", mutates_args=())
def _multiply_codes(
    x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, group: int
) -> Tensor:
    if values.dtype == torch.uint8:
        split = values.view(*scales.shape, group // 2)
        values = torch.stack([split & 15, split >> 4], 3)
    dense = values.view(*scales.shape, group).float()
    if zeros is not None:
        dense -= zeros[..., None]
    dense *= scales[..., None]
    return _one_by_one(x.float(), dense.flatten(2).mT, ends).to(x.dtype)


_multiply_codes.register_fake(lambda x, values, *_: x.new_empty(x.shape[0], values.shape[1]))


@_multiply_codes.register_kernel("cuda")
def _multiply_codes_on_gpu(
    x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, group: int
) -> Tensor:
    held, inputs = CODES[values.dtype], x.shape[1]
    weights = GroupedWeights(len(ends), inputs, values.shape[1], True, held, group, zeros is not None)
    values = values.view(torch.uint8) if held == "fp8" else values
    return _launch(x, values, scales, zeros, ends, weights)


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, weights: GroupedWeights
) -> Tensor:
    """Run Lamina's kernel. ``scales`` of weights without codes are not read, nor are missing ``zeros``."""
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


@torch.library.custom_op("lamina::product_of_codes", mutates_args=())
def _multiply_by_codes(x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Tensor:
    result: Tensor = _multiply_codes(x, values, scales, zeros, _all_rows(len(x), x.device), group)
    return result


_multiply_by_codes.register_fake(lambda x, values, *_: x.new_empty(x.shape[0], values.shape[1]))


@functools.cache  # without a limit: recordings read these, and steps have few numbers of rows
def _all_rows(rows: int, device: torch.device) -> Tensor:
    """Return the ends of one expert that has all rows; made when slices run, before they are recorded."""
    return torch.tensor([rows], dtype=torch.int32, device=device)


def _one_by_one(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out, first = x.new_zeros(len(x), weight.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        out[first:end] = x[first:end] @ weight[expert]
        first = end
    return out
