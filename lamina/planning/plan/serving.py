"""Evaluates ways to serve whole requests, prompts and decoding together, by a closed form.

In a steady state with b decoding sequences in a batch, every step generates b tokens, and per generated token P / O
prompt tokens must be computed (P, O: mean computed prompt tokens and output tokens of a request). A share
f = b P / (O c) of the steps has a chunk of c tokens. With T0 and T1 the seconds of a step without and with a chunk,

    requests per second = batches b / (O ((1 - f) T0 + f T1))

at the largest b for which KV fits, and the 99th percentiles of a step and of the time to first token are within the
SLOs. Prompts wait for chunks as in a queue with utilisation f (``closed_form.Prompts``).
``lamina.planning.simulate.trial`` simulates the best few ways.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lamina.kv.placement import AHEAD, WATERMARK
from lamina.planning.plan.apart import Apart
from lamina.planning.plan.closed_form import PERCENTILE, Prompts, scratch_tokens
from lamina.planning.plan.copies import Copies, Passes
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.nearest import Reach
from lamina.planning.plan.offloaded_steps import OffloadedSteps
from lamina.planning.plan.overheads import NO_OVERHEAD, Engine
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.stages import chunks_met
from lamina.planning.plan.ways import Capacity, Kind, Slo, Way
from lamina.planning.plan.workload import Workload

MARGIN = 0.9
"""Share of the SLO on TBT that a step of the mean batch may take: batches and lengths vary."""

LONGEST_SHARE = 0.98
"""Share of the KV beside the weights that the longest request may take: requests take whole blocks."""

WAITED = 0.5
"""Stages whose time a step with a long chunk waits for others, on average, as lanes are not evenly spaced."""


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
        passes: Passes | None = None,
    ) -> None:
        """``passes``: cached times of slices; None: none yet."""
        self.engine = engine
        self.shape = shape
        self.workload = workload
        self.models = models
        self.prices = prices
        self.slo = slo
        self._prompts = Prompts(workload)
        self._copies = Copies(shape, workload, models, engine, passes)
        self._apart = Apart(workload, models, prices, slo, self._prompts, self._copies)

    def serving(self, workload: Workload) -> "Server":
        """Return a copy for another workload. Both share the times of slices, which do not depend on the workload."""
        passes = self._copies.passes
        return Server(self.shape, workload, self.models, self.prices, self.slo, self.engine, passes)

    def evaluate(self, way: Way) -> Capacity | None:
        """Return the capacity of a way; None if weights, the longest request, an SLO or the budget rule it out."""
        if not self.slo.affords(sum(way.usd_per_hour(self.prices))) or self.unfit(way) is not None:
            return None
        if way.kind.divides_roles:
            return self._apart.evaluate(way)
        loads = self._loads(way)
        return None if loads is None else self._best(loads)

    def reach(self, way: Way) -> list[Reach]:
        """Return targets that a way keeps, with the least TTFT and with the least TBT; none if requests do not fit."""
        if self.unfit(way) is not None:
            return []
        if way.kind.divides_roles:
            return self._apart.reach(way)
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
        for kind, copy in zip((way.prefill, way.compute), way.shapes, strict=True):
            if kind is not None and not self._copies.fit(kind, copy):
                held = f"{copy.workers} {kind.kind} ({copy.workers * self.models[kind.kind].usable_bytes / 1e9:.0f} GB)"
                return f"{shape.weight_bytes / 1e9:.0f} GB of weights do not fit {held}"
        if way.memory:
            room = self.models[way.second.kind].kv_tokens * way.memory_workers
            if longest > room:
                return f"the longest request has {longest} tokens; {way.memory_workers} {way.second.kind} hold {room}"
            return self._lacks_scratch(way)
        count = self._copies.lenders(way)
        room = int(LONGEST_SHARE * count * self._copies.kv_room(way.compute, way.shape, way.chunk))
        if longest > room:
            holders = f"{count * way.shape.workers} {way.compute.kind} hold {room} beside the weights"
            return f"the longest request has {longest} tokens; {holders}"
        return None

    def _lacks_scratch(self, way: Way) -> str | None:
        """Return why scratch memory has no room for a step's chunk; None if it has, or the way needs none."""
        least, model = min(way.chunk, self.workload.longest), self.models[way.prompts.kind]
        devices = way.shapes[0].workers
        held = scratch_tokens(model, devices, self.workload.longest, beside_kv=False)
        if not way.scratch or held >= least:
            return None
        return f"scratch memory of {devices} {way.prompts.kind} holds {held} tokens; a step has {least}"

    # -- two pools, one pool -----------------------------------------------------------------------

    def _two_pools(self, way: Way) -> "_Loads | None":
        compute, memory = self.models[way.compute.kind].widened, self.models[way.second.kind]
        workers, lanes, degree = way.memory_workers, way.lanes, way.shape.ranks
        # Requests are admitted with room for the tokens that they have, and slots left for all to grow. A sequence
        # whose worker is full goes on elsewhere, so that the pool is one.
        room = (1 - WATERMARK) * memory.kv_tokens * workers
        rows, found = self._copies.rows(room, lanes, way.chunk, way.replicas, workers, AHEAD)
        if not len(rows):
            return None
        chunk, share = self._chunks(rows, way.chunk, found)
        attends = self._prompts.attention(compute, memory, way, found)
        live, dense = self.workload.live, self._copies.whole_pass(compute, degree, rows)
        model = OffloadedSteps(
            way=way,
            compute=compute,
            memory=memory,
            rows=rows,
            live=live,
            dense_s=dense,
            attends=attends,
        )
        added = self._copies.whole_pass(compute, degree, rows + chunk) + chunk * attends.own_s - dense
        times = model.steps(chunk, share, added)
        average = times.average
        prompts = _prompts_share(rows, share, dense, added)
        busy = model.together / model.replicas * (dense + share * added) / average
        memory_busy = lanes * (model.attention_s + share * chunk * attends.prefix_load_s / workers) / average
        waiting = np.minimum(share * times.with_chunk / average, 1.0)
        attending = chunk * (attends.own_s + attends.prefix_s) / times.with_chunk
        first = self._prompts.first_token_s(
            chunk, found, waiting, times.with_chunk, times.longest, np.minimum(attending, 1.0), lanes
        )
        steps = _Steps(times.plain, times.longest, average, first)
        return _Loads(way, rows * lanes, share, steps, found, prompts, busy, memory_busy)

    def _one_pool(self, way: Way) -> "_Loads | None":
        model, degree, stages = self.models[way.compute.kind], way.shape.ranks, way.shape.stages
        local, lenders = way.kind is Kind.LOCAL, self._copies.lenders(way)
        model = model.widened if local else model
        # Lamina keeps slots free for sequences to grow; vLLM preempts.
        room = (1 - WATERMARK if local else 1) * self._copies.kv_room(way.compute, way.shape, way.chunk)
        rows, found = self._copies.rows(room, stages, way.chunk, ahead=AHEAD if local else 0, lenders=lenders)
        if not len(rows):
            return None
        chunk, share = self._chunks(rows, way.chunk, found)
        attends = self._prompts.attention(model, model, way, found)
        attention = self._copies.attention(model, degree, rows)
        if self.workload.live > room:  # most sequences are divided: each attention waits for other copies
            attention = attention + model.fits.runtime.round_trip_s

        def step(tokens: Floats | float, token_s: Floats | float) -> Floats:
            each = attention + tokens * token_s / self.shape.layers
            return self._copies.stage_step(model, way.shape, rows, tokens, each)

        plain, mixed = step(0.0, 0.0), step(chunk, attends.slowest_own_s)
        met = chunks_met(share, stages)
        average = (1 - met) * plain + met * mixed
        prompts = _prompts_share(rows, share, plain, mixed - plain)
        late = step(way.chunk - rows, attends.late_own_s)
        some = 1 - (1 - np.minimum(share, 1.0)) ** stages  # of the steps, with a chunk in one of the replica's lanes
        longest = np.where(some < 1 - PERCENTILE, plain, late * (1 if stages == 1 else 1 + WAITED / stages))
        ones = np.ones_like(rows)
        waiting = np.minimum(share * mixed / average, 1.0)
        # A prompt's chunks follow each other through the stages.
        attending = np.minimum(chunk * attends.own_s / stages / mixed, 1.0)
        first = self._prompts.first_token_s(chunk, found, waiting, mixed, longest, attending, way.replicas, stages)
        first = first + (stages - 1) * longest
        steps = _Steps(stages * plain, stages * longest, stages * average, first)
        return _Loads(way, rows * way.replicas * stages, share, steps, found, prompts, ones, ones)

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

    def _chunks(self, rows: Floats, chunk: int, found: Floats) -> tuple[Floats, Floats]:
        size = chunk - rows  # near capacity, prompts wait and fill the step
        return size, rows * (self.workload.prompt - found) / self.workload.output / size


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
