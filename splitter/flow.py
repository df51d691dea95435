"""Dependencies between the nodes of a captured graph, and the cost of sending their tensors."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from lamina.splitter.capture import Capture


def clean(captured: Capture) -> None:
    """Remove redundant copies and dead code from ``captured.graph`` (mutated)."""
    graph = captured.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        if _keeps_layout(node):
            node.replace_all_uses_with(node.args[0])  # of dropout, for instance: the graph writes nothing in place
    graph.eliminate_dead_code()
    graph.lint()


def _keeps_layout(node: fx.Node) -> bool:
    (source,) = node.all_input_nodes
    return bool(source.meta["val"].stride() == node.meta["val"].stride())


def replicable(captured: Capture) -> set[fx.Node]:
    """Nodes that every slice that uses them computes itself, instead of receiving their values.

    They depend on ids, positions and constants alone (cos, sin, row counts), or on weights alone (1 + weight).
    """
    weights = {node for node in captured.graph.nodes if node.name in captured.weights}
    on_inputs: set[fx.Node] = {
        node for node in captured.graph.nodes if node.op == "placeholder" and node not in weights
    }
    on_weights: set[fx.Node] = set(weights)
    constants = {node for node in captured.graph.nodes if node.name in captured.constants}
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        if all(source in on_inputs for source in node.all_input_nodes):
            on_inputs.add(node)
        elif all(source in on_weights or source in constants for source in node.all_input_nodes):
            on_weights.add(node)
    return on_inputs | on_weights


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything they are computed from."""
    return _reach(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and everything computed from them."""
    return _reach(nodes, lambda node: node.users)


def _reach(nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(neighbours(node))
    return seen


@dataclass(frozen=True)
class RowLayout:
    """How a tensor holds one row per token: [1, ..., T, *shape] with ``ones`` dimensions before T."""

    ones: int
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Elements per token."""
        return math.prod(self.shape)


def row_layout(node: fx.Node) -> RowLayout | None:
    """Return the layout of a node's value; None if it does not have exactly one row per token, so that it cannot be
    sent."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes = list(value.shape)
    ones = 0
    while ones < len(sizes) and not isinstance(sizes[ones], torch.SymInt) and sizes[ones] == 1:
        ones += 1
    rows, shape = sizes[ones : ones + 1], sizes[ones + 1 :]
    if not rows or not isinstance(rows[0], torch.SymInt) or not rows[0].node.expr.is_symbol:
        return None
    if any(isinstance(size, torch.SymInt) for size in shape):
        return None
    return RowLayout(ones, tuple(shape))


def context_layout(node: fx.Node) -> RowLayout:
    """``row_layout`` of a value that is sent. Raises ValueError if it cannot be."""
    layout = row_layout(node)
    if layout is None:
        raise ValueError(f"{node.name} does not hold one row per token, so slices cannot hand it on")
    return layout


def bytes_per_token(node: fx.Node) -> float:
    """Bytes per token of the node's value; infinite if it cannot be sent."""
    layout = row_layout(node)
    return math.inf if layout is None else layout.width * node.meta["val"].dtype.itemsize
