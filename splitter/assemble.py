"""``split``: captures, shards and cuts a model's graph, makes slices of it, and verifies the result of each pass."""

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from transformers.configuration_utils import PretrainedConfig

from lamina.core.errors import UnsupportedModelError
from lamina.core.types import AttentionSpec, DType
from lamina.splitter import attention
from lamina.splitter.capture import Capture, capture
from lamina.splitter.cut import Partition, RowLayout, partition, row_layout
from lamina.splitter.operators import shift
from lamina.splitter.parts import ONLY, Part, Rank, runs
from lamina.splitter.shard import shard
from lamina.splitter.split_model import Crossing, Cut, Shard, Slice, SplitModel, Weight
from lamina.splitter.verify import verify, verify_capture, verify_order, verify_partition

aten = torch.ops.aten


def split(config: PretrainedConfig, dtype: DType = DType.FLOAT32, rank: Rank = ONLY) -> SplitModel:
    """Cut a model at its attention operators. No weights are read or allocated.

    Args:
        config: configuration of the model.
        dtype: element type of weights, activations and KV.
        rank: rank whose part of the model to make, if several ranks share each slice (``lamina.splitter.shard``).

    Raises:
        UnsupportedModelError: the model cannot be split, or not among so many ranks.

    >>> from transformers import LlamaConfig
    >>> model = split(LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=128))
    >>> len(model.attentions), len(model.slices)
    (2, 3)
    """
    return assemble(config, dtype, capture_clean(config, dtype), rank)


def capture_clean(config: PretrainedConfig, dtype: DType) -> Capture:
    """Return the graph of a model, before it is cut. Raises UnsupportedModelError."""
    captured = capture(config, dtype)
    for node in captured.graph.find_nodes(op="call_function", target=aten.clone.default):
        (source,) = node.all_input_nodes
        if source.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(source)  # of dropout, for instance: the graph writes nothing in place
    captured.graph.eliminate_dead_code()
    captured.graph.lint()
    verify_capture(captured)
    verify_order(captured)
    return captured


def assemble(config: PretrainedConfig, dtype: DType, captured: Capture, rank: Rank) -> SplitModel:
    """Return the split model of a captured graph, which is not changed."""
    held: Mapping[str, Part] = {}
    nodes = captured.attentions
    whole = tuple(attention.spec(nodes[source], layer) for layer, source in enumerate(captured.representatives[:-1]))
    if rank != ONLY:
        captured, held = shard(captured, rank)
        verify_capture(captured)
    parts = partition(captured)
    verify_partition(captured, parts)
    model = _replicate(config, dtype, captured, parts, held, whole)
    if rank != ONLY:
        _check_share(model, rank)
    verify(model)
    return model


def _replicate(
    config: PretrainedConfig,
    dtype: DType,
    captured: Capture,
    parts: Partition,
    held: Mapping[str, Part],
    whole: tuple[AttentionSpec, ...],
) -> SplitModel:
    """Make all slices from those of the captured layers. ``held`` has a rank's parts of weights, by placeholder."""
    attentions = captured.attentions
    graphs: dict[Hashable, fx.GraphModule] = {}
    built = [_slice(captured, parts, index) for index in range(len(attentions) + 1)]
    built = [dataclasses.replace(part, graph=graphs.setdefault(_key(part.graph.graph), part.graph)) for part in built]
    slices: list[Slice] = []
    cuts, specs, sinks = [], [], []
    known = {
        captured.weights[name]: {dim: runs(indices) for dim, indices in part.items()} for name, part in held.items()
    }
    shards: dict[str, Shard] = {}
    for index, source in enumerate(captured.representatives):
        part = built[source]
        shards |= {shift(name, index - source): known[name] for name in part.weights if name in known}
        slices.append(
            dataclasses.replace(
                part,
                index=index,
                weights=tuple(shift(name, index - source) for name in part.weights),
                constants=tuple(shift(name, index - source) for name in part.constants),
            )
        )
        if part.last:
            break
        cuts.append(Cut(index, tuple(_crossing(node, index - source) for node in parts.contexts[source])))
        specs.append(attention.spec(attentions[source], index))
        sink = attention.sinks(attentions[source])
        name = None if sink is None else captured.weights[sink.name]
        if name in known:
            shards[shift(name, index - source)] = known[name]
        sinks.append(None if name is None else shift(name, index - source))
    used = {name for part in slices for name in part.weights} | {name for name in sinks if name}
    return SplitModel(
        config=config,
        dtype=dtype,
        slices=tuple(slices),
        cuts=tuple(cuts),
        attentions=tuple(specs),
        sinks=tuple(sinks),
        weights={name: weight for name, weight in captured.shapes.items() if name in used},
        ties={name: target for name, target in captured.ties.items() if target in used},
        constants={name: captured.buffer(name) for part in slices for name in part.constants},
        shards=shards,
        whole=whole,
    )


