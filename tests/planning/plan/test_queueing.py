"""The queue of prompts: its simulation against queueing theory, and the formula against the simulation."""

import collections
import itertools
import math

import numpy as np
import pytest

from lamina.core.requests import Completion, Group
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.planning.plan.closed_form import Prompts, mean_of_largest
from lamina.planning.plan.queueing import queue_waits, replayed_sojourn
from lamina.planning.plan.workload import TracedRequest, of_requests
from lamina.schedule.batches import PromptBatch

MANY = 60_000
RANDOM = np.random.default_rng(0)
ARRIVALS = np.cumsum(RANDOM.exponential(size=MANY))


@pytest.mark.parametrize("busy", [0.3, 0.8])
def test_one_server_and_exponential_times(busy: float) -> None:
    """M/M/1: the sojourn is exponential with the mean 1 / (1 - busy)."""
    found = replayed_sojourn(ARRIVALS, RANDOM.exponential(size=MANY), 1, busy, 0.9, first_share=1.0)
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
        found = replayed_sojourn(ARRIVALS, seconds, servers, 0.8, 0.99, first_share=1.0)
        assert late < found < 2 * (late + np.quantile(seconds, 0.99))


def test_two_requests_by_hand() -> None:
    """The first takes 8 s and gets half of the server while the second, of 3 s, runs: that ends after 6 s, at 8."""
    arrivals, seconds = np.array([0.0, 2.0, 110.0]), np.array([8.0, 3.0, 0.0])
    for share, last in ((0.5, 11.0), (1.0, 9.0), (0.0, 11.0)):  # 8 + 3; the second waits for 6; the first for 3
        assert replayed_sojourn(arrivals, seconds, 1, 0.1, 1.0, first_share=share) == pytest.approx(last)


def test_lanes_share_a_server_and_idle_lanes_help_the_first() -> None:
    """Three at once: the first and the third share one lane, that is half of the server, until the second ends at 6 s.

    The third then has half of the server for 1.5 s of work, and ends at 9 s; in one lane, it would wait for the second.
    """
    arrivals, seconds = np.array([0.0, 0.0, 0.0, 140.0]), np.array([8.0, 3.0, 3.0, 0.0])
    for lanes, third in ((2, 9.0), (1, 12.0)):
        for percentile, end in ((1 / 3, 6.0), (2 / 3, third), (1.0, 14.0)):
            found = replayed_sojourn(arrivals, seconds, 1, 0.1, percentile, lanes)
            assert found == pytest.approx(end)


def test_a_replayed_prompt_takes_the_time_of_its_own_attention() -> None:
    """That grows with the square of its tokens: long prompts, which the percentile is about, take longer."""
    random = np.random.default_rng(4)
    tokens, arrivals = (
        100 + (2000 * random.pareto(1.5, 300)).clip(0, 40_000).astype(int),
        np.cumsum(random.exponential(size=300)),
    )
    requests = [
        TracedRequest(float(at), int(own), 1, ((number, int(own)),))
        for number, (at, own) in enumerate(zip(arrivals, tokens, strict=True))
    ]
    prompts, mean = Prompts(of_requests("long", requests)), tokens.mean()
    for share in (0.0, 0.4, 1.0):
        chunk, none, busy, step_s, attending = (np.array([each]) for each in (mean, 0.0, 0.6, 1.0, share))
        found = float(prompts.first_token_s(chunk, none, busy, step_s, none, attending, 2)[0])
        work = (1 - share) * tokens / mean + share * tokens**2 / (tokens**2).mean()
        exact = replayed_sojourn(arrivals, work, 2, 0.6, 0.99)
        assert found == pytest.approx(exact, rel=0.05 if share in (0.0, 1.0) else 0.15)


def test_the_slowest_of_several_chunks_by_brute_force() -> None:
    values, odds = np.array([3.0, 1.0, 7.0]), np.array([0.2, 0.7, 0.1])
    for draws in (1, 2, 4):
        drawn = itertools.product(zip(values, odds, strict=True), repeat=draws)
        mean = sum(max(value for value, _ in one) * math.prod(odd for _, odd in one) for one in drawn)
        assert mean_of_largest(values, odds, draws) == pytest.approx(mean)


@pytest.mark.parametrize("percentile", [0.5, 0.9, 0.99])
def test_a_replay_takes_prompts_in_the_order_of_the_runtime_s_batches(percentile: float) -> None:
    """Steps of 64 tokens, each of which takes 1 s, shared among the prompts of one lane."""
    random = np.random.default_rng(3)
    tokens = np.ceil(2000 * random.pareto(1.5, 400).clip(0.05, 20)).astype(int)
    arrivals = np.cumsum(random.exponential(tokens.mean() / 0.85, 400))
    batch, now, ends = PromptBatch(), 0.0, np.zeros(400)
    coming = collections.deque(enumerate(arrivals.tolist()))
    while coming or len(batch):
        now = now if len(batch) else max(now, coming[0][1])
        while coming and coming[0][1] <= now:
            number, _ = coming.popleft()
            one = Completion(number, 0)
            batch.add(Group(Request(str(number), None, [0] * tokens[number], SamplingParams()), 1, [one]), one)
        shared = batch.share(64)
        now += sum(shared.values())
        ends[[one.sequence for _, one in shared if not one.left]] = now
    span = arrivals[-1] - arrivals[0]
    found = replayed_sojourn(arrivals, tokens.astype(float), 1, tokens.sum() / span, percentile)
    assert found == pytest.approx(np.quantile(ends - arrivals, percentile), rel=0.05)
    fifo = replayed_sojourn(arrivals, tokens.astype(float), 1, tokens.sum() / span, percentile, first_share=1.0)
    assert fifo != pytest.approx(found, rel=0.2)
