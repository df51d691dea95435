"""Checks that the rows of a captured graph are independent outside of its attentions.

A slice runs over rows of any number of sequences at once, and over one new token at a time. That is correct only if
row t of every result depends only on row t of the inputs. A convolution over time or a state-space scan violates this
without changing any shape, so operators are checked by their effect on the token dimension. A model that uses row
numbers as positions violates it too: a row number may select rows, but no value may be computed from it.
Mixture-of-expert layers may sort rows by expert, if they restore the order, which ``depends_on_order`` checks.

``mixing`` and ``numbering`` check the operators that they know. ``depends_on_order`` checks all operators by running
the graph with its rows in two orders, and with single rows. It needs no weights: a matrix of weights is replaced by a
random matrix of rank 2 and the same shape, the result of an attention by random numbers that belong to its row. All
values have float64, so that rounding errors are far below any effect of order.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from lamina.core.errors import UnsupportedModelError
from lamina.splitter.capture import Capture
from lamina.splitter.markers import ATTENTION
from lamina.splitter.propagate import Product, name

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

_IDS = torch.tensor([3, 7, 3, 1, 4])
_POSITIONS = torch.tensor([0, 5, 2, 5, 1])
_ORDERS = ([4, 0, 2, 1, 3], [3, 1], [2])
_RANK = 2
_TOLERANCE = 1e-6
_LARGE = 1 << 20
"""Weights of more elements repeat their last dimension."""

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def mixing(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a captured graph through which one token's values affect another token's."""
    return [node for node in graph.nodes if node.op == "call_function" and _mixes(node)]