def _check_share(model: SplitModel, rank: Rank) -> None:
    total = sum(weight.nbytes for weight in model.weights.values())
    held = sum(weight.nbytes * _fraction(weight, model.shards.get(name, {})) for name, weight in model.weights.items())
    if held > total * (1 + 1 / rank.count) / 2:
        raise UnsupportedModelError(
            f"each of {rank.count} ranks would hold {held / total:.0%} of the weights of this "
            f"{model.config.model_type!r} model, since most of its layers cannot be shared; run it without tensor "
            "parallelism"
        )


def _fraction(weight: Weight, shard: Shard) -> float:
    kept = [sum(stop - start for start, stop in ranges) / weight.shape[dim] for dim, ranges in shard.items()]
    return math.prod(kept)


def _layout(node: fx.Node) -> RowLayout:
    """Return the layout of a value that crosses a cut; ``verify_partition`` has checked that it has one."""
    layout = row_layout(node)
    assert layout is not None
    return layout


def _crossing(node: fx.Node, layers: int) -> Crossing:
    """Describe a value by the module whose code made it and the operator, such as ``layers.3: add``."""
    operator = getattr(node.target, "_opname", None) or node.name
    origin = f"{node.meta['path'].removeprefix('model.')}: {operator}"
    return Crossing(shift(origin, layers), (_layout(node).width,), node.meta["val"].dtype)


def _slice(captured: Capture, parts: Partition, index: int) -> Slice:
    """Copy the nodes of slice ``index`` into a graph of its own; those that q needs come first."""
    attentions = captured.attentions
    last = index == len(attentions)
    received = parts.contexts[index - 1] if index > 0 else ()
    sent = () if last else parts.contexts[index]
    results: Any = captured.graph.output_node().all_input_nodes if last else attentions[index].args[:3]
    nodes = _demand_order(captured, parts, index, [*results, *sent])

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    wanted = {source for node in nodes for source in node.all_input_nodes} | {*results, *sent}
    weights = [node for node in captured.graph.nodes if node in wanted and node.name in captured.weights]
    constants = [node for node in captured.graph.nodes if node in wanted and node.name in captured.constants]
    for node, name in [
        *((node, f"weight_{place}") for place, node in enumerate(weights)),
        *((node, f"constant_{place}") for place, node in enumerate(constants)),
        *((captured.ids, "ids"), (captured.positions, "positions")),
        *([(attentions[index - 1], "attention")] if index > 0 else []),
    ]:
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    arrivals = [graph.placeholder(f"context_{place}") for place in range(len(received))]  # [T, width]
    for node, arrival in zip(received, arrivals, strict=True):
        if node not in copies:
            shape = [*[1] * _layout(node).ones, -1, *_layout(node).shape]
            copies[node] = graph.call_function(aten.reshape.default, (arrival, shape))
            copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    packed = [graph.call_function(aten.reshape.default, (copies[node], [-1, _layout(node).width])) for node in sent]
    graph.output((*(copies[node] for node in results), *packed))
    graph.eliminate_dead_code()
    graph.lint()
    return Slice(
        index=index,
        graph=fx.GraphModule(torch.nn.Module(), graph, class_name=f"Slice{index}"),
        weights=tuple(captured.weights[node.name] for node in weights),
        constants=tuple(captured.constants[node.name] for node in constants),
        last=last,
        linears_before_q=_linears(graph),
    )


def _demand_order(captured: Capture, parts: Partition, index: int, results: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes that slice ``index`` runs: what its first result (q) needs, then what k, v and context need."""
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


def _linears(graph: fx.Graph) -> tuple[int, int]:
    """Return the number of linear layers that run until the first result exists, and of all linear layers."""
    kinds = {aten.linear.default, aten.addmm.default, aten.mm.default}
    results: Any = graph.output_node().args[0]
    nodes = list(graph.nodes)
    until_q = nodes[: nodes.index(results[0])]
    return sum(node.target in kinds for node in until_q), sum(node.target in kinds for node in nodes)


def _key(graph: fx.Graph) -> Hashable:
    """Return a key that is equal for equal graphs: numbered nodes, and the types of inputs."""
    number: dict[fx.Node, int] = {}
    lines: list[Hashable] = []
    for node in graph.nodes:
        number[node] = len(number)
        arguments: Any = map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
        value = node.meta.get("val") if node.op == "placeholder" else None
        kind = (tuple(str(size) for size in value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        lines.append((node.op, str(node.target), repr(arguments), repr(kind)))
    return tuple(lines)
