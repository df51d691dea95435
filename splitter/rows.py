"""Finds operators that mix tokens outside the attentions, or compute with row numbers; such models cannot be split.

A slice runs over rows of any number of sequences at once, and over one new token at a time. That is correct only if
row t of every result depends on row t of the inputs alone. A convolution over time or a state-space scan beside the
attention violates this without changing any shape, so operators are checked by what they do to the token dimension.
So does a model that numbers the rows of its input as if they were positions: a row number may select rows, but nothing
may be computed with it. Mixture-of-expert layers sort rows by expert and back, which is allowed; ``reorder`` checks
that rows come back.
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
_COUNTING = ("bincount", "histc")  # how many rows chose each expert
_SELECTING = ("gather", "index_add", "index_copy", "index_select", "scatter", "scatter_add", "scatter_reduce")
_FILLING: dict[str, int | None] = {  # operators that repeat one value -> the place of the value
    **dict.fromkeys(("empty", "empty_like", "new_empty", "new_ones", "new_zeros", "ones", "ones_like"), None),
    **dict.fromkeys(("zeros", "zeros_like"), None),
    **{"fill": 1, "full": 1, "full_like": 1, "new_full": 2},
}


def mixing(graph: fx.Graph) -> list[fx.Node]:
    """Nodes of a captured graph through which one token's values affect another's."""
    return [node for node in graph.nodes if node.op == "call_function" and _mixes(node)]


def numbering(graph: fx.Graph) -> list[fx.Node]:
    """Nodes of a captured graph that compute with the numbers of rows, or with how many rows there are."""
    ordered: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (_numbers_rows(node) or not ordered.isdisjoint(_read(node))):
            ordered.add(node)
    return [node for node in ordered if _is_number(node)]


def _numbers_rows(node: fx.Node) -> bool:
    """Return whether the node makes values of the numbers or the count of rows, which its inputs do not hold."""
    if "size" in node.meta:
        return False
    name = _name(node)
    if name == "getitem" and isinstance(node.args[0], fx.Node) and _name(node.args[0]) == "sort":
        return bool(node.args[1] == 1) and _sorts_rows(node.args[0])  # where each row was
    if name in _COUNTING or name == "argsort":
        return _sorts_rows(node) if name == "argsort" else bool(_row_dimensions(_input(node)))
    if name in _FILLING:
        return any("size" in source.meta for source in _filled_with(node))
    sources = node.all_input_nodes
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return any("size" in source.meta for source in sources)
    value = _value(node)
    return value is not None and bool(_row_dimensions(value)) and all("size" in source.meta for source in sources)


def _input(node: fx.Node) -> Tensor:
    source = _value(node.args[0])
    assert source is not None
    return source


def _sorts_rows(node: fx.Node) -> bool:
    source = _value(node.args[0])
    along = next((each for each in node.args[1:] if type(each) is int), -1)  # after ``stable``, if it is given
    return source is not None and along % source.dim() in _row_dimensions(source)


def _read(node: fx.Node) -> set[fx.Node]:
    """Return the inputs whose elements the result is made of; not those that only give its shape or select among
    rows."""
    name = _name(node)
    if name in _FILLING:
        return set(_filled_with(node))
    selecting: Any = None
    source = _value(node.args[0]) if node.args else None
    rows = _row_dimensions(source) if source is not None else set()
    if name in ("index", "index_put", "_unsafe_index"):
        places: Any = node.args[1]
        selecting = [place for dim, place in enumerate(places) if dim in rows]
    elif name in _SELECTING and source is not None:
        selecting = [node.args[2]] if _dimensions(node.args[1], source.dim()) <= rows else []
    elif name in ("grouped_mm_fallback", "_grouped_mm"):
        selecting = [node.args[2] if len(node.args) > 2 else node.kwargs["offs"]]
    return set(node.all_input_nodes) - {place for place in selecting or () if isinstance(place, fx.Node)}


def _filled_with(node: fx.Node) -> list[fx.Node]:
    """Return the values that an operator of ``_FILLING`` repeats."""
    place = _FILLING[_name(node)]
    given = [node.args[place]] if place is not None and len(node.args) > place else []
    return [value for value in given if isinstance(value, fx.Node)]


def _is_number(node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and value.is_floating_point() and _name(node) not in _COUNTING


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", "")))


def _mixes(node: fx.Node) -> bool:
    name = _name(node)
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
    """Return the dimensions that an argument selects: one, several, or all if it is None or empty."""
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
    """Return whether ``end``, computed from the number of rows, is the size of a tensor."""
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
