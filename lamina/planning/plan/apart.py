"""The closed form of ``serving`` for prefill apart from decode: replicas that only run prompts, and some that decode.

The pool that prefills and the one that decodes have a highest rate each; the lower one counts. Prefixes are cached with
the KV of sequences that decode, in local memory or memory workers, so that prompts and decoding depend on each other by
the room for prefixes, and by the attention of prompts to these.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lamina.kv.placement import AHEAD, WATERMARK
from lamina.planning.plan.closed_form import PrefillPool, Prompts
from lamina.planning.plan.copies import LEAST_LOAD, Copies
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.nearest import Reach
from lamina.planning.plan.offloaded_steps import OffloadedSteps
from lamina.planning.plan.planner import MOST_ROWS
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.ways import Capacity, Slo, Way, spreads_memory
from lamina.planning.plan.workload import Workload

SEATED = 0.97
"""Share of the SLO on TBT for workers that only decode: ``Capacity.seats`` bounds their batch, only lengths vary."""

BATCHES = 12
"""Batches at which prompts are tried where prefixes are cached beside what decodes."""

DEVIATIONS = 2.33
"""Standard deviations above its mean at which a normal variable has its percentile PERCENTILE."""

MOST_LENT = 0.9
"""Most of a step's time that is counted for attention to prefixes of other replicas' prompts."""


@dataclass(frozen=True)
class Apart:
    """Evaluates ways with prefill apart.

    Attributes:
        workload: The workload.
        models: Cost models by kind.
        prices: What devices cost.
        slo: The SLOs.
        prompts: The workload's prompts.
        copies: Copies of the weights.
    """

    workload: Workload
    models: Mapping[str, CostModel]
    prices: Prices
    slo: Slo
    prompts: Prompts
    copies: Copies
    _pools: dict[tuple[object, ...], PrefillPool] = field(default_factory=dict)  # by all that they depend on
    _decodings: dict[tuple[object, ...], "_Decoding"] = field(default_factory=dict)

    def evaluate(self, way: Way) -> Capacity | None:
        """Return the capacity of a way; None if it keeps the SLOs at no load."""
        decoding = self._decoding(way)
        rows, shared = decoding.rows, decoding.shared
        if not len(rows):
            return None
        # Prefixes are cached, and shared, where sequences decode: a smaller batch leaves more room for them. The batch
        # need not be larger than what the prompts that are computed lead to.
        places = np.unique(np.linspace(0, len(rows) - 1, BATCHES).astype(int)).tolist()
        best: tuple[float, int, _Apart] | None = None
        beside: _Apart | None = None
        for place in places:
            found = min(float(shared[place]), self.workload.prompt - 1)
            if beside is None or found != beside.found:
                beside = self._beside(way, decoding, found)
            rate = min(beside.within_s, float(beside.rates[: place + 1].max()))
            best = (rate, place, beside) if best is None or rate > best[0] else best
            if rate == beside.within_s > 0:
                break
        assert best is not None
        rate, place, beside = best
        if not rate:
            return None
        # The smallest batch that draws as many tokens: it is what the rate leads to.
        batch = int(np.argmax(beside.rates >= rate - 1e-12))
        usd = way.usd_per_hour(self.prices)
        return Capacity(
            way=way,
            requests_s=rate,
            batch=max(1, round(float(rows[batch]) * way.replicas)),
            step_s=float(decoding.steps[batch]),
            chunk_step_s=float(beside.longest[batch]),
            prompt_share=1.0,
            compute_busy=rate / beside.pool.prompts_s,
            memory_busy=rate / float(beside.rates[: place + 1].max()),
            usd_per_hour=sum(usd),
            prompt_usd=usd[0] / sum(usd),
            found=beside.found,
            seats=max(1, int(rows[beside.rates > 0].max())),
        )

    def reach(self, way: Way) -> list[Reach]:
        """Return the targets that a way keeps at low load; none if requests do not fit."""
        decoding = self._decoding(way)
        if not len(decoding.rows):
            return []
        beside = self._beside(way, decoding, min(float(decoding.shared[0]), self.workload.prompt - 1))
        return [Reach(way, beside.pool.first_s(LEAST_LOAD), float(beside.longest[0]) / SEATED)]

    def _beside(self, way: Way, decoding: "_Decoding", found: float) -> "_Apart":
        """Return what a way serves if ``found`` tokens of a prompt are cached."""
        pool = self._pool(way, found)
        besides = self._beside_memory if way.memory else self._beside_copies
        longest, rates = besides(way, decoding, pool, found)
        within_s = pool.within_s if pool.within_s >= LEAST_LOAD * pool.prompts_s else 0.0
        return _Apart(within_s, found, pool, longest, np.where(longest <= SEATED * self.slo.tbt_s, rates, 0.0))

    def _pool(self, way: Way, found: float) -> PrefillPool:
        """Return the replicas that prefill."""
        holder, each = way.memory or way.compute, way.lanes_each
        key = (
            way.prompts.kind,
            way.prefill_workers,
            way.shapes[0] if way.memory else way.shapes,
            way.chunk,
            found,
            holder.kind,
            way.memory and each,
        )
        if key not in self._pools:
            prefill, model = self.models[way.prompts.kind].widened, self.models[holder.kind]
            model = model if way.memory else model.widened
            self._pools[key] = self.prompts.prefill_pool(way, prefill, model, found, self.slo.ttft_s)
        return self._pools[key]

    def _decoding(self, way: Way) -> "_Decoding":
        """Return what replicas that decode can do without prompts."""
        if way.memory is None:
            return self._with_copies(way)
        key = way.compute.kind, way.replicas, way.shape, way.memory.kind, way.memory_workers, way.lanes_each
        if key not in self._decodings:
            self._decodings[key] = self._with_memory(way)
        return self._decodings[key]

    # -- local memory ----------------------------------------------------------------------------------------------

    def _with_copies(self, way: Way) -> "_Decoding":
        prefill, decode = (self.models[kind.kind].widened for kind in (way.prompts, way.compute))
        pools, (early, late) = (way.prompts, way.compute), way.shapes
        there, here = (
            (1 - WATERMARK) * self.copies.kv_room(kind, copy, way.chunk)
            for kind, copy in zip(pools, way.shapes, strict=True)
        )
        # Replicas that prefill hold KV too, if they attend for others.
        spreads = spreads_memory(way.most_ranks, pools)
        there *= way.prefill_replicas / way.replicas if spreads else 0.0
        lenders = self.copies.lenders(way)
        rows, shared = self.copies.rows(here + there, 1, 2 * MOST_ROWS, ahead=AHEAD, lenders=lenders)
        most, _ = self.copies.rows(here, 1, 2 * MOST_ROWS, ahead=AHEAD, lenders=lenders)
        beyond = np.maximum(rows - most.max(initial=0.0), 0.0)
        attention = self.copies.attention(decode, late.ranks, rows, (prefill, early.ranks), beyond)
        return _Decoding(rows, self.copies.stage_step(decode, late, rows, attention=attention), shared)

    def _beside_copies(self, way: Way, decoding: "_Decoding", pool: PrefillPool, found: float) -> tuple[Floats, Floats]:
        """Return, by batch, seconds of a decode step at PERCENTILE, and requests per second, while the replicas that
        decode attend to the cached prefixes of the pool's prompts."""
        rows, steps = decoding.rows, decoding.steps
        asking = math.ceil(way.prefill_replicas / way.replicas)
        share = min(MOST_LENT, asking * pool.lent_share)
        rates = way.replicas / (self.workload.output * steps / rows + pool.lent_s)
        prompts = np.minimum(rates, pool.within_s) / way.replicas * steps  # that run beside a step, on average
        lent_s = _percentile(prompts) * pool.lent_s
        lent_s = np.maximum(lent_s, asking * pool.longest_lent_s)
        return steps + np.minimum(lent_s, steps * share / (1 - share)), rates

    # -- memory workers --------------------------------------------------------------------------------------------

    def _with_memory(self, way: Way) -> "_Decoding":
        part, memory = way.decoding, self.models[way.second.kind]
        room = (1 - WATERMARK) * memory.kv_tokens * way.memory_workers
        most = min(2 * MOST_ROWS, way.chunk)
        rows, shared = self.copies.rows(room, part.lanes, most, part.replicas, way.memory_workers, AHEAD)
        steps = self._lane_steps(way, rows, 0.0).step_seconds(*_NO_CHUNK, 0)
        return _Decoding(rows * way.lanes_each, steps, shared)

    def _lane_steps(self, way: Way, rows: Floats, found: float) -> OffloadedSteps:
        """Return the steps of the lanes that decode, beside prompts of which ``found`` tokens are cached."""
        memory = self.models[way.second.kind]
        prefill, decode = (self.models[kind.kind].widened for kind in (way.prompts, way.compute))
        return OffloadedSteps(
            way=way.decoding,
            compute=decode,
            memory=memory,
            rows=rows,
            live=self.workload.live,
            dense_s=self.copies.whole_pass(decode, way.shape.ranks, rows),
            attends=self.prompts.attention(prefill, memory, way, np.array(found)),
        )

    def _beside_memory(self, way: Way, decoding: "_Decoding", pool: PrefillPool, found: float) -> tuple[Floats, Floats]:
        """Return, by batch, seconds of a decode step at PERCENTILE, and requests per second, while memory workers
        store K and V of the pool's prompts and attend to their cached prefixes."""
        lanes = self._lane_steps(way, decoding.rows / way.lanes_each, found)
        sequences, tokens = decoding.rows * way.replicas, self.workload.prompt - found
        rates = sequences / (self.workload.output * decoding.steps)
        prompts = np.minimum(rates, pool.within_s) * decoding.steps  # that are computed during a step, on average
        most = np.minimum(_percentile(prompts), pool.prompts_s * decoding.steps)
        mean, longest = (
            lanes.step_seconds(np.full_like(prompts, tokens), np.zeros_like(prompts), 0, elsewhere)
            + lanes.arrivals_s(tokens, elsewhere, decoding.steps, late)
            for elsewhere, late in ((prompts, False), (np.maximum(prompts, most), True))
        )
        return longest, sequences / (self.workload.output * mean)


_NO_CHUNK = np.ones(1), np.zeros(1)
"""Tokens of a chunk, and the seconds that it adds, where no lane has one."""


def _percentile(mean: Floats) -> Floats:
    """Return the percentile PERCENTILE of numbers of random arrivals."""
    return np.asarray(mean + DEVIATIONS * np.sqrt(mean))


@dataclass(frozen=True)
class _Decoding:
    """What a replica that decodes can do, by batch.

    Attributes:
        rows: Sequences of all its lanes.
        steps: Seconds of a step without prompts.
        shared: Prompt tokens found by a prefix cache.
    """

    rows: Floats
    steps: Floats
    shared: Floats


@dataclass(frozen=True)
class _Apart:
    """What prefill apart serves beside a number of cached tokens.

    Attributes:
        within_s: Prompts per second that the pool computes within the SLO on the time to a first token.
        found: Cached tokens of a prompt.
        pool: The replicas that prefill.
        longest: By batch, seconds of a decode step at PERCENTILE.
        rates: By batch, requests per second that the other replicas decode; 0 beyond the SLO.
    """

    within_s: float
    found: float
    pool: PrefillPool
    longest: Floats
    rates: Floats
