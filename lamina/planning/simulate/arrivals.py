"""Generates the arriving requests: a trace at any speed, or requests with lengths sampled from a trace."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.core.errors import ConfigError
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.reuse import Content
from lamina.planning.plan.workload import TracedRequest

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order in which they arrive: arrays of one length.

    Attributes:
        arrival_s: seconds since the first one, non-decreasing.
        prompt, output: tokens, at least 1.
        max_tokens: output tokens that each request asks for; one with a longer output asks for exactly that.
        contents, answers: what prompts say, and ids of outputs, as in ``TracedRequest``; empty: no two are alike.
        concurrency: requests that are in the system at once: each further request arrives when one ends, and the run
            writes its time into ``arrival_s``. 0: requests arrive at their times.
    """

    arrival_s: Floats
    prompt: Ints
    output: Ints
    max_tokens: int = 1
    contents: Sequence[Content] = ()
    answers: Sequence[int | None] = ()
    concurrency: int = 0

    @property
    def asked(self) -> Ints:
        """Output tokens that each request asks for, at least those it generates."""
        return np.maximum(self.output, self.max_tokens)

    def __len__(self) -> int:
        return len(self.arrival_s)


def replay(trace: Iterable[TracedRequest], rate_scale: float = 1.0, max_tokens: int = 1) -> Arrivals:
    """Return the requests of a trace at ``rate_scale`` times its rate. Raises ConfigError for a scale not above 0."""
    _check(rate_scale)
    requests = sorted(trace, key=lambda request: request.arrival_s)
    alike = any(request.content for request in requests)
    return Arrivals(
        np.array([request.arrival_s for request in requests], np.float64) / rate_scale,
        np.array([request.prompt for request in requests], np.int64),
        np.array([request.output for request in requests], np.int64),
        max_tokens,
        [request.content for request in requests] if alike else (),
        [request.answer for request in requests] if alike else (),
    )


def draw(
    trace: Iterable[TracedRequest], count: int, seed: int, rate_scale: float = 1.0, max_tokens: int = 1
) -> Arrivals:
    """``count`` requests with pairs of lengths (prompt, output) sampled from a trace.

    They arrive in a Poisson process at ``rate_scale`` times the trace's mean rate, and have nothing in common: what
    prompts share depends on the order of the trace, which only ``replay`` keeps. Raises ConfigError for a scale not
    above 0, or a trace without a rate.
    """
    _check(rate_scale)
    requests = list(trace)
    first, last = (pick(request.arrival_s for request in requests) for pick in (min, max))
    if last <= first:
        raise ConfigError(
            "all requests of the trace arrive at the same time, so it has no rate for --draw; leave --draw out"
        )
    # Each has random numbers of its own, so that a longer run begins with the requests of a shorter one.
    lengths, times = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    chosen = lengths.integers(len(requests), size=count)
    gaps = times.exponential((last - first) / (len(requests) - 1) / rate_scale, size=count)
    prompts, outputs = (np.array([getattr(r, name) for r in requests], np.int64) for name in ("prompt", "output"))
    return Arrivals(np.cumsum(gaps) - gaps[0], prompts[chosen], outputs[chosen], max_tokens)


def _check(rate_scale: float) -> None:
    if not 0 < rate_scale < float("inf"):
        raise ConfigError(f"the rate scale is {rate_scale}; give a number above 0, 1 for the trace's own rate")
