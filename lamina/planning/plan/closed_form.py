"""Terms of the closed form that ``serving`` evaluates: attention and waits of prompts, steps of offloaded attention.

Decoding rows and chunks of prompts share a step. Where attention is offloaded, q, k and v of all rows leave the compute
workers in every layer. A prompt's later chunks ask the memory worker that has its earlier ones, which gets their q and
sends answers as for decoding rows. The prompts in a step lie on different memory workers, and other lanes ask the same
ones.
"""

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.ways import Kind, Way
from lamina.planning.plan.workload import Workload


def queue_waits(mean: Floats, second: Floats, busy: Floats, servers: int, percentile: float) -> tuple[Floats, Floats]:
    """Return the mean wait, and that at ``percentile``, in a queue before ``servers`` that are busy for a share of the
    time.

    ``mean``, ``second``: moments of the time that a server takes. Arrivals are random; those who wait do so for an
    exponentially distributed time (Sakasegawa, 1977, for several servers).
    """
    busy = np.minimum(busy, 1 - 1e-6)
    waiting = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if_waiting = second / (2 * mean) / (1 - busy) / servers
    late = if_waiting * np.log(np.maximum(waiting / (1 - percentile), 1.0))
    return waiting * if_waiting, late


def replayed_sojourn(arrivals: Floats, seconds: Floats, servers: int, busy: float, percentile: float) -> float:
    """Wait and service at ``percentile``, of requests that each join the server with fewest, which serves in order.

    ``arrivals``: times, in any unit: they are stretched until ``servers`` are busy for that share of the time until the
    last one. ``seconds``: what each request takes. A queue that is busy for most of the time does not reach its steady
    state within a thousand requests, and a trace's arrivals are not random: so what a run will show is played here.
    """
    span = float(arrivals[-1] - arrivals[0])
    stretch = seconds.sum() / servers / busy / span if span else 0.0
    ends: list[collections.deque[float]] = [collections.deque() for _ in range(servers)]
    took = []
    for at, own in zip(((arrivals - arrivals[0]) * stretch).tolist(), seconds.tolist(), strict=True):
        for queue in ends:
            while queue and queue[0] <= at:
                queue.popleft()
        shortest = min(ends, key=len)
        shortest.append(max(shortest[-1] if shortest else at, at) + own)
        took.append(shortest[-1] - at)
    return float(np.quantile(took, percentile))


PERCENTILE = 0.99
"""Percentile of the times between tokens and to a first token that the SLOs bound."""

FOUND = 9
"""Sizes of what a cache finds at which prompts are looked at; between them, it is interpolated."""

BUSY = np.array([0.05, *np.linspace(0.2, 0.8, 7), 0.85, 0.9, 0.95, 0.98, 1.0])
"""Shares of the time for which servers compute prompts at which the queue of a trace is played."""


@dataclass(frozen=True, kw_only=True)
class PromptAttention:
    """Seconds of attention per computed prompt token, of all layers, and what it asks of memory workers; by batch.

    Attributes:
        own_s: on the compute workers.
        prefix_s: to earlier chunks on the memory workers that hold them, until the last one answers.
        prefix_load_s: the same, of all of these workers together.
        asked: memory workers that get a token's q and answer.
        size: tokens of one prompt's chunk; a step has chunks of several prompts if these are shorter.
        late_own_s, late_prefix_s, late_asked, late_size: of the chunk at ``PERCENTILE``: one late in a long prompt.
    """

    own_s: Floats
    prefix_s: Floats
    prefix_load_s: Floats
    asked: Floats
    size: Floats
    late_own_s: Floats
    late_prefix_s: Floats
    late_asked: Floats
    late_size: Floats


