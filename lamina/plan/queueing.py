"""How long prompts wait for the servers that compute them: by formula for random arrivals, or played for a trace."""

import collections
import math

import numpy as np

from lamina.plan.gemm import Floats


def waits(mean: Floats, second: Floats, busy: Floats, servers: int, percentile: float) -> tuple[Floats, Floats]:
    """Mean wait, and that at ``percentile``, in a queue before ``servers`` that are busy for a share of the time.

    ``mean``, ``second``: moments of the time that a server takes. Arrivals are random; those who wait do so for an
    exponentially distributed time (Sakasegawa, 1977, for several servers).
    """
    busy = np.minimum(busy, 1 - 1e-6)
    waiting = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if_waiting = second / (2 * mean) / (1 - busy) / servers
    late = if_waiting * np.log(np.maximum(waiting / (1 - percentile), 1.0))
    return waiting * if_waiting, late


def sojourn(arrivals: Floats, seconds: Floats, servers: int, busy: float, percentile: float) -> float:
    """Wait and service at ``percentile``, of requests that each join the server with fewest, which serves in order.

    ``arrivals``: times, in any unit: they are stretched until ``servers`` are busy for that share of the time until the
    last one. ``seconds``: what each request takes. A queue that is busy for most of the time does not reach its steady
    state within a thousand requests, and a trace's arrivals are not random: so what a run will show is played here.
    """
    span = float(arrivals[-1] - arrivals[0])
    stretch = seconds.sum() / servers / busy / span if span else 0.0
    ends: list[collections.deque[float]] = [collections.deque() for _ in range(servers)]
    took = []
    for at, own in zip(((arrivals - arrivals[0]) * stretch).tolist(), seconds.tolist(), strict=True):
        for queue in ends:
            while queue and queue[0] <= at:
                queue.popleft()
        shortest = min(ends, key=len)
        shortest.append(max(shortest[-1] if shortest else at, at) + own)
        took.append(shortest[-1] - at)
    return float(np.quantile(took, percentile))
