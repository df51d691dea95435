"""Plans for decoding alone, as in the Lamina paper: speed and cost of offloaded attention, and of one pool.

A plan has compute workers of one kind in ``replicas`` groups of ``tensor_parallel``, memory workers of one kind,
``lanes`` batches in flight and a partition of attention. Its steady state (``docs/cost-model.md``, Pipeline): let M and
A be the seconds of one lane's slices and attention in a whole iteration, C and W the seconds for which its messages
occupy the NICs of a replica and of a memory worker, and S the latency of the messages; then

    TBT = max(lanes M / replicas, lanes A, max(lanes C / replicas, lanes W), M + A + S + max(C, W))

where the last term is the path of one lane alone. The largest term is the bottleneck.

The baseline, a tensor-parallel group with weights and paged KV, takes TBT = M + A: without overlap, network, and host
time, which favours the baseline.
"""

import enum
import math
from dataclasses import dataclass

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.ways import DEFAULT_CHUNK, Partition, Slo, Way
from lamina.planning.plan.workload import Workload

MOST_ROWS = 4096
"""Most decode rows of one lane: beyond it a step takes longer without gaining efficiency."""

NETWORK_ALPHA = 0.2
"""Share of a step that messages may take in the minimum bandwidth (second Lamina paper)."""

_ROWS = np.union1d(np.round(np.geomspace(1, MOST_ROWS, 97)), np.arange(128, MOST_ROWS, 128))
"""Batches per lane to try, besides the largest that fits. Multiples of 128 fill the tiles of matrix products: one row
more may take a third longer."""

_EVERY_ROW = np.arange(1.0, MOST_ROWS + 1)