class Prompts:
    """The prompts of a workload. Their attention is kept by kinds and layout."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        lengths = [request.prompt for request in workload.sample] or [max(1, round(workload.prompt))]
        self._lengths = np.array(lengths, dtype=np.float64)
        self._grid = np.linspace(0.0, workload.reuse.most, FOUND) if workload.reuse.most else np.zeros(1)
        computed = [self._computed(found) for found in self._grid]
        self._arrivals = np.array([request.arrival_s for request in workload.sample]) if workload.replayed else None
        self._played: dict[int, Floats] = {}
        self._moments = [(own.mean(), (own**2).mean(), np.quantile(own, PERCENTILE)) for own in computed]
        self._kept: dict[tuple[str, int, int, int, int | None], tuple[Floats, Floats]] = {}

    def _computed(self, found: float) -> Floats:
        """Return tokens of each prompt that are computed if ``found`` are in a cache on average."""
        return self._lengths - self._workload.reuse.each(found, self._lengths)

    # -- attention -----------------------------------------------------------------------------------------------

    def attention(self, compute: CostModel, memory: CostModel, way: Way, found: Floats) -> PromptAttention:
        """Return the attention of prompts of which ``found`` tokens are cached. With one pool, compute workers have all
        of it.

        Interpolated between prompts of which nothing and all that may be is found.
        """
        offloaded = way.kind is Kind.OFFLOADED
        shared = way.memory_workers if offloaded else 1
        key = (
            f"{compute.hardware.kind},{memory.hardware.kind},{offloaded}",
            way.tensor_parallel,
            way.chunk,
            shared if way.segment else 1,
            way.segment,
        )
        if key not in self._kept:
            self._kept[key] = (
                self._by_chunk(compute, memory, way, 0.0),
                self._by_chunk(compute, memory, way, self._workload.reuse.most),
            )
        none, all_found = self._kept[key]
        part = found / max(self._workload.reuse.most, 1e-9)
        names = [one.name for one in fields(PromptAttention)]
        between = (low + part * (high - low) for low, high in zip(none, all_found, strict=True))
        return PromptAttention(**dict(zip(names, between, strict=True)))

    def _by_chunk(self, compute: CostModel, memory: CostModel, way: Way, found: float) -> Floats:
        """Return the figures of ``PromptAttention``, in their order, if so many tokens are found on average."""
        layers, offloaded = compute.shape.layers, way.kind is Kind.OFFLOADED
        hits = self._lengths - self._computed(found)
        starts = np.concatenate([np.arange(hit, n, way.chunk) for hit, n in zip(hits, self._lengths, strict=True)])
        ends = np.concatenate(
            [np.append(np.arange(hit + way.chunk, n, way.chunk), n) for hit, n in zip(hits, self._lengths, strict=True)]
        )
        sizes = ends - starts
        before = np.zeros_like(starts) if offloaded else starts
        own = layers * compute.chunk_attention_seconds(sizes, before, way.tensor_parallel)
        prefix, parts = np.zeros_like(own), np.ones_like(own)
        if offloaded:
            room = way.segment or memory.kv_tokens
            parts = np.clip(np.ceil(starts / room), 1, way.memory_workers)
            prefix = layers * memory.prefix_attention_seconds(sizes, starts / parts)
        asked = np.where(starts > 0, parts, 0.0) if offloaded else np.zeros_like(own)
        late = int(np.argsort(own + prefix)[min(len(own) - 1, int(PERCENTILE * len(own)))])
        total = sizes.sum()
        return np.array(
            [
                own.sum() / total,
                prefix.sum() / total,
                (prefix * parts).sum() / total,
                (asked * sizes).sum() / total,
                sizes.mean(),
                own[late] / sizes[late],
                prefix[late] / sizes[late],
                asked[late],
                sizes[late],
            ]
        )

    # -- waiting -------------------------------------------------------------------------------------------------

    def first_token_s(
        self, chunk: Floats, found: Floats, busy: Floats, step_s: Floats, longest_s: Floats, servers: int
    ) -> Floats:
        """Return the time to a first token at PERCENTILE, by batch.

        Prompts, of which ``found`` tokens are cached, arrive at random and wait for chunks of ``chunk`` tokens, of
        which ``servers`` run at once, each in ``step_s``; ``busy`` is the share of the time in which they do. Either
        the wait is long and the prompt average, or the wait average and the prompt long.
        """
        moments = np.array(self._moments).T
        mean, second, longest = (np.interp(found, self._grid, one) for one in moments)
        mean, second = mean / chunk, second / chunk**2  # in chunks; several short prompts share one
        if self._arrivals is not None:
            return np.asarray(self._replayed(found, busy, servers) * mean * step_s + 0.5 * longest_s)
        wait, late = queue_waits(mean, second, busy, servers, PERCENTILE)
        last = np.ceil(longest / chunk)
        return np.asarray(np.maximum((late + np.ceil(mean) + 0.5) * step_s, wait * step_s + (last + 0.5) * longest_s))

    def _replayed(self, found: Floats, busy: Floats, servers: int) -> Floats:
        """Wait and service at PERCENTILE in the trace's own order, over the mean service."""
        assert self._arrivals is not None
        if servers not in self._played:
            computed = [self._computed(each) for each in self._grid]
            self._played[servers] = np.array(
                [
                    [replayed_sojourn(self._arrivals, own, servers, share, PERCENTILE) / own.mean() for share in BUSY]
                    for own in computed
                ]
            )
        table = self._played[servers]
        by_found = np.array([np.interp(found, self._grid, column) for column in table.T])
        return np.array([np.interp(one, BUSY, own) for one, own in zip(busy, by_found.T, strict=True)])

    # -- prefill on workers of its own -----------------------------------------------------------------------------

    def prefill_pool(
        self, model: CostModel, degree: int, replicas: int, budget: int, found: float
    ) -> tuple[float, Callable[[Floats], Floats]]:
        """Return prompts per second of ``replicas`` that compute whole prompts, as many in a step as ``budget`` tokens
        hold; and the time to a first token at PERCENTILE, by the share of that rate at which they arrive."""
        layers, sizes = model.shape.layers, self._computed(found)
        prefix = self._lengths - sizes
        attention = model.chunk_attention_seconds(sizes, prefix, degree)

        def dense(rows: Floats) -> Floats:
            return np.asarray(layers * model.slice_seconds(rows, degree) + float(model.ends_seconds(1, degree)))

        alone = dense(sizes) + layers * attention
        together = max(1, math.floor(budget / sizes.mean()))
        packed = float(dense(np.array([together * sizes.mean()]))[0]) / together + layers * float(attention.mean())
        mean = packed if together > 1 else float(alone.mean())
        second = mean**2 * float((alone**2).mean()) / float(alone.mean()) ** 2
        longest = float(np.quantile(alone, PERCENTILE))

        def first_s(loads: Floats) -> Floats:
            if self._arrivals is not None:
                packing = mean / float(alone.mean())
                played = [
                    replayed_sojourn(self._arrivals, alone * packing, replicas, load, PERCENTILE) for load in BUSY
                ]
                return np.interp(loads, BUSY, played)
            wait, late = queue_waits(
                np.full_like(loads, mean), np.full_like(loads, second), loads, replicas, PERCENTILE
            )
            return np.asarray(np.maximum(late + float(alone.mean()), wait + longest))

        return replicas / mean, first_s


