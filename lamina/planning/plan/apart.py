"""The closed form of ``serving`` for prefill apart from decode: replicas that only run prompts, and some that decode.

The pool that prefills and the one that decodes have a highest rate each; the lower one counts. Prefixes are cached
where sequences decode, so that prompts and decoding depend on each other by the room for prefixes, and by the attention
of prompts to these.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lamina.kv.placement import AHEAD, WATERMARK
from lamina.planning.plan.closed_form import PrefillPool, Prompts
from lamina.planning.plan.copies import LEAST_LOAD, Copies
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.nearest import Reach
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
    """Evaluates ways with prefill apart and local memory.

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

    def evaluate(self, way: Way) -> Capacity | None:
        """Return the capacity of a way; None if it keeps the SLOs at no load."""
        rows, steps, shared = self._decoding(way)
        if not len(rows):
            return None
        # Prefixes are cached, and shared, where sequences decode: a smaller batch leaves more room for them. The batch
        # need not be larger than what the prompts that are computed lead to.
        places = np.unique(np.linspace(0, len(rows) - 1, BATCHES).astype(int)).tolist()
        best: _Apart | None = None
        for place in places:
            found = min(float(shared[place]), self.workload.prompt - 1)
            if best is None or found != best.found:
                pool = self._prompts_apart(way, found)
            one = self._beside(pool, found, way, rows[: place + 1], steps[: place + 1])
            best = one if best is None or one.rate > best.rate else best
            if best.rate == best.pool.within_s > 0:
                break
        if best is None or not best.rate:
            return None
        # The smallest batch that draws as many tokens: it is what the rate leads to.
        batch = int(np.argmax(best.rates >= best.rate - 1e-12))
        usd = way.usd_per_hour(self.prices)
        return Capacity(
            way=way,
            requests_s=best.rate,
            batch=max(1, round(float(rows[batch]) * way.replicas)),
            step_s=float(steps[batch]),
            chunk_step_s=float(best.longest[batch]),
            prompt_share=1.0,
            compute_busy=best.rate / best.pool.prompts_s,
            memory_busy=best.rate / float(best.rates.max()),
            usd_per_hour=sum(usd),
            prompt_usd=usd[0] / sum(usd),
            found=best.found,
            seats=max(1, int(rows[self._beside(best.pool, best.found, way, rows, steps).rates > 0].max())),
        )

    def reach(self, way: Way) -> list[Reach]:
        """Return the targets that a way keeps at low load; none if requests do not fit."""
        rows, steps, shared = self._decoding(way)
        if not len(steps):
            return []
        found = min(float(shared[0]), self.workload.prompt - 1)
        pool = self._prompts_apart(way, found)
        longest = self._beside(pool, found, way, rows[:1], steps[:1]).longest
        return [Reach(way, pool.first_s(LEAST_LOAD), float(longest[0]) / SEATED)]

    def _decoding(self, way: Way) -> tuple[Floats, Floats, Floats]:
        """Return batches of a group that only decodes, the seconds of a step of each, and the prompt tokens found."""
        prefill, decode = (self.models[kind.kind].widened for kind in (way.prompts, way.compute))
        here, there = ((1 - WATERMARK) * self.copies.kv_room(kind, way) for kind in (way.compute, way.prompts))
        # Replicas that prefill hold KV too, if they attend for others.
        spreads = spreads_memory(way.tensor_parallel, (way.prompts, way.compute))
        there *= way.prefill_replicas / way.replicas if spreads else 0.0
        lenders = self.copies.lenders(way)
        rows, shared = self.copies.rows(here + there, 1, 2 * MOST_ROWS, ahead=AHEAD, lenders=lenders)
        most, _ = self.copies.rows(here, 1, 2 * MOST_ROWS, ahead=AHEAD, lenders=lenders)
        beyond = np.maximum(rows - most.max(initial=0.0), 0.0)
        attention = self.copies.attention(decode, way.tensor_parallel, rows, prefill, beyond)
        return rows, self.copies.stage_step(decode, way, rows, attention=attention), shared

    def _prompts_apart(self, way: Way, found: float) -> PrefillPool:
        """Return ``Prompts.prefill_pool`` of the workers for prompts."""
        prefill, decode = (self.models[kind.kind].widened for kind in (way.prompts, way.compute))
        return self.prompts.prefill_pool(way, prefill, decode, found, self.slo.ttft_s)

    def _beside(self, pool: PrefillPool, found: float, way: Way, rows: Floats, steps: Floats) -> "_Apart":
        """Return what replicas decode while they attend to the cached prefixes of the pool's prompts."""
        asking = math.ceil(way.prefill_replicas / way.replicas)
        share = min(MOST_LENT, asking * pool.lent_share)
        rates = way.replicas / (self.workload.output * steps / rows + pool.lent_s)
        prompts = np.minimum(rates, pool.within_s) / way.replicas * steps  # that run beside a step, on average
        lent_s = (prompts + DEVIATIONS * np.sqrt(prompts)) * pool.lent_s
        lent_s = np.maximum(lent_s, asking * pool.longest_lent_s)
        longest = steps + np.minimum(lent_s, steps * share / (1 - share))
        rates = np.where(longest <= SEATED * self.slo.tbt_s, rates, 0.0)
        within_s = pool.within_s if pool.within_s >= LEAST_LOAD * pool.prompts_s else 0.0
        return _Apart(min(within_s, float(rates.max())), found, pool, longest, rates)


@dataclass(frozen=True)
class _Apart:
    """What prefill apart serves beside a number of cached tokens.

    Attributes:
        rate: Requests per second.
        found: Cached tokens of a prompt.
        pool: The replicas that prefill.
        longest: By batch, seconds of a decode step at PERCENTILE.
        rates: By batch, requests per second that the other replicas decode; 0 beyond the SLO.
    """

    rate: float
    found: float
    pool: PrefillPool
    longest: Floats
    rates: Floats
