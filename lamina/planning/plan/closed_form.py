"""Terms of the closed form in ``serving``: prompt attention, queueing of prompts, steps with offloaded attention.

Decode rows and prompt chunks share a step. With offloaded attention, q, k and v of all rows are sent to memory workers
in every layer. A later chunk sends its q to the memory worker that has the earlier chunks, and receives the partials,
like decode rows, unless the replica attends to a copy of them in scratch memory. The prompts of a step are on different
memory workers, which also serve other lanes.
"""

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from lamina.cluster.pool import CPU
from lamina.cluster.scratch import GPU_SHARE, PROMPTS, SHARE
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.ways import Kind, Way
from lamina.planning.plan.workload import Workload


def queue_waits(mean: Floats, second: Floats, busy: Floats, servers: int, percentile: float) -> tuple[Floats, Floats]:
    """Return the mean wait and the wait at ``percentile`` in a queue with Poisson arrivals.

    Waits are taken to be exponentially distributed (Sakasegawa, 1977, for several servers).

    Args:
        mean: First moment of the service time.
        second: Second moment of the service time.
        busy: Utilisation of the servers.
        servers: Number of servers.
        percentile: Between 0 and 1.
    """
    busy = np.minimum(busy, 1 - 1e-6)
    waiting = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if_waiting = second / (2 * mean) / (1 - busy) / servers
    late = if_waiting * np.log(np.maximum(waiting / (1 - percentile), 1.0))
    return waiting * if_waiting, late


def replayed_sojourn(arrivals: Floats, seconds: Floats, servers: int, busy: float, percentile: float) -> float:
    """Return the sojourn time (wait plus service) at ``percentile`` by replaying arrivals to the shortest queue.

    Unlike a formula, a replay reflects that a trace's arrivals are not random, and that a busy queue does not reach its
    steady state within a thousand requests.

    Args:
        arrivals: Arrival times in any unit, scaled to the utilisation ``busy``.
        seconds: Service time of each request.
        servers: Number of servers.
        busy: Utilisation of the servers until the last arrival.
        percentile: Between 0 and 1.
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
"""How many numbers of cached tokens prompts are evaluated for; other numbers are interpolated."""

BUSY = np.array([0.05, *np.linspace(0.2, 0.8, 7), 0.85, 0.9, 0.95, 0.98, 1.0])
"""Utilisations at which a trace's arrivals are replayed; other utilisations are interpolated."""


