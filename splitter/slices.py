"""Cuts a captured graph into slices: graphs of their own whose inputs are weights, rows and context."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from lamina.splitter.capture import Capture
from lamina.splitter.cut import minimum_cut
from lamina.splitter.flow import ancestors, bytes_per_token, context_layout, descendants, replicable


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
    repeated = replicable(captured)
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
        after = descendants([attention]) & inside
        before = minimum_cut(nodes, users, before | needed, after, bytes_per_token)
        for node in before:
            home.setdefault(node, index)
        contexts.append(tuple(node for node in nodes if node in before and any(u not in before for u in users(node))))
    for node in nodes:
        home.setdefault(node, len(attentions))
    for attention in attentions:
        del home[attention]
    return Partition(home, tuple(contexts), frozenset(repeated))


@dataclass(frozen=True)
class SliceGraph:
    """One slice of a captured graph. ``key`` is equal for graphs that compute the same function of their inputs."""

    module: fx.GraphModule
    weights: tuple[str, ...]
    constants: tuple[str, ...]
    linears_before_q: tuple[int, int]
    key: Hashable


def build(captured: Capture, parts: Partition, index: int) -> SliceGraph:
    """Copy the nodes of slice ``index`` into a graph of their own; those that q needs come first."""
    attentions = captured.attentions
    received = parts.contexts[index - 1] if index > 0 else ()
    sent = parts.contexts[index] if index < len(attentions) else ()
    if index < len(attentions):
        results = [*_inputs(attentions[index]), *sent]
    else:
        results = list(captured.graph.output_node().all_input_nodes)
    nodes = _demand_order(captured, parts, index, results)

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    wanted = {source for node in nodes for source in node.all_input_nodes} | set(results)
    weights = [node for node in captured.graph.nodes if node in wanted and node.name in captured.weights]
    constants = [node for node in captured.graph.nodes if node in wanted and node.name in captured.constants]
    rows = [captured.ids, captured.positions]
    for node, name in [
        *((node, f"weight_{place}") for place, node in enumerate(weights)),
        *((node, f"constant_{place}") for place, node in enumerate(constants)),
        *zip(rows, ("ids", "positions"), strict=True),
        *([(attentions[index - 1], "attention")] if index > 0 else []),
    ]:
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    arrivals = [(node, graph.placeholder(f"context_{place}")) for place, node in enumerate(received)]
    for node, arrival in arrivals:
        copies.setdefault(node, _unpack(graph, node, arrival))
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    outputs = [copies[node] for node in results[: len(results) - len(sent)]]
    outputs += [_pack(graph, node, copies[node]) for node in sent]
    graph.output(tuple(outputs))
    graph.eliminate_dead_code()
    graph.lint()
    return SliceGraph(
        module=fx.GraphModule(torch.nn.Module(), graph, class_name=f"Slice{index}"),
        weights=tuple(captured.weights[node.name] for node in weights),
        constants=tuple(captured.constants[node.name] for node in constants),
        linears_before_q=_linears(graph),
        key=_key(graph),
    )


def _inputs(attention: fx.Node) -> list[fx.Node]:
    query, key, value = attention.args[:3]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    return [query, key, value]


def _demand_order(captured: Capture, parts: Partition, index: int, results: list[fx.Node]) -> list[fx.Node]:
    """Nodes that slice ``index`` runs: first those that its first result (q) needs, then those of k, v and context."""
    place = {node: position for position, node in enumerate(captured.graph.nodes)}
    ordered: list[fx.Node] = []
    seen: set[fx.Node] = set()
    for result in results:
        found = []
        stack = [result]
        while stack:
            node = stack.pop()
            runs_here = node.op == "call_function" and (node in parts.replicable or parts.home.get(node) == index)
            if runs_here and node not in seen:
                seen.add(node)
                found.append(node)
                stack.extend(node.all_input_nodes)
        ordered += sorted(found, key=place.__getitem__)
    return ordered


def _pack(graph: fx.Graph, original: fx.Node, node: fx.Node) -> fx.Node:
    """Return a context tensor as [T, width]."""
    layout = context_layout(original)
    return graph.call_function(torch.ops.aten.reshape.default, (node, [-1, layout.width]))


def _unpack(graph: fx.Graph, original: fx.Node, node: fx.Node) -> fx.Node:
    """Return what ``_pack`` was given, from what it gave."""
    layout = context_layout(original)
    unpacked = graph.call_function(torch.ops.aten.reshape.default, (node, [*[1] * layout.ones, -1, *layout.shape]))
    unpacked.meta = dict(original.meta)
    return unpacked


def _linears(graph: fx.Graph) -> tuple[int, int]:
    """(linear layers that run until the first result exists, all linear layers)."""
    kinds = {torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default}
    results: Any = graph.output_node().args[0]
    nodes = list(graph.nodes)
    until_q = nodes[: nodes.index(results[0])]
    return sum(node.target in kinds for node in until_q), sum(node.target in kinds for node in nodes)


def _key(graph: fx.Graph) -> Hashable:
    """Return the graph with its nodes numbered in order, and the types of its inputs."""
    number: dict[fx.Node, int] = {}
    lines: list[Hashable] = []
    for node in graph.nodes:
        number[node] = len(number)
        arguments: Any = map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
        value = node.meta.get("val") if node.op == "placeholder" else None
        kind = (tuple(str(size) for size in value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        lines.append((node.op, str(node.target), repr(arguments), repr(kind)))
    return tuple(lines)
