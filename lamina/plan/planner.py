"""The planner: every way to serve a model on two pools, what each does and costs, and which are worth having.

Pure: the catalogue, a model's shape and a workload go in, plans come out. A plan is compute workers of one kind in
``replicas`` groups of ``tensor_parallel``, memory workers of one kind, ``lanes`` batches in flight and a partition of
attention. Its steady state (``docs/cost-model.md``, Pipeline): with M and A the seconds that one lane's slices and
attention of a whole iteration take, C and W the seconds its messages occupy the network cards of a replica and of a
memory worker, and S the messages' own latency,

    TBT = max(lanes M / replicas, lanes A, max(lanes C / replicas, lanes W), M + A + S + max(C, W))

the last being one lane's own path. The largest term is the bottleneck.
"""

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from lamina.plan.cost import CostModel
from lamina.plan.gemm import Floats
from lamina.plan.hardware import Hardware
from lamina.plan.models import ModelShape
from lamina.plan.workload import Workload

TENSOR_PARALLEL = (1, 2, 4, 8)
MOST_ROWS = 4096
"""Decode rows of one lane: beyond it a step is longer without being better used."""

PREFILL_CHUNK = 2048
"""Prompt tokens of one step, the runtime's default max_num_batched_tokens."""

NETWORK_ALPHA = 0.2
"""Share of a step that messages may take in the minimum bandwidth (second Lamina paper)."""

_ROWS = np.union1d(np.round(np.geomspace(1, MOST_ROWS, 97)), np.arange(128, MOST_ROWS, 128))
"""Batches per lane that are tried, and the largest that fits. Multiples of 128 fill the tiles of matrix products: a row
more may take a third longer."""

_EVERY_ROW = np.arange(1.0, MOST_ROWS + 1)


class Partition(enum.Enum):
    """How attention is divided over the memory workers (Lamina, section 5.2)."""

    REQUEST = "request"
    HEAD = "head"


class Bottleneck(enum.Enum):
    """What a plan's iteration waits for: a pool, its network cards, or one lane's own path through everything."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"
    LATENCY = "latency"


class Limit(enum.Enum):
    """What keeps a plan's batch from growing."""

    KV = "KV capacity"
    TBT = "SLO on TBT"
    ROWS = f"{MOST_ROWS} rows a lane"
    NOTHING = "no gain beyond"


