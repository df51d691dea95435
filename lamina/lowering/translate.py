"""Translates a lowered slice's graph to the steps of a native program, if a program can express it.

A program can express Lamina's own linear layers, fused norms, rotations and gates, views that keep rows whole, and the
embedding of ids. That is enough for Llama-like slices. Slices with routed experts, other norms or activations, or
element types other than bfloat16 run as graphs.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from lamina import _native
from lamina.lowering import native_operators
from lamina.lowering.cpu_codes import PackedCodes, PackedExperts, linear_codes
from lamina.lowering.native_operators import linear_native
from lamina.lowering.native_program import NOWHERE, Columns, Program, Step, Steps

aten = torch.ops.aten
_END = 2**63 - 1
_IDS = object()
T = TypeVar("T")
_PAIRS = (0, 0, 0, 0)  # what a weight in bfloat16 has in place of ``PackedCodes.native``


def translate(
    graph: fx.Graph,
    weights: Sequence[Tensor | PackedCodes | PackedExperts],
    hoisted: Sequence[tuple[Tensor, Tensor]],
    arrivals: Sequence[tuple[int, ...]],
) -> Steps | None:
    """Return a lowered slice's graph as steps; None if a program cannot express it.

    Args:
        weights: the graph's first inputs, contiguous; those of linear layers packed.
        hoisted: the graph's next inputs, each computed for two positions and for three.
        arrivals: shapes of a row of attention (not in slice 0) and of context.
    """
    translation = _Translation()
    try:
        translation.add_inputs(graph, weights, hoisted, arrivals)
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                translation.call(node)
        return translation.steps(graph.output_node())
    except _InexpressibleError:
        return None


class _InexpressibleError(Exception):
    """A native program cannot express this."""


def _require(holds: bool) -> None:
    if not holds:
        raise _InexpressibleError


class _Translation:
    """The translation of one graph, node by node.

    ``_values`` maps nodes to values of the program: ``Columns``, a tuple of them, a weight, or ``_IDS``.
    """

    def __init__(self) -> None:
        self._widths: list[int] = []
        self._inputs: list[int] = []
        self._embedding: Tensor | None = None
        self._steps: list[Step] = []
        self._values: dict[fx.Node, Any] = {}

    def add_inputs(
        self,
        graph: fx.Graph,
        weights: Sequence[Tensor | PackedCodes | PackedExperts],
        hoisted: Sequence[tuple[Tensor, Tensor]],
        arrivals: Sequence[tuple[int, ...]],
    ) -> None:
        """Assign values to the graph's inputs, except positions."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._values.update(zip(inputs, weights, strict=False))
        self._values.update((node, _IDS) for node in inputs if node.target == "ids")
        others = [node for node in inputs[len(weights) :] if node.target not in ("ids", "positions")]
        for node, (two, three) in zip(others, hoisted, strict=False):
            ones, width = [1] * (two.dim() - 2), two.shape[-1] if two.dim() else 0
            _require(list(two.shape) == [*ones, 2, width] and list(three.shape) == [*ones, 3, width])
            self._values[node] = self._matrix((width,), len(ones))
        for node, row in zip(others[len(hoisted) :], arrivals, strict=True):
            self._values[node] = self._matrix(row)
        self._inputs = list(range(len(self._widths)))

    def steps(self, output: fx.Node) -> Steps:
        """Return all steps, once all nodes have been translated."""
        results: list[Columns] = []
        returned: Any = output.args[0]
        for node in returned:
            value = self._rows(node)
            _require(value.ones == 0)
            if not self._is_whole(value) or value.matrix in {*self._inputs, *(result.matrix for result in results)}:
                value = self._copy(value)
            results.append(value)
        return Steps(self._widths, self._steps, self._inputs, results, self._embedding)

    def call(self, node: fx.Node) -> None:
        """Translate a call whose operands have been translated."""
        known = _CALLS.get(node.target)
        if known is None or node.kwargs:
            raise _InexpressibleError
        self._values[node] = known(self, *node.args)

    def _matrix(self, shape: Sequence[int], ones: int = 0) -> Columns:
        self._widths.append(math.prod(shape))
        return Columns(len(self._widths) - 1, 0, tuple(shape), ones)

    def _value(self, node: Any, kind: type[T]) -> T:
        value = self._values.get(node)
        if not isinstance(value, kind):
            raise _InexpressibleError
        return value

    def _rows(self, node: Any) -> Columns:
        return self._value(node, Columns)

    def _weight(self, node: Any) -> Tensor:
        return self._value(node, Tensor)

    def _is_whole(self, value: Columns) -> bool:
        return value.width == self._widths[value.matrix]

    def _embed(self, weight: Any, ids: Any, *_: Any) -> Columns:
        """Make the rows of the embedding one more input. The padding argument only matters for gradients."""
        _require(self._embedding is None and self._values.get(ids) is _IDS)
        self._embedding = self._weight(weight)
        value = self._matrix(self._embedding.shape[1:], ones=1)
        self._inputs.append(value.matrix)
        return value

    def _linear(self, x: Any, weight: Any, bias: Any, outputs: int) -> Columns:
        rows, packed = self._rows(x), self._weight(weight)
        _require(len(rows.shape) == 1 and packed.numel() == _native.linear_packed_pairs(outputs, rows.width))
        out = self._matrix((outputs,), rows.ones)
        self._product(rows, packed, bias, out, outputs, _PAIRS)
        return out

    def _linear_codes(self, x: Any, weight: Any, bias: Any, _: Any) -> Columns:
        rows, packed = self._rows(x), self._value(weight, PackedCodes)
        _require(len(rows.shape) == 1)
        out = self._matrix((packed.outputs,), rows.ones)
        codes = (*packed.native, packed.x_group) if packed.x_group else packed.native
        self._product(rows, packed.values, bias, out, packed.outputs, codes)
        return out

    def _product(
        self,
        rows: Columns,
        packed: Tensor,
        bias: Any,
        out: Columns,
        outputs: int,
        codes: tuple[int, ...],
    ) -> None:
        bias_address = 0 if bias is None else self._weight(bias).data_ptr()
        product = (packed.data_ptr(), bias_address, out, outputs, codes)
        self._steps.append(Step(Program.add_products, (rows, rows.width, [product])))

    def _norm(self, x: Any, weight: Any, *settings: float) -> Columns:
        return self._norm_of(self._rows(x), NOWHERE, NOWHERE, weight, settings)

    def _sum_norm(self, x: Any, residual: Any, weight: Any, *settings: float) -> tuple[Columns, Columns]:
        rows, other = self._rows(x), self._rows(residual)
        _require(rows.shape == other.shape and rows.ones == other.ones and self._is_whole(other))
        total = self._matrix(rows.shape, rows.ones)
        return total, self._norm_of(rows, other, total, weight, settings)

    def _norm_of(
        self, rows: Columns, residual: Columns, total: Columns, weight: Any, settings: tuple[float, ...]
    ) -> Columns:
        factors = self._weight(weight)
        width = factors.numel()
        _require(self._is_whole(rows) and rows.shape[-1] == width)
        out = self._matrix(rows.shape, rows.ones)
        sizes = (rows.width // width, width)
        self._steps.append(Step(Program.add_norm, (rows, residual, factors.data_ptr(), total, out, *sizes, *settings)))
        return out

    def _rotate(self, x: Any, cosines: Any, sines: Any, heads: int) -> Columns:
        rows, angles = self._rows(x), (self._rows(cosines), self._rows(sines))
        _require(rows.ones == 1 and rows.width % heads == 0 and angles[0].shape == angles[1].shape)
        _require(rows.shape in ((rows.width,), (heads, rows.width // heads)))
        out = self._matrix((heads, rows.width // heads))
        sizes = (heads, rows.width // heads, angles[0].width)
        self._steps.append(Step(Program.add_rotation, (rows, *angles, out, *sizes)))
        return out

    def _copy(self, value: Columns) -> Columns:
        """Copy to a new matrix: a rotation with no rotated elements."""
        out = self._matrix(value.shape)
        self._steps.append(Step(Program.add_rotation, (value, NOWHERE, NOWHERE, out, 1, value.width, 0)))
        return out

    def _gate(self, x: Any, up: Any, activation: str) -> Columns:
        rows, other = self._rows(x), self._rows(up)
        _require(rows.shape == other.shape and rows.ones == other.ones)
        out = self._matrix(rows.shape, rows.ones)
        kind = native_operators.ACTIVATIONS[activation]
        self._steps.append(Step(Program.add_gate, (kind, rows, other, out, rows.width)))
        return out

    def _item(self, values: Any, place: int) -> Columns:
        value: Columns = self._value(values, tuple)[place]
        return value

    def _size(self, x: Any, dim: int) -> None:
        """Accept the number of rows, which only views use."""
        _require(isinstance(x, fx.Node) and x.target in ("ids", "positions") and dim == 0)

    def _view(self, x: Any, sizes: Sequence[Any]) -> Columns:
        """Return a view. ``sizes`` are leading ones, then rows, then the shape of a row."""
        value = self._rows(x)
        ones = next((place for place, size in enumerate(sizes) if size != 1), len(sizes))
        _require(ones < len(sizes))
        rows, shape = sizes[ones], list(sizes[ones + 1 :])
        _require(bool(shape) and all(isinstance(size, int) for size in shape))
        if shape.count(-1) == 1 and rows != -1:
            shape[shape.index(-1)] = -value.width // math.prod(shape)
        _require((rows == -1 or isinstance(rows, fx.Node)) and math.prod(shape) == value.width and min(shape) > 0)
        return Columns(value.matrix, value.column, tuple(shape), ones)

    def _unsqueeze(self, x: Any, dim: int) -> Any:
        if self._values.get(x) is _IDS:
            return _IDS  # only the embedding uses it
        value = self._rows(x)
        _require(dim == 0)
        return Columns(value.matrix, value.column, value.shape, value.ones + 1)

    def _squeeze(self, x: Any, dim: int, index: int = 0) -> Columns:
        value = self._rows(x)
        _require(dim == 0 and index == 0 and value.ones > 0)
        return Columns(value.matrix, value.column, value.shape, value.ones - 1)

    def _slice(self, x: Any, dim: int, start: int, end: int) -> Columns:
        value = self._rows(x)
        if dim == value.ones:
            _require(start == 0 and end == _END)
            return value
        _require(len(value.shape) == 1 and dim in (-1, value.ones + 1) and 0 <= start < min(end, value.width))
        return Columns(value.matrix, value.column + start, (min(end, value.width) - start,), value.ones)

    def _split(self, x: Any, size: int, dim: int) -> tuple[Columns, ...]:
        value = self._rows(x)
        _require(len(value.shape) == 1 and dim in (-1, value.ones + 1))
        return tuple(self._slice(x, dim, start, start + size) for start in range(0, value.width, size))


_CALLS: dict[Any, Any] = {
    aten.embedding.default: _Translation._embed,
    linear_native: _Translation._linear,
    linear_codes: _Translation._linear_codes,
    native_operators.rms_norm: _Translation._norm,
    native_operators.add_rms_norm: _Translation._sum_norm,
    native_operators.rotate: _Translation._rotate,
    native_operators.gate: _Translation._gate,
    operator.getitem: _Translation._item,
    "size": _Translation._size,
    "view": _Translation._view,
    "reshape": _Translation._view,
    "unsqueeze": _Translation._unsqueeze,
    "squeeze": _Translation._squeeze,
    aten.select.int: _Translation._squeeze,
    aten.slice.Tensor: _Translation._slice,
    aten.split.Tensor: _Translation._split,
}
