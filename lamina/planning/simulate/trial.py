"""Finds how much load a way to serve takes, by simulating it at rising rates until a percentile breaks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamina.planning.plan.fit_store import ProfileStore
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.ways import Capacity, Kind, Slo, Way
from lamina.planning.plan.workload import TracedRequest, Workload
from lamina.planning.simulate import System, simulate
from lamina.planning.simulate.arrivals import Arrivals, draw, replay
from lamina.planning.simulate.deployment import Deployment
from lamina.planning.simulate.result import Result, State

FEWEST, MOST = 400, 12_000
TURNOVERS = 16
"""A run has at least so many times as many requests as decode at once, between FEWEST and MOST. With 4, runs ended
before a queue broke the SLO on TTFT, and requests that took longer than half of the run looked like a growing queue."""

STEP_UP, STEP_DOWN = 1.25, 1.12
TOLERANCE = 0.04
"""Rates are tried in factors of these, and then between the highest that holds and the lowest that does not. Downwards
in small ones at first: where the longest prompts alone take most of an SLO, chance decides at several rates."""

SUSTAINED = 0.94
"""Share of the offered requests that must finish while the second half arrives: with fewer, queues grow, which a run of
a few minutes does not show in its percentiles."""

MOST_REPLAYED = 1000
"""Requests of a trace whose prompts have something in common that plans are for: these are replayed in order. The load
that holds depends on how many there are: with fewer, queues have no time to grow."""

WORSE = 3.0
"""Ways whose requests cost more than so many times those of the cheapest simulated so far are given up."""

ROUNDS = 8
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The highest load within the SLOs. Dollars of prompts and outputs together are what the pools cost, divided as the
    closed form divides the compute pool's time between them.

    Attributes:
        capacity: the closed form's.
        rate: requests per second that the run was made for.
        result, requests: of the run at that load, and how many it had.
        workload: means of what it served.
    """

    capacity: Capacity
    rate: float
    result: Result
    requests: int
    workload: Workload

    @property
    def requests_s(self) -> float:
        """Requests per second, as `lamina simulate` prints them of the same run."""
        return self.result.served_requests_s

    @property
    def way(self) -> Way:
        """What was simulated."""
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
    ) -> None:
        """``trace``: the requests whose lengths are drawn; empty: all have the workload's mean lengths. If prompts have
        something in common, the first ones are replayed in order instead. ``turnovers``: see ``TURNOVERS``."""
        self._shape = shape
        self._workload = workload
        lengths = max(1, round(workload.prompt)), max(1, round(workload.output))
        self._trace = list(trace) or [TracedRequest(second, *lengths) for second in (0.0, 1.0)]
        self.replays = any(request.content for request in self._trace)
        if self.replays:
            self._trace.sort(key=lambda request: request.arrival_s)
        self._prices = prices
        self._slo = slo
        self._profile = profile
        self._turnovers = turnovers

    @property
    def prices(self) -> str:
        """The market that prices the pools."""
        return self._prices.name

    def rate_scale(self, rate: float, requests: int) -> float:
        """``lamina simulate --rate-scale`` for about ``rate`` requests per second, in four digits to be typed."""
        replayed = self._trace[:requests] if self.replays else self._trace
        times = [request.arrival_s for request in replayed]
        return float(f"{rate * (max(times) - min(times)) / max(1, len(times) - 1):.4g}")

    def requests(self, capacity: Capacity) -> int:
        """Return the number of requests of a run."""
        fewest = MOST_REPLAYED if self.replays else FEWEST
        needed = int(min(MOST, max(fewest, self._turnovers * capacity.batch)))
        return min(needed, len(self._trace)) if self.replays else needed

    def steps(self, capacity: Capacity) -> float:
        """About how many a run has: every group of sequences that decode together takes its own."""
        way, workload = capacity.way, self._workload
        decoders = {Kind.LOCAL: 1, Kind.OFFLOADED: way.lanes, Kind.APART: way.memory_workers // way.tensor_parallel}
        groups = decoders.get(way.kind, way.replicas)
        each = workload.output * groups / capacity.batch + (workload.prompt - capacity.found) / way.chunk
        return self.requests(capacity) * each

    def arrivals(self, requests: int, rate: float) -> Arrivals:
        """``requests`` drawn from the trace that arrive at random, as `lamina simulate --draw` has them; or the first
        ones replayed, as `--first` has them."""
        scale = self.rate_scale(rate, requests)
        return replay(self._trace[:requests], scale) if self.replays else draw(self._trace, requests, SEED, scale)

    def deployment(self, capacity: Capacity) -> Deployment:
        """Return what the simulator runs for a way: its pools, with room for the batch of the closed form."""
        way = capacity.way
        return Deployment(
            model=self._shape,
            compute=way.compute,
            compute_workers=way.compute_workers,
            memory=way.memory,
            memory_workers=way.memory_workers,
            local=way.kind is Kind.LOCAL,
            tensor_parallel=way.tensor_parallel,
            lanes=way.lanes if way.kind is Kind.OFFLOADED else None,
            pipelining="rotational" if way.rotates else "fixed" if way.kind is Kind.OFFLOADED else "auto",
            max_num_seqs=min(way.chunk, capacity.seats or max(16, 2 * capacity.batch)),
            max_num_batched_tokens=way.chunk,
            kv_tokens_per_worker=way.segment,
            profile=self._profile,
            prices=self._prices,
        )

    def run(self, capacity: Capacity, rate: float, requests: int) -> Result:
        """One simulation at an offered rate."""
        return simulate(self.deployment(capacity), self.arrivals(requests, rate), System(capacity.way.kind.system))

    def holds(self, result: Result) -> bool:
        """Return whether every request was served, the queue did not grow, and both percentiles are within the SLOs;
        also for requests that wait after their first token, on whose gaps the percentile of TBT does not depend."""
        log, gaps, slo = result.log, result.tbt_s.p99, self._slo
        served = log.count(State.FINISHED) == len(log.arrivals)
        arrival_s = log.arrivals.arrival_s
        half = len(arrival_s) // 2
        offered = (len(arrival_s) - 1 - half) / max(1e-9, float(arrival_s[-1] - arrival_s[half]))
        steady = result.sustained_requests_s >= SUSTAINED * offered
        return (
            served
            and steady
            and result.ttft_s.p99 <= slo.ttft_s
            and result.stalled_s.p99 <= slo.ttft_s + slo.tbt_s
            and (math.isnan(gaps) or gaps <= slo.tbt_s)
        )

    def most(
        self,
        capacity: Capacity,
        most_usd: float = math.inf,
        on_run: Callable[[], None] = lambda: None,
        rounds: int = ROUNDS,
        tolerance: float = TOLERANCE,
    ) -> Trial | None:
        """Return the highest rate that holds, to ``tolerance``, found in ``rounds`` runs at most; None if none does at
        which a request costs less than ``most_usd``."""
        requests = self.requests(capacity)
        rate, low, high = 0.9 * capacity.requests_s, 0.0, math.inf
        useless = capacity.usd_per_hour / 3600 / most_usd
        kept: Result | None = None
        for _ in range(rounds):
            result = self.run(capacity, rate, requests)
            on_run()
            if self.holds(result):
                low, kept = rate, result
            else:
                high = rate
            if (low and high <= low * (1 + tolerance)) or high < useless:
                break
            if low:
                rate = min(math.sqrt(low * high), low * STEP_UP)
            else:
                share = high / capacity.requests_s
                rate = high / (STEP_DOWN if share > 0.7 else STEP_UP if share > 0.5 else 2)
                if 0 < result.requests_s < high / STEP_UP:  # far overloaded: what it served all the same is near
                    rate = min(rate, result.requests_s)
        if kept is None:
            return None
        return Trial(capacity=capacity, rate=low, result=kept, requests=requests, workload=self._workload)
