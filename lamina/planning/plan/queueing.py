"""Waits in a queue: by a formula for random arrivals, or by replaying a trace through the runtime's order."""

import math

import numpy as np

from lamina.planning.plan.kernel_times import Floats
from lamina.schedule.policy import FIFO


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


def replayed_sojourn(
    arrivals: Floats,
    seconds: Floats,
    servers: int,
    busy: float,
    percentile: float,
    first_share: float = FIFO.first_share,
) -> float:
    """Return the sojourn time (wait plus service) at ``percentile`` by replaying arrivals to the shortest queue.

    Unlike a formula, a replay reflects that a trace's arrivals are not random, that a busy queue does not reach its
    steady state within a thousand requests, and that a server runs two prompts at once
    (``lamina.schedule.batches.PromptBatch``), so that long prompts take up to twice as long.

    Args:
        arrivals: Arrival times in any unit, scaled to the utilisation ``busy``.
        seconds: Service time of each request.
        servers: Number of servers.
        busy: Utilisation of the servers until the last arrival.
        percentile: Between 0 and 1.
        first_share: Share of a server's time for its first request; the rest is for the request with least time left.
    """
    span = float(arrivals[-1] - arrivals[0])
    stretch = seconds.sum() / servers / busy / span if span else 0.0
    ends = np.zeros(len(arrivals))
    queues = [_Queue(first_share, ends) for _ in range(servers)]
    times = (arrivals - arrivals[0]) * stretch
    for number, (at, own) in enumerate(zip(times.tolist(), seconds.tolist(), strict=True)):
        for queue in queues:
            queue.serve_until(at)
        min(queues, key=lambda queue: len(queue.left)).left[number] = own
    for queue in queues:
        queue.serve_until(math.inf)
    return float(np.quantile(ends - times, percentile))


class _Queue:
    """The requests of one server: their remaining service times, in order of arrival."""

    def __init__(self, first_share: float, ends: Floats) -> None:
        """``ends`` is set, for each request that ends, to the time of its end."""
        self.left: dict[int, float] = {}
        self._share, self._ends, self._now = first_share, ends, 0.0

    def serve_until(self, until: float) -> None:
        left = self.left
        while left and self._now < until:
            first, least = next(iter(left)), min(left, key=left.__getitem__)
            shares = {first: self._share, least: 1 - self._share} if first != least else {first: 1.0}
            shares = {one: share for one, share in shares.items() if share}
            ending = min(shares, key=lambda one: left[one] / shares[one])
            passed = min(left[ending] / shares[ending], until - self._now)
            ends = passed < until - self._now
            self._now += passed
            for one, share in shares.items():
                left[one] -= share * passed
            if ends:
                self._ends[ending] = self._now
                del left[ending]
        self._now = max(self._now, until)
