"""The queue of prompts: its simulation against queueing theory, and the formula against the simulation."""

import math

import numpy as np
import pytest

from lamina.planning.plan.closed_form import queue_waits, replayed_sojourn

MANY = 60_000
RANDOM = np.random.default_rng(0)
ARRIVALS = np.cumsum(RANDOM.exponential(size=MANY))


@pytest.mark.parametrize("busy", [0.3, 0.8])
def test_one_server_and_exponential_times(busy: float) -> None:
    """M/M/1: the sojourn is exponential with the mean 1 / (1 - busy)."""
    found = replayed_sojourn(ARRIVALS, RANDOM.exponential(size=MANY), 1, busy, 0.9)
    assert found == pytest.approx(math.log(10) / (1 - busy), rel=0.1)


def test_a_trace_is_stretched_and_not_reordered() -> None:
    """Bursts of four requests of 1 s, far apart: one server takes them in turn, two share them."""
    arrivals, seconds = np.array([0.0, 0.0, 0.0, 0.0, 1e3]), np.ones(5)
    assert replayed_sojourn(arrivals, seconds, 1, 0.1, 1.0) == pytest.approx(4.0)
    assert replayed_sojourn(arrivals, seconds, 2, 0.1, 1.0) == pytest.approx(2.0)
    assert replayed_sojourn(arrivals[:1], seconds[:1], 2, 0.1, 1.0) == 1.0


def test_the_formula_is_what_many_random_arrivals_find() -> None:
    seconds = RANDOM.gamma(0.5, 2.0, size=MANY)  # a squared coefficient of variation of 2
    for servers in (1, 4):
        late = queue_waits(np.ones(1), np.full(1, 3.0), np.full(1, 0.8), servers, 0.99)[1][0]
        assert late < replayed_sojourn(ARRIVALS, seconds, servers, 0.8, 0.99) < 2 * (late + np.quantile(seconds, 0.99))
