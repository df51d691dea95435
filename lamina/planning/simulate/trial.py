"""Finds the highest load of a way within the SLOs, by simulations at different rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lamina.planning.plan.closed_form import PERCENTILE
from lamina.planning.plan.fit_store import ProfileStore
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.nearest import Reach
from lamina.planning.plan.overheads import NO_OVERHEAD, Engine
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.ways import Capacity, Slo, Way
from lamina.planning.plan.workload import TracedRequest, Workload, one_a_second
from lamina.planning.simulate import System, simulate
from lamina.planning.simulate.result import RequestLog, Result, State
from lamina.planning.simulate.scenario import Arrivals, Deployment, draw, replay

FEWEST, MOST = 400, 12_000
TURNOVERS = 10
"""A run has so many times as many requests as decode at once, between FEWEST and MOST. With 4, runs ended before a
queue broke the SLO on TTFT, and requests that took longer than half of the run looked like a growing queue."""

LEAST_TURNOVERS, LEAST_REQUESTS = 2.5, 100
RUN_STEPS, WAY_STEPS = 8_000, 40_000
"""Steps of a run, and of all runs of a way, above which runs get fewer requests, down to LEAST_TURNOVERS and
LEAST_REQUESTS, and the search fewer runs, down to LEAST_ROUNDS: outputs of thousands of tokens would otherwise take
minutes. ``Trial.error`` then is larger."""

STEP_UP = 1.25
TOLERANCE = 0.04
"""The search ends when the lowest rate that does not hold is within this share of the highest that does."""

NEAR, MOST_FALLS = 0.7, 8
"""While no rate holds, the next is lower by STEP_UP if it is above this share of the closed form's, else by half; so
many times at most. These runs are short, since they end when the SLOs are missed."""

UNSERVED = 0.06
"""Share of the requests above which they count as more than a way serves: queues grow, which a run of a few minutes
does not show in its percentiles."""

MOST_REPLAYED = 1000
"""Requests of a recorded trace whose prompts have something in common that plans are for: these are replayed in order.
The load that holds depends on how many there are: with fewer, queues have no time to grow."""

WORSE = 3.0
"""Ways whose requests cost more than so many times those of the cheapest simulated so far are given up."""

LOW, LOW_REQUESTS = 0.1, 50
"""A low load, over the closed form's, and the number of requests that show what a way keeps there."""

