"""Evaluates ways to serve whole requests, prompts and decoding together, by a closed form.

In a steady state with b decoding sequences in a batch, every step generates b tokens, and per generated token P / O
prompt tokens must be computed (P, O: mean computed prompt tokens and output tokens of a request). A share
f = b P / (O c) of the steps has a chunk of c tokens. With T0 and T1 the seconds of a step without and with a chunk,

    requests per second = batches b / (O ((1 - f) T0 + f T1))

at the largest b for which KV fits, and the 99th percentiles of a step and of the time to first token are within the
SLOs. Prompts wait for chunks as in a queue with utilisation f (``closed_form.Prompts``).
``lamina.planning.simulate.trial`` simulates the best few ways.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lamina.kv.placement import AHEAD, WATERMARK
from lamina.planning.plan.closed_form import PERCENTILE, OffloadedSteps, PrefillPool, Prompts, scratch_tokens
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.nearest import Reach
from lamina.planning.plan.overheads import AS_PUBLISHED, NO_OVERHEAD, Engine
from lamina.planning.plan.planner import MOST_ROWS
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.ways import Capacity, Kind, Slo, Way, spreads_memory
from lamina.planning.plan.workload import Workload

MARGIN = 0.9
"""Share of the SLO on TBT that a step of the mean batch may take: batches and lengths vary."""

SEATED = 0.97
"""Share of the SLO on TBT for workers that only decode: ``Capacity.seats`` bounds their batch, only lengths vary."""

LONGEST_SHARE = 0.98
"""Share of the KV beside the weights that the longest request may take: requests take whole blocks."""

POINTS = 80
"""Batches to try. Near the SLOs, a fraction of a sequence more counts: batches are means."""

BATCHES = 12
"""Batches at which prompts are tried where prefixes are cached beside what decodes."""

LEAST_LOAD = 0.1
"""Share of what workers could do with prompts at which these are tried: workers that may do less keep no SLO."""

MOST_LENT = 0.9
"""Most of a step's time that is counted for attention to prefixes of other replicas' prompts."""

_EVERY_ROW = np.arange(1.0, 2 * MOST_ROWS + 1)


class Server:
    """Evaluates ways for one model and workload. Times of slices and of prompts are cached by kind and TP."""

    def __init__(
        self,
        shape: ModelShape,
        workload: Workload,
        models: Mapping[str, CostModel],
        prices: Prices,
        slo: Slo,
        engine: Engine = NO_OVERHEAD,
    ) -> None:
        self.engine = engine
        self.shape = shape
        self.workload = workload
        self.models = models
        self.prices = prices
        self.slo = slo
        self._prompts = Prompts(workload)
        self._passes: dict[tuple[str, int, bool], Floats] = {}

    def serving(self, workload: Workload) -> "Server":
        """Return a copy for another workload. Both share the times of slices, which do not depend on the workload."""
        other = Server(self.shape, workload, self.models, self.prices, self.slo, self.engine)
        other._passes = self._passes
        return other

    def evaluate(self, way: Way) -> Capacity | None:
        """Return the capacity of a way; None if weights, the longest request, an SLO or the budget rule it out."""
        if not self.slo.affords(sum(way.usd_per_hour(self.prices))) or self.unfit(way) is not None:
            return None
        if way.kind.divides_roles:
            return self._apart(way)
        loads = self._loads(way)
        return None if loads is None else self._best(loads)

    def reach(self, way: Way) -> list[Reach]:
        """Return targets that a way keeps, with the least TTFT and with the least TBT; none if requests do not fit."""
        if self.unfit(way) is not None:
            return []
        if way.kind.divides_roles:
            rows, steps, shared = self._decoding(way)
            if not len(steps):
                return []
            found = min(float(shared[0]), self.workload.prompt - 1)
            pool = self._prompts_apart(way, found)
            longest = self._beside(pool, found, way, rows[:1], steps[:1]).longest
            return [Reach(way, pool.first_s(LEAST_LOAD), float(longest[0]) / SEATED)]
        loads = self._loads(way)
        if loads is None:
            return []
        every, possible = loads.steps, np.flatnonzero(loads.share <= 1)
        best = {int(possible[times[possible].argmin()]) for times in (every.first, every.longest) if len(possible)}
        return [Reach(way, float(every.first[one]), float(every.longest[one]) / MARGIN) for one in best]

    def _loads(self, way: Way) -> "_Loads | None":
        return self._two_pools(way) if way.kind is Kind.OFFLOADED else self._one_pool(way)

    def unfit(self, way: Way) -> str | None:
        """Return why the weights or the longest request do not fit; None if they do."""
        shape, longest = self.shape, self.workload.longest
        degree = way.tensor_parallel
        copies = [way.compute, way.second] if way.kind.divides_roles else [way.compute]
        for kind in copies:
            if not self.models[kind.kind].weights_fit(degree):
                held = degree * self.models[kind.kind].usable_bytes / 1e9
                return f"{shape.weight_bytes / 1e9:.0f} GB of weights do not fit {degree} {kind.kind} ({held:.0f} GB)"
        if way.kind is Kind.OFFLOADED:
            room = self.models[way.second.kind].kv_tokens * way.memory_workers
            if longest > room:
                return f"the longest request has {longest} tokens; {way.memory_workers} {way.second.kind} hold {room}"
            return self._lacks_scratch(way)
        kind, count = copies[-1], self._lenders(way)
        room = int(LONGEST_SHARE * count * self._free(kind, degree, way.chunk))
        if longest > room:
            holders = f"{count * degree} {kind.kind} hold {room} beside the weights"
            return f"the longest request has {longest} tokens; {holders}"
        return None

    def _lacks_scratch(self, way: Way) -> str | None:
        """Return why scratch memory has no room for a step's chunk; None if it has, or the way needs none."""
        least, model = min(way.chunk, self.workload.longest), self.models[way.compute.kind]
        held = scratch_tokens(model, way.tensor_parallel, self.workload.longest, beside_kv=False)
        if not way.scratch or held >= least:
            return None
        return f"scratch memory of {way.tensor_parallel} {way.compute.kind} holds {held} tokens; a step has {least}"

    @staticmethod
    def _lenders(way: Way) -> int:
        """Return how many copies of the weights that decode hold the KV of one request together."""
        if way.kind is Kind.PREFILL:
            spread = spreads_memory(way.tensor_parallel, (way.compute, way.second))
            return way.memory_workers // way.tensor_parallel if spread else 1
        return way.replicas if way.kind is Kind.LOCAL and spreads_memory(way.tensor_parallel, [way.compute]) else 1

    def _free(self, kind: Hardware, degree: int, chunk: int) -> float:
        """Return the tokens of KV that fit beside one copy of the weights, with steps of up to ``chunk`` tokens."""
        usable = self.models[kind.kind].usable_bytes - self._host(self.models[kind.kind]).reserved(chunk)
        free = degree * usable - self.shape.weight_bytes
        return free / self.shape.kv_bytes_per_token

    # -- two pools, one pool, prefill apart -----------------------------------------------------------------------

    def _two_pools(self, way: Way) -> "_Loads | None":
        compute, memory = self.models[way.compute.kind].widened, self.models[way.second.kind]
        workers, lanes, degree = way.memory_workers, way.lanes, way.tensor_parallel
        # Requests are admitted with room for the tokens that they have, and slots left for all to grow. A sequence
        # whose worker is full goes on elsewhere, so that the pool is one.
        room = (1 - WATERMARK) * memory.kv_tokens * workers
        rows, found = self._rows(room, lanes, way.chunk, copies=workers, ahead=AHEAD)
        if not len(rows):
            return None
        chunk, share = self._chunks(rows, way.chunk, found)
        attends = self._prompts.attention(compute, memory, way, found)
        live, dense = self.workload.live, self._pass(compute, degree, rows)
        model = OffloadedSteps(
            way=way,
            compute=compute,
            memory=memory,
            rows=rows,
            live=live,
            parts=min(workers, math.ceil(live / (way.segment or memory.kv_tokens))),
            dense_s=dense,
            attends=attends,
        )
        added = self._pass(compute, degree, rows + chunk) + chunk * attends.own_s - dense
        times = model.steps(chunk, share, added)
        average = times.average
        prompts = _prompts_share(rows, share, dense, added)
        busy = model.together / model.replicas * (dense + share * added) / average
        memory_busy = lanes * (model.attention_s + share * chunk * attends.prefix_load_s / workers) / average
        waiting = np.minimum(share * times.with_chunk / average, 1.0)
        first = self._prompts.first_token_s(chunk, found, waiting, times.with_chunk, times.longest, lanes)
        steps = _Steps(times.plain, times.longest, average, first)
        return _Loads(way, rows * lanes, share, steps, found, prompts, busy, memory_busy)

    def _one_pool(self, way: Way) -> "_Loads | None":
        model, degree = self.models[way.compute.kind], way.tensor_parallel
        local, lenders = way.kind is Kind.LOCAL, self._lenders(way)
        model = model.widened if local else model
        # Lamina keeps slots free for sequences to grow; vLLM preempts.
        room = (1 - WATERMARK if local else 1) * self._free(way.compute, degree, way.chunk)
        rows, found = self._rows(room, 1, way.chunk, ahead=AHEAD if local else 0, lenders=lenders)
        if not len(rows):
            return None
        chunk, share = self._chunks(rows, way.chunk, found)
        attends = self._prompts.attention(model, model, way, found)
        plain = self._group_step(model, degree, rows)
        if self.workload.live > room:  # most sequences are divided: each attention waits for other copies
            plain = plain + self.shape.layers * model.fits.runtime.round_trip_s
        attention = plain - self._pass(model, degree, rows)

        def with_chunk(tokens: Floats, token_s: Floats) -> Floats:
            return np.asarray(self._pass(model, degree, rows + tokens) + attention + tokens * token_s)

        mixed = with_chunk(chunk, attends.own_s)
        average = (1 - share) * plain + share * mixed
        prompts = _prompts_share(rows, share, plain, mixed - plain)
        late = with_chunk(way.chunk - rows, attends.late_own_s)
        longest = np.where(share < 1 - PERCENTILE, plain, late)
        ones = np.ones_like(rows)
        waiting = np.minimum(share * mixed / average, 1.0)
        first = self._prompts.first_token_s(chunk, found, waiting, mixed, longest, way.replicas)
        steps = _Steps(plain, longest, average, first)
        return _Loads(way, rows * way.replicas, share, steps, found, prompts, ones, ones)

    def _apart(self, way: Way) -> Capacity | None:
        groups = way.memory_workers // way.tensor_parallel
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
            batch=max(1, round(float(rows[batch]) * groups)),
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

    def _decoding(self, way: Way) -> tuple[Floats, Floats, Floats]:
        """Return batches of a group that only decodes, the seconds of a step of each, and the prompt tokens found."""
        degree, groups = way.tensor_parallel, way.memory_workers // way.tensor_parallel
        prefill, decode = (self.models[kind.kind].widened for kind in (way.compute, way.second))
        here, there = ((1 - WATERMARK) * self._free(kind, degree, way.chunk) for kind in (way.second, way.compute))
        # Replicas that prefill hold KV too, if they attend for others.
        there *= way.replicas / groups if spreads_memory(degree, (way.compute, way.second)) else 0.0
        rows, shared = self._rows(here + there, 1, 2 * MOST_ROWS, ahead=AHEAD, lenders=self._lenders(way))
        most, _ = self._rows(here, 1, 2 * MOST_ROWS, ahead=AHEAD, lenders=self._lenders(way))
        beyond = np.maximum(rows - most.max(initial=0.0), 0.0)
        return rows, self._group_step(decode, degree, rows, prefill, beyond), shared

    def _prompts_apart(self, way: Way, found: float) -> PrefillPool:
        """Return ``Prompts.prefill_pool`` of the workers for prompts."""
        prefill, decode = (self.models[kind.kind].widened for kind in (way.compute, way.second))
        return self._prompts.prefill_pool(way, prefill, decode, found, self.slo.ttft_s)

    def _beside(self, pool: PrefillPool, found: float, way: Way, rows: Floats, steps: Floats) -> "_Apart":
        """Return what replicas decode while they attend to the cached prefixes of the pool's prompts."""
        groups = way.memory_workers // way.tensor_parallel
        asking = math.ceil(way.replicas / groups)
        share = min(MOST_LENT, asking * pool.lent_share)
        longest = steps + np.minimum(asking * pool.longest_lent_s, steps * share / (1 - share))
        rates = groups / (self.workload.output * steps / rows + pool.lent_s)
        rates = np.where(longest <= SEATED * self.slo.tbt_s, rates, 0.0)
        within_s = pool.within_s if pool.within_s >= LEAST_LOAD * pool.prompts_s else 0.0
        return _Apart(min(within_s, float(rates.max())), found, pool, longest, rates)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _best(self, loads: "_Loads") -> Capacity | None:
        way, steps = loads.way, loads.steps
        in_time = (steps.longest <= MARGIN * self.slo.tbt_s) & (steps.first <= self.slo.ttft_s)
        allowed = (loads.share <= 1) & in_time
        rates = np.where(allowed, loads.sequences / (self.workload.output * steps.average), 0.0)
        best = int(rates.argmax())
        if not rates[best]:
            return None
        compute_usd, memory_usd = way.usd_per_hour(self.prices)
        return Capacity(
            way=way,
            requests_s=float(rates[best]),
            batch=max(1, round(float(loads.sequences[best]))),
            step_s=float(steps.plain[best]),
            chunk_step_s=float(steps.longest[best]),
            prompt_share=float(loads.prompts[best]),
            compute_busy=float(loads.busy[best]),
            memory_busy=float(loads.memory_busy[best]) if way.memory else 0.0,
            usd_per_hour=compute_usd + memory_usd,
            prompt_usd=float(loads.prompts[best]) * compute_usd / (compute_usd + memory_usd),
            found=float(loads.found[best]),
        )

    def _rows(
        self, room: float, lanes: int, chunk: int, copies: int = 1, ahead: int = 0, lenders: int = 1
    ) -> tuple[Floats, Floats]:
        """Return the decode rows of a batch to try, and the prompt tokens found by a prefix cache in the free KV.

        Args:
            room: Tokens of KV.
            lanes: Batches that share it.
            chunk: Most rows of a step.
            copies: Copies of the prefix that all sequences share.
            ahead: Tokens kept free for each sequence.
            lenders: Number of such rooms that hold the sequences of all together.
        """
        reuse = self.workload.reuse
        common = copies * reuse.shared
        each = self.workload.live - reuse.shared + ahead
        most = min((room - common) / each / lanes, chunk - 1, MOST_ROWS)
        if most * lanes * lenders < 1:
            return np.zeros(0), np.zeros(0)
        full = np.arange(128, most, 128)  # these fill the tiles of matrix products
        fewest = min(most, 0.25, LEAST_LOAD * chunk * self.workload.output / self.workload.prompt)
        rows = np.union1d(np.geomspace(fewest, most, POINTS), full)
        left = room - common - rows * lanes * each
        return rows, np.minimum(reuse.found_tokens(left + reuse.shared, rows * lanes), self.workload.prompt - 1)

    def _chunks(self, rows: Floats, chunk: int, found: Floats) -> tuple[Floats, Floats]:
        size = chunk - rows  # near capacity, prompts wait and fill the step
        return size, rows * (self.workload.prompt - found) / self.workload.output / size

    def _group_step(
        self,
        model: CostModel,
        degree: int,
        rows: Floats,
        other: CostModel | None = None,
        beyond: Floats | float = 0.0,
    ) -> Floats:
        """Return seconds of a decode step on a copy of the weights.

        Args:
            model: Cost model of a device of the copy.
            degree: Devices of the copy.
            rows: Sequences that decode.
            other: Cost model of a device of the copy that attends to KV for which this one has no room.
            beyond: Sequences whose KV is there.
        """
        here = rows - beyond
        attention = model.attention_seconds(here * self.workload.live, here, 1 / degree)
        if other is not None:
            there = other.attention_seconds(beyond * self.workload.live, beyond, 1 / degree)
            messages = other.fits.runtime.round_trip_s + other.wire_seconds(other.exchange_bytes(beyond)) / degree
            attention = np.maximum(attention, np.where(beyond > 0, there + messages, 0.0))
        return np.asarray(self._pass(model, degree, rows) + self.shape.layers * attention)

    def _host(self, model: CostModel) -> Engine:
        """Return the engine's overheads; none if a profile of the kind includes them."""
        return self.engine if model.fits.runtime is AS_PUBLISHED else NO_OVERHEAD

    def _pass(self, model: CostModel, degree: int, rows: Floats) -> Floats:
        key = (model.hardware.kind, degree, model.widens)
        if key not in self._passes:
            host = self._host(model)
            self._passes[key] = model.decode_seconds(_EVERY_ROW, degree) + host.step_s + host.step_row_s * _EVERY_ROW
        return np.interp(rows, _EVERY_ROW, self._passes[key])


