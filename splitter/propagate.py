"""Derives which part of its inputs an operator of a captured graph needs to compute a part of its result.

There is one rule for each kind of operator. An operator is computed whole on every rank (MixesError) if it has no rule,
or if each wanted element depends on all indices of a dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from lamina.splitter.parts import Indices, MixesError, Part, reshaped

aten = torch.ops.aten
VIEWS = ("view", "_unsafe_view", "reshape")

Needs = Mapping[fx.Node, Part]
"""The part of each tensor input that is needed. An input without an entry is needed whole."""


def needs(node: fx.Node, part: Part) -> Needs:
    """Return the parts of its inputs that ``node`` needs to compute ``part`` of its result. Raises MixesError."""
    if (selection := Selection.from_node(node)) is not None:
        return {selection.source: selection.needs(part)}
    if not part:
        return {}
    if is_pointwise(node):
        return {source: _broadcast(node, source, part) for source in node.all_input_nodes if shape(source) is not None}
    rule = _RULES.get(name(node))
    if rule is None or node.op != "call_function":
        raise MixesError
    return rule(node, part)


def shape(node: Any) -> tuple[Any, ...] | None:
    """Return the shape of a node's (first) tensor, with symbols for unknown sizes; None if it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, tuple | list):
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def sizes(node: Any) -> tuple[Any, ...]:
    """Return the shape of a node's tensor. Raises MixesError if it is not a tensor."""
    found = shape(node)
    if found is None:
        raise MixesError
    return found


def name(node: fx.Node) -> str:
    """Return the operator's name without its overload, such as ``view``."""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", "")))


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of the result depends only on the same element of each input."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or name(node) in ("_to_copy", "clone", "alias")


@dataclass(frozen=True)
class Selection:
    """An operator that selects ``indices`` of dimension ``dim`` of ``source``: slice, select, or one result of a split.

    ``removes``: Whether the result lacks dimension ``dim``.
    """

    source: fx.Node
    dim: int
    indices: Indices
    removes: bool

    @classmethod
    def from_node(cls, node: fx.Node) -> "Selection | None":
        """Return the selection that a node makes; None for another operator, and along a dimension of symbolic size."""
        arguments: Any = node.args
        if not arguments or not isinstance(arguments[0], fx.Node):
            return None
        several = name(node) == "getitem" and name(arguments[0]) in _SPLITS
        source: Any = arguments[0].args[0] if several else arguments[0]
        whole = shape(source)
        if whole is None:
            return None
        if several:
            return cls._from_split(arguments[0], source, arguments[1], whole)
        if name(node) == "select":
            dim, index = arguments[1] % len(whole), arguments[2]
            known = isinstance(whole[dim], int) and isinstance(index, int)
            return cls(source, dim, np.array([index % whole[dim]]), True) if known else None
        if name(node) != "slice":
            return None
        dim, start, stop, step = (*arguments[1:], None, None, None, None)[:4]
        return cls._from_slice(source, (dim or 0) % len(whole), slice(start, stop, step), whole)

    @classmethod
    def _from_split(cls, split: fx.Node, source: Any, place: int, whole: tuple[Any, ...]) -> "Selection | None":
        arguments: Any = split.args
        if name(split) == "unbind":
            dim = (arguments[1] if len(arguments) > 1 else 0) % len(whole)
            return cls(source, dim, np.array([place]), True)
        dim = (arguments[2] if len(arguments) > 2 else 0) % len(whole)
        if isinstance(arguments[1], int):
            bounds = slice(place * arguments[1], (place + 1) * arguments[1])
        else:
            bounds = slice(sum(arguments[1][:place]), sum(arguments[1][: place + 1]))
        return cls._from_slice(source, dim, bounds, whole)

    @classmethod
    def _from_slice(cls, source: Any, dim: int, bounds: slice, whole: tuple[Any, ...]) -> "Selection | None":
        numbers = (whole[dim], *(each for each in (bounds.start, bounds.stop, bounds.step) if each is not None))
        if not all(isinstance(each, int) for each in numbers):
            return None
        return cls(source, dim, np.arange(whole[dim])[bounds], False)

    def needs(self, part: Part) -> Part:
        """Return the part of the source that holds ``part`` of the result."""
        moved = {dim + (self.removes and dim >= self.dim): held for dim, held in part.items()}
        held = moved.get(self.dim)
        return {**moved, self.dim: self.indices if held is None else self.indices[held]}


_SPLITS = ("split", "split_with_sizes", "chunk", "unbind")


def _broadcast(node: fx.Node, source: fx.Node, part: Part) -> Part:
    """Return the part of an operand that broadcasts to the result: aligned at the right, size 1 is repeated."""
    own = sizes(source)
    skipped = len(sizes(node)) - len(own)
    return {dim - skipped: held for dim, held in part.items() if dim >= skipped and own[dim - skipped] != 1}


def _view(node: fx.Node, part: Part) -> Needs:
    source: Any = node.args[0]
    return {source: reshaped(part, sizes(node), sizes(source))}