def numbering(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a captured graph that compute with row numbers, or with the number of rows."""
    ordered: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (_numbers_rows(node) or not ordered.isdisjoint(_read(node))):
            ordered.add(node)
    return [node for node in ordered if _is_number(node)]


def _numbers_rows(node: fx.Node) -> bool:
    """Return whether the node creates row numbers, or a value from the number of rows."""
    if "size" in node.meta:
        return False
    kind = name(node)
    if kind == "getitem" and isinstance(node.args[0], fx.Node) and name(node.args[0]) == "sort":
        return bool(node.args[1] == 1) and _sorts_rows(node.args[0])  # where each row was
    if kind == "argsort":
        return _sorts_rows(node)
    if kind in _FILLING:
        return any("size" in source.meta for source in _filled_with(node))
    sources = node.all_input_nodes
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return any("size" in source.meta for source in sources)
    value = _value(node.args[0] if kind in _COUNTING else node)
    made_of_sizes = kind in _COUNTING or all("size" in source.meta for source in sources)
    return value is not None and bool(_row_dimensions(value)) and made_of_sizes


def _sorts_rows(node: fx.Node) -> bool:
    source = _value(node.args[0])
    along = next((each for each in node.args[1:] if type(each) is int), -1)  # after ``stable``, if it is given
    return source is not None and along % source.dim() in _row_dimensions(source)


def _read(node: fx.Node) -> set[fx.Node]:
    """Return the inputs whose elements go into the result, without inputs that give its shape or select rows."""
    kind = name(node)
    if kind in _FILLING:
        return set(_filled_with(node))
    selecting: Any = None
    source = _value(node.args[0]) if node.args else None
    rows = _row_dimensions(source) if source is not None else set()
    if kind in ("index", "index_put", "_unsafe_index"):
        places: Any = node.args[1]
        selecting = [place for dim, place in enumerate(places) if dim in rows]
    elif kind in _SELECTING and source is not None:
        selecting = [node.args[2]] if _dimensions(node.args[1], source.dim()) <= rows else []
    elif kind in ("grouped_mm_fallback", "_grouped_mm"):
        selecting = [node.args[2] if len(node.args) > 2 else node.kwargs["offs"]]
    return set(node.all_input_nodes) - {place for place in selecting or () if isinstance(place, fx.Node)}


def _filled_with(node: fx.Node) -> list[fx.Node]:
    place = _FILLING[name(node)]
    given = [node.args[place]] if place is not None and len(node.args) > place else []
    return [value for value in given if isinstance(value, fx.Node)]


def _is_number(node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and value.is_floating_point() and name(node) not in _COUNTING


def _mixes(node: fx.Node) -> bool:
    kind = name(node)
    if kind in _NEVER or "scaled_dot_product" in kind:
        return True
    if kind in _CONTRACTION:
        left = _value(node.args[_CONTRACTION[kind]])
        return left is not None and left.dim() - 1 in _row_dimensions(left)
    source = _value(node.args[0]) if node.args else None
    check = _reduces if kind in _ALONG_DIMENSION else _OTHERS.get(kind)
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


def depends_on_order(captured: Capture) -> str | None:
    """Return the first result whose rows depend on each other: q, k or v of an attention, or logits.

    Raises UnsupportedModelError for an operator that cannot be run.
    """
    trial = _Trial(captured)
    together = trial.compute(list(range(len(_IDS))))
    for order in _ORDERS:
        for label, found in trial.compute(order).items():
            expected = together[label][order]
            bound = _TOLERANCE * float(expected.abs().nan_to_num().max())
            if not torch.allclose(found, expected, rtol=0, atol=bound, equal_nan=True):
                return label
    return None


class _Trial:
    def __init__(self, captured: Capture) -> None:
        self._captured = captured
        self._tensors: dict[str, Tensor] = {}  # random, by purpose
        self._fixed = {  # values that are the same in every run
            node: self._fixed_value(node)
            for node in captured.graph.nodes
            if node.op == "placeholder" and node not in (captured.ids, captured.positions) and node.users
        }

    def compute(self, rows: Sequence[int]) -> Mapping[str, Tensor]:
        """Return every q, k and v, and the logits, for ``rows`` in this order."""
        captured = self._captured
        values: dict[fx.Node, Any] = {captured.ids: _IDS[rows], captured.positions: _POSITIONS[rows], **self._fixed}
        results: dict[str, Tensor] = {}
        for node in captured.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is ATTENTION:
                count = sum(label.endswith("q") for label in results)
                for letter, source in zip("qkv", node.args, strict=False):
                    results[f"attention {count}: {letter}"] = values[source]
                values[node] = self._normal(f"{node.name}", (len(_IDS), *node.meta["val"].shape[1:]))[rows]
            else:
                values[node] = self._compute(node, values)
        (logits,) = captured.graph.output_node().all_input_nodes
        return {**results, "logits": values[logits]}

    def _compute(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        args: Any = map_aggregate(map_arg(node.args, values.__getitem__), _widened)
        kwargs: Any = map_aggregate(map_arg(node.kwargs, values.__getitem__), _widened)
        if name(node) == "_softmax":
            args = (*args[:2], False)  # "from half to float" is for half
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        if _factored(node) is not None:
            product = Product.from_node(node)
            function, kwargs = (self._embed if product is None else self._multiply), {}
            args = (node, values) if product is None else (product, node, values)
        try:
            return function(*args, **kwargs)
        except Exception as error:  # operators raise any type
            raise UnsupportedModelError(
                f"{node.meta.get('path', node.name)}: {node.target} cannot be run to check that rows do not depend on "
                f"each other ({error}); this model cannot be split, please report its config.json"
            ) from error

    def _multiply(self, product: Product, node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
        x: Tensor = values[product.x]
        weight = product.weight
        shape = weight.meta["val"].shape
        inputs, outputs = shape[product.inputs], shape[product.outputs]
        into = self._normal(f"{weight.name} into", (inputs, _RANK)) / inputs**0.5
        # Not BLAS: on a busy machine its threads wait for each other far longer than these products take.
        result = torch.stack([(x * column).sum(-1) for column in into.unbind(1)], -1)
        if len(shape) == 3:  # of experts
            factors = self._normal(f"{weight.name} experts", (shape[0], _RANK))
            if x.dim() == 3:
                result = result * factors[:, None]
            else:
                ends = values[node.args[2] if len(node.args) > 2 else node.kwargs["offs"]]  # type: ignore[index]
                result = result * factors[torch.searchsorted(ends, torch.arange(len(x)), right=True)]
        out = self._normal(f"{weight.name} out", (_RANK, outputs))
        result = sum((result[..., place, None] * row for place, row in enumerate(out)), torch.zeros(outputs))
        return result if product.bias is None else result + values[product.bias]

    def _embed(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
        table, ids = node.args[:2]
        assert isinstance(table, fx.Node) and isinstance(ids, fx.Node)
        width = table.meta["val"].shape[1]
        return torch.sin((values[ids][..., None] + 1) * self._normal(f"{table.name} rows", (width,)))

    def _fixed_value(self, node: fx.Node) -> Tensor:
        captured = self._captured
        if node.name in captured.constants:
            constant: Tensor = captured.buffer(captured.constants[node.name])
            return constant.to(_widened(constant.dtype))
        value: Tensor = node.meta["val"]
        if all(_factored(user) is node for user in node.users):  # only its shape counts: drawing it takes longest
            return torch.zeros(()).expand(value.shape)
        if value.numel() <= _LARGE:
            return 1 + self._normal(node.name, value.shape) / 4
        return (1 + self._normal(node.name, value.shape[-1:]) / 4).expand(value.shape)

    def _normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        if purpose not in self._tensors:
            generator = torch.Generator().manual_seed(zlib.crc32(purpose.encode()))
            self._tensors[purpose] = torch.randn(tuple(shape), dtype=torch.float64, generator=generator)
        return self._tensors[purpose]


def _widened(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _factored(node: fx.Node) -> fx.Node | None:
    """Return the weight or table that ``_Trial`` replaces by a few random vectors to run this operator, if any."""
    product = Product.from_node(node)
    weight = node.args[0] if name(node) == "embedding" else None if product is None else product.weight
    return weight if isinstance(weight, fx.Node) and not _has_rows(weight) else None


def _has_rows(node: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
