"""Runs a captured graph with its rows in two orders and alone: what a row gives must not depend on the rows beside it.

``rows`` judges the operators that it knows; this module tries all of them. It needs no weights: the product of rows
with a matrix of weights is replaced by one with a random matrix of rank 2 and the same shape. The results of attentions
are random numbers, which move with their rows. Everything is computed in float64, so that rounding is far below any
effect of order.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from lamina.core.errors import UnsupportedModelError
from lamina.splitter.attention import OPERATOR
from lamina.splitter.capture import Capture
from lamina.splitter.propagate import Product, name

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


def depends_on_order(captured: Capture) -> str | None:
    """Return the first result (an attention's q, k or v, or the logits) of which a row depends on the rows beside it.

    Raises UnsupportedModelError for an operator that cannot be run.
    """
    trial = _Trial(captured)
    together = trial.run(list(range(len(_IDS))))
    for order in _ORDERS:
        for label, found in trial.run(order).items():
            expected = together[label][order]
            bound = _TOLERANCE * float(expected.abs().nan_to_num().max())
            if not torch.allclose(found, expected, rtol=0, atol=bound, equal_nan=True):
                return label
    return None


class _Trial:
    """A graph with random weights."""

    def __init__(self, captured: Capture) -> None:
        self._captured = captured
        self._tensors: dict[str, Tensor] = {}  # random, by purpose
        self._fixed = {  # values that are the same in every run
            node: self._fixed_value(node)
            for node in captured.graph.nodes
            if node.op == "placeholder" and node not in (captured.ids, captured.positions) and node.users
        }

    def run(self, rows: Sequence[int]) -> Mapping[str, Tensor]:
        """Every q, k and v, and the logits, of some of the rows in the given order."""
        captured = self._captured
        values: dict[fx.Node, Any] = {captured.ids: _IDS[rows], captured.positions: _POSITIONS[rows], **self._fixed}
        results: dict[str, Tensor] = {}
        for node in captured.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is OPERATOR:
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
        product = Product.from_node(node)
        if product is not None and not _has_rows(product.weight):
            function, args, kwargs = self._multiply, (product, node, values), {}
        elif name(node) == "embedding" and not _has_rows(node.args[0]):
            function, args, kwargs = self._embed, (node, values), {}
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
        if value.numel() <= _LARGE:
            return 1 + self._normal(node.name, value.shape) / 4
        return (1 + self._normal(node.name, value.shape[-1:]) / 4).expand(value.shape)

    def _normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """Random numbers that are the same whenever they are asked for."""
        if purpose not in self._tensors:
            generator = torch.Generator().manual_seed(zlib.crc32(purpose.encode()))
            self._tensors[purpose] = torch.randn(tuple(shape), dtype=torch.float64, generator=generator)
        return self._tensors[purpose]


def _widened(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _has_rows(node: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
