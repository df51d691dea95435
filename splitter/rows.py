"""Finds operators that mix tokens outside the attentions; such models cannot be split.

A slice runs over rows of any number of sequences at once, and over one new token at a time. That is correct only if
row t of every result depends on row t of the inputs alone. A convolution over time or a state-space scan beside the
attention violates this without changing any shape, so operators are checked by what they do to the token dimension.
Mixture-of-expert layers sort rows by expert and back, which is allowed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

_ALONG_DIMENSION = {  # operators of (input, dimension or dimensions, ...)
    *("all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "median", "min", "prod", "sum"),
    *("std", "std_mean", "var", "var_mean"),
    *("cummax", "cummin", "cumprod", "cumsum", "flip", "logcumsumexp"),
    *("_log_softmax", "_softmax", "log_softmax", "select", "softmax"),
}
_CONTRACTION = {"mm": 0, "bmm": 0, "linear": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}  # place of the left factor
_NEVER = {
    *("_convolution", "conv1d", "conv2d", "conv3d", "convolution", "unfold"),
    *("_fft_c2c", "_fft_c2r", "_fft_r2c", "native_group_norm"),
}


def mixing(graph: fx.Graph) -> list[fx.Node]:
    """Nodes of a captured graph through which one token's values affect another's."""
    return [node for node in graph.nodes if node.op == "call_function" and _mixes(node)]


def _mixes(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
    if name in _NEVER or "scaled_dot_product" in name:
        return True
    if name in _CONTRACTION:
        left = _value(node.args[_CONTRACTION[name]])
        return left is not None and left.dim() - 1 in _row_dimensions(left)
    source = _value(node.args[0]) if node.args else None
    check = _reduces if name in _ALONG_DIMENSION else _OTHERS.get(name)
    return source is not None and check is not None and check(node, source.dim(), _row_dimensions(source))


def _value(argument: Any) -> Tensor | None:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _row_dimensions(value: Tensor) -> set[int]:
    return {dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}


def _dimensions(argument: Any, rank: int) -> set[int]:
    """The dimensions that an argument selects: one, several, or all if it is None or empty."""
    given: Iterable[int] = (argument,) if isinstance(argument, int) else argument or range(rank)
    return {dim % rank for dim in given} if rank else set()


def _reduces(node: fx.Node, rank: int, rows: set[int]) -> bool:
    along = node.args[1] if len(node.args) > 1 else None
    if isinstance(along, fx.Node):  # max and min of two tensors
        return False
    return bool(_dimensions(along, rank) & rows)


def _slices(node: fx.Node, rank: int, rows: set[int]) -> bool:
    given: tuple[Any, ...] = node.args[1:4]
    dim, start, end = given + (0, None, None)[len(given) :]
    whole = start in (None, 0) and (end in (None, 2**63 - 1) or _is_size(end, node.args[0], dim))
    return bool(_dimensions(dim, rank) & rows) and not whole


def _is_size(end: Any, of: Any, dim: int) -> bool:
    """Whether ``end``, computed from the number of rows, is the size of a tensor."""
    size: Any = of.meta["val"].shape[dim]
    return isinstance(end, fx.Node) and isinstance(size, torch.SymInt) and end.meta.get("size") == size.node.expr


def _normalises(node: fx.Node, rank: int, rows: set[int]) -> bool:
    over: Any = node.args[1]
    return bool(set(range(rank - len(over), rank)) & rows)


def _pads(node: fx.Node, rank: int, rows: set[int]) -> bool:
    amounts: Any = node.args[1]
    padded = {rank - 1 - place // 2 for place, amount in enumerate(amounts) if amount != 0}
    return bool(padded & rows)


def _along_third(node: fx.Node, rank: int, rows: set[int]) -> bool:
    return bool(_dimensions(node.args[2] if len(node.args) > 2 else None, rank) & rows)


_OTHERS: dict[str, Callable[[fx.Node, int, set[int]], bool]] = {
    "constant_pad_nd": _pads,
    "linalg_vector_norm": _along_third,
    "native_layer_norm": _normalises,
    "roll": _along_third,
    "slice": _slices,
}