LEAST_ROUNDS, ROUNDS = 4, 8
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The highest load within the SLOs. Costs are divided between prompts and outputs as in the closed form.

    Attributes:
        capacity: The closed form's capacity.
        rate: Offered requests per second.
        error: Relative error of ``rate``: the distance to the lowest rate beyond the SLOs, and the sampling error.
        result: Result of the run at ``rate``.
        requests: Number of requests of the run.
        workload: Mean lengths of the requests.
    """

    capacity: Capacity
    rate: float
    error: float
    result: Result
    requests: int
    workload: Workload

    @property
    def requests_s(self) -> float:
        """Requests per second, as `lamina simulate` prints them."""
        return self.result.served_requests_s

    @property
    def way(self) -> Way:
        """The simulated way."""
        return self.capacity.way

    @property
    def usd_per_request(self) -> float:
        """Dollars of one request."""
        return self.capacity.usd_per_hour / 3600 / self.requests_s

    @property
    def usd_per_million_in(self) -> float:
        """Dollars of a million prompt tokens."""
        return self.usd_per_request * self.capacity.prompt_usd / self.workload.prompt * 1e6

    @property
    def usd_per_million_out(self) -> float:
        """Dollars of a million output tokens."""
        return self.usd_per_request * (1 - self.capacity.prompt_usd) / self.workload.output * 1e6


class Course:
    """Simulates ways for one model, trace and set of SLOs. Every way serves the same requests at every rate."""

    def __init__(
        self,
        shape: ModelShape,
        workload: Workload,
        trace: Sequence[TracedRequest],
        prices: Prices,
        slo: Slo,
        profile: ProfileStore | None = None,
        turnovers: int = TURNOVERS,
        engine: Engine = NO_OVERHEAD,
    ) -> None:
        """``trace``: requests whose lengths are drawn; empty: all requests have the workload's mean lengths.

        If prompts share prefixes, the trace's first requests are replayed in order. ``turnovers``: see ``TURNOVERS``.
        """
        self._shape = shape
        self._workload = workload
        lengths = max(1, round(workload.prompt)), max(1, round(workload.output))
        self._trace = list(trace) or one_a_second(*lengths)
        self.replays = any(request.content for request in self._trace)
        if self.replays:
            self._trace.sort(key=lambda request: request.arrival_s)
        self._prices = prices
        self._slo = slo
        self._profile = profile
        self._turnovers = turnovers
        self._engine = engine

    @property
    def prices(self) -> str:
        """Name of the market."""
        return self._prices.name

    def rate_scale(self, rate: float, requests: int) -> float:
        """Return ``lamina simulate --rate-scale`` for about ``rate`` requests per second, rounded to four digits."""
        replayed = self._trace[:requests] if self.replays else self._trace
        times = [request.arrival_s for request in replayed]
        return float(f"{rate * (max(times) - min(times)) / max(1, len(times) - 1):.4g}")

    def requests(self, capacity: Capacity) -> int:
        """Return the number of requests of a run."""
        if self.replays:
            return min(len(self._trace), max(MOST_REPLAYED, self._turnovers * capacity.batch // 2))
        needed = max(FEWEST, self._turnovers * capacity.batch)
        affordable = RUN_STEPS / self._steps_of_request(capacity)
        return int(min(MOST, needed, max(affordable, LEAST_REQUESTS, LEAST_TURNOVERS * capacity.batch)))

    def rounds(self, capacity: Capacity) -> int:
        """Return the most runs of a search for the highest load."""
        return max(LEAST_ROUNDS, min(ROUNDS, int(WAY_STEPS / self.steps(capacity))))

    def steps(self, capacity: Capacity) -> float:
        """Return the approximate number of steps of a run."""
        return self.requests(capacity) * self._steps_of_request(capacity)

    def _steps_of_request(self, capacity: Capacity) -> float:
        """Return the steps per request; every group of sequences that decode together has its own steps."""
        way, workload = capacity.way, self._workload
        groups = way.decoding.lanes if way.memory else way.replicas * way.shape.stages
        return workload.output * groups / capacity.batch + (workload.prompt - capacity.found) / way.chunk

    def arrivals(self, requests: int, rate: float) -> Arrivals:
        """Return requests drawn from the trace (`lamina simulate --draw`), or its first requests (`--first`)."""
        scale = self.rate_scale(rate, requests)
        return replay(self._trace[:requests], scale) if self.replays else draw(self._trace, requests, SEED, scale)

    def deployment(self, capacity: Capacity) -> Deployment:
        """Return the deployment of a way, with ``max_num_seqs`` for the closed form's batch."""
        way = capacity.way
        return Deployment(
            model=self._shape,
            compute=way.compute,
            compute_workers=way.compute_workers,
            memory=way.memory,
            memory_workers=way.memory_workers,
            prefill=way.prefill,
            prefill_workers=way.prefill_workers,
            local=way.has_local,
            shape=way.shape,
            prefill_shape=way.prefill_shape,
            lanes=way.lanes if way.memory else None,
            pipelining="rotational" if way.rotates else "fixed" if way.memory else "auto",
            max_num_seqs=min(way.chunk, capacity.seats or max(16, 2 * capacity.batch)),
            max_num_batched_tokens=way.chunk,
            kv_tokens_per_worker=way.segment,
            prompt_attention="memory" if not way.scratch else "compute" if way.memory else "auto",
            profile=self._profile,
            prices=self._prices,
            engine=self._engine.lamina if way.kind.is_lamina else self._engine,
        )

    def simulate(self, capacity: Capacity, rate: float, requests: int) -> Result:
        """Run one simulation at an offered rate, until all requests have ended or the SLOs are missed."""
        system = System(capacity.way.kind.system)
        return simulate(self.deployment(capacity), self.arrivals(requests, rate), system, stops=self.misses_slos)

    def misses_slos(self, log: RequestLog, now_s: float) -> bool:
        """Return whether the SLOs are missed whatever follows: more requests or tokens are late than 1%."""
        slo, arrivals, count = self._slo, log.arrivals, len(log.arrivals)
        may_be_late = count - 1 - math.floor(PERCENTILE * (count - 1))
        waits = np.where(np.isnan(log.first_s), now_s, log.first_s) - arrivals.arrival_s
        stalls = waits + np.nan_to_num(log.longest_gap_s)
        late = (waits > slo.ttft_s).sum(), (stalls > slo.ttft_s + slo.tbt_s).sum()
        gaps, counts = log.gaps
        tokens = int(arrivals.output.sum()) - count
        in_time = tokens - int(counts[gaps > slo.tbt_s].sum())
        return max(late) > may_be_late or in_time < PERCENTILE * tokens

    def reach(self, capacity: Capacity) -> Reach:
        """Return the targets that a way keeps if a few requests arrive at a low rate."""
        arrivals = self.arrivals(LOW_REQUESTS, LOW * capacity.requests_s)
        result = simulate(self.deployment(capacity), arrivals, System(capacity.way.kind.system))
        gaps = 0.0 if math.isnan(result.tbt_s.p99) else result.tbt_s.p99
        return Reach(capacity.way, max(result.ttft_s.p99, result.stalled_s.p99 - gaps), gaps)

    def within_slos(self, result: Result) -> bool:
        """Return whether all requests were served, the queue did not grow, and TTFT, TBT and stalls keep the SLOs."""
        log, gaps, slo = result.log, result.tbt_s.p99, self._slo
        return (
            log.count(State.FINISHED) == len(log.arrivals)
            and result.growth <= UNSERVED
            and result.ttft_s.p99 <= slo.ttft_s
            and result.stalled_s.p99 <= slo.ttft_s + slo.tbt_s
            and (math.isnan(gaps) or gaps <= slo.tbt_s)
        )

    def sampling_error(self, requests: int) -> float:
        """Return the relative standard error of the load of ``requests`` random requests, by times and by tokens."""
        tokens = np.array([one.prompt + one.output for one in self._trace], np.float64)
        return float(math.sqrt((1 + (tokens.std() / tokens.mean()) ** 2) / requests))

    def highest_load(
        self,
        capacity: Capacity,
        most_usd: float = math.inf,
        rounds: int = ROUNDS,
        tolerance: float = TOLERANCE,
    ) -> Trial | None:
        """Return the highest rate within the SLOs, to ``tolerance``.

        ``rounds``: most runs, from the first that holds. None if no rate within the SLOs lets a request cost less than
        ``most_usd``.
        """
        requests = self.requests(capacity)
        useless = capacity.usd_per_hour / 3600 / most_usd
        rate, low, high = max(0.9 * capacity.requests_s, useless), 0.0, math.inf
        kept: Result | None = None
        left, falls = min(rounds, self.rounds(capacity)), MOST_FALLS
        while left and falls:
            result = self.simulate(capacity, rate, requests)
            if self.within_slos(result):
                low, kept = rate, result
            else:
                high = rate
            if (low and high <= low * (1 + tolerance)) or high <= useless:
                break
            if low:
                left -= 1
                rate = math.sqrt(low * high) if high < math.inf else low * STEP_UP
            else:
                falls -= 1
                rate = high / (STEP_UP if high > NEAR * capacity.requests_s else 2)
        if kept is None or low < useless:
            return None
        bracket = high / low - 1 if high < math.inf else STEP_UP - 1
        error = math.hypot(bracket, 0.0 if self.replays else self.sampling_error(requests))
        return Trial(capacity=capacity, rate=low, error=error, result=kept, requests=requests, workload=self._workload)

    def ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return trials by cost; ties with the cheapest come first, by their waits relative to the SLOs."""
        found = sorted(trials, key=lambda one: (one.usd_per_request, -one.requests_s))
        tied = [one for one in found if is_tie(one, found[0])]
        slo = self._slo

        def waits(one: Trial) -> float:
            gaps = one.result.tbt_s.p99
            return max(one.result.stalled_s.p99 / slo.ttft_s, 0.0 if math.isnan(gaps) else gaps / slo.tbt_s)

        return sorted(tied, key=waits) + [one for one in found if not any(one is other for other in tied)]


def is_tie(one: Trial, other: Trial) -> bool:
    """Return whether the costs of two ways differ by less than the larger error of both."""
    ratio = one.usd_per_request / other.usd_per_request
    return max(ratio, 1 / ratio) - 1 <= max(one.error, other.error)
