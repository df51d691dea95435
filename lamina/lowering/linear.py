"""Linear layers with weights packed once: Lamina's own matrix product, or oneDNN's where that is faster.

With the few rows of a decode step, a linear layer takes as long as reading its weight. The native product reads it
once, in order. With AVX-512's bfloat16 pairs it takes 0.6 to 1.0 of oneDNN's time, at 1 to 512 rows
(``bench/kernels/slices.py``). With AVX2 alone, where torch multiplies bfloat16 in scalar code, it takes a sixth to an
eighth of torch's time; beside oneDNN in float32, a quarter at 1 row and 1.2 at 256. oneDNN is used for other element
types and on processors with matrix tiles (AMX), where it takes as long at 1 to 4 rows, and a ninth from 64 on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina import _native
from lamina.kernels.memory import allocate
from lamina.types import DType


@dataclass(frozen=True)
class Packing:
    """One way to compute linear layers.

    Attributes:
        pack: converts a weight [outputs, inputs] to the form ``linear`` takes; the original can then be freed.
        linear: (x [..., inputs], packed weight, bias [outputs] or None, outputs) -> [..., outputs].
        inputs_multiple: only weights whose number of inputs is a multiple of it can be packed.
    """

    pack: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
    inputs_multiple: int = 1


def packing(dtype: DType) -> Packing | None:
    """The fastest packing for ``dtype`` on this processor; None if torch's own linear is faster."""
    if dtype is DType.BFLOAT16 and _native.linear_available() and not torch.cpu._is_amx_tile_supported():
        return NATIVE
    return ONEDNN if _onednn_packs(dtype) else None


def _onednn_packs(dtype: DType) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype is DType.BFLOAT16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is DType.FLOAT32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _pack_native(weight: Tensor) -> Tensor:
    """int32 [pairs], on huge pages: bfloat16 pairs in the order they are read."""
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    pairs = _native.linear_packed_pairs(outputs, inputs)
    packed = torch.from_numpy(allocate(4 * pairs)).view(torch.int32)
    _native.linear_pack(weight.data_ptr(), outputs, inputs, packed.data_ptr(), torch.get_num_threads())
    return packed


def linear_native(
    x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, *, path: _native.AttentionPath | None = None
) -> Tensor:
    """x [..., inputs] times the weight that ``NATIVE.pack`` took, plus bias: [..., outputs], rounded once.

    ``path``: the instruction set; by default this processor's widest.
    """
    x, stride = evenly_spaced_rows(x)
    inputs = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], outputs)
    bias_address = 0 if bias is None else bias.data_ptr()
    sizes = (x.numel() // inputs, inputs, outputs, torch.get_num_threads())
    _native.linear(x.data_ptr(), stride, packed.data_ptr(), bias_address, out.data_ptr(), *sizes, path=path)
    return out


def evenly_spaced_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [..., N], or a contiguous copy of it, and the elements from one row to the next."""
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
    """The same with oneDNN, for weights packed by ``ONEDNN.pack``."""
    out: Tensor = _POINTWISE(x, packed, bias, "none", [], "")
    return out


NATIVE = Packing(_pack_native, linear_native, inputs_multiple=2)
ONEDNN = Packing(_pack_onednn, linear_onednn)
