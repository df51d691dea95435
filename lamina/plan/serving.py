"""Ranks ways to serve whole requests, prompts and decoding together, by a closed form.

Four systems compete: attention offloaded to a second pool (Lamina), one pool with chunked prefill, and one or two pools
with prefill and decoding apart. A ``Way`` is one layout of one of them. In a steady state with b decoding sequences in
a batch, every step generates b tokens, and per generated token P / O prompt tokens arrive (P, O: means of both). Chunks
come in steps of their own size c; a share f = b P / (O c) of the steps has one. With T0 and T1 the seconds of a
step without and with a chunk,

    requests per second = batches b / (O ((1 - f) T0 + f T1))

at the largest b for which KV has room, f <= 1, and the 99th percentiles of a step and of a prompt without a queue are
within the SLOs. This is a capacity: queues cost more, which ``lamina.simulate.trial`` measures for the best few.
"""

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lamina.placement.map import AHEAD, WATERMARK
from lamina.plan.cost import CostModel
from lamina.plan.gemm import Floats
from lamina.plan.hardware import Hardware
from lamina.plan.homogeneous import batches, capacity
from lamina.plan.models import ModelShape
from lamina.plan.planner import MOST_ROWS, TENSOR_PARALLEL, Partition, Pools, layouts
from lamina.plan.prices import Prices
from lamina.plan.workload import Workload

MARGIN = 0.9
"""Share of the SLO on TBT that a step of the mean batch may take: batches and lengths vary."""

PERCENTILE = 0.99
"""Of the times between tokens, for which the SLO is."""

CHUNKS = (128, 256, 512, 1024, 2048, 4096)
"""Rows of a step (max_num_batched_tokens) to try: more prompts at once, or shorter steps."""

_EVERY_ROW = np.arange(1.0, 2 * MOST_ROWS + 1)


