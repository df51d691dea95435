"""The planner: enumerates the ways to serve a model on two pools and computes the speed and cost of each.

Pure: the catalogue, a model's shape and a workload go in, plans come out. A plan has compute workers of one kind in
``replicas`` groups of ``tensor_parallel``, memory workers of one kind, ``lanes`` batches in flight and a partition of
attention. Its steady state (``docs/cost-model.md``, Pipeline): let M and A be the seconds of one lane's slices and
attention in a whole iteration, C and W the seconds for which its messages occupy the NICs of a replica and of a memory
worker, and S the latency of the messages; then

    TBT = max(lanes M / replicas, lanes A, max(lanes C / replicas, lanes W), M + A + S + max(C, W))

where the last term is the path of one lane alone. The largest term is the bottleneck.
"""

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.workload import Workload

TENSOR_PARALLEL = (1, 2, 4, 8)
MOST_ROWS = 4096
"""Most decode rows of one lane: beyond it a step takes longer without gaining efficiency."""

PREFILL_CHUNK = 2048
"""Prompt tokens per step, the runtime's default max_num_batched_tokens."""

NETWORK_ALPHA = 0.2
"""Share of a step that messages may take in the minimum bandwidth (second Lamina paper)."""

_ROWS = np.union1d(np.round(np.geomspace(1, MOST_ROWS, 97)), np.arange(128, MOST_ROWS, 128))
"""Batches per lane to try, besides the largest that fits. Multiples of 128 fill the tiles of matrix products: one row
more may take a third longer."""

_EVERY_ROW = np.arange(1.0, MOST_ROWS + 1)


