"""Models the baseline of the Lamina papers, one pool: tensor parallelism, continuous batching and paged KV.

Every device holds its share of the weights and, in the remaining memory, its share of the KV heads; a step of B
sequences takes

    TBT = M(B) + L A(B)

with the M and A of the planner (``docs/cost-model.md``). Nothing overlaps, nothing crosses a network, and the engine's
own time is not counted, which favours the baseline.
"""

import math
from dataclasses import dataclass

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.planner import MOST_ROWS
from lamina.planning.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Homogeneous:
    """One group at its best batch: the batch, seconds between tokens, output tokens per second."""

    batch: int
    tbt_s: float
    tokens_s: float


def capacity(model: CostModel, devices: int, workload: Workload) -> int:
    """Sequences whose KV fits beside the weights of one tensor-parallel group; 0 if the weights do not fit."""
    free = devices * model.usable_bytes - model.shape.weight_bytes
    return max(0, math.floor(free / (workload.live * model.shape.kv_bytes_per_token)))


def step_seconds(model: CostModel, devices: int, batch: int, live: float) -> float:
    """Seconds of one decode step of ``batch`` sequences of ``live`` cached tokens on a group of ``devices``."""
    attention = model.attention_seconds(batch * live, batch, 1 / devices)
    return float(model.pass_seconds(batch, devices) + model.shape.layers * attention)


def batches(most: int) -> list[int]:
    """Batch sizes to try, up to ``most``, including multiples of 128, which fill the tiles of matrix products."""
    spread = np.round(np.geomspace(1, max(1, most), 64))
    return [int(batch) for batch in np.union1d(spread, np.arange(128, most, 128)) if batch <= most]


def evaluate(
    model: CostModel, devices: int, workload: Workload, longest_tbt_s: float | None = None
) -> Homogeneous | None:
    """Return the group at the batch of highest throughput within ``longest_tbt_s``; None if no batch fits or meets
    it."""
    most = min(capacity(model, devices, workload), MOST_ROWS)
    best: Homogeneous | None = None
    for batch in batches(most):
        seconds = step_seconds(model, devices, batch, workload.live)
        if longest_tbt_s is not None and seconds > longest_tbt_s:
            continue
        if best is None or batch / seconds > best.tokens_s:
            best = Homogeneous(batch=batch, tbt_s=seconds, tokens_s=batch / seconds)
    return best
