"""Cuts a captured graph at its attentions: finds the slice of each node, and the values that cross each cut.

All nodes that an attention needs are before its cut, and all nodes that depend on the attention are after it. The other
nodes (the residual stream, a parallel feed-forward) are placed so that the tensors to send have the fewest bytes: a
minimum cut. A tensor with several users is sent once, so the capacity belongs to the node, not to its edges.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import networkx as nx
import torch
from torch import fx

from lamina.core.errors import UnsupportedModelError
from lamina.splitter.capture import Capture

Node = TypeVar("Node", bound=Hashable)


def minimum_cut(
    nodes: Sequence[Node],
    users: Callable[[Node], Iterable[Node]],
    before: set[Node],
    after: set[Node],
    cost: Callable[[Node], float],
) -> set[Node]:
    """Return the nodes to compute before a cut, such that the values used after it are the cheapest to send.

    Args:
        nodes: nodes of a directed acyclic graph, in topological order; users outside ``nodes`` are ignored.
        users: returns the users of a node.
        before: nodes that must be before the cut; none may depend on a node of ``after``.
        after: nodes that must be after the cut.
        cost: cost of sending a node's value across the cut, once for all its users.

    Returns:
        The nodes before the cut, including ``before``. Of equally cheap cuts, the latest: work that may run before
        or after an attention runs before, while memory workers already compute the attention.
    """
    inside = set(nodes)
    flow = nx.DiGraph()
    flow.add_nodes_from(("source", "sink"))

    def entry(node: Node) -> Hashable:  # the fixed nodes of each side collapse into source and sink
        return "source" if node in before else "sink" if node in after else ("in", node)

    for node in nodes:
        targets = {entry(user) for user in users(node) if user in inside} - {"source"}
        if node in after or (node in before and not targets):
            continue
        bound = cost(node)
        flow.add_edge(entry(node), ("out", node), **({} if math.isinf(bound) else {"capacity": bound}))
        for target in targets:
            flow.add_edge(("out", node), target)  # no capacity given: infinite
            if target != "sink":
                flow.add_edge(target, entry(node))  # a node before the cut has all its inputs before the cut
    try:
        _, (source_side, _) = nx.minimum_cut(flow, "source", "sink")
    except nx.NetworkXUnbounded as error:
        raise UnsupportedModelError(
            "no cut exists at an attention: later layers need earlier tensors that do not have one row per token"
        ) from error
    return before | {node for node in nodes if ("in", node) in source_side}


@dataclass(frozen=True)
class Partition:
    """Which slice computes each node (``home``), and which nodes' values cross each cut (``contexts``).

    ``home`` omits replicable nodes, placeholders and attention operators: an attention's result is a slice's input.
    """

    home: Mapping[fx.Node, int]
    contexts: tuple[tuple[fx.Node, ...], ...]
    replicable: frozenset[fx.Node]


def partition(captured: Capture) -> Partition:
    """Cut the graph at every attention, first to last."""
    repeated = _replicable(captured)
    attentions = captured.attentions
    nodes = [node for node in captured.graph.nodes if node.op == "call_function" and node not in repeated]
    inside = set(nodes)
    before: set[fx.Node] = set()
    home: dict[fx.Node, int] = {}
    contexts = []
    for index, attention in enumerate(attentions):

        def users(node: fx.Node, attention: fx.Node = attention) -> list[fx.Node]:
            # q, k and v reach their attention through the memory workers
            return [user for user in node.users if user is not attention]

        needed = ancestors(attention.all_input_nodes) & inside
        after = _reach([attention], lambda node: node.users) & inside
        before = minimum_cut(nodes, users, before | needed, after, _bytes_per_token)
        for node in before:
            home.setdefault(node, index)
        contexts.append(tuple(node for node in nodes if node in before and any(u not in before for u in users(node))))
    for node in nodes:
        home.setdefault(node, len(attentions))
    for attention in attentions:
        del home[attention]
    return Partition(home, tuple(contexts), frozenset(repeated))


def _replicable(captured: Capture) -> set[fx.Node]:
    """Return the nodes that each slice computes itself: they depend only on ids, positions and constants, or only on
    weights."""
    placeholders = {node for node in captured.graph.nodes if node.op == "placeholder"}
    on_weights = {node for node in placeholders if node.name in captured.weights}
    constants = {node for node in placeholders if node.name in captured.constants}
    on_inputs = placeholders - on_weights
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        sources = set(node.all_input_nodes)
        if sources <= on_inputs:
            on_inputs.add(node)
        elif sources <= on_weights | constants:
            on_weights.add(node)
    return on_inputs | on_weights


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and everything they are computed from."""
    return _reach(nodes, lambda node: node.all_input_nodes)


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
    """Return the layout of a node's value; None if it cannot be sent, as it has not exactly one row per token."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes = list(value.shape)
    ones = next((dim for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt) or size != 1), len(sizes))
    rows, shape = sizes[ones : ones + 1], sizes[ones + 1 :]
    if not rows or not isinstance(rows[0], torch.SymInt) or not rows[0].node.expr.is_symbol:
        return None
    if any(isinstance(size, torch.SymInt) for size in shape):
        return None
    return RowLayout(ones, tuple(shape))


def _bytes_per_token(node: fx.Node) -> float:
    """Return the bytes per token of a node's value; infinite if it cannot be sent."""
    layout = row_layout(node)
    return math.inf if layout is None else layout.width * node.meta["val"].dtype.itemsize
