"""Linear layers on a CPU whose weights stay quantised to 8 or 4 bits: Lamina's own matrix product, in bfloat16.

torch's products round scales and zero points to bfloat16, which changes the weights of most checkpoints; here they have
float32. Native programs use the same product.

Time relative to bfloat16 weights (``bench/kernels/codes.py``): AVX-512 and bfloat16: 0.5 (8 bits) and 0.35 (4 bits) for
one row, 0.7 to 0.8 for 8 rows, 1.0 to 1.2 for 64; AVX2: 0.9 for one row, 1.2 to 1.6 for more than 4.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lamina import _native
from lamina.core.types import ActivationDType
from lamina.kernels.host_memory import allocate
from lamina.lowering.expert_operators import is_grouped
from lamina.lowering.native_operators import evenly_spaced_rows, linear_native, linear_onednn
from lamina.models.quantisation.codes import Codes, ExpertCodes

Linear = Callable[[Tensor, Any, Tensor | None, int | None], Tensor]
"""(x [..., inputs], weight, bias [outputs] or None, number of outputs or None) -> [..., outputs]."""

Experts = Callable[[Tensor, Any, Tensor], Tensor]
"""(x [T, inputs] sorted by expert, weights of all experts, ends int32 [experts]) -> [T, outputs]."""

PRODUCTS = (torch.ops.aten.linear.default, linear_native, linear_onednn)
"""Operators by which lowered graphs multiply by a weight."""

_BATCHED = torch.ops.aten.bmm.default  # each expert takes all rows of a batch: [experts, rows, inputs]
_TURNS = "transpose", torch.ops.aten.transpose.int  # transpositions in graphs for CPUs, and in those for GPUs
_PANEL = 32  # outputs
_LEAST_GROUP = 16
_QUAD = 4  # inputs that an instruction for codes of 8 bits multiplies at once
_MOST_X_GROUP = 128
_MIDDLE = 8.0  # zero point of codes of 4 bits if the weight has no zero points of its own


@dataclass(frozen=True)
class PackedCodes:
    """A weight as ``native/include/lamina/linear.h`` describes it.

    Attributes:
        outputs: outputs of the weight.
        bits: bits of a code, 8 or 4.
        group: inputs that share a scale.
        values: uint8, codes in the order in which they are read.
        scales: float32 [panels, groups, 32].
        zeros: float32 [panels, groups, 32]; None: the codes have no zero points.
        x_group: inputs of x that share a scale if x is rounded to 8 bits; 0 if it stays bfloat16.
    """

    outputs: int
    bits: int
    group: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    x_group: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def native(self) -> tuple[int, int, int, int]:
        """(bits, group, address of scales, address of zeros or 0)."""
        return self.bits, self.group, self.scales.data_ptr(), 0 if self.zeros is None else self.zeros.data_ptr()


@dataclass(frozen=True)
class PackedExperts:
    """The weights of a layer's experts, all of one shape."""

    each: tuple[PackedCodes, ...]


def can_pack(codes: Codes) -> bool:
    """Return whether the product takes these codes: integers in runs of ``_LEAST_GROUP`` inputs or more."""
    return codes.values.dtype in (torch.int8, torch.uint8) and codes.group >= _LEAST_GROUP


def pack_experts(codes: ExpertCodes, activations: ActivationDType = "auto") -> PackedExperts:
    """Return the form that ``linear_experts`` takes; the original can then be freed."""
    return PackedExperts(tuple(pack_codes(one, activations) for one in codes.each))


def x_group(codes: Codes) -> int:
    """Return how many inputs of x share a scale if x is rounded to 8 bits; 0 if no such runs fit the weight's groups.

    That is the largest divisor of the weight's group that is a multiple of 4 from 16 to 128.
    """
    sizes = range(_MOST_X_GROUP, _LEAST_GROUP - 1, -_QUAD)
    return next((size for size in sizes if codes.group % size == 0), 0)


def pack_codes(codes: Codes, activations: ActivationDType = "auto") -> PackedCodes:
    """Return the form that ``linear_codes`` takes; the original can then be freed.

    ``activations``: "int8" rounds x to 8 bits in every product with this weight, if its groups permit (``x_group``).
    """
    outputs = len(codes.values)
    quads = x_group(codes) if activations == "int8" else 0
    group, bits = codes.group, codes.bits
    # The product takes codes of 8 bits as signed ones, and those of 4 bits as 0 to 15.
    shift = 128 * (codes.values.dtype == torch.uint8) if bits == 8 else -8 * (codes.values.dtype == torch.int8)
    places = codes.columns[::group]
    zeros = None if codes.zeros is None else codes.zeros[codes.rows][:, places].float() - shift
    if zeros is not None and bool((zeros == (_MIDDLE if bits == 4 else 0.0)).all()):
        zeros = None
    return PackedCodes(
        outputs,
        bits,
        group,
        _pack_values(codes.values, shift, bits, bool(quads)),
        _pack_groups(codes.scales[codes.rows][:, places].float()),
        None if zeros is None else _pack_groups(zeros),
        quads,
    )