def _prompts_share(rows: Floats, share: Floats, plain: Floats, added: Floats) -> Floats:
    """Return the share of the time of steps that prompts take.

    Args:
        rows: Mean number of sequences that decode. Below 1, this is the share of the steps in which a sequence decodes;
            the other steps run a chunk alone.
        share: Share of the steps that have a chunk.
        plain: Seconds of a step without a chunk.
        added: Seconds that a chunk adds.
    """
    decodes = np.minimum(rows, 1.0)
    prompts = share * (added + (1 - decodes) * plain)
    return np.asarray(prompts / (prompts + decodes * plain))


@dataclass(frozen=True)
class _Steps:
    """Seconds by batch: a step without a chunk, at PERCENTILE, on average; the time to first token at PERCENTILE."""

    plain: Floats
    longest: Floats
    average: Floats
    first: Floats


@dataclass(frozen=True)
class _Loads:
    """What a way does by batch.

    Attributes:
        way: The way.
        sequences: Sequences that decode at once.
        share: Share of the steps that have a chunk.
        steps: Seconds of steps, and to a first token.
        found: Prompt tokens found by a prefix cache.
        prompts: Share of the compute pool's time spent on prompts.
        busy: Utilisation of the compute pool.
        memory_busy: Utilisation of the memory pool.
    """

    way: Way
    sequences: Floats
    share: Floats
    steps: _Steps
    found: Floats
    prompts: Floats
    busy: Floats
    memory_busy: Floats


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
