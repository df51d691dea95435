"""Stages of a model's copies: their layers and weights as compute workers divide them, and the seconds of their steps.

In the steady state of a replica with S stages and S lanes, steps follow each other through all stages. Let a and b be
the seconds per stage of a step without and with a chunk: those of the largest stage or, if it is longer, the mean over
the stages of the step's whole path with its messages. Steps do not overtake, and a lane's next step begins after its
last one. A step with a chunk in front of shorter ones therefore delays all that follow until it has passed all stages,
and each such step counts as S ones in a row: with a share f of the steps having chunks, a step takes, per stage,

    ((1 - f) a + S f b) / ((1 - f) + S f)

on average, and a lane's step S times that. The extra is the pipeline's bubbles; there are none at f = 0 or 1.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lamina.core.stages import divide
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape

STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Degrees of pipeline parallelism to try."""


def stage_starts(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Return the first slice of each stage, as compute workers divide the model. Raises ConfigError."""
    return divide(_slice_weights(shape), stages)


@dataclass(frozen=True)
class Stage:
    """A part of each copy of the weights.

    Attributes:
        weight_bytes: Bytes of its weights.
        attentions: Layers whose attention it runs, and whose KV it has with local memory.
        layers: Layers' worth of dense work, without the model's ends.
        last: Whether it has the output head.
    """

    weight_bytes: int
    attentions: int
    layers: float
    last: bool


@lru_cache(maxsize=64)
def stages_of(shape: ModelShape, stages: int) -> tuple[Stage, ...]:
    """Return the stages in order. Raises ConfigError if the model has fewer slices."""
    slices, starts = _slice_weights(shape), stage_starts(shape, stages)
    layer, before = _layer_weights(shape)
    made = []
    for start, stop in zip(starts, (*starts[1:], len(slices)), strict=True):
        held = {name: nbytes for one in slices[start:stop] for name, nbytes in one.items()}
        last = stop == len(slices)
        dense = stop - start - (start == 0) * (1 - before / layer) - last * before / layer
        made.append(Stage(sum(held.values()), stop - start - last, dense, last))
    return tuple(made)


@lru_cache(maxsize=256)
def fewest_stages(shape: ModelShape, device_bytes: float, degree: int) -> int | None:
    """Return the least number of stages of ``STAGES`` whose weights fit; None if no number does.

    Args:
        shape: The model.
        device_bytes: Bytes of a device for weights.
        degree: Devices of each stage.
    """
    for stages in STAGES:
        if shape.weight_bytes > degree * stages * device_bytes or stages > shape.layers:
            continue
        if stages == 1 or max(one.weight_bytes for one in stages_of(shape, stages)) <= degree * device_bytes:
            return stages
    return None


def kv_tokens(shape: ModelShape, stages: int, stage_bytes: float) -> float:
    """Return the tokens of KV beside one copy of the weights: the stage with the least room counts.

    ``stage_bytes``: Bytes of a stage's devices for weights and KV.
    """
    if stages == 1:
        return (stage_bytes - shape.weight_bytes) / shape.kv_bytes_per_token
    layer = shape.kv_bytes_per_token / shape.layers
    parts = stages_of(shape, stages)
    return min((stage_bytes - one.weight_bytes) / (layer * one.attentions) for one in parts if one.attentions)


def stage_seconds(shape: ModelShape, stages: int, layer_s: Floats, ends_s: Floats, hop_s: Floats) -> Floats:
    """Return seconds per stage of a step, so that a lane alone, or one lane per stage, takes ``stages`` times as long.

    Args:
        shape: The model.
        stages: Number of stages.
        layer_s: Seconds of one layer, with attention that occupies its stage.
        ends_s: Seconds of the output head and of drawing tokens.
        hop_s: Seconds of the context from one stage to the next.
    """
    if stages == 1:
        return np.asarray(shape.layers * layer_s + ends_s)
    longest = np.maximum.reduce([one.layers * layer_s + one.last * ends_s for one in stages_of(shape, stages)])
    path = shape.layers * layer_s + ends_s + stages * hop_s
    return np.asarray(np.maximum(longest, path / stages))


def busiest_share(shape: ModelShape, stages: int, layer_s: float, ends_s: float) -> float:
    """Return the share of a step's slices that the stage with most of them runs. ``layer_s``, ``ends_s``: as in
    ``stage_seconds``."""
    parts = [one.layers * layer_s + one.last * ends_s for one in stages_of(shape, stages)]
    return max(parts) / sum(parts)


def chunks_met(share: Floats, stages: int) -> Floats:
    """Return the share of the steps that take as long as one with a chunk, if a ``share`` of them has one."""
    met = stages * np.minimum(share, 1.0)
    return np.asarray(met / (met + 1 - np.minimum(share, 1.0)))


def _layer_weights(shape: ModelShape) -> tuple[int, int]:
    """Return the bytes of a layer's weights, and of those before its attention."""
    ends = _end_bytes(shape)
    layer = (shape.weight_bytes - ends * (1 if shape.tied_embeddings else 2)) // shape.layers
    heads = shape.query_heads + 2 * shape.kv_heads
    return layer, round(shape.hidden * shape.head_size * heads * shape.dense_itemsize)


def _end_bytes(shape: ModelShape) -> int:
    return shape.vocabulary * shape.hidden * shape.dtype.itemsize


def _slice_weights(shape: ModelShape) -> list[dict[str, int]]:
    """Return the bytes of the weights that each slice needs, by name."""
    ends, (layer, before) = _end_bytes(shape), _layer_weights(shape)
    slices = [{f"{k} after": layer - before, f"{k + 1} before": before} for k in range(shape.layers - 1)]
    first, last = {"embedding": ends, "0 before": before}, {f"{shape.layers - 1} after": layer - before}
    return [first, *slices, last | {"embedding" if shape.tied_embeddings else "head": ends}]
