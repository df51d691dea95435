"""Terms of the closed form in ``serving``: attention and waits of prompts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from lamina.cluster.pool import CPU
from lamina.cluster.scratch import GPU_SHARE, PROMPTS, SHARE
from lamina.core.pipeline import Shape
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.queueing import queue_waits, replayed_sojourn
from lamina.planning.plan.stages import busiest_share
from lamina.planning.plan.ways import Way
from lamina.planning.plan.workload import Workload

PERCENTILE = 0.99
"""Percentile of the times between tokens and to a first token that the SLOs bound."""

FOUND = 9
"""How many numbers of cached tokens prompts are evaluated for; other numbers are interpolated."""

LOADS = 50
"""Shares of the time in which workers that prefill may be busy: multiples of 1 / LOADS."""

ATTENDING = (0.0, 0.5, 1.0)
"""Shares of a prompt's time taken by attention at which a trace's arrivals are replayed; others are interpolated."""

BUSY = np.array([0.05, *np.linspace(0.2, 0.8, 7), 0.85, 0.9, 0.95, 0.98, 1.0])
"""Utilisations at which a trace's arrivals are replayed; other utilisations are interpolated."""


@dataclass(frozen=True, kw_only=True)
class PromptAttention:
    """Seconds of attention per computed prompt token, of all layers, and its load on memory workers; by batch.

    With scratch memory, attention to earlier chunks is part of ``own_s``, and memory workers attend to what is cached.

    Attributes:
        own_s: On the compute workers.
        slowest_own_s: ``own_s`` of the slowest of as many chunks as a copy of the weights has stages. Steps do not
            overtake each other, so that all go on at its pace.
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
    slowest_own_s: Floats
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
        self._arrivals = np.array([request.arrival_s for request in workload.sample]) if workload.replayed else None
        self._sojourns: dict[tuple[int, int], Floats] = {}
        self._moments = np.array([self._moments_of(found) for found in self._grid]).T
        self._kept: dict[tuple[str, Shape, int, int, int | None], tuple[Floats, Floats]] = {}

    def _computed(self, found: float) -> Floats:
        return self._lengths - self._workload.reuse.each(found, self._lengths)

    def _work(self, found: float) -> tuple[Floats, Floats]:
        """Return each prompt's dense work and its attention to all tokens before it, over their means."""
        own = self._computed(found)
        attended = own * (self._lengths - own / 2)
        return own / own.mean(), attended / attended.mean()

    def _moments_of(self, found: float) -> tuple[float, ...]:
        """Return the mean tokens of a prompt, the tokens at PERCENTILE, and the mean products of ``_work``."""
        own, (dense, attended) = self._computed(found), self._work(found)
        products = dense * dense, dense * attended, attended * attended
        return own.mean(), np.quantile(own, PERCENTILE), *(each.mean() for each in products)

    # -- attention -----------------------------------------------------------------------------------------------

    def attention(self, compute: CostModel, memory: CostModel, way: Way, found: Floats) -> PromptAttention:
        """Return the attention of prompts of which ``found`` tokens are cached; on compute workers without memory ones.

        Interpolates between no cached tokens and the most that can be cached.
        """
        offloaded = way.memory is not None
        shared = way.memory_workers if offloaded else 1
        key = (
            f"{compute.hardware.kind},{memory.hardware.kind},{offloaded},{way.scratch}",
            way.shapes[0],
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
        own = layers * compute.chunk_attention_seconds(sizes, starts - elsewhere, way.shapes[0].ranks)
        room = way.segment or memory.kv_tokens
        parts = np.clip(np.ceil(elsewhere / room), 1, max(1, way.memory_workers))
        prefix = layers * memory.prefix_attention_seconds(sizes, elsewhere / parts)
        asked = np.where(elsewhere > 0, parts, 0.0)
        late = int(np.argsort(own + prefix)[min(len(own) - 1, int(PERCENTILE * len(own)))])
        total = sizes.sum()
        return np.array(
            [
                own.sum() / total,
                mean_of_largest(own / sizes, sizes / total, way.shapes[0].stages),
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
        if way.memory is None:
            return np.zeros(hits.shape)
        if not way.scratch:
            return np.full(hits.shape, np.inf)
        room = scratch_tokens(compute, way.shapes[0].workers, self._workload.longest, beside_kv=False)
        return np.where(self._lengths - hits > room, np.inf, hits)

    # -- waiting -------------------------------------------------------------------------------------------------

    def first_token_s(
        self,
        chunk: Floats,
        found: Floats,
        busy: Floats,
        step_s: Floats,
        longest_s: Floats,
        attending: Floats,
        servers: int,
        lanes: int = 1,
    ) -> Floats:
        """Return the time to first token at PERCENTILE, by batch: the longer of a long wait's and a long prompt's.

        Args:
            chunk: Prompt tokens of a step.
            found: Cached tokens of a prompt.
            busy: Share of the time in which chunks run.
            step_s: Mean seconds of a step with a chunk.
            longest_s: Seconds of such a step at PERCENTILE.
            attending: Share of ``step_s`` in which the chunk's tokens attend.
            servers: Chunks that run at once, but for those of ``lanes``.
            lanes: Lanes that share each server.
        """
        mean, longest, *products = (np.interp(found, self._grid, one) for one in self._moments)
        mean = mean / chunk  # in chunks; several short prompts share one
        if self._arrivals is not None:
            return np.asarray(self._replayed(found, busy, attending, servers, lanes) * mean * step_s + 0.5 * longest_s)
        weights = (1 - attending) ** 2, 2 * attending * (1 - attending), attending**2
        second = mean**2 * sum(weight * product for weight, product in zip(weights, products, strict=True))
        wait, late = queue_waits(mean, second, busy, servers, PERCENTILE)
        last = np.ceil(longest / chunk)
        return np.asarray(np.maximum((late + np.ceil(mean) + 0.5) * step_s, wait * step_s + (last + 0.5) * longest_s))

    def _replayed(self, found: Floats, busy: Floats, attending: Floats, servers: int, lanes: int) -> Floats:
        """Return the sojourn time at PERCENTILE in the trace's own order, over the mean service time.

        Interpolates between no cached tokens and the most that can be cached, and between the values of ``ATTENDING``.
        """
        if (servers, lanes) not in self._sojourns:
            self._sojourns[servers, lanes] = np.array(
                [
                    [self._by_load((1 - share) * dense + share * attended, servers, lanes) for share in ATTENDING]
                    for dense, attended in map(self._work, (0.0, self._workload.reuse.most))
                ]
            )
        table = self._sojourns[servers, lanes]
        part = found / max(self._workload.reuse.most, 1e-9)
        times = np.array([[np.interp(busy, BUSY, row) for row in rows] for rows in table])
        none, half, all_attention = (1 - part) * times[0] + part * times[1]
        first, second = np.clip(2 * attending, 0.0, 1.0), np.clip(2 * attending - 1, 0.0, 1.0)
        return np.asarray(none + first * (half - none) + second * (all_attention - half))

    def _by_load(self, work: Floats, servers: int, lanes: int) -> list[float]:
        assert self._arrivals is not None
        return [replayed_sojourn(self._arrivals, work, servers, busy, PERCENTILE, lanes) for busy in BUSY]

    # -- prefill on workers of its own -----------------------------------------------------------------------------

    def prefill_pool(self, way: Way, model: CostModel, holder: CostModel, found: float, ttft_s: float) -> "PrefillPool":
        """Return what the replicas of a way that only prefill can do, if ``found`` tokens of a prompt are cached.

        Args:
            way: The way; its ``chunk`` is the most prompt tokens of a step.
            model: Cost model of a device that prefills.
            holder: Cost model of a device whose memory has the cached prefixes: one that decodes, or a memory worker.
            found: Cached tokens of a prompt, on average.
            ttft_s: Longest time to first token at PERCENTILE.
        """
        layers, copy = model.shape.layers, way.shapes[0]
        degree = copy.ranks
        computed = self._computed(found)
        cached = self._lengths - computed

        waits = way.memory is not None and way.lanes_each == copy.stages  # in every layer, until K and V are stored
        fixed_s = float(model.ends_seconds(1, degree)) + waits * layers * holder.fits.runtime.round_trip_s

        def dense_s(rows: Floats) -> Floats:
            return np.asarray(layers * model.slice_seconds(rows, degree) + fixed_s)

        def alone_s(rows: Floats, asking: Floats | float = 0.0) -> Floats:
            elsewhere = asking + waits * _storing_seconds(model, holder, degree, rows)
            attention = np.maximum(model.chunk_attention_seconds(rows, 0, degree), elsewhere)
            return np.asarray(dense_s(rows) + layers * attention)

        asking, lent = _asking_seconds(model, holder, way, computed, cached)
        asked, again = alone_s(computed, asking), alone_s(self._lengths)
        asks = asked <= again  # else the runtime computes the prefix again
        alone, rows = np.where(asks, asked, again), np.where(asks, computed, self._lengths)
        lent = np.where(asks, lent, 0.0)
        together = max(1, math.floor(way.chunk / rows.mean()))
        packed = float(dense_s(np.array([together * rows.mean()]))[0]) / together
        packed += float((alone - dense_s(rows)).mean())
        mean = packed if together > 1 else float(alone.mean())
        share, filling_s = 1.0, 0.0
        if (stages := copy.stages) > 1:  # a prompt's chunks follow each other through the stages
            layer, ends = (float(part(way.chunk, degree)) for part in (model.slice_seconds, model.ends_seconds))
            share = busiest_share(model.shape, stages, layer, ends)
            filling = (stages - 1) / stages * alone / np.ceil(rows / way.chunk)
            filling_s = float(np.quantile(filling, PERCENTILE))
        mean *= share
        servers = way.prefill_replicas, way.lanes_each if way.memory else 1
        first_s = partial(self._first_s, share * alone, mean, filling_s, servers)
        return PrefillPool(
            first_s=first_s,
            prompts_s=way.prefill_replicas / mean,
            within_s=way.prefill_replicas / mean * _highest_load(first_s, ttft_s),
            lent_s=layers * float(lent.mean()),
            longest_lent_s=layers * float(np.quantile(lent * np.minimum(1.0, way.chunk / computed), PERCENTILE)),
            lent_share=float(np.quantile(layers * lent / alone, PERCENTILE)),
        )

    def _first_s(self, alone: Floats, mean: float, filling_s: float, servers: tuple[int, int], load: float) -> float:
        """Return the time to first token at PERCENTILE of prompts that take ``alone`` seconds, and ``mean`` if packed
        into steps, on replicas busy for a share ``load`` of the time.

        Args:
            filling_s: Seconds in which a chunk passes the stages before the last.
            servers: Number of replicas, and lanes of each.
        """
        replicas, lanes = servers
        packing = mean / float(alone.mean())
        if self._arrivals is not None:
            return filling_s + replayed_sojourn(self._arrivals, alone * packing, replicas, load, PERCENTILE, lanes)
        first, second = (np.full(1, (packing**power * alone**power).mean()) for power in (1, 2))
        wait, late = queue_waits(first, second, np.full(1, load), replicas, PERCENTILE)
        longest = float(np.quantile(alone, PERCENTILE))
        return filling_s + float(np.maximum(late + float(alone.mean()), wait + longest)[0])


def mean_of_largest(values: Floats, odds: Floats, draws: int) -> float:
    """Return the mean of the largest of several independent draws of ``values``, which have these ``odds``."""
    order = np.argsort(values)
    below = np.cumsum(odds[order]) ** draws
    return float((values[order] * np.diff(below, prepend=0.0)).sum())


def _highest_load(first_s: Callable[[float], float], ttft_s: float) -> float:
    """Return the largest share of the time for which replicas may be busy within ``ttft_s``.

    ``first_s``: As ``PrefillPool.first_s``.
    """
    low, high = 0, LOADS
    while low < high:
        middle = (low + high + 1) // 2
        if first_s(middle / LOADS) <= ttft_s:
            low = middle
        else:
            high = middle - 1
    return low / LOADS


@dataclass(frozen=True)
class PrefillPool:
    """Replicas that only prefill.

    Attributes:
        first_s: Returns the time to first token at PERCENTILE, from the share of the time for which they are busy.
        prompts_s: Prompts per second that they compute at most.
        within_s: Prompts per second that they compute within the SLO on the time to a first token.
        lent_s: Seconds of attention to a prompt's cached prefix where it lies, on average.
        longest_lent_s: Seconds of such attention for one step with prompts, at PERCENTILE.
        lent_share: Share of the time of a prompt in which its prefix is attended to there, at PERCENTILE.
    """

    first_s: Callable[[float], float]
    prompts_s: float
    within_s: float
    lent_s: float
    longest_lent_s: float
    lent_share: float


def _asking_seconds(
    model: CostModel, holder: CostModel, way: Way, rows: Floats, cached: Floats
) -> tuple[Floats, Floats]:
    """Return seconds of one layer's attention of prompts to prefixes elsewhere, and the part of these in which the
    devices that hold the prefixes attend.

    Args:
        model: Cost model of a device that prefills.
        holder: Cost model of a device that holds prefixes.
        way: The way.
        rows: Tokens of each prompt that ask.
        cached: Tokens of each prompt's prefix.
    """
    shape, degree = model.shape, way.shapes[0].ranks
    holding = 1 if way.memory else way.shape.ranks
    asked = rows * shape.query_heads * shape.head_size * shape.dtype.itemsize  # q; the answer is as long
    here, there = model.wire_seconds(asked / degree), holder.wire_seconds(asked / holding)
    lent = holder.prefix_attention_seconds(rows, cached) / holding
    latency = np.ceil(rows / way.chunk) * holder.fits.runtime.round_trip_s
    return np.where(cached > 0, here + there + np.maximum(here, there) + lent + latency, 0.0), lent


def _storing_seconds(model: CostModel, holder: CostModel, degree: int, rows: Floats) -> Floats:
    """Return seconds in which K and V of one layer of ``rows`` tokens travel to a memory worker."""
    shape = model.shape
    kept = rows * 2 * shape.kv_heads * shape.head_size * shape.dtype.itemsize
    return np.asarray(model.wire_seconds(kept / degree) + holder.wire_seconds(kept))
