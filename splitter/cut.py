"""The minimum cut at each attention: which tensors cross from slice k to slice k + 1 besides q, k and v.

Everything an attention needs comes before its cut and everything it feeds comes after; the nodes between (the residual
stream, a parallel feed-forward) may fall on either side, and the cheapest set of tensors to send decides. A tensor
used by several nodes is sent once, so the capacity sits on the node, not on its edges.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import networkx as nx

from lamina.errors import UnsupportedModelError

Node = TypeVar("Node", bound=Hashable)


def minimum_cut(
    nodes: Sequence[Node],
    users: Callable[[Node], Iterable[Node]],
    before: set[Node],
    after: set[Node],
    cost: Callable[[Node], float],
) -> set[Node]:
    """The nodes to compute before a cut, such that the values used after it are the cheapest to send.

    Args:
        nodes: of a directed acyclic graph, in topological order; users outside ``nodes`` are ignored.
        before, after: nodes whose side is given; no node of ``before`` may depend on one of ``after``.
        cost: of sending a node's value across the cut, once for all its users.

    Returns:
        The nodes before the cut, ``before`` among them. Of equally cheap cuts the latest: work that may run before
        or after an attention runs before, while memory workers are already attending.
    """
    inside = set(nodes)
    flow = nx.DiGraph()
    flow.add_nodes_from(("source", "sink"))

    def entry(node: Node) -> Hashable:  # all given nodes of a side are one: only undecided ones enter the graph
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
            "an attention cannot be cut off: what later layers need of earlier ones does not hold one row per token"
        ) from error
    return before | {node for node in nodes if ("in", node) in source_side}


def _capacity(cost: float) -> Mapping[str, float]:
    return {} if math.isinf(cost) else {"capacity": cost}