@dataclass(frozen=True, kw_only=True)
class PromptAttention:
    """Seconds of attention per computed prompt token, of all layers, and its load on memory workers; by batch.

    With scratch memory, attention to earlier chunks is part of ``own_s``, and memory workers attend to what is cached.

    Attributes:
        own_s: On the compute workers.
        prefix_s: Latency of attention to earlier chunks on memory workers.
        prefix_load_s: Work of that attention, summed over the memory workers.
        asked: Memory workers that receive a token's q.
        size: Tokens of one prompt's chunk; a step has chunks of several prompts if they are shorter.
        late_own_s: ``own_s`` of the chunk at ``PERCENTILE``, late in a long prompt.
        late_prefix_s: ``prefix_s`` of that chunk.
        late_asked: ``asked`` of that chunk.
        late_size: ``size`` of that chunk.
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


def scratch_tokens(model: CostModel, degree: int, longest: int, beside_kv: bool, reserved: float = 0.0) -> int:
    """Return the tokens in scratch memory of one copy of the weights, as ``lamina.cluster.scratch`` sizes it.

    Args:
        model: Cost model of a device.
        degree: Devices of the copy.
        longest: Tokens of the longest request.
        beside_kv: Whether the devices hold other KV too.
        reserved: Bytes of each device that steps need.
    """
    share = SHARE if beside_kv or model.hardware.kind == CPU else GPU_SHARE
    free = degree * (model.usable_bytes - reserved) - model.shape.weight_bytes
    return min(PROMPTS * longest, max(0, int(share * free / model.shape.kv_bytes_per_token)))


class Prompts:
    """Attention and queueing of a workload's prompts. Attention is cached by kinds and layout."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        lengths = [request.prompt for request in workload.sample] or [max(1, round(workload.prompt))]
        self._lengths = np.array(lengths, dtype=np.float64)
        self._grid = np.linspace(0.0, workload.reuse.most, FOUND) if workload.reuse.most else np.zeros(1)
        computed = [self._computed(found) for found in self._grid]
        self._arrivals = np.array([request.arrival_s for request in workload.sample]) if workload.replayed else None
        self._sojourns: dict[int, Floats] = {}
        self._moments = [(own.mean(), (own**2).mean(), np.quantile(own, PERCENTILE)) for own in computed]
        self._kept: dict[tuple[str, int, int, int, int | None], tuple[Floats, Floats]] = {}

    def _computed(self, found: float) -> Floats:
        return self._lengths - self._workload.reuse.each(found, self._lengths)

    # -- attention -----------------------------------------------------------------------------------------------

    def attention(self, compute: CostModel, memory: CostModel, way: Way, found: Floats) -> PromptAttention:
        """Return the attention of prompts of which ``found`` tokens are cached; on compute workers alone with one pool.

        Interpolates between no cached tokens and the most that can be cached.
        """
        offloaded = way.kind is Kind.OFFLOADED
        shared = way.memory_workers if offloaded else 1
        key = (
            f"{compute.hardware.kind},{memory.hardware.kind},{offloaded},{way.scratch}",
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
        """Return the figures of ``PromptAttention``, in their order, if ``found`` tokens are cached on average."""
        layers = compute.shape.layers
        hits = self._lengths - self._computed(found)
        each = [np.arange(hit, n, way.chunk) for hit, n in zip(hits, self._lengths, strict=True)]
        starts = np.concatenate(each)
        sizes = np.concatenate([np.diff(one, append=n) for one, n in zip(each, self._lengths, strict=True)])
        most = np.repeat(self._most_elsewhere(compute, way, hits), [len(one) for one in each])
        elsewhere = np.minimum(starts, most)
        own = layers * compute.chunk_attention_seconds(sizes, starts - elsewhere, way.tensor_parallel)
        room = way.segment or memory.kv_tokens
        parts = np.clip(np.ceil(elsewhere / room), 1, max(1, way.memory_workers))
        prefix = layers * memory.prefix_attention_seconds(sizes, elsewhere / parts)
        asked = np.where(elsewhere > 0, parts, 0.0)
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

    def _most_elsewhere(self, compute: CostModel, way: Way, hits: Floats) -> Floats:
        """Return how many tokens of each prompt memory workers attend to at most, of which ``hits`` were cached."""
        if way.kind is not Kind.OFFLOADED:
            return np.zeros(hits.shape)
        if not way.scratch:
            return np.full(hits.shape, np.inf)
        room = scratch_tokens(compute, way.tensor_parallel, self._workload.longest, beside_kv=False)
        return np.where(self._lengths - hits > room, np.inf, hits)

    # -- waiting -------------------------------------------------------------------------------------------------

    def first_token_s(
        self, chunk: Floats, found: Floats, busy: Floats, step_s: Floats, longest_s: Floats, servers: int
    ) -> Floats:
        """Return the time to first token at PERCENTILE, by batch: the longer of a long wait's and a long prompt's.

        Args:
            chunk: Prompt tokens of a step.
            found: Cached tokens of a prompt.
            busy: Share of the time in which chunks run.
            step_s: Mean seconds of a step with a chunk.
            longest_s: Seconds of such a step at PERCENTILE.
            servers: Chunks that run at once.
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
        """Return the sojourn time at PERCENTILE in the trace's own order, over the mean service time."""
        assert self._arrivals is not None
        if servers not in self._sojourns:
            computed = [self._computed(each) for each in self._grid]
            self._sojourns[servers] = np.array(
                [
                    [replayed_sojourn(self._arrivals, own, servers, share, PERCENTILE) / own.mean() for share in BUSY]
                    for own in computed
                ]
            )
        table = self._sojourns[servers]
        by_found = np.array([np.interp(found, self._grid, column) for column in table.T])
        return np.array([np.interp(one, BUSY, own) for one, own in zip(busy, by_found.T, strict=True)])

    # -- prefill on workers of its own -----------------------------------------------------------------------------

    def prefill_pool(
        self, model: CostModel, degree: int, replicas: int, budget: int, found: float
    ) -> tuple[float, Callable[[Floats], Floats]]:
        """Return the capacity of ``replicas`` that only prefill, and the time to first token at a load.

        Returns (prompts per second, function from utilisation to the time to first token at PERCENTILE).

        Args:
            model: Cost model of a device.
            degree: Devices of a replica.
            replicas: Number of replicas.
            budget: Most prompt tokens of a step.
            found: Cached tokens of a prompt.
        """
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
    """Predicts the steps of a way's lanes, by batch.

    Attributes:
        way: The way.
        compute: Cost model of a compute worker.
        memory: Cost model of a memory worker.
        rows: Sequences that decode in a lane.
        live: Cached tokens of a sequence.
        parts: Memory workers that hold a sequence.
        dense_s: Seconds of a lane's slices with ``rows`` rows.
        attends: Attention of chunks.
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
        """Number of lanes that share replicas, and therefore wait for each other's chunks at every slice."""
        return self.way.lanes if self.way.rotates else self.way.lanes // self.way.replicas

    @property
    def replicas(self) -> int:
        """Number of replicas that ``together`` lanes share."""
        return self.way.replicas if self.way.rotates else 1

    @cached_property
    def attention_s(self) -> Floats:
        """Return seconds of attention of a lane's decode rows, on the memory worker with most of it."""
        busiest = np.ceil(self.rows * self.parts / self.way.memory_workers)
        layer = self.memory.attention_seconds(busiest * self.live / self.parts, busiest)
        return np.asarray(self.compute.shape.layers * layer)

    def step_seconds(
        self, tokens: Floats, added_s: Floats, having: int, elsewhere: Floats | float = 0.0, late: bool = False
    ) -> Floats:
        """Return seconds of a step.

        Args:
            tokens: Tokens of a chunk.
            added_s: Seconds that a chunk adds to the replica's slices.
            having: Lanes with a chunk, of the lanes that share replicas.
            elsewhere: Lanes with a chunk, of the other lanes.
            late: Whether the chunks of ``having`` are those at PERCENTILE, late in long prompts.
        """
        way, attends = self.way, self.attends
        own_s = np.maximum(attends.late_own_s, attends.own_s) if late and way.scratch else attends.own_s
        added_s = added_s + tokens * (own_s - attends.own_s)
        own, prefix_s, asked = (
            (attends.late_size, attends.late_prefix_s, attends.late_asked)
            if late
            else (attends.size, attends.prefix_s, attends.asked)
        )
        spread = np.clip(own / tokens, 1 / way.memory_workers, 1.0)
        kept, query = self._row_bytes
        out_s = tokens * self._compute_nic_s(kept + asked * query)
        one = np.minimum(asked, 1.0)  # one worker receives a row's q at most once
        in_s, back_s = (tokens * spread * self._memory_nic_s(nbytes) for nbytes in (kept + one * query, one * query))
        here_s, there_s = self._decoding_wire_s
        latency_s = self.compute.shape.layers * self.memory.fits.runtime.round_trip_s
        path = self.dense_s + here_s + there_s + latency_s + self.attention_s
        path = path + min(having, 1) * (added_s + out_s + in_s + tokens * spread * prefix_s + back_s)
        if way.scratch:  # K and V travel while the replica attends
            travel_s = tokens * (self._compute_nic_s(kept) + spread * self._memory_nic_s(kept))
            path = path - min(having, 1) * np.minimum(tokens * own_s, travel_s)
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
        """Return seconds of a step that waits for other lanes' chunks at memory workers.

        In every layer, with probability ``met``, a worker is busy with a chunk, for half of its time on average, and
        longer with a higher load: T = path + met chunk_s / 2 / (1 - reading / T). Without chunks, T is the longer of
        ``path`` and ``reading``, the load of the workers.
        """
        met = 1 - (1 - np.minimum(others_s / np.maximum(path, reading), 1.0)) ** self.way.memory_workers
        linear = path + reading + met * chunk_s / 2
        return np.asarray((linear + np.sqrt(np.maximum(linear**2 - 4 * path * reading, 0.0))) / 2)

    def steps(self, chunk: Floats, share: Floats, added_s: Floats) -> LaneSteps:
        """Return a lane's steps if a ``share`` of every lane's steps has a chunk of ``chunk`` tokens, independently."""
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
        """Return a row's bytes of k and v, and its bytes of q (or of the reply), in all layers."""
        shape = self.compute.shape
        each = shape.layers * shape.head_size * shape.dtype.itemsize
        return 2.0 * shape.kv_heads * each, float(shape.query_heads * each)

    @cached_property
    def _decoding_wire_s(self) -> tuple[Floats, Floats]:
        """Return seconds for which a lane's decode rows occupy the NICs of a replica, and of each memory worker."""
        _, query = self._row_bytes
        sent = self.compute.shape.layers * self.compute.exchange_bytes(self.rows)
        sent = sent + (self.parts - 1) * 2 * self.rows * query
        return self._compute_nic_s(sent), self._memory_nic_s(sent / self.way.memory_workers)

    def _compute_nic_s(self, nbytes: Floats | float) -> Floats:
        return self.compute.wire_seconds(nbytes / self.way.tensor_parallel)

    def _memory_nic_s(self, nbytes: Floats | float) -> Floats:
        return self.memory.wire_seconds(nbytes)