class Bottleneck(enum.Enum):
    """What limits the speed of a plan: a pool, the network, or the path of one lane through everything."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"
    LATENCY = "latency"


class Limit(enum.Enum):
    """What limits the size of a plan's batch."""

    KV = "KV capacity"
    TBT = "SLO on TBT"
    ROWS = f"{MOST_ROWS} rows per lane"
    NOTHING = "no gain beyond it"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout at its best batch.

    Attributes:
        pools: The layout.
        batch: Sequences decoding at once in all lanes.
        tbt_s: Time between tokens of a sequence.
        tokens_s: Output tokens per second of all sequences.
        ttft_s: Prefill time of the mean prompt on an idle replica.
        prompt_tokens_s: Tokens prefilled per second by all replicas.
        usd_per_hour: Cost of both pools.
        usd_per_million_in: Cost of both pools while they prefill a million tokens.
        usd_per_million_out: Cost of both pools while they generate a million tokens.
        compute_busy: Utilisation of the compute pool.
        memory_busy: Utilisation of the memory pool.
        network_busy: Utilisation of the network.
        bottleneck: What limits the speed.
        limit: What limits the batch.
        network_bytes_s: Bandwidth between the pools, both directions, at which messages take the share NETWORK_ALPHA
            of a step.
    """

    pools: Way
    batch: int
    tbt_s: float
    tokens_s: float
    ttft_s: float
    prompt_tokens_s: float
    usd_per_hour: float
    usd_per_million_in: float
    usd_per_million_out: float
    compute_busy: float
    memory_busy: float
    network_busy: float
    bottleneck: Bottleneck
    limit: Limit
    network_bytes_s: float


class Planner:
    """Evaluates layouts for one model and workload. Slice times are cached by kind and tensor parallelism."""

    def __init__(
        self, shape: ModelShape, workload: Workload, models: dict[str, CostModel], prices: Prices, goals: Slo
    ) -> None:
        self.shape = shape
        self.workload = workload
        self.prices = prices
        self.goals = goals
        self.models = models
        self._passes: dict[tuple[str, int], Floats] = {}
        self._prefills: dict[tuple[str, int], float] = {}

    def evaluate(self, pools: Way) -> Plan | None:
        """Return the plan at the batch of highest throughput, or None if weights, KV or a goal rule out every batch."""
        goals = self.goals
        hourly = sum(pools.usd_per_hour(self.prices))
        if not goals.affords(hourly):
            return None
        rows = self._rows(pools)
        if not len(rows):
            return None
        ttft = self._prefill(self.models[pools.compute.kind], pools.shape.ranks)
        if ttft > goals.ttft_s:
            return None
        terms = self._terms(pools, rows)
        tbt = terms.max(axis=0)
        allowed = tbt <= goals.tbt_s
        if not allowed.any():
            return None
        best = int(np.where(allowed, rows / tbt, 0).argmax())
        return self._plan(pools, rows, terms, best, bool(allowed.all()), ttft, hourly)

    def least_tbt(self, pools: Way) -> float:
        """Return the least seconds between tokens at any batch, ignoring the goals; infinite if nothing fits."""
        rows = self._rows(pools)
        return float(self._terms(pools, rows).max(axis=0).min()) if len(rows) else math.inf

    def curve(self, pools: Way) -> list[tuple[int, float]]:
        """Return (batch, output tokens per second) of every batch that fits, ignoring the goals; empty if nothing
        fits."""
        rows = self._rows(pools)
        if not len(rows):
            return []
        batches = rows * pools.lanes
        speeds = batches / self.tbt(pools, rows)
        return [(int(batch), float(speed)) for batch, speed in zip(batches, speeds, strict=True)]

    def tbt(self, pools: Way, rows: Floats) -> Floats:
        """Return seconds between tokens with ``rows`` sequences in each lane, whether or not their KV fits."""
        return np.asarray(self._terms(pools, rows).max(axis=0))

    def _rows(self, pools: Way) -> Floats:
        """Return batches per lane to try, up to the KV capacity of the memory pool; empty if weights or KV do not
        fit."""
        if not self.models[pools.compute.kind].weights_fit(pools.shape.ranks):
            return _ROWS[:0]
        most = min(self._sequences(pools) // pools.lanes, MOST_ROWS)
        rows = _ROWS[: int(np.searchsorted(_ROWS, most, side="right"))]
        return np.append(rows, most) if len(rows) and rows[-1] < most else rows

    def _sequences(self, pools: Way) -> int:
        """Return the number of sequences whose KV fits the memory pool; one worker each if partitioned by requests."""
        each, live = self.models[pools.second.kind].kv_tokens, self.workload.live
        if pools.partition is Partition.HEAD:
            return int(each * pools.memory_workers / live)
        return int(each / live) * pools.memory_workers

    def _terms(self, pools: Way, rows: Floats) -> Floats:
        """Return ``[4, rows]`` seconds: compute, memory, network and one lane's path, in the order of Bottleneck."""
        compute, memory = self.models[pools.compute.kind], self.models[pools.second.kind]
        layers = self.shape.layers
        dense = self._pass(compute, pools.shape.ranks, rows)
        attention = layers * self._attention(pools, memory, rows)
        if pools.lanes > 1:
            dense, attention = _contended(dense, attention, memory.fits.runtime.contention)
        sent, turns = layers * compute.exchange_bytes(rows), pools.lanes / pools.replicas
        here = compute.wire_seconds(sent / pools.shape.ranks)
        there = memory.wire_seconds(sent / pools.memory_workers)
        path = dense + attention + np.maximum(here, there) + layers * memory.fits.runtime.round_trip_s
        network = np.maximum(turns * here, pools.lanes * there)
        return np.stack([turns * dense, pools.lanes * attention, network, path])

    def _attention(self, pools: Way, memory: CostModel, rows: Floats) -> Floats:
        """Return seconds of one layer's attention of a lane, on the worker with the most work."""
        live, workers = self.workload.live, pools.memory_workers
        if pools.partition is Partition.HEAD:
            return memory.attention_seconds(rows * live, rows, 1 / workers)
        most = np.ceil(rows / workers)
        return memory.attention_seconds(most * live, most)

    def _pass(self, model: CostModel, tensor_parallel: int, rows: Floats) -> Floats:
        key = (model.hardware.kind, tensor_parallel)
        if key not in self._passes:
            # For every number of rows, not only those tried: one row more may need another wave of tiles.
            self._passes[key] = model.widened.decode_seconds(_EVERY_ROW, tensor_parallel)
        return np.interp(rows, _EVERY_ROW, self._passes[key])

    def _prefill(self, model: CostModel, tensor_parallel: int) -> float:
        key = (model.hardware.kind, tensor_parallel)
        if key not in self._prefills:
            prompt = max(1, round(self.workload.prompt))
            self._prefills[key] = model.widened.prefill_seconds(prompt, DEFAULT_CHUNK, tensor_parallel)
        return self._prefills[key]

    def _plan(
        self, pools: Way, rows: Floats, terms: Floats, best: int, all_allowed: bool, ttft_s: float, hourly: float
    ) -> Plan:
        busy = terms[:, best]
        tbt = float(busy.max())
        batch = int(rows[best]) * pools.lanes
        tokens_s, prompt_tokens_s = batch / tbt, self.workload.prompt * pools.replicas / ttft_s
        moved = self.shape.layers * float(self.models[pools.compute.kind].exchange_bytes(rows[best]))
        lane_s = busy[0] * pools.replicas / pools.lanes + busy[1] / pools.lanes
        return Plan(
            pools=pools,
            batch=batch,
            tbt_s=tbt,
            tokens_s=tokens_s,
            ttft_s=ttft_s,
            prompt_tokens_s=prompt_tokens_s,
            usd_per_hour=hourly,
            usd_per_million_in=hourly / 3600 / prompt_tokens_s * 1e6,
            usd_per_million_out=hourly / 3600 / tokens_s * 1e6,
            compute_busy=float(busy[0] / tbt),
            memory_busy=float(busy[1] / tbt),
            network_busy=float(busy[2] / tbt),
            bottleneck=list(Bottleneck)[int(busy.argmax())],
            limit=_limit(rows, best, all_allowed),
            network_bytes_s=float(moved / (NETWORK_ALPHA * lane_s)),
        )


