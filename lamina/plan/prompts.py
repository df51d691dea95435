"""Prompts in the closed form: their attention by chunk, how long they wait, and prefill on workers of its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from lamina.plan.cost import CostModel
from lamina.plan.gemm import Floats
from lamina.plan.ways import Kind, Way
from lamina.plan.workload import Workload

PERCENTILE = 0.99
"""Of the times between tokens, and to a first token, for which the SLOs are."""


@dataclass(frozen=True, kw_only=True)
class PromptAttention:
    """Seconds of attention per computed prompt token, of all layers, and what it asks of memory workers; by batch.

    Attributes:
        own_s: on the compute workers. prefix_s: to earlier chunks on the memory workers that hold them, until the last
            one answers. prefix_load_s: the same, of all of these workers together.
        asked: memory workers that get a token's q and answer. size: tokens of one prompt's chunk; a step has chunks of
            several prompts if these are shorter.
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
        self._late = float(np.quantile(self._lengths, PERCENTILE))
        self._kept: dict[tuple[str, int, int, int, int | None], tuple[Floats, Floats]] = {}

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
            most = self._workload.reuse.most / self._workload.prompt
            self._kept[key] = (
                self._by_chunk(compute, memory, way, 0.0),
                self._by_chunk(compute, memory, way, min(most, 1 - 1e-9)),
            )
        none, all_found = self._kept[key]
        part = found / max(self._workload.reuse.most, 1e-9)
        names = [one.name for one in fields(PromptAttention)]
        between = (low + part * (high - low) for low, high in zip(none, all_found, strict=True))
        return PromptAttention(**dict(zip(names, between, strict=True)))

    def _by_chunk(self, compute: CostModel, memory: CostModel, way: Way, found: float) -> Floats:
        """The figures of ``PromptAttention``, in their order, if this share of every prompt is found."""
        layers, offloaded = compute.shape.layers, way.kind is Kind.OFFLOADED
        hits = np.floor(found * self._lengths)
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
        """The time to a first token at PERCENTILE, by batch.

        Prompts, of which ``found`` tokens are cached, arrive at random and wait for chunks of ``chunk`` tokens, of
        which ``servers`` run at once, each in ``step_s``; ``busy`` is the share of steps that have one. Either the wait
        is long and the prompt average, or the wait average and the prompt long.
        """
        part = (1 - found / self._workload.prompt) / chunk  # of a prompt, in chunks; several short ones share a chunk
        mean = part * self._lengths.mean()
        waits, late = _waits(mean, part**2 * (self._lengths**2).mean(), busy, servers)
        last = np.ceil(part * self._late)
        return np.asarray(np.maximum((late + np.ceil(mean) + 0.5) * step_s, waits * step_s + (last + 0.5) * longest_s))

    # -- prefill on workers of its own -----------------------------------------------------------------------------

    def whole(
        self, model: CostModel, degree: int, replicas: int, budget: int, found: float
    ) -> tuple[float, Callable[[Floats], Floats]]:
        """Prompts per second of ``replicas`` that compute whole prompts, as many in a step as ``budget`` tokens hold;
        and the time to a first token at PERCENTILE, by the share of that rate at which they arrive."""
        layers, part = model.shape.layers, found / self._workload.prompt
        prefix = np.floor(part * self._lengths)
        sizes = self._lengths - prefix
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
            waits, late = _waits(np.full_like(loads, mean), np.full_like(loads, second), loads, replicas)
            return np.asarray(np.maximum(late + float(alone.mean()), waits + longest))

        return replicas / mean, first_s


def _waits(mean: Floats, second: Floats, busy: Floats, servers: int) -> tuple[Floats, Floats]:
    """Mean wait, and that at PERCENTILE, in a queue before ``servers`` that are busy for a share of the time.

    ``mean``, ``second``: moments of the time that a server takes. Arrivals are random; those who wait do so for an
    exponentially distributed time (Sakasegawa, 1977, for several servers).
    """
    busy = np.minimum(busy, 1 - 1e-6)
    waiting = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if_waiting = second / (2 * mean) / (1 - busy) / servers
    late = if_waiting * np.log(np.maximum(waiting / (1 - PERCENTILE), 1.0))
    return waiting * if_waiting, late