class Partition(enum.Enum):
    """How attention is divided over the memory workers (Lamina, section 5.2)."""

    REQUEST = "request"
    HEAD = "head"


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
class Pools:
    """One way to lay out the workers.

    Attributes:
        compute, memory: hardware of each pool's workers.
        replicas: groups of ``tensor_parallel`` compute workers, each group with all weights.
        memory_workers: workers that share every lane's attention.
        lanes: batches in flight.
    """

    compute: Hardware
    tensor_parallel: int
    replicas: int
    memory: Hardware
    memory_workers: int
    lanes: int
    partition: Partition

    @property
    def compute_workers(self) -> int:
        """Devices of the compute pool."""
        return self.tensor_parallel * self.replicas

    def usd_per_hour(self, prices: Prices) -> float:
        """Cost of both pools and of the network between them."""
        compute, memory = (prices.usd_per_hour(kind, networked=True) for kind in (self.compute, self.memory))
        return compute * self.compute_workers + memory * self.memory_workers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout at its best batch.

    Attributes:
        batch: sequences decoding at once in all lanes together.
        tbt_s: time between tokens of a sequence.
        tokens_s: output tokens per second of all sequences.
        ttft_s: prefill of the mean prompt on an idle replica.
        prompt_tokens_s: tokens prefilled per second by all replicas.
        usd_per_hour: cost of both pools.
        usd_per_million_in, usd_per_million_out: cost of both pools while they prefill, or generate, a million tokens.
        compute_busy, memory_busy, network_busy: share of an iteration for which each is busy.
        bottleneck, limit: what limits the speed, and what limits the batch.
        network_bytes_s: bandwidth between the pools, summed over both directions, at which messages take the share
            NETWORK_ALPHA of a step.
    """

    pools: Pools
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


@dataclass(frozen=True, kw_only=True)
class Goals:
    """Limits that a plan must keep; None: no limit."""

    tbt_s: float | None = None
    ttft_s: float | None = None
    usd_per_hour: float | None = None

    def affords(self, usd_per_hour: float) -> bool:
        """Return whether a cost is within the budget, with a margin for rounding: 11.06 + 4.63 dollars are 15.69."""
        return self.usd_per_hour is None or usd_per_hour <= self.usd_per_hour + 1e-6


class Planner:
    """Evaluates layouts for one model and workload. Slice times are cached by kind and tensor parallelism."""

    def __init__(
        self, shape: ModelShape, workload: Workload, models: dict[str, CostModel], prices: Prices, goals: Goals
    ) -> None:
        self.shape = shape
        self.workload = workload
        self.prices = prices
        self.goals = goals
        self.models = models
        self._passes: dict[tuple[str, int], Floats] = {}
        self._prefills: dict[tuple[str, int], float] = {}

    def evaluate(self, pools: Pools) -> Plan | None:
        """Return the plan at the batch of highest throughput, or None if weights, KV or a goal rule out every batch."""
        goals = self.goals
        hourly = pools.usd_per_hour(self.prices)
        if not goals.affords(hourly):
            return None
        rows = self._rows(pools)
        if not len(rows):
            return None
        ttft = self._prefill(self.models[pools.compute.kind], pools.tensor_parallel)
        if goals.ttft_s is not None and ttft > goals.ttft_s:
            return None
        terms = self._terms(pools, rows)
        tbt = terms.max(axis=0)
        allowed = np.full(len(rows), True) if goals.tbt_s is None else tbt <= goals.tbt_s
        if not allowed.any():
            return None
        best = int(np.where(allowed, rows / tbt, 0).argmax())
        return self._plan(pools, rows, terms, best, bool(allowed.all()), ttft, hourly)

    def least_tbt(self, pools: Pools) -> float:
        """Return the least seconds between tokens at any batch, ignoring the goals; infinite if nothing fits."""
        rows = self._rows(pools)
        return float(self._terms(pools, rows).max(axis=0).min()) if len(rows) else math.inf

    def curve(self, pools: Pools) -> list[tuple[int, float]]:
        """(batch, output tokens per second) of every batch that fits, ignoring the goals; empty if nothing fits."""
        rows = self._rows(pools)
        if not len(rows):
            return []
        batches = rows * pools.lanes
        speeds = batches / self.tbt(pools, rows)
        return [(int(batch), float(speed)) for batch, speed in zip(batches, speeds, strict=True)]

    def tbt(self, pools: Pools, rows: Floats) -> Floats:
        """Seconds between tokens with ``rows`` sequences in each lane, whether or not their KV fits."""
        return np.asarray(self._terms(pools, rows).max(axis=0))

    def _rows(self, pools: Pools) -> Floats:
        """Batches per lane to try, up to the KV capacity of the memory pool; empty if weights or KV do not fit."""
        if not self.models[pools.compute.kind].weights_fit(pools.tensor_parallel):
            return _ROWS[:0]
        most = min(self._sequences(pools) // pools.lanes, MOST_ROWS)
        rows = _ROWS[: int(np.searchsorted(_ROWS, most, side="right"))]
        return np.append(rows, most) if len(rows) and rows[-1] < most else rows

    def _sequences(self, pools: Pools) -> int:
        """Sequences whose KV fits in the memory pool; partitioned by requests, each lies on one worker as a whole."""
        each, live = self.models[pools.memory.kind].kv_tokens, self.workload.live
        if pools.partition is Partition.HEAD:
            return int(each * pools.memory_workers / live)
        return int(each / live) * pools.memory_workers

    def _terms(self, pools: Pools, rows: Floats) -> Floats:
        """``[4, rows]`` seconds: compute, memory, network and one lane's path, in the order of Bottleneck."""
        compute, memory = self.models[pools.compute.kind], self.models[pools.memory.kind]
        layers = self.shape.layers
        dense = self._pass(compute, pools.tensor_parallel, rows)
        attention = layers * self._attention(pools, memory, rows)
        if pools.lanes > 1:
            dense, attention = _contended(dense, attention, memory.fits.runtime.contention)
        sent, turns = layers * compute.exchange_bytes(rows), pools.lanes / pools.replicas
        here = compute.wire_seconds(sent / pools.tensor_parallel)
        there = memory.wire_seconds(sent / pools.memory_workers)
        path = dense + attention + np.maximum(here, there) + layers * memory.fits.runtime.round_trip_s
        network = np.maximum(turns * here, pools.lanes * there)
        return np.stack([turns * dense, pools.lanes * attention, network, path])

    def _attention(self, pools: Pools, memory: CostModel, rows: Floats) -> Floats:
        """Seconds of one layer's attention of a lane, on the worker with the most work."""
        live, workers = self.workload.live, pools.memory_workers
        if pools.partition is Partition.HEAD:
            return memory.attention_seconds(rows * live, rows, 1 / workers)
        most = np.ceil(rows / workers)
        return memory.attention_seconds(most * live, most)

    def _pass(self, model: CostModel, tensor_parallel: int, rows: Floats) -> Floats:
        key = (model.hardware.kind, tensor_parallel)
        if key not in self._passes:
            # For every number of rows, not only those tried: one row more may need another wave of tiles.
            self._passes[key] = model.decode_seconds(_EVERY_ROW, tensor_parallel)
        return np.interp(rows, _EVERY_ROW, self._passes[key])

    def _prefill(self, model: CostModel, tensor_parallel: int) -> float:
        key = (model.hardware.kind, tensor_parallel)
        if key not in self._prefills:
            prompt = max(1, round(self.workload.prompt))
            self._prefills[key] = model.prefill_seconds(prompt, PREFILL_CHUNK, tensor_parallel)
        return self._prefills[key]

    def _plan(
        self, pools: Pools, rows: Floats, terms: Floats, best: int, all_allowed: bool, ttft_s: float, hourly: float
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
    """Both times with contention: each slows the other while both work, which is as long as the shorter takes."""
    both = np.minimum(dense, attention) / (1 - contention)
    return dense + contention * both, attention + contention * both


def _limit(rows: Floats, best: int, all_allowed: bool) -> Limit:
    if best == len(rows) - 1:
        return Limit.ROWS if rows[best] >= MOST_ROWS else Limit.KV
    return Limit.NOTHING if all_allowed else Limit.TBT


def layouts(
    shape: ModelShape, compute: Sequence[tuple[Hardware, int]], memory: Sequence[tuple[Hardware, int]]
) -> Iterator[Pools]:
    """Every layout with at most the given number of workers of each kind."""
    for (kind, most), (memory_kind, most_memory) in product(compute, memory):
        for tensor_parallel, replicas in _groups(shape, most):
            for workers, lanes, partition in product(range(1, most_memory + 1), _lanes(replicas), Partition):
                if partition is Partition.HEAD and (workers == 1 or shape.kv_heads % workers):
                    continue
                yield Pools(
                    compute=kind,
                    tensor_parallel=tensor_parallel,
                    replicas=replicas,
                    memory=memory_kind,
                    memory_workers=workers,
                    lanes=lanes,
                    partition=partition,
                )


def _lanes(replicas: int) -> list[int]:
    """Numbers of lanes to try: one more than replicas, rotating, and one to three per replica, fixed."""
    return sorted({replicas + 1, *(each * replicas for each in (1, 2, 3))})


def _groups(shape: ModelShape, most: int) -> Iterator[tuple[int, int]]:
    """(tensor parallelism, replicas): degrees that divide the heads, with the replicas that fit on ``most`` devices."""
    for tensor_parallel in TENSOR_PARALLEL:
        if shape.kv_heads % tensor_parallel == 0:
            yield from ((tensor_parallel, replicas) for replicas in range(1, most // tensor_parallel + 1))
