"""Prefix hits in the simulator: against token lists compared one by one, in every system."""

import numpy as np
import pytest

from bench.cost import traces
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.workload import TracedRequest
from lamina.planning.simulate import Deployment, Result, State, System, simulate
from lamina.planning.simulate.baseline_instance import BLOCK
from lamina.planning.simulate.baselines import BaselineSimulation
from lamina.planning.simulate.scenario import replay

CATALOGUE = hardware.load()
SMALL = model_shapes.find("Llama-2-7B")


def deployment(system: System, memory_gib: float = 80, prefix_cache: bool = True) -> Deployment:
    h100 = CATALOGUE["h100"]
    two = system in (System.LAMINA, System.DISAGGREGATED)
    small = hardware.Hardware(**{**vars(h100), "kind": "small", "like": "h100", "memory_bytes": memory_gib * 2**30})
    one = h100 if system is System.LAMINA else small  # the pool that keeps prompts is the small one
    return Deployment(
        model=SMALL,
        compute=one,
        compute_workers=1,
        memory=(small if system is System.LAMINA else h100) if two else None,
        memory_workers=1 if two else 0,
        prefix_cache=prefix_cache,
    )


def run(system: System, trace: list[TracedRequest], memory_gib: float = 80, prefix_cache: bool = True) -> Result:
    return simulate(deployment(system, memory_gib, prefix_cache), replay(trace), system)


def tokens(one: TracedRequest) -> list[int]:
    return [name for name, count in one.content for _ in range(count)]


def oracle(trace: list[TracedRequest], answers: bool, unit: int) -> int:
    """Tokens found if nothing is ever evicted and each request ends before the next arrives."""
    kept: list[list[int]] = []
    found = 0
    for one in trace:
        prompt, longest = tokens(one), 0
        for other in kept:
            pairs = zip(prompt[: one.prompt - 1], other, strict=False)
            longest = max(
                longest, next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(other), one.prompt - 1))
            )
        found += longest // unit * unit
        kept.append(prompt + ([one.answer] * (one.output - 1) if answers and one.answer is not None else []))
    return found


def conversations(count: int, gap_s: float) -> list[TracedRequest]:
    """Turns of a few users, one after another, whose runs are whole blocks; every other prompt begins alike."""
    random = np.random.default_rng(5)
    histories: dict[int, tuple[tuple[int, int], ...]] = {}
    made = []
    for turn in range(count):
        user = int(random.integers(4))
        begin = histories.get(user, ((0, 3 * BLOCK),) if user % 2 else ())
        content = (*begin, (1000 + turn, BLOCK * int(random.integers(1, 9))))
        output, answer = BLOCK * int(random.integers(1, 4)), 2000 + turn
        made.append(TracedRequest(turn * gap_s, sum(n for _, n in content), output, content, answer))
        histories[user] = (*content, (answer, output))
    return made


@pytest.mark.parametrize("system", list(System))
def test_what_is_found_is_what_earlier_requests_had(system: System) -> None:
    trace = conversations(24, gap_s=30.0)
    result = run(system, trace)
    assert result.log.count(State.FINISHED) == len(trace)
    assert result.prefix_queried == sum(one.prompt for one in trace)
    whole = system is not System.DISAGGREGATED  # which computes answers elsewhere
    exact = oracle(trace, answers=whole, unit=1 if system is System.LAMINA else BLOCK)
    assert result.prefix_hit == exact > 0
    without = run(system, trace, prefix_cache=False)
    assert without.prefix_hit == 0 and result.ttft_s.p50 < without.ttft_s.p50


def crowd(count: int, answers: int) -> list[TracedRequest]:
    """Questions about documents that come while others are answered: all lengths divided, answers by ``answers``."""
    return [
        TracedRequest(0.5 * one.arrival_s, sum(n for _, n in content), 1 + one.output // answers, content, one.answer)
        for one in traces.documents(count, 2.0, seed=3)
        for content in [tuple((name, 1 + n // 40) for name, n in one.content)]
    ]


@pytest.mark.parametrize("system", list(System))
@pytest.mark.parametrize(
    ("memory_gib", "count", "answers"),
    [
        (17.0, 40, 8),
        pytest.param(17.0, 60, 1, marks=pytest.mark.slow),
        pytest.param(24.0, 60, 1, marks=pytest.mark.slow),
    ],
)
def test_crowded_workers_evict_and_serve_all(system: System, memory_gib: float, count: int, answers: int) -> None:
    """Documents that do not fit together, many at once: less is found, nothing is lost."""
    trace = crowd(count, answers)
    if system is System.LAMINA:
        memory_gib -= 13  # its small pool holds no weights
    small = run(system, trace, memory_gib)
    assert small.log.count(State.FINISHED) + small.log.count(State.REFUSED) == len(trace)
    assert small.log.count(State.FINISHED) > 0.8 * count
    assert small.prefix_hit < run(system, trace).prefix_hit


def test_an_engine_gets_all_of_its_blocks_back() -> None:
    """Also after preemptions: no block is lost, and no more is kept than is free."""
    trace = [
        TracedRequest(0.01 * turn, one.prompt, one.output * 8, one.content, one.answer)
        for turn, one in enumerate(conversations(120, 0.01))
    ]
    simulation = BaselineSimulation(System.CHUNKED_PREFILL, deployment(System.CHUNKED_PREFILL, 15.6), replay(trace), ())
    result = simulation.simulate()
    (instance,) = simulation._first
    assert result.preempted > 0 and result.log.count(State.FINISHED) > 100
    assert instance.free == instance.blocks and 0 < instance.prefixes.idle <= instance.free


def test_requests_without_content_share_nothing() -> None:
    alike = [TracedRequest(float(10 * at), 200, 20) for at in range(5)]
    mixed = [*alike, *(TracedRequest(100.0 + 10 * at, 200, 20, ((7, 200),), None) for at in range(3))]
    assert run(System.LAMINA, alike).prefix_queried == 0
    assert run(System.LAMINA, mixed).prefix_hit == 2 * 199