def _permuted(node: fx.Node, part: Part) -> Needs:
    """Reorder, add or drop dimensions: dimension i of the result is ``order[i]`` of the source; -1 if new."""
    source: Any = node.args[0]
    arguments: Any = node.args[1:]
    rank = len(sizes(source))
    order = list(range(rank))
    if name(node) == "transpose":
        a, b = arguments
        order[a], order[b] = order[b], order[a]
    elif name(node) == "t":
        order.reverse()
    elif name(node) == "permute":
        order = [dim % rank for dim in arguments[0]]
    elif name(node) == "unsqueeze":
        order.insert(arguments[0] % (rank + 1), -1)
    elif len(arguments) == 1 and isinstance(arguments[0], int):
        del order[arguments[0]]
    else:
        raise MixesError
    return {source: {order[dim]: held for dim, held in part.items() if order[dim] >= 0}}


def _expand(node: fx.Node, part: Part) -> Needs:
    source: Any = node.args[0]
    return {source: _broadcast(node, source, part)}


def _cat(node: fx.Node, part: Part) -> Needs:
    """Handle cat and stack. The dimension along which they join must be whole."""
    sources, dim, *_ = (*node.args, 0)
    along: int = dim % len(sizes(node))  # type: ignore[operator, assignment]
    if along in part:
        raise MixesError
    if name(node) == "stack":
        part = {place - (place > along): held for place, held in part.items()}
    return dict.fromkeys(sources, part)  # type: ignore[arg-type]


def _reduction(node: fx.Node, part: Part) -> Needs:
    source: Any = node.args[0]
    dims, keeps = reduced(node)
    kept = [dim for dim in range(len(sizes(source))) if keeps or dim not in dims]
    return {source: {kept[dim]: held for dim, held in part.items()}}


def reduced(node: fx.Node) -> tuple[set[int], bool]:
    """Return the dimensions that a reduction runs over, and whether the result keeps them with size 1."""
    arguments: list[Any] = [*node.args[1:3], None, None]
    over, keeps = arguments[:2]
    rank = len(sizes(node.args[0]))
    dims = [over] if isinstance(over, int) else over or range(rank)
    return {dim % rank for dim in dims}, bool(keeps)


def _softmax(node: fx.Node, part: Part) -> Needs:
    source: Any = node.args[0]
    dim: Any = node.args[1]
    if dim % len(sizes(node)) in part:
        raise MixesError
    return {source: part}


def _index(node: fx.Node, part: Part) -> Needs:
    """Handle indexing of the first dimension by a single one-dimensional tensor."""
    source: Any = node.args[0]
    places: Any = node.args[1]
    if len(places) != 1 or len(sizes(places[0])) != 1 or 0 in part:
        raise MixesError
    return {source: part}


def _layer_norm(node: fx.Node, part: Part) -> Needs:
    source: Any = node.args[0]
    over: Any = node.args[1]
    if max(part) >= len(sizes(source)) - len(over):
        raise MixesError
    return {source: part}


def _item(node: fx.Node, part: Part) -> Needs:
    source: Any = node.args[0]
    if node.args[1] != 0:
        raise MixesError
    return {source: part}


@dataclass(frozen=True)
class Product:
    """A linear layer, or the linear layers of several experts: ``x`` times ``weight``, plus ``bias``.

    Attributes:
        inputs: Dimension of ``weight`` that is summed over.
        outputs: Dimension of ``weight`` that becomes the last dimension of the result.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    inputs: int
    outputs: int

    @classmethod
    def from_node(cls, node: fx.Node) -> "Product | None":
        """Return the product that a node computes; None for another operator."""
        arguments: Any = node.args
        match name(node):
            case "linear":
                x, weight, bias = (*arguments, None)[:3]
                return cls(x, weight, bias, 1, 0)
            case "mm":
                return cls(arguments[0], arguments[1], None, 0, 1)
            case "addmm" if not node.kwargs:
                bias, x, weight = arguments
                return cls(x, weight, bias, 0, 1)
            case "bmm" | "grouped_mm_fallback" | "_grouped_mm":  # grouped: rows of x are sorted by expert
                return cls(arguments[0], arguments[1], None, 1, 2)
        return None

    @property
    def size(self) -> int:
        """Number of inputs that are summed."""
        size: int = sizes(self.weight)[self.inputs]
        return size

    def by_inputs(self, held: Indices) -> Needs:
        """Return the parts of x and weight with which a rank sums over the inputs ``held``."""
        return {self.x: {len(sizes(self.x)) - 1: held}, self.weight: {self.inputs: held}}

    def by_outputs(self, held: Indices) -> Needs:
        """Return the parts of weight and bias with which a rank computes the outputs ``held``."""
        bias = {} if self.bias is None else {self.bias: {len(sizes(self.bias)) - 1: held}}
        return {self.weight: {self.outputs: held}, **bias}


def _product(node: fx.Node, part: Part) -> Needs:
    product, outputs = Product.from_node(node), len(sizes(node)) - 1
    if product is None or part.keys() != {outputs}:
        raise MixesError
    return product.by_outputs(part[outputs])


def _embedding(node: fx.Node, part: Part) -> Needs:
    weight: Any = node.args[0]
    last = len(sizes(node)) - 1
    if part.keys() != {last}:
        raise MixesError
    return {weight: {1: part[last]}}


_RULES: dict[str, Callable[[fx.Node, Part], Needs]] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(("transpose", "t", "permute", "unsqueeze", "squeeze"), _permuted),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _reduction),
    **dict.fromkeys(("_softmax", "softmax"), _softmax),
    **dict.fromkeys(("linear", "mm", "addmm", "bmm", "grouped_mm_fallback", "_grouped_mm"), _product),
    "expand": _expand,
    "native_layer_norm": _layer_norm,
    "getitem": _item,
    "index": _index,
    "embedding": _embedding,
}
