"""Shards a captured graph over the ranks of a tensor-parallel replica, by what its operators compute.

Every rank has some heads of every attention. Backwards from q, k and v, ``propagate`` derives the part of each value
that a rank needs: so the linear layers before an attention compute only some outputs (by columns), also if one layer
computes q, k and v. A linear layer whose inputs can be computed in parts sums over a part of its inputs (by rows): the
output projection after an attention, and the down projection of a feed-forward layer, whose gate and up projections
then compute a part of their outputs. Its results are summed over the ranks, and then the bias is added. The embedding
and the head are divided by the vocabulary. All else, such as norms over the residual stream, is computed on every rank.

Each rank makes its own graph; all have the same sequence of sums over ranks.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.node import map_arg

from lamina.core.errors import UnsupportedModelError
from lamina.splitter.capture import Capture
from lamina.splitter.cut import ancestors
from lamina.splitter.markers import ALL_REDUCE, ATTENTION
from lamina.splitter.parts import WHOLE, Indices, MixesError, Part, Rank, block, equal, positions, runs, union
from lamina.splitter.propagate import (
    VIEWS,
    Needs,
    Product,
    Selection,
    is_pointwise,
    name,
    needs,
    reduced,
    shape,
    sizes,
)

aten = torch.ops.aten


def shard(captured: Capture, rank: Rank) -> tuple[Capture, Mapping[str, Part]]:
    """Return the graph that ``rank`` computes, and its parts of the sharded weights, by placeholder name.

    Raises UnsupportedModelError: its heads cannot be divided by the number of ranks, or an attention's result is used
    in a way that needs all heads.
    """
    return _Writer(_Plan(captured, rank)).build()


def _heads_of(query_heads: int, kv_heads: int, rank: Rank) -> tuple[Indices, Indices]:
    """Return the query heads and the KV heads of a rank. With more ranks than KV heads, ranks share a KV head.

    Raises UnsupportedModelError.
    """
    count = rank.count
    if query_heads % count or (kv_heads % count and count % kv_heads):
        raise UnsupportedModelError(
            f"an attention with {query_heads} query heads and {kv_heads} KV heads cannot be divided among {count} "
            "ranks; use a number of ranks that divides the query heads, and divides the KV heads or is a multiple of "
            "them"
        )
    if kv_heads % count == 0:
        return block(query_heads, rank.number, count), block(kv_heads, rank.number, count)
    return block(query_heads, rank.number, count), np.array([rank.number * kv_heads // count])


class _Plan:
    """Which part of every value a rank computes.

    Attributes:
        parts: by node that is used: the part of its value that the rank computes.
        uses: by node: the parts of its inputs that it needs, unless it needs them whole.
        rows: linear layers that sum over a part of their inputs, with these inputs.
        head: the linear layer that makes logits, if it is divided.
        embeddings: embeddings of token ids, divided by the vocabulary.
        means: means over dimensions of which the rank has a part.
    """

    def __init__(self, captured: Capture, rank: Rank) -> None:
        self.captured, self.rank = captured, rank
        self.nodes = list(captured.graph.nodes)
        self.weights = {node for node in self.nodes if node.name in captured.weights}
        self.parts: dict[fx.Node, Part] = {}
        self.uses: dict[fx.Node, Needs] = {}
        self.rows = self._find_rows()
        self.head = self._find_head()
        self.embeddings = self._find_embeddings()
        self.means = set[fx.Node]()
        self._wanted: dict[fx.Node, list[Part]] = defaultdict(list)
        for node in reversed(self.nodes):
            if node.op == "output" or node in self._wanted:
                self._visit(node)

    def heads(self, attention: fx.Node, rank: Rank | None = None) -> tuple[Indices, Indices]:
        """Return the query heads and KV heads of a rank, this one by default."""
        query, key = (shape(node) for node in attention.args[:2])
        assert query is not None and key is not None
        return _heads_of(query[1], key[1], rank or self.rank)

    def _block(self, size: int, rank: Rank | None = None) -> Indices:
        rank = rank or self.rank
        return block(size, rank.number, rank.count)

    def _find_columns(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for attention in self.captured.attentions:
            for node in attention.args[:3]:
                found |= (_sources(node, {1: self.heads(attention)[node is not attention.args[0]]}) or {}).keys()
        return found

    def _find_rows(self) -> dict[fx.Node, Indices]:
        columns = self._find_columns()
        rows: dict[fx.Node, Indices] = {}
        ranks = [Rank(number, self.rank.count) for number in range(self.rank.count)]
        for node in self.nodes:
            product = Product.from_node(node)
            if product is not None and node not in columns and all(self._divides(product, one, rows) for one in ranks):
                rows[node] = self._block(product.size)
        return rows

    def _divides(self, product: Product, rank: Rank, rows: Mapping[fx.Node, Indices]) -> bool:
        """True if a rank can compute its block of a layer's inputs from its parts of attentions and other layers."""
        sources = _sources(product.x, {len(sizes(product.x)) - 1: self._block(product.size, rank)})
        return bool(sources) and all(
            equal(part, {1: self.heads(node, rank)[0]})
            if node.target is ATTENTION
            else node not in rows and part.keys() == {len(sizes(node)) - 1}
            for node, part in (sources or {}).items()
        )

    def _find_head(self) -> fx.Node | None:
        """Return the linear layer each of whose outputs is one logit."""
        (node,) = self.captured.graph.output_node().all_input_nodes
        while Product.from_node(node) is None:
            sources = [source for source in node.all_input_nodes if source.op != "placeholder" and shape(source)]
            if len(sources) != 1 or not (is_pointwise(node) or name(node) in (*VIEWS, "select", "slice", "squeeze")):
                return None
            (node,) = sources
        return None if node in self.rows else node

    def _find_embeddings(self) -> set[fx.Node]:
        return {
            node
            for node in self.nodes
            if node.target is aten.embedding.default
            and node.args[0] in self.weights
            and self.captured.ids in ancestors(node.all_input_nodes)
        }

    def _visit(self, node: fx.Node) -> None:
        wanted, whole = self._wanted[node], shape(node)
        part = union(wanted, whole) if wanted and whole is not None else WHOLE
        uses: Needs = {}
        product = Product.from_node(node)
        if node.op == "placeholder":
            part = part if node in self.weights else WHOLE
        elif node.target is ATTENTION:
            part, uses = self._attention(node, part)
        elif product is not None and node in self.rows:
            part, uses = WHOLE, product.by_inputs(self.rows[node])
        elif product is not None and node is self.head:
            part, uses = WHOLE, product.by_outputs(self._block(sizes(node)[-1]))
        elif node in self.embeddings:
            part, uses = WHOLE, {node.args[0]: {0: self._block(sizes(node.args[0])[0])}}  # type: ignore[dict-item]
        elif not part and (known := self._averaged(node)):
            uses = {node.args[0]: known}  # type: ignore[dict-item]
            self.means.add(node)
        else:
            try:
                uses = needs(node, part)
            except MixesError:
                part = WHOLE
        self.parts[node], self.uses[node] = part, uses
        selection = Selection.from_node(node)
        for source in node.all_input_nodes if selection is None else [selection.source]:
            self._wanted[source].append(uses.get(source, WHOLE))

    def _attention(self, node: fx.Node, wanted: Part) -> tuple[Part, Needs]:
        query_heads, kv_heads = self.heads(node)
        if not equal(wanted, {1: query_heads}):
            users = sorted({name(user) for user in node.users})
            raise UnsupportedModelError(
                f"the result of an attention ({node.meta.get('path', node.name)}) goes through {users} to an operator "
                "that needs the heads of all ranks; this model cannot run on several ranks"
            )
        query, key, value, sinks, *_ = node.args
        uses: dict[Any, Part] = {query: {1: query_heads}, key: {1: kv_heads}, value: {1: kv_heads}}
        if sinks is not None:
            uses[sinks] = {0: query_heads}
        return wanted, uses

    def _averaged(self, node: fx.Node) -> Part:
        """Return the part of the input over which a rank computes a mean over features; ``WHOLE`` if others need more.

        The ranks sum their means. Norms of q and k over all heads need this.
        """
        if node.target is not aten.mean.dim:
            return WHOLE
        source: Any = node.args[0]
        size = shape(source)
        base = source
        while not self._wanted.get(base) and is_pointwise(base) and len(base.all_input_nodes) == 1:
            (base,) = base.all_input_nodes
        if not self._wanted.get(base) or shape(base) != size or size is None:
            return WHOLE
        part = union(self._wanted[base], size)
        dims, _ = reduced(node)
        evenly = all(
            size[dim] % len(held) == 0 == self.rank.count % (size[dim] // len(held)) for dim, held in part.items()
        )
        return part if evenly and part.keys() <= dims else WHOLE


def _sources(node: Any, part: Part) -> dict[fx.Node, Part] | None:
    """Return the linear layers and attentions on which ``part`` of a value depends, with the parts of their results
    that it needs; None if an operator in between mixes indices."""
    found: dict[fx.Node, Part] = {}
    todo = [(node, part)]
    while todo:
        node, part = todo.pop()
        if not part or node.op == "placeholder":
            continue
        if node.target is ATTENTION or Product.from_node(node) is not None:
            found[node] = part
            continue
        try:
            todo.extend(needs(node, part).items())
        except MixesError:
            return None
    return found


class _Writer:
    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._held: dict[tuple[Any, ...], fx.Node] = {}
        self._mode = plan.captured.ids.meta["val"].fake_mode

    def build(self) -> tuple[Capture, Mapping[str, Part]]:
        captured = self._plan.captured
        for node in self._plan.nodes:
            if node in self._plan.parts:
                self._copies[node] = self._write(node)
            elif node in (captured.ids, captured.positions):
                self._copies[node] = self._placeholder(node)
        self._graph.eliminate_dead_code()
        self._graph.lint()
        parts = {node.name: part for node, part in self._plan.parts.items() if node in self._plan.weights and part}
        ids, positions = self._copies[captured.ids], self._copies[captured.positions]
        return dataclasses.replace(captured, graph=self._graph, ids=ids, positions=positions), parts

    def _write(self, node: fx.Node) -> fx.Node:
        plan, part = self._plan, self._plan.parts[node]
        selection = Selection.from_node(node)
        if node.op == "placeholder":
            copy = self._placeholder(node, part)
        elif node in plan.rows:
            copy = self._sum_over_inputs(node)
        elif node is plan.head:
            copy = self._join_outputs(node)
        elif node in plan.embeddings:
            copy = self._embed(node)
        elif selection is not None and (
            part or plan.parts[selection.source] or selection.source not in node.all_input_nodes
        ):
            copy = self._select(node, selection)
        elif part or any(plan.parts.get(source) for source in node.all_input_nodes):
            copy = self._compute(node, part)
        else:
            copy = self._graph.node_copy(node, self._copies.__getitem__)
        return copy

    def _compute(self, node: fx.Node, part: Part) -> fx.Node:
        plan, arguments = self._plan, self._arguments(node)
        if name(node) in (*VIEWS, "expand"):
            given: Any = arguments[1]
            local = [len(part[dim]) if dim in part and size != -1 else size for dim, size in enumerate(given)]
            arguments = (arguments[0], local, *arguments[2:])
        elif node.target is ATTENTION:
            heads, slopes = plan.heads(node)[0], arguments[4]
            arguments = (*arguments[:4], [slopes[head] for head in heads] if slopes else [], *arguments[5:])
        kwargs: Any = map_arg(node.kwargs, lambda source: self._part(source, plan.uses[node].get(source, WHOLE)))
        copy = self._call(node.target, arguments, kwargs, node)
        if node in plan.means:
            copy = self._call(aten.mul.Tensor, (copy, 1.0 / plan.rank.count), like=node)
            copy = self._call(ALL_REDUCE, (copy,), like=node)
        return copy

    def _placeholder(self, node: fx.Node, part: Part = WHOLE) -> fx.Node:
        copy = self._graph.node_copy(node)
        assert copy.name == node.name
        if part:
            local = [len(part[dim]) if dim in part else size for dim, size in enumerate(sizes(node))]
            with enable_python_dispatcher(), self._mode, torch.no_grad():
                copy.meta = {**node.meta, "val": node.meta["val"].new_empty(local)}
        return copy

    def _arguments(self, node: fx.Node) -> tuple[Any, ...]:
        uses = self._plan.uses[node]
        found: Any = map_arg(node.args, lambda source: self._part(source, uses.get(source, WHOLE)))
        return tuple(found)

    def _call(
        self,
        target: Any,
        arguments: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        like: fx.Node | None = None,
    ) -> fx.Node:
        """Add a call of an operator on parts, and run it on fake tensors for the shape of the result."""
        node = self._graph.call_function(target, tuple(arguments), dict(kwargs or {}))
        node.meta = {} if like is None else {key: value for key, value in like.meta.items() if key != "val"}
        with enable_python_dispatcher(), self._mode, torch.no_grad():
            values: Any = map_arg((node.args, node.kwargs), _value)
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def _part(self, source: fx.Node, wanted: Part) -> fx.Node:
        """Return the node with the part ``wanted`` of the value of ``source`` in the whole graph."""
        copy, held = self._copies[source], self._plan.parts[source]
        for dim in held.keys() | wanted.keys():
            if dim not in wanted:
                raise AssertionError(f"{source.name} is needed whole in dimension {dim}")
            copy = self._take(copy, dim, positions(held.get(dim), wanted[dim]), source)
        return copy

    def _take(self, copy: fx.Node, dim: int, places: Indices, like: fx.Node) -> fx.Node:
        if len(places) == sizes(copy)[dim]:
            return copy
        key = (copy, dim, places.tobytes())
        if key not in self._held:
            found = runs(places)
            steps = set(np.diff(places).tolist())
            if len(found) > 1 and len(steps) == 1:
                bounds = [(int(places[0]), int(places[-1]) + 1, steps.pop())]
            else:
                bounds = [(start, stop, 1) for start, stop in found or [(0, 0)]]
            pieces = [self._call(aten.slice.Tensor, (copy, dim, *each), like=like) for each in bounds]
            self._held[key] = pieces[0] if len(pieces) == 1 else self._call(aten.cat.default, (pieces, dim), like=like)
        return self._held[key]

    def _select(self, node: fx.Node, selection: Selection) -> fx.Node:
        copy = self._part(selection.source, self._plan.uses[node][selection.source])
        return self._call(aten.select.int, (copy, selection.dim, 0), like=node) if selection.removes else copy

    def _sum_over_inputs(self, node: fx.Node) -> fx.Node:
        product, uses = Product.from_node(node), self._plan.uses[node]
        assert product is not None
        x, weight = (self._part(source, uses[source]) for source in (product.x, product.weight))
        if product.bias is not None or node.target is aten.linear.default:
            target = aten.linear.default if node.target is aten.linear.default else aten.mm.default
            partial = self._call(target, (x, weight), like=node)
        else:
            partial = self._call(node.target, (x, weight, *self._arguments(node)[2:]), like=node)
        total = self._call(ALL_REDUCE, (partial,), like=node)
        if product.bias is None:
            return total
        return self._call(aten.add.Tensor, (total, self._part(product.bias, WHOLE)), like=node)

    def _join_outputs(self, node: fx.Node) -> fx.Node:
        """Return the logits: the sum over ranks of the logits of each rank's part of the vocabulary, else zeros."""
        partial = self._call(node.target, self._arguments(node), like=node)
        whole, rank = sizes(node)[-1], self._plan.rank
        before, behind = rank.number * whole // rank.count, whole - (rank.number + 1) * whole // rank.count
        padded = self._call(aten.constant_pad_nd.default, (partial, [before, behind]), like=node)
        return self._call(ALL_REDUCE, (padded,), like=node)

    def _embed(self, node: fx.Node) -> fx.Node:
        """Return embeddings: each rank looks up ids of its part of the vocabulary, with zeros for others; all are
        summed."""
        weight: Any = node.args[0]
        ids: Any = node.args[1]
        tokens = self._plan.uses[node][weight][0]
        shifted = self._call(aten.sub.Tensor, (self._part(ids, WHOLE), int(tokens[0])), like=node)
        nearest = self._call(aten.clamp.default, (shifted, 0, len(tokens) - 1), like=node)
        own = self._call(aten.eq.Tensor, (shifted, nearest), like=node)
        rows = self._call(
            aten.embedding.default, (self._part(weight, self._plan.uses[node][weight]), nearest), like=node
        )
        kept = self._call(aten.mul.Tensor, (rows, self._call(aten.unsqueeze.default, (own, -1), like=node)), like=node)
        return self._call(ALL_REDUCE, (kept,), like=node)


def _value(node: fx.Node) -> Any:
    """Return the fake value of a node. Sizes recorded without a value are computed."""
    if "val" in node.meta:
        return node.meta["val"]
    target: Any = node.target
    value: Any = target(*map_arg(node.args, _value))
    return value
