"""Splits a model: runs the passes capture, clean, cut, build and replicate, and verifies the result of each."""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import fx
from transformers import PretrainedConfig

from lamina.core.errors import UnsupportedModelError
from lamina.core.types import AttentionSpec, DType
from lamina.splitter import attention
from lamina.splitter.capture import Capture, capture
from lamina.splitter.flow import clean, context_layout
from lamina.splitter.layer_trace import shift
from lamina.splitter.parts import ONLY, Part, Rank, runs
from lamina.splitter.shard import shard
from lamina.splitter.slices import Partition, build, partition
from lamina.splitter.split_model import Crossing, Cut, Shard, Slice, SplitModel, Weight
from lamina.splitter.verify import verify, verify_capture, verify_order, verify_partition


def split(config: PretrainedConfig, dtype: DType = DType.FLOAT32, rank: Rank = ONLY) -> SplitModel:
    """Cut a model at its attention operators. No weights are read or allocated.

    Args:
        config: of the model.
        dtype: of weights, activations and KV.
        rank: whose part of the model to make, if several share each slice (``lamina.splitter.shard``).

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
    clean(captured)
    verify_capture(captured)
    verify_order(captured)
    return captured


def assemble(config: PretrainedConfig, dtype: DType, captured: Capture, rank: Rank) -> SplitModel:
    """Return what ``split`` makes of a model's graph, which is not changed."""
    held: Mapping[str, Part] = {}
    whole = captured
    if rank != ONLY:
        sharded = shard(captured, rank)
        captured, held = sharded.captured, sharded.parts
        verify_capture(captured)
    parts = partition(captured)
    verify_partition(captured, parts)
    model = _replicate(config, dtype, captured, parts, held)
    model = dataclasses.replace(model, whole=_attentions(whole))
    if rank != ONLY:
        _check_share(model, rank)
    verify(model)
    return model


def _replicate(
    config: PretrainedConfig, dtype: DType, captured: Capture, parts: Partition, held: Mapping[str, Part]
) -> SplitModel:
    """Make the slices of the whole model from those of the captured layers; equal ones share their graph.

    ``held``: what a rank holds of weights, by placeholder.
    """
    attentions = captured.attentions
    built = [build(captured, parts, index) for index in range(len(attentions) + 1)]
    graphs: dict[object, fx.GraphModule] = {}
    slices, cuts, specs, sinks = [], [], [], []
    known = {captured.weights[name]: _shard(part) for name, part in held.items()}
    shards: dict[str, Shard] = {}
    last = len(captured.representatives) - 1
    for index, source in enumerate(captured.representatives):
        part = built[source]
        shards |= {shift(name, index - source): known[name] for name in part.weights if name in known}
        slices.append(
            Slice(
                index=index,
                graph=graphs.setdefault(part.key, part.module),
                weights=tuple(shift(name, index - source) for name in part.weights),
                constants=tuple(shift(name, index - source) for name in part.constants),
                last=index == last,
                linears_before_q=part.linears_before_q,
            )
        )
        if index == last:
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
    )


def _check_share(model: SplitModel, rank: Rank) -> None:
    """Raises UnsupportedModelError if ranks save less than half of what they could."""
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


def _attentions(captured: Capture) -> tuple[AttentionSpec, ...]:
    """Return all attentions of the whole model."""
    nodes = captured.attentions
    return tuple(attention.spec(nodes[source], index) for index, source in enumerate(captured.representatives[:-1]))


def _shard(part: Part) -> Shard:
    return {dim: runs(indices) for dim, indices in part.items()}


def _crossing(node: fx.Node, layers: int) -> Crossing:
    layout = context_layout(node)
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return Crossing(shift(_origin(node), layers), (layout.width,), value.dtype)


def _origin(node: fx.Node) -> str:
    """Return the module whose code made a node, and the operator, as in ``model.layers.3: add``."""
    operator = getattr(node.target, "_opname", None) or node.name
    return f"{node.meta['path'].removeprefix('model.')}: {operator}"
