"""Native calls for operators of slices on a CPU: norms, rotary embeddings, gates, linear layers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lamina import _native
from lamina._native import Activation, ElementType
from lamina.core.types import DType
from lamina.kernels.host_memory import allocate

ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.float16: ElementType.FLOAT16,
    torch.bfloat16: ElementType.BFLOAT16,
}
ACTIVATIONS = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH}
PATH = _native.attention_paths()[-1]
"""The instruction set that kernels use."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float, round_before_weight: bool) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * (weight + offset) over the last dimension of x [..., N]; weight [N].

    ``round_before_weight`` rounds to the element type also before the multiplication by the weight.
    """
    return _norm(x, None, weight, epsilon, offset, round_before_weight)[1]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return x + residual, and the ``rms_norm`` of that sum; x and residual have one shape."""
    return _norm(x, residual, weight, epsilon, offset, round_before_weight)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, offset: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    added = None if residual is None else residual.contiguous()
    total, out = x if added is None else torch.empty_like(x), torch.empty_like(x)
    given = (x.data_ptr(), 0 if added is None else added.data_ptr(), weight.data_ptr())
    results = (0 if added is None else total.data_ptr(), out.data_ptr())
    kind, width, threads = ELEMENT_TYPES[x.dtype], weight.numel(), torch.get_num_threads()
    rows = x.numel() // width
    _native.rms_norm(kind, *given, *results, rows, width, epsilon, offset, round_before_weight, threads, PATH)
    return total, out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, heads: int) -> Tensor:
    """Return the rotary embedding of x [1, T, H, D] or [1, T, H * D], as [T, H, D].

    ``cosines`` and ``sines`` [..., T, R] have a value for each of the first R elements of a head. Element i is paired
    with element i + R / 2; elements from R on are copied.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    cosines, sines = cosines.contiguous(), sines.contiguous()
    rows = x.shape[1]
    dim = x.shape[-1] if x.dim() == 4 else x.shape[-1] // heads
    head_stride = x.stride(2) if x.dim() == 4 else dim
    out = x.new_empty(rows, heads, dim)
    source = (x.data_ptr(), x.stride(1), head_stride, cosines.data_ptr(), sines.data_ptr())
    shape = (rows, heads, dim, cosines.shape[-1])
    _native.rotate(ELEMENT_TYPES[x.dtype], *source, out.data_ptr(), *shape, torch.get_num_threads(), PATH)
    return out


def gate(x: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(x) * up; both have shape [..., N], and ``activation`` is a key of ``ACTIVATIONS``."""
    x, x_stride = evenly_spaced_rows(x)
    up, up_stride = evenly_spaced_rows(up)
    out = torch.empty(x.shape, dtype=x.dtype)
    width = x.shape[-1]
    kind = (ELEMENT_TYPES[x.dtype], ACTIVATIONS[activation])
    source = (x.data_ptr(), x_stride, up.data_ptr(), up_stride)
    _native.gate(*kind, *source, out.data_ptr(), x.numel() // width, width, torch.get_num_threads(), PATH)
    return out


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row of x [R, N], float32 [R] (NaN if the row has a NaN), and its first index,
    int64 [R]: ``x.max(-1)``, in a third of the time for wide rows on the CPU.
    """
    if x.device.type != "cpu":
        values, indices = x.max(-1)
        return values.float(), indices
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, width = x.shape
    values, indices = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    source, results = (x.data_ptr(), x.stride(0)), (values.data_ptr(), indices.data_ptr())
    _native.largest(ELEMENT_TYPES[x.dtype], *source, *results, rows, width, torch.get_num_threads(), PATH)
    return values, indices


def masked(x: Tensor, bits: npt.NDArray[np.int32]) -> Tensor:
    """Return a copy of x [R, N] with -inf in place of the elements whose bit is 0: bit i % 32 of ``bits[r, i // 32]``,
    contiguous.
    """
    rows, width = x.shape
    if x.device.type != "cpu":
        kept = np.unpackbits(bits.view(np.uint8), axis=1, count=width, bitorder="little").view(np.bool_)
        return x.masked_fill(torch.from_numpy(~kept).to(x.device), -torch.inf)
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    arrays = x.data_ptr(), x.stride(0), bits.ctypes.data, out.data_ptr()
    _native.mask(ELEMENT_TYPES[x.dtype], *arrays, rows, width, torch.get_num_threads(), PATH)
    return out


@dataclass(frozen=True)
class Packing:
    """A packed form of weights, and the linear layer that reads it.

    Attributes:
        pack: packs a copy of a weight [outputs, inputs].
        linear: (x [..., inputs], packed weight, bias [outputs] or None, outputs) -> [..., outputs].
        inputs_multiple: the number of inputs of a weight must be a multiple of it.
    """

    pack: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
    inputs_multiple: int = 1


def packing(dtype: DType) -> Packing | None:
    """Return the fastest packing for ``dtype`` on this processor; None if torch's own linear is faster."""
    if dtype is DType.BFLOAT16 and _native.linear_available():
        return NATIVE
    return ONEDNN if _onednn_packs(dtype) else None


def tiles_refusal() -> str:
    """Return why kernels cannot use the matrix tiles (AMX) that this processor has; otherwise ""."""
    error = _native.linear_tiles_error()
    if not error:
        return ""
    return (
        f"this processor has matrix tiles (AMX), which the operating system refuses ({os.strerror(error)}): prompts "
        "are multiplied with AVX-512 instead; use Linux 5.16 or later, and a container profile that allows arch_prctl"
    )


def _onednn_packs(dtype: DType) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype is DType.BFLOAT16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is DType.FLOAT32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _pack_native(weight: Tensor) -> Tensor:
    """Return int32 [pairs], on huge pages: pairs of bfloat16 in the order in which they are read."""
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    pairs = _native.linear_packed_pairs(outputs, inputs)
    packed = torch.from_numpy(allocate(4 * pairs)).view(torch.int32)
    _native.linear_pack(weight.data_ptr(), outputs, inputs, packed.data_ptr(), torch.get_num_threads())
    return packed


def linear_native(
    x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, *, path: _native.AttentionPath | None = None
) -> Tensor:
    """Return x [..., inputs] times a weight packed by ``NATIVE.pack``, plus bias: [..., outputs], rounded once.

    ``path`` is the instruction set; None: this processor's widest.
    """
    x, stride = evenly_spaced_rows(x)
    inputs = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], outputs)
    bias_address = 0 if bias is None else bias.data_ptr()
    sizes = (x.numel() // inputs, inputs, outputs, torch.get_num_threads())
    _native.linear(x.data_ptr(), stride, packed.data_ptr(), bias_address, out.data_ptr(), *sizes, path=path)
    return out


def evenly_spaced_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., N] or a contiguous copy of x, and the number of elements from one row to the next."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.dim() == 3 and x.shape[0] == 1 and x.stride(2) == 1:  # part of a wider product
        return x, x.stride(1)
    return x.contiguous(), x.shape[-1]


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


_POINTWISE: Callable[..., Any] = torch.ops.mkldnn._linear_pointwise.default


def linear_onednn(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Apply a linear layer with oneDNN, for weights packed by ``ONEDNN.pack``."""
    out: Tensor = _POINTWISE(x, packed, bias, "none", [], "")
    return out


NATIVE = Packing(_pack_native, linear_native, inputs_multiple=2)
ONEDNN = Packing(_pack_onednn, linear_onednn)