def _contended(dense: Floats, attention: Floats, contention: float) -> tuple[Floats, Floats]:
    both = np.minimum(dense, attention) / (1 - contention)
    return dense + contention * both, attention + contention * both


def _limit(rows: Floats, best: int, all_allowed: bool) -> Limit:
    if best == len(rows) - 1:
        return Limit.ROWS if rows[best] >= MOST_ROWS else Limit.KV
    return Limit.NOTHING if all_allowed else Limit.TBT


# -- one pool, for comparison ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Group:
    """One tensor-parallel group that serves alone, at its best batch."""

    batch: int
    tbt_s: float
    tokens_s: float


def group_capacity(model: CostModel, devices: int, workload: Workload) -> int:
    """Return the number of sequences whose KV fits a tensor-parallel group; 0 if the weights do not fit."""
    free = devices * model.usable_bytes - model.shape.weight_bytes
    return max(0, math.floor(free / (workload.live * model.shape.kv_bytes_per_token)))


def group_step_seconds(model: CostModel, devices: int, batch: int, live: float) -> float:
    """Return seconds of one decode step of ``batch`` sequences of ``live`` cached tokens on a group of ``devices``."""
    attention = model.attention_seconds(batch * live, batch, 1 / devices)
    return float(model.pass_seconds(batch, devices) + model.shape.layers * attention)


def _batches(most: int) -> list[int]:
    spread = np.round(np.geomspace(1, max(1, most), 64))
    return [int(batch) for batch in np.union1d(spread, np.arange(128, most, 128)) if batch <= most]


def evaluate_group(model: CostModel, devices: int, workload: Workload, longest_tbt_s: float = math.inf) -> Group | None:
    """Return a group of ``devices`` at its fastest batch within ``longest_tbt_s``; None if no batch is."""
    most = min(group_capacity(model, devices, workload), MOST_ROWS)
    best: Group | None = None
    for batch in _batches(most):
        seconds = group_step_seconds(model, devices, batch, workload.live)
        if seconds <= longest_tbt_s and (best is None or batch / seconds > best.tokens_s):
            best = Group(batch=batch, tbt_s=seconds, tokens_s=batch / seconds)
    return best