@dataclass(frozen=True, kw_only=True)
class Pools:
    """One way to lay out the workers.

    Attributes:
        compute, memory: what a worker of each pool runs on.
        replicas: groups of ``tensor_parallel`` compute workers, each with all weights.
        memory_workers: that share every lane's attention. lanes: batches in flight.
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

    def usd_per_hour(self, owned: bool = False) -> float:
        """Of both pools, rented as the catalogue says, or ``owned``."""
        compute, memory = (
            kind.owned_usd_per_hour if owned else kind.usd_per_hour for kind in (self.compute, self.memory)
        )
        return compute * self.compute_workers + memory * self.memory_workers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout at its best batch.

    Attributes:
        batch: sequences decoding at once, all lanes together.
        tbt_s: between two tokens of a sequence. tokens_s: drawn per second, all sequences together.
        ttft_s: of the mean prompt on an idle replica. prompt_tokens_s: prefilled per second by all replicas.
        usd_per_hour: of both pools.
        usd_per_million_in, usd_per_million_out: what the pools cost while they prefill, or draw, a million tokens.
        compute_busy, memory_busy, network_busy: share of an iteration in which each works.
        bottleneck, limit: what the iteration waits for, and what bounds the batch.
        network_bytes_s: least bandwidth between the pools, each way added, at which messages take NETWORK_ALPHA.
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
    """What a plan must keep: None is no bound."""

    tbt_s: float | None = None
    ttft_s: float | None = None
    usd_per_hour: float | None = None
    owned: bool = False

    def affords(self, usd_per_hour: float) -> bool:
        """Whether that is within the bound, as printed in cents: 11.06 + 4.63 dollars are 15.69."""
        return self.usd_per_hour is None or usd_per_hour <= self.usd_per_hour + 1e-6


class Planner:
    """Evaluates layouts of one model and workload. Slice times are kept by kind and tensor parallelism."""

    def __init__(self, shape: ModelShape, workload: Workload, models: dict[str, CostModel], goals: Goals) -> None:
        self.shape = shape
        self.workload = workload
        self.goals = goals
        self.models = models
        self._passes: dict[tuple[str, int], Floats] = {}
        self._prefills: dict[tuple[str, int], float] = {}

    def evaluate(self, pools: Pools) -> Plan | None:
        """The plan at the batch that draws most, or None if weights, KV or a goal rule every batch out."""
        goals = self.goals
        hourly = pools.usd_per_hour(goals.owned)
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
        """Seconds between tokens at the batch that makes them fewest, whatever the goals; infinite if nothing fits."""
        rows = self._rows(pools)
        return float(self._terms(pools, rows).max(axis=0).min()) if len(rows) else math.inf

    def curve(self, pools: Pools) -> list[tuple[int, float]]:
        """(batch, tokens drawn per second) of every batch that fits, whatever the goals; empty if nothing fits."""
        rows = self._rows(pools)
        if not len(rows):
            return []
        batches = rows * pools.lanes
        speeds = batches / self.tbt(pools, rows)
        return [(int(batch), float(speed)) for batch, speed in zip(batches, speeds, strict=True)]

    def tbt(self, pools: Pools, rows: Floats) -> Floats:
        """Seconds between tokens with so many sequences in each lane, whether or not their KV fits."""
        return np.asarray(self._terms(pools, rows).max(axis=0))

    def _rows(self, pools: Pools) -> Floats:
        """Batches per lane to try: up to what the KV of the memory pool holds; none if weights or KV do not fit."""
        if not self.models[pools.compute.kind].weights_fit(pools.tensor_parallel):
            return _ROWS[:0]
        most = min(self._sequences(pools) // pools.lanes, MOST_ROWS)
        rows = _ROWS[: int(np.searchsorted(_ROWS, most, side="right"))]
        return np.append(rows, most) if len(rows) and rows[-1] < most else rows

    def _sequences(self, pools: Pools) -> int:
        """Sequences whose KV the memory pool holds: by requests, a worker has all of a sequence or nothing."""
        each, reserved = self.models[pools.memory.kind].kv_tokens, self.workload.reserved
        if pools.partition is Partition.HEAD:
            return int(each * pools.memory_workers / reserved)
        return int(each / reserved) * pools.memory_workers

    def _terms(self, pools: Pools, rows: Floats) -> Floats:
        """``[4, rows]`` seconds: compute, memory, network and one lane's own path, in the order of Bottleneck."""
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
        """Seconds of one layer's attention of a lane, on the worker that has most to do."""
        live, workers = self.workload.live, pools.memory_workers
        if pools.partition is Partition.HEAD:
            return memory.attention_seconds(rows * live, rows, 1 / workers)
        most = np.ceil(rows / workers)
        return memory.attention_seconds(most * live, most)

    def _pass(self, model: CostModel, tensor_parallel: int, rows: Floats) -> Floats:
        key = (model.hardware.kind, tensor_parallel)
        if key not in self._passes:
            # Of every number of rows, not only those tried: a row more may take a wave of tiles more.
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
    """Both where each slows the other for as long as both work, which is as long as the shorter takes."""
    both = np.minimum(dense, attention) / (1 - contention)
    return dense + contention * both, attention + contention * both


def _limit(rows: Floats, best: int, all_allowed: bool) -> Limit:
    if best == len(rows) - 1:
        return Limit.ROWS if rows[best] >= MOST_ROWS else Limit.KV
    return Limit.NOTHING if all_allowed else Limit.TBT


def layouts(
    shape: ModelShape, compute: Sequence[tuple[Hardware, int]], memory: Sequence[tuple[Hardware, int]]
) -> Iterator[Pools]:
    """Every layout on at most so many workers of each kind."""
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
    """Batches in flight worth trying: one more than replicas, which rotates, and one to three on each, fixed."""
    return sorted({replicas + 1, *(each * replicas for each in (1, 2, 3))})


def _groups(shape: ModelShape, most: int) -> Iterator[tuple[int, int]]:
    """Degrees of tensor parallelism that divide the heads, with the replicas that ``most`` devices hold."""
    for tensor_parallel in TENSOR_PARALLEL:
        if shape.kv_heads % tensor_parallel == 0:
            yield from ((tensor_parallel, replicas) for replicas in range(1, most // tensor_parallel + 1))
