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
    lanes: int = 1,
    first_share: float = FIFO.first_share,
) -> float:
    """Return the sojourn time (wait plus service) at ``percentile`` by replaying arrivals to the shortest queue.

    Unlike a formula, a replay reflects that a trace's arrivals are not random, that a busy queue does not reach its
    steady state within a thousand requests, and that a server runs two prompts at once
    (``lamina.schedule.batches.PromptBatch``), so that long prompts take up to twice as long. A server of several lanes
    divides its time evenly over those that have prompts; idle lanes run chunks of the first one's.

    Args:
        arrivals: Arrival times in any unit, scaled to the utilisation ``busy``.
        seconds: Service time of each request.
        servers: Number of servers.
        busy: Utilisation of the servers until the last arrival.
        percentile: Between 0 and 1.
        lanes: Lanes of each server, each with requests of its own.
        first_share: Share of a lane's time for its first request; the rest is for the request with least time left.
    """
    span = float(arrivals[-1] - arrivals[0])
    stretch = seconds.sum() / servers / busy / span if span else 0.0
    ends = np.zeros(len(arrivals))
    queues = [_Server(lanes, first_share, ends) for _ in range(servers)]
    times = (arrivals - arrivals[0]) * stretch
    for number, (at, own) in enumerate(zip(times.tolist(), seconds.tolist(), strict=True)):
        for queue in queues:
            queue.serve_until(at)
        min(queues, key=len).add(number, own)
    for queue in queues:
        queue.serve_until(math.inf)
    return float(np.quantile(ends - times, percentile))


class _Server:
    """The requests of each lane of one server: their remaining service times, in order of arrival."""

    def __init__(self, lanes: int, first_share: float, ends: Floats) -> None:
        """``ends`` is set, for each request that ends, to the time of its end."""
        self._lanes = [dict[int, float]() for _ in range(lanes)]
        self._share, self._ends, self._now = first_share, ends, 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def add(self, number: int, seconds: float) -> None:
        min(self._lanes, key=len)[number] = seconds

    def serve_until(self, until: float) -> None:
        while self._now < until and (shares := self._shares()):
            ending, lane, share = min(shares, key=lambda one: one[1][one[0]] / one[2])
            passed = min(lane[ending] / share, until - self._now)
            ends = passed < until - self._now
            self._now += passed
            for number, left, own in shares:
                left[number] -= own * passed
            if ends:
                self._ends[ending] = self._now
                del lane[ending]
        self._now = max(self._now, until)

    def _shares(self) -> list[tuple[int, dict[int, float], float]]:
        """Return the requests that are served, their lanes, and their shares of the server's time."""
        busy, each, found = [lane for lane in self._lanes if lane], 1 / len(self._lanes), []
        for place, lane in enumerate(busy):
            own = each if place else 1 - each * (len(busy) - 1)
            first, least = next(iter(lane)), min(lane, key=lane.__getitem__)
            if first == least:
                found.append((first, lane, own))
            else:
                found += [(first, lane, own * self._share), (least, lane, own * (1 - self._share))]
        return [one for one in found if one[2]]
