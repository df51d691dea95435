"""Splits a model: runs the passes capture, clean, cut, build and replicate, and verifies the result of each."""

import torch
from torch import fx
from transformers import PretrainedConfig

from lamina.splitter import attention
from lamina.splitter.capture import Capture, capture
from lamina.splitter.flow import clean, context_layout
from lamina.splitter.names import shift
from lamina.splitter.slices import Partition, build, partition
from lamina.splitter.split_model import Crossing, Cut, Slice, SplitModel
from lamina.splitter.verify import verify, verify_capture, verify_partition
from lamina.types import DType


def split(config: PretrainedConfig, dtype: DType = DType.FLOAT32) -> SplitModel:
    """Cut a model at its attention operators. No weights are read or allocated.

    Args:
        config: of the model.
        dtype: of weights, activations and KV.

    Raises:
        UnsupportedModelError: the model cannot be split.
    """
    captured = capture(config, dtype)
    clean(captured)
    verify_capture(captured)
    parts = partition(captured)
    verify_partition(captured, parts)
    model = _replicate(config, dtype, captured, parts)
    verify(model)
    return model


def _replicate(config: PretrainedConfig, dtype: DType, captured: Capture, parts: Partition) -> SplitModel:
    """Make the slices of the whole model from those of the captured layers; equal ones share their graph."""
    attentions = captured.attentions
    built = [build(captured, parts, index) for index in range(len(attentions) + 1)]
    graphs: dict[object, fx.GraphModule] = {}
    slices, cuts, specs, sinks = [], [], [], []
    last = len(captured.representatives) - 1
    for index, source in enumerate(captured.representatives):
        part = built[source]
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
        sinks.append(None if sink is None else shift(captured.weights[sink.name], index - source))
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
    )


def _crossing(node: fx.Node, layers: int) -> Crossing:
    layout = context_layout(node)
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return Crossing(shift(_origin(node), layers), (layout.width,), value.dtype)


def _origin(node: fx.Node) -> str:
    """The module whose code made a node, and the operator, as in ``model.layers.3: add``."""
    operator = getattr(node.target, "_opname", None) or node.name
    return f"{node.meta['path'].removeprefix('model.')}: {operator}"