def _pack_values(values: Tensor, shift: int, bits: int, quads: bool) -> Tensor:
    """Return codes as uint8 [panels, inputs, 32], or [panels, inputs, 16] if of 4 bits, flattened, on huge pages.

    ``quads``: whether the four codes of an output for neighbouring inputs lie next to each other.
    """
    outputs, inputs = values.shape
    count = -(-outputs // _PANEL)
    packed = torch.from_numpy(allocate(_native.linear_codes_bytes(bits, outputs, inputs))).view(count, inputs, -1)
    for panel in range(count):  # one at a time, to need little memory besides
        part = values[panel * _PANEL : (panel + 1) * _PANEL].short() - shift
        columns = torch.zeros(inputs, _PANEL, dtype=torch.int16)
        columns[:, : len(part)] = part.T
        if bits == 4:
            columns = columns[:, : _PANEL // 2] | columns[:, _PANEL // 2 :] << 4
        if quads:
            columns = columns + 128 * (bits == 8)  # a product of codes needs unsigned ones
            columns = columns.view(inputs // _QUAD, _QUAD, -1).transpose(1, 2).reshape(columns.shape)
        packed[panel] = columns.to(torch.int8).view(torch.uint8)
    return packed.flatten()


def _pack_groups(each: Tensor) -> Tensor:
    outputs, groups = each.shape
    count = -(-outputs // _PANEL)
    full = each.new_zeros(count * _PANEL, groups)
    full[:outputs] = each
    return full.view(count, _PANEL, groups).transpose(1, 2).contiguous()


def linear_codes(
    x: Tensor,
    packed: PackedCodes,
    bias: Tensor | None,
    _: int | None = None,
    *,
    path: _native.AttentionPath | None = None,
) -> Tensor:
    """Multiply x bfloat16 [..., inputs] by the weight and add bias. Sums are float32 and rounded once, to bfloat16.

    The fourth argument makes this a ``Linear``; the number of outputs is known. ``path``: the instruction set; by
    default this processor's widest.
    """
    x, stride = evenly_spaced_rows(x)
    out = x.new_empty(*x.shape[:-1], packed.outputs)
    _multiply(x, stride, packed, bias, out, path)
    return out


def _multiply(
    x: Tensor, stride: int, packed: PackedCodes, bias: Tensor | None, out: Tensor, path: _native.AttentionPath | None
) -> None:
    inputs, bias_address = x.shape[-1], 0 if bias is None else bias.data_ptr()
    sizes = (x.numel() // inputs, inputs, packed.outputs, torch.get_num_threads())
    addresses = packed.values.data_ptr(), bias_address, out.data_ptr()
    _native.linear(x.data_ptr(), stride, *addresses, *sizes, *packed.native, packed.x_group, path=path)


def linear_experts(
    x: Tensor, packed: PackedExperts, ends: Tensor, *, path: _native.AttentionPath | None = None
) -> Tensor:
    """Multiply each row of x bfloat16 [T, inputs], sorted by expert, by its expert's weight, like ``linear_codes``.

    ``ends``: int32 [experts], the row after the last one of each expert.
    """
    x, first = x.contiguous(), 0
    out = x.new_empty(len(x), packed.each[0].outputs)
    for expert, end in zip(packed.each, ends.tolist(), strict=True):
        if end > first:
            _multiply(x[first:end], x.shape[1], expert, None, out[first:end], path)
        first = end
    return out


def grouped_by(weight: fx.Node) -> list[fx.Node]:
    """Return the products of rows with the weights of experts; empty if anything else uses the weights too.

    Weights are [experts, outputs, inputs] and transposed first, or [experts, inputs, outputs] (``is_turned``).
    """
    sides = {weight} if is_turned(weight) else set(weight.users)
    products = [user for side in sides for user in side.users]
    fits = all(side is weight or (side.target in _TURNS and side.args[1:] == (-2, -1)) for side in sides) and all(
        _multiplies_experts(user) and user.args[1] in sides and user.args[0] not in sides for user in products
    )
    return products if fits else []


def is_turned(weight: fx.Node) -> bool:
    """Return whether the weights of experts are [experts, inputs, outputs], so that products use them untransposed."""
    return any(_multiplies_experts(user) for user in weight.users)


def _multiplies_experts(node: fx.Node) -> bool:
    return is_grouped(node) or node.target is _BATCHED


def use_codes(module: fx.GraphModule, places: Collection[int], linear: Linear, experts: Experts) -> fx.GraphModule:
    """Return a copy of a graph in which ``linear`` and ``experts`` multiply by the weights at inputs ``places``."""
    changed = copy.deepcopy(module)
    weights = {node for place, node in enumerate(changed.graph.nodes) if place in places}
    for weight in weights:
        for product in grouped_by(weight):
            x, _, ends = (*product.args, None)[:3]
            if ends is None:
                _unbatch(product, weight, experts)
            else:
                product.target, product.args, product.kwargs = experts, (x, weight, ends), {}
        for turned in [node for node in weight.users if not node.users]:
            changed.graph.erase_node(turned)
    for node in changed.graph.nodes:
        if node.target in PRODUCTS and node.args[1] in weights:
            x, weight, bias, outputs = (*node.args, None, None)[:4]
            node.target, node.args, node.kwargs = linear, (x, weight, bias, outputs), {}
    changed.recompile()
    return changed


def _unbatch(product: fx.Node, weight: fx.Node, experts: Experts) -> None:
    """Replace a batched product with the weights of experts by a product of rows that are sorted by expert."""
    x, graph = product.args[0], product.graph
    with graph.inserting_before(product):
        rows = graph.call_function(torch.flatten, (x, 0, 1))
        out = graph.call_function(experts, (rows, weight, graph.call_function(_batch_ends, (x,))))
    product.target, product.args, product.kwargs = _batch_of, (out, x), {}


def _batch_ends(x: Tensor) -> Tensor:
    """Return int32 [experts]: the row after each expert's last one, once x [experts, rows, inputs] is [T, inputs]."""
    experts, rows, _ = x.shape
    return torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * rows


def _batch_of(out: Tensor, x: Tensor) -> Tensor:
    return out.view(*x.shape[:2], out.shape[1])