@dataclass(frozen=True)
class LaneSteps:
    """Seconds of a lane's step by batch: without a chunk, at PERCENTILE, on average, and with a chunk of its own."""

    plain: Floats
    longest: Floats
    average: Floats
    with_chunk: Floats


@dataclass(frozen=True, kw_only=True)
class OffloadedSteps:
    """The steps of ``way``'s lanes, by batch.

    Attributes:
        compute, memory: cost models of a worker of each pool.
        rows: sequences that decode in a lane.
        live: tokens cached of each.
        parts: memory workers that each lies on.
        dense_s: seconds of a lane's slices, of ``rows``.
        attends: attention of chunks.
    """

    way: Way
    compute: CostModel
    memory: CostModel
    rows: Floats
    live: float
    parts: int
    dense_s: Floats
    attends: PromptAttention

    @property
    def together(self) -> int:
        """Lanes that share replicas keep one pace: a lane behind one with a chunk waits for it at every slice."""
        return self.way.lanes if self.way.rotates else self.way.lanes // self.way.replicas

    @property
    def replicas(self) -> int:
        """Replicas that those lanes share."""
        return self.way.replicas if self.way.rotates else 1

    @cached_property
    def attention_s(self) -> Floats:
        """Attention of a lane's decoding rows, on the worker with most of it."""
        busiest = np.ceil(self.rows * self.parts / self.way.memory_workers)
        layer = self.memory.attention_seconds(busiest * self.live / self.parts, busiest)
        return np.asarray(self.compute.shape.layers * layer)

    def step_seconds(
        self, tokens: Floats, added_s: Floats, having: int, elsewhere: Floats | float = 0.0, late: bool = False
    ) -> Floats:
        """Return seconds of a step while ``having`` of the lanes that share replicas have a chunk of ``tokens``, which
        takes ``added_s`` more on the replica, and so have ``elsewhere`` of the other lanes. ``late``: those of the
        former are at PERCENTILE by their attention."""
        way, attends = self.way, self.attends
        own, prefix_s, asked = (
            (attends.late_size, attends.late_prefix_s, attends.late_asked)
            if late
            else (attends.size, attends.prefix_s, attends.asked)
        )
        spread = np.clip(own / tokens, 1 / way.memory_workers, 1.0)
        kept, query = self._row_bytes
        out_s = tokens * self._compute_nic_s(kept + asked * query)
        one = np.minimum(asked, 1.0)  # a worker is asked by a row once, though several may be
        in_s, back_s = (tokens * spread * self._memory_nic_s(nbytes) for nbytes in (kept + one * query, one * query))
        here_s, there_s = self._decoding_wire_s
        latency_s = self.compute.shape.layers * self.memory.fits.runtime.round_trip_s
        path = self.dense_s + here_s + there_s + latency_s + self.attention_s
        path = path + min(having, 1) * (added_s + out_s + in_s + tokens * spread * prefix_s + back_s)
        load = (self.together * self.dense_s + having * added_s) / self.replicas
        arriving_s = tokens * self._memory_nic_s(kept + asked * query) / way.memory_workers
        wire = np.maximum(
            (self.together * here_s + having * out_s) / self.replicas,
            way.lanes * there_s + (having + elsewhere) * arriving_s,
        )
        each_s = tokens * attends.prefix_load_s / way.memory_workers
        reading = way.lanes * self.attention_s + (having + elsewhere) * each_s
        others_s = (having * (1 - 1 / self.together) + elsewhere) * each_s
        path = self._behind(path, reading, others_s, tokens * spread * attends.prefix_s)
        return np.asarray(np.maximum.reduce([path, load, wire]))

    def _behind(self, path: Floats, reading: Floats, others_s: Floats, chunk_s: Floats) -> Floats:
        """Return the step of a lane that waits behind other lanes' chunks at memory workers.

        Every layer it finds one of its workers busy with a chunk with the probability ``met``, for half of what that
        takes, and longer the busier the worker is: T = path + met chunk_s / 2 / (1 - reading / T). Lanes without chunks
        keep out of each other's way: then T is the longer of path and ``reading``, the load of the workers.
        """
        met = 1 - (1 - np.minimum(others_s / np.maximum(path, reading), 1.0)) ** self.way.memory_workers
        linear = path + reading + met * chunk_s / 2
        return np.asarray((linear + np.sqrt(np.maximum(linear**2 - 4 * path * reading, 0.0))) / 2)

    def steps(self, chunk: Floats, share: Floats, added_s: Floats) -> LaneSteps:
        """Return a lane's steps while a ``share`` of each lane's steps have a chunk of ``chunk`` tokens, independently
        of other lanes."""
        likely = np.minimum(share, 1.0)
        elsewhere = (self.way.lanes - self.together) * likely
        plain = self.step_seconds(chunk, added_s, 0, elsewhere)
        average, below, with_chunk = np.zeros_like(plain), np.zeros_like(plain), np.zeros_like(plain)
        longest = plain
        for having in range(self.together + 1):
            late = self.step_seconds(chunk, added_s, having, elsewhere, late=True) if having else plain
            longest = np.where(below < PERCENTILE, late, longest)
            odds = math.comb(self.together, having) * likely**having * (1 - likely) ** (self.together - having)
            step = self.step_seconds(chunk, added_s, having, elsewhere) if having else plain
            average += odds * step
            with_chunk += odds * having / self.together * step
            below = below + odds
        return LaneSteps(plain, longest, average, with_chunk / np.maximum(likely, 1e-9))

    @property
    def _row_bytes(self) -> tuple[float, float]:
        """Bytes of k and v of a row, and of its q or its answer; of all layers."""
        shape = self.compute.shape
        each = shape.layers * shape.head_size * shape.dtype.itemsize
        return 2.0 * shape.kv_heads * each, float(shape.query_heads * each)

    @cached_property
    def _decoding_wire_s(self) -> tuple[Floats, Floats]:
        """Seconds for which a lane's decoding rows occupy the NICs of a replica, and of each memory worker."""
        _, query = self._row_bytes
        sent = self.compute.shape.layers * self.compute.exchange_bytes(self.rows)
        sent = sent + (self.parts - 1) * 2 * self.rows * query
        return self._compute_nic_s(sent), self._memory_nic_s(sent / self.way.memory_workers)

    def _compute_nic_s(self, nbytes: Floats) -> Floats:
        return self.compute.wire_seconds(nbytes / self.way.tensor_parallel)

    def _memory_nic_s(self, nbytes: Floats) -> Floats:
        return self.memory.wire_seconds(nbytes)
