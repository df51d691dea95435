"""Finds the minimum cut at an attention: the cheapest set of tensors to send to the next slice besides q, k and v.

Everything an attention needs comes before its cut and everything it feeds comes after. The other nodes (the residual
stream, a parallel feed-forward) go on the side that makes the tensors to send cheapest. A tensor used by several nodes
is sent once, so the capacity belongs to the node, not to its edges.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import networkx as nx

from lamina.core.errors import UnsupportedModelError

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
        nodes: of a directed acyclic graph, in topological order; users outside ``nodes`` are ignored.
        before, after: nodes whose side is fixed; no node of ``before`` may depend on one of ``after``.
        cost: of sending a node's value across the cut, once for all its users.

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
        flow.add_edge(entry(node), ("out", node), **_capacity(cost(node)))
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


def _capacity(cost: float) -> Mapping[str, float]:
    return {} if math.isinf(cost) else {"capacity": cost}