class Kind(enum.Enum):
    """The systems that compete; values are the simulator's names."""

    OFFLOADED = "lamina"
    ONE_POOL = "chunked-prefill"
    APART = "disaggregated"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to serve.

    Attributes:
        kind: the system. chunk: rows of a step (max_num_batched_tokens).
        compute, compute_workers: of the pool that holds weights and, with ``APART``, prefills.
        memory, memory_workers: of the pool for attention or, with ``APART``, of the one that decodes; None, 0: no pool.
        tensor_parallel: devices of one copy of the weights, in both pools. lanes: with ``OFFLOADED``; else 1.
    """

    kind: Kind
    chunk: int
    compute: Hardware
    compute_workers: int
    memory: Hardware | None = None
    memory_workers: int = 0
    tensor_parallel: int = 1
    lanes: int = 1

    @property
    def replicas(self) -> int:
        """Copies of the weights in the compute pool."""
        return self.compute_workers // self.tensor_parallel

    @property
    def rotates(self) -> bool:
        """Whether lanes move from replica to replica, rather than each staying with one."""
        return self.kind is Kind.OFFLOADED and self.lanes == self.replicas + 1

    def usd_per_hour(self, prices: Prices) -> tuple[float, float]:
        """Cost of each pool, and of the network between two."""
        two = self.memory is not None
        compute = prices.usd_per_hour(self.compute, networked=two) * self.compute_workers
        return compute, prices.usd_per_hour(self.memory, networked=True) * self.memory_workers if self.memory else 0.0

    def describe(self) -> str:
        """The pools in words."""
        copies = f"{self.replicas} x TP{self.tensor_parallel}"
        if self.kind is Kind.ONE_POOL:
            return f"{self.compute.kind}:{self.compute_workers} alone, {copies}"
        second = f"{self.memory.kind if self.memory else ''}:{self.memory_workers}"
        if self.kind is Kind.APART:
            return f"{self.compute.kind}:{self.compute_workers} prefill, {second} decode, TP{self.tensor_parallel}"
        order = "rotating" if self.rotates else "fixed"
        return f"{self.compute.kind}:{self.compute_workers} + {second} memory, {copies}, {self.lanes} {order} lanes"


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a way can serve by the closed form.

    Attributes:
        requests_s: requests per second. batch: sequences decoding in all copies together.
        step_s, chunk_step_s: seconds between tokens without and with a chunk in the step.
        prompt_share: share of the compute pool's time that prompts take.
        compute_busy, memory_busy: share of the time for which each pool works at that rate.
        usd_per_hour: of all pools. usd_per_request: of one request. prompt_usd: the share of it that its prompt costs.
    """

    way: Way
    requests_s: float
    batch: int
    step_s: float
    chunk_step_s: float
    prompt_share: float
    compute_busy: float
    memory_busy: float
    usd_per_hour: float
    prompt_usd: float

    @property
    def usd_per_request(self) -> float:
        """Dollars of one request."""
        return self.usd_per_hour / 3600 / self.requests_s


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits on 99th percentiles, in seconds, and on dollars an hour."""

    tbt_s: float = 0.2
    ttft_s: float = 10.0
    usd_per_hour: float | None = None


def ways(
    shape: ModelShape, compute: Sequence[tuple[Hardware, int]], memory: Sequence[tuple[Hardware, int]]
) -> Iterator[Way]:
    """Every way with at most the given number of devices of each kind. One pool takes as many as there are: half of
    them would serve half as much for half the money."""
    for pools in layouts(shape, compute, memory):
        if pools.partition is Partition.REQUEST:
            for chunk in CHUNKS:
                yield _offloaded(pools, chunk)
    degrees = [degree for degree in TENSOR_PARALLEL if shape.kv_heads % degree == 0]
    kinds = {kind.kind: (kind, most) for kind, most in (*memory, *compute)}
    for kind, most in kinds.values():
        for degree in degrees:
            if groups := most // degree:
                for chunk in CHUNKS:
                    yield Way(
                        kind=Kind.ONE_POOL,
                        chunk=chunk,
                        compute=kind,
                        compute_workers=groups * degree,
                        tensor_parallel=degree,
                    )
    for kind, most in compute:
        for other, most_other in kinds.values():
            for degree in degrees:
                for prefilling in range(1, most // degree + 1):
                    left = most - prefilling * degree if other is kind else most_other
                    for decoding in range(1, left // degree + 1):
                        yield Way(
                            kind=Kind.APART,
                            chunk=CHUNKS[-1],
                            compute=kind,
                            compute_workers=prefilling * degree,
                            memory=other,
                            memory_workers=decoding * degree,
                            tensor_parallel=degree,
                        )


def _offloaded(pools: Pools, chunk: int) -> Way:
    return Way(
        kind=Kind.OFFLOADED,
        chunk=chunk,
        compute=pools.compute,
        compute_workers=pools.compute_workers,
        memory=pools.memory,
        memory_workers=pools.memory_workers,
        tensor_parallel=pools.tensor_parallel,
        lanes=pools.lanes,
    )


class Server:
    """Evaluates ways for one model and workload. Times of slices and of prompts are kept by kind and TP."""

    def __init__(
        self, shape: ModelShape, workload: Workload, models: Mapping[str, CostModel], prices: Prices, slo: Slo
    ) -> None:
        self.shape = shape
        self.workload = workload
        self.models = models
        self.prices = prices
        self.slo = slo
        self._late_prompt = float(np.quantile(self._prompt_sample(), PERCENTILE))
        self._passes: dict[tuple[str, int], Floats] = {}
        self._whole: dict[tuple[str, int], tuple[float, float]] = {}
        self._prompts: dict[tuple[str, int, int], _PromptToken] = {}

    def serving(self, workload: Workload) -> "Server":
        """The same for another workload; both keep the times of slices, which do not depend on it, together."""
        other = Server(self.shape, workload, self.models, self.prices, self.slo)
        other._passes = self._passes
        return other

    def evaluate(self, way: Way) -> Capacity | None:
        """The capacity of a way; None if weights, the longest request, an SLO or the budget rule it out."""
        usd = sum(way.usd_per_hour(self.prices))
        if self.slo.usd_per_hour is not None and usd > self.slo.usd_per_hour + 1e-6:
            return None
        if self.unfit(way) is not None:
            return None
        return {Kind.OFFLOADED: self._two_pools, Kind.ONE_POOL: self._one_pool, Kind.APART: self._apart}[way.kind](way)

    def unfit(self, way: Way) -> str | None:
        """Why the weights or the longest request of the workload do not fit; None if they do."""
        shape, longest = self.shape, self.workload.longest
        degree = way.tensor_parallel
        holders = [way.compute] if way.kind is not Kind.APART or way.memory is None else [way.compute, way.memory]
        for kind in holders:
            if not self.models[kind.kind].weights_fit(degree):
                held = degree * self.models[kind.kind].usable_bytes / 1e9
                return f"{shape.weight_bytes / 1e9:.0f} GB of weights do not fit {degree} {kind.kind} ({held:.0f} GB)"
        if way.kind is Kind.OFFLOADED:
            assert way.memory is not None
            room = self.models[way.memory.kind].kv_tokens
            if longest > room:
                return f"the longest request has {longest} tokens; one {way.memory.kind} holds {room}"
            return None
        for kind in holders:
            free = degree * self.models[kind.kind].usable_bytes - shape.weight_bytes
            if longest * shape.kv_bytes_per_token > 0.98 * free:
                room = int(0.98 * free / shape.kv_bytes_per_token)
                return f"the longest request has {longest} tokens; {degree} {kind.kind} hold {room} beside the weights"
        return None

    # -- the three systems ---------------------------------------------------------------------------------------

    def _two_pools(self, way: Way) -> Capacity | None:
        assert way.memory is not None
        compute, memory = self.models[way.compute.kind], self.models[way.memory.kind]
        workers, lanes = way.memory_workers, way.lanes
        # Requests are admitted with room for the tokens that they have, and slots left for all to grow.
        most = int((1 - WATERMARK) * memory.kv_tokens / (self.workload.live + AHEAD)) * workers // lanes
        rows = self._rows(most, way.chunk)
        if not len(rows):
            return None
        chunk, share = self._chunks(rows, way.chunk)
        prompt = self._prompt_token_s(way.compute, way.memory, way)
        own_s = prompt.own_s
        layers = self.shape.layers
        dense = self._pass(compute, way.tensor_parallel, rows)
        busiest = np.ceil(rows / workers)
        attention = layers * memory.attention_seconds(busiest * self.workload.live, busiest)
        sent = layers * compute.exchange_bytes(rows)
        here, there = compute.wire_seconds(sent / way.tensor_parallel), memory.wire_seconds(sent / workers)
        latency = here + there + layers * memory.fits.runtime.round_trip_s
        kept = layers * 2 * self.shape.kv_heads * self.shape.head_size * self.shape.dtype.itemsize
        kept_byte_s = [float(model.wire_seconds(kept)) for model in (compute, memory)]
        # Lanes that share replicas keep one pace: a lane behind one with a chunk waits for it at every slice.
        together, replicas = (lanes, way.replicas) if way.rotates else (lanes // way.replicas, 1)

        def pace(tokens: Floats, having: int, prefix_s: float = prompt.prefix_s) -> Floats:
            """Seconds of a step while ``having`` of the lanes that share replicas have a chunk of ``tokens``."""
            added = self._pass(compute, way.tensor_parallel, rows + tokens) + tokens * own_s - dense
            first = min(having, 1)
            # Keys and values of a chunk go to the one worker that holds its sequence, through both NICs in turn.
            kept_here, kept_there = tokens * kept_byte_s[0] / way.tensor_parallel, tokens * kept_byte_s[1]
            path = dense + first * (added + tokens * prefix_s + kept_here + kept_there) + attention + latency
            load = (together * dense + having * added) / replicas
            wire = np.maximum(
                (together * here + having * kept_here) / replicas, lanes * there + having * kept_there / workers
            )
            reading = lanes * attention + having * tokens * prefix_s / workers
            return np.asarray(np.maximum.reduce([path, load, reading, wire]))

        plain, likely = pace(chunk, 0), np.minimum(share, 1.0)
        average, longest, below = np.zeros_like(rows), plain, np.zeros_like(rows)
        for having in range(together + 1):
            late = pace(way.chunk - rows, having, prompt.late_prefix_s) if having else plain
            longest = np.where(below < PERCENTILE, late, longest)
            odds = math.comb(together, having) * likely**having * (1 - likely) ** (together - having)
            average += odds * (pace(chunk, having) if having else plain)
            below = below + odds
        added = self._pass(compute, way.tensor_parallel, rows + chunk) + chunk * own_s - dense
        prompts = share * added / (dense + share * added)
        busy = together / replicas * (dense + share * added) / average
        memory_busy = lanes * (attention + share * chunk * prompt.prefix_s / workers) / average
        return self._best(way, rows * lanes, chunk, share, plain, longest, average, prompts, busy, memory_busy)

    def _one_pool(self, way: Way) -> Capacity | None:
        model, degree = self.models[way.compute.kind], way.tensor_parallel
        rows = self._rows(capacity(model, degree, self.workload), way.chunk)
        if not len(rows):
            return None
        chunk, share = self._chunks(rows, way.chunk)
        prompt = self._prompt_token_s(way.compute, way.compute, way)
        plain = self._group_step(model, degree, rows)
        attention = plain - self._pass(model, degree, rows)

        def with_chunk(tokens: Floats, token_s: float = prompt.own_s) -> Floats:
            return np.asarray(self._pass(model, degree, rows + tokens) + attention + tokens * token_s)

        average = (1 - share) * plain + share * with_chunk(chunk)
        prompts = share * (with_chunk(chunk) - plain) / average
        late = with_chunk(way.chunk - rows, prompt.late_own_s)
        longest = np.where(share < 1 - PERCENTILE, plain, late)
        ones = np.ones_like(rows)
        return self._best(way, rows * way.replicas, chunk, share, plain, longest, average, prompts, ones, ones)

    def _apart(self, way: Way) -> Capacity | None:
        assert way.memory is not None
        degree, groups = way.tensor_parallel, way.memory_workers // way.tensor_parallel
        prefill, decode = self.models[way.compute.kind], self.models[way.memory.kind]
        prompt_s, late_prompt_s = self._whole_prompt_s(prefill, degree)
        rows = self._rows(capacity(decode, degree, self.workload), 2 * MOST_ROWS)
        if not len(rows):
            return None
        steps = self._group_step(decode, degree, rows)
        within = steps <= MARGIN * self.slo.tbt_s
        rates = np.where(within, groups * rows / (self.workload.output * steps), 0.0)
        best = int(rates.argmax())
        if not rates[best] or late_prompt_s > self.slo.ttft_s:
            return None
        limit = way.replicas / prompt_s
        rate = min(limit, float(rates[best]))
        usd = way.usd_per_hour(self.prices)
        return Capacity(
            way=way,
            requests_s=rate,
            batch=int(rows[best]) * groups,
            step_s=float(steps[best]),
            chunk_step_s=float(steps[best]),
            prompt_share=1.0,
            compute_busy=rate / limit,
            memory_busy=rate / float(rates[best]),
            usd_per_hour=sum(usd),
            prompt_usd=usd[0] / sum(usd),
        )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _best(
        self,
        way: Way,
        sequences: Floats,
        chunk: Floats,
        share: Floats,
        plain: Floats,
        longest: Floats,
        average: Floats,
        prompts: Floats,
        busy: Floats,
        memory_busy: Floats,
    ) -> Capacity | None:
        """The batch of the highest rate within the SLOs."""
        first_token = np.ceil(self._late_prompt / chunk) * longest
        allowed = (share <= 1) & (longest <= MARGIN * self.slo.tbt_s) & (first_token <= self.slo.ttft_s)
        rates = np.where(allowed, sequences / (self.workload.output * average), 0.0)
        best = int(rates.argmax())
        if not rates[best]:
            return None
        compute_usd, memory_usd = way.usd_per_hour(self.prices)
        return Capacity(
            way=way,
            requests_s=float(rates[best]),
            batch=int(sequences[best]),
            step_s=float(plain[best]),
            chunk_step_s=float(longest[best]),
            prompt_share=float(prompts[best]),
            compute_busy=float(busy[best]),
            memory_busy=float(memory_busy[best]) if way.memory else 0.0,
            usd_per_hour=compute_usd + memory_usd,
            prompt_usd=float(prompts[best]) * compute_usd / (compute_usd + memory_usd),
        )

    def _rows(self, most: int, chunk: int) -> Floats:
        """Decode rows of a batch to try."""
        most = min(most, chunk - 1, MOST_ROWS)
        return np.array(batches(most), dtype=np.float64) if most >= 1 else np.zeros(0)

    def _chunks(self, rows: Floats, chunk: int) -> tuple[Floats, Floats]:
        """Prompt tokens of a step that has some, and the share of steps that do."""
        size = chunk - rows  # near capacity, prompts wait and fill the step
        return size, rows * self.workload.prompt / self.workload.output / size

    def _group_step(self, model: CostModel, degree: int, rows: Floats) -> Floats:
        attention = model.attention_seconds(rows * self.workload.live, rows, 1 / degree)
        return np.asarray(self._pass(model, degree, rows) + self.shape.layers * attention)

    def _pass(self, model: CostModel, degree: int, rows: Floats) -> Floats:
        key = (model.hardware.kind, degree)
        if key not in self._passes:
            self._passes[key] = model.decode_seconds(_EVERY_ROW, degree)
        return np.interp(rows, _EVERY_ROW, self._passes[key])

    def _whole_prompt_s(self, model: CostModel, degree: int) -> tuple[float, float]:
        """Seconds of a prompt of the workload in one step: mean, and ``PERCENTILE``."""
        key = (model.hardware.kind, degree)
        if key not in self._whole:
            prompts, layers = np.array(self._prompt_sample(), dtype=np.float64), self.shape.layers
            attention = model.chunk_attention_seconds(prompts, 0, degree)
            seconds = layers * (model.slice_seconds(prompts, degree) + attention) + float(model.ends_seconds(1, degree))
            self._whole[key] = float(seconds.mean()), float(np.quantile(seconds, PERCENTILE))
        return self._whole[key]

    def _prompt_sample(self) -> list[int]:
        return [request.prompt for request in self.workload.sample] or [max(1, round(self.workload.prompt))]

    def _prompt_token_s(self, compute: Hardware, memory: Hardware, way: Way) -> "_PromptToken":
        """Attention of prompts on these kinds. With one pool, the compute workers have all of it."""
        offloaded = way.kind is Kind.OFFLOADED
        key = (f"{compute.kind},{memory.kind},{offloaded}", way.tensor_parallel, way.chunk)
        if key not in self._prompts:
            prompts = self._prompt_sample()
            starts = np.concatenate([np.arange(0, prompt, way.chunk) for prompt in prompts]).astype(np.float64)
            ends = np.concatenate([np.append(np.arange(way.chunk, prompt, way.chunk), prompt) for prompt in prompts])
            sizes, model = ends - starts, self.models[compute.kind]
            before = np.zeros_like(starts) if offloaded else starts
            own = self.shape.layers * model.chunk_attention_seconds(sizes, before, way.tensor_parallel)
            prefix = np.zeros_like(own)
            if offloaded:
                prefix = self.shape.layers * self.models[memory.kind].prefix_attention_seconds(sizes, starts)
            late = int(np.argsort(own + prefix)[min(len(own) - 1, int(PERCENTILE * len(own)))])
            self._prompts[key] = _PromptToken(
                own_s=float(own.sum()) / sum(prompts),
                prefix_s=float(prefix.sum()) / sum(prompts),
                late_own_s=float(own[late] / sizes[late]),
                late_prefix_s=float(prefix[late] / sizes[late]),
            )
        return self._prompts[key]


@dataclass(frozen=True, kw_only=True)
class _PromptToken:
    """Seconds of attention per prompt token, of all layers.

    Attributes:
        own_s, prefix_s: on the compute workers, and to earlier chunks on the memory worker that holds them; means.
        late_own_s, late_prefix_s: of the chunk at ``PERCENTILE``: one late in a long prompt.
    """

    own_s: float
    prefix_s: float
    late_own_s: float
    late_prefix_s: float


def shortlist(found: Sequence[Capacity], most: int = 10) -> list[Capacity]:
    """The ways worth simulating: the cheapest per request of every system on every pair of kinds, with every
    number of lanes of a replica, and rotating; at most ``most``, and at least one of every system."""
    best: dict[tuple[Kind, str, str, bool, int], Capacity] = {}
    for one in sorted(found, key=lambda one: (one.usd_per_request, one.usd_per_hour)):
        way = one.way
        offloaded = way.kind is Kind.OFFLOADED
        memory, each = way.memory.kind if way.memory else "", 0 if way.rotates else way.lanes // way.replicas
        best.setdefault((way.kind, way.compute.kind, memory, way.rotates, each if offloaded else 0), one)
    kept = sorted(best.values(), key=lambda one: one.usd_per_request)
    first = {one.way.kind: one for one in reversed(kept)}.values()
    others = [one for one in kept if not any(one is chosen for chosen in first)]
    return sorted([*first, *others[: max(0, most - len(first))]], key=lambda one: one.usd_per_request)
