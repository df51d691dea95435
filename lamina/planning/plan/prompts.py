"""Prompts in the closed form: their attention by chunk, how long they wait, prefill apart."""

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.ways import Kind, Way
from lamina.planning.plan.workload import Workload


def waits(mean: Floats, second: Floats, busy: Floats, servers: int, percentile: float) -> tuple[Floats, Floats]:
    """Mean wait, and that at ``percentile``, in a queue before ``servers`` that are busy for a share of the time.

    ``mean``, ``second``: moments of the time that a server takes. Arrivals are random; those who wait do so for an
    exponentially distributed time (Sakasegawa, 1977, for several servers).
    """
    busy = np.minimum(busy, 1 - 1e-6)
    waiting = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if_waiting = second / (2 * mean) / (1 - busy) / servers
    late = if_waiting * np.log(np.maximum(waiting / (1 - percentile), 1.0))
    return waiting * if_waiting, late


def sojourn(arrivals: Floats, seconds: Floats, servers: int, busy: float, percentile: float) -> float:
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
        """Tokens of each prompt that are computed if ``found`` are in a cache on average."""
        return self._lengths - self._workload.reuse.each(found, self._lengths)

    # -- attention -----------------------------------------------------------------------------------------------

    def attention(self, compute: CostModel, memory: CostModel, way: Way, found: Floats) -> PromptAttention:
        """Attention of prompts of which ``found`` tokens are cached. With one pool, compute workers have all of it.

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
        wait, late = waits(mean, second, busy, servers, PERCENTILE)
        last = np.ceil(longest / chunk)
        return np.asarray(np.maximum((late + np.ceil(mean) + 0.5) * step_s, wait * step_s + (last + 0.5) * longest_s))

    def _replayed(self, found: Floats, busy: Floats, servers: int) -> Floats:
        """Wait and service at PERCENTILE in the trace's own order, over the mean service."""
        assert self._arrivals is not None
        if servers not in self._played:
            computed = [self._computed(each) for each in self._grid]
            self._played[servers] = np.array(
                [
                    [sojourn(self._arrivals, own, servers, share, PERCENTILE) / own.mean() for share in BUSY]
                    for own in computed
                ]
            )
        table = self._played[servers]
        by_found = np.array([np.interp(found, self._grid, column) for column in table.T])
        return np.array([np.interp(one, BUSY, own) for one, own in zip(busy, by_found.T, strict=True)])

    # -- prefill on workers of its own -----------------------------------------------------------------------------

    def whole(
        self, model: CostModel, degree: int, replicas: int, budget: int, found: float
    ) -> tuple[float, Callable[[Floats], Floats]]:
        """Prompts per second of ``replicas`` that compute whole prompts, as many in a step as ``budget`` tokens hold;
        and the time to a first token at PERCENTILE, by the share of that rate at which they arrive."""
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
                played = [sojourn(self._arrivals, alone * packing, replicas, load, PERCENTILE) for load in BUSY]
                return np.interp(loads, BUSY, played)
            wait, late = waits(np.full_like(loads, mean), np.full_like(loads, second), loads, replicas, PERCENTILE)
            return np.asarray(np.maximum(late + float(alone.mean()), wait + longest))

        return replicas / mean, first_s
