"""Shortcuts of the simulator: steps run at once, runs that end early and segments counted once change no result."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from lamina.core.pipeline import Shape
from lamina.planning.plan import hardware, model_shapes, prices, workload
from lamina.planning.plan.overheads import NO_OVERHEAD
from lamina.planning.plan.ways import Capacity, Kind, Slo, Way
from lamina.planning.simulate import Arrivals, Deployment, Result, System, simulate
from lamina.planning.simulate.baseline_instance import Batch, Instance
from lamina.planning.simulate.repeats import Repeats
from lamina.planning.simulate.step_times import SplitSequence
from lamina.planning.simulate.trial import Course

CATALOGUE = hardware.load()
SMALL = model_shapes.find("Llama-3-8B")


def arriving(count: int, rate: float, concurrency: int = 0) -> Arrivals:
    """Requests of random lengths at random times."""
    random = np.random.default_rng(5)
    times = np.cumsum(random.exponential(1 / rate, count))
    return Arrivals(
        times - times[0], random.integers(50, 2500, count), random.integers(1, 900, count), concurrency=concurrency
    )


def deployment(system: System) -> Deployment:
    """A card that is nearly full of weights."""
    second = CATALOGUE["rtx4090"] if system is System.DISAGGREGATED else None
    return Deployment(
        model=SMALL,
        compute=CATALOGUE["rtx4090"],
        compute_workers=1,
        memory=second,
        memory_workers=1 if second else 0,
        max_num_seqs=100,
    )


@pytest.mark.parametrize("concurrency", [0, 40])
@pytest.mark.parametrize("system", [System.CHUNKED_PREFILL, System.TENSOR_PARALLEL, System.DISAGGREGATED])
def test_steps_run_at_once_are_those_run_one_by_one(
    system: System, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Result:
        return simulate(deployment(system), arriving(150, 4.0, concurrency), system)

    at_once = run()
    planned: list[int] = []

    def one(self: Instance, batch: Batch, most: int) -> int:
        planned.append(most)
        return 1

    monkeypatch.setattr(Instance, "steps_alike", one)
    single = run()
    assert at_once.preempted > 0 and max(planned) > 16, "blocks run out, and runs are longer than a block"
    assert (at_once.steps, at_once.preempted) == (single.steps, single.preempted)
    for name in ("first_s", "longest_gap_s"):
        np.testing.assert_allclose(getattr(at_once.log, name), getattr(single.log, name), rtol=1e-9)
    np.testing.assert_allclose(at_once.log.end_s, single.log.end_s, rtol=1e-9)
    assert at_once.pools[0].busy == pytest.approx(single.pools[0].busy)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one pool": {"local": True, "compute_workers": 4, "shape": Shape(2)},
    "lending": {"local": True, "compute": CATALOGUE["rtx4090"], "compute_workers": 3},
    "one lane": {"memory_workers": 2, "lanes": 1},
    "rotating": {"compute_workers": 2, "memory_workers": 3, "lanes": 3, "pipelining": "rotational"},
    "fixed": {"memory_workers": 2, "lanes": 2, "pipelining": "fixed"},
    "in parts": {"memory_workers": 3, "lanes": 2, "pipelining": "fixed", "kv_tokens_per_worker": 600},
    "prompts on compute": {"memory_workers": 2, "lanes": 2, "pipelining": "fixed", "prompt_attention": "compute"},
    "apart": {"local": True, "compute_workers": 2, "prefill": CATALOGUE["h100"], "prefill_workers": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_steps_of_the_runtime_are_those_planned_one_by_one(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"compute": CATALOGUE["h100"], "compute_workers": 1, "max_num_seqs": 100}
    settings |= LAYOUTS[layout]
    if "memory_workers" in settings:
        settings["memory"] = CATALOGUE["rtx4090"]
    arrivals = dataclasses.replace(arriving(150, 8.0), output=3 * arriving(150, 8.0).output)

    def run() -> Result:
        return simulate(Deployment(model=SMALL, **settings), arrivals)

    at_once = run()
    monkeypatch.setattr(Repeats, "begin_repeating", lambda *_: None)
    single = run()
    assert at_once.decisions is not None and single.decisions is not None
    if layout != "apart":
        assert at_once.decisions.steps < 0.9 * single.decisions.steps, "many steps repeat the one before"
    assert (at_once.steps, at_once.preempted) == (single.steps, single.preempted)
    for name in ("first_s", "longest_gap_s", "end_s"):
        np.testing.assert_allclose(getattr(at_once.log, name), getattr(single.log, name), rtol=1e-9)
    for one, other in zip(at_once.pools, single.pools, strict=True):
        assert (one.busy, one.network) == pytest.approx((other.busy, other.network))
    assert (at_once.queued, at_once.refused) == pytest.approx((single.queued, single.refused))


@pytest.mark.parametrize(("ahead", "steps"), [(False, 1), (True, 2)])
def test_a_request_that_arrives_while_a_step_runs_joins_the_next_that_is_not_planned(ahead: bool, steps: int) -> None:
    """The first request decodes alone; the other, which arrives in the middle of a step, gets a token steps later."""
    engine, system = dataclasses.replace(NO_OVERHEAD, plans_ahead=ahead), System.CHUNKED_PREFILL
    settings = dataclasses.replace(deployment(system), engine=engine)

    alone = simulate(settings, Arrivals(np.zeros(1), np.array([100]), np.array([50])), system).log
    step = float(alone.end_s[0] - alone.first_s[0]) / 49
    at = float(alone.first_s[0]) + 0.5 * step
    log = simulate(settings, Arrivals(np.array([0.0, at]), np.full(2, 100), np.array([50, 1])), system).log
    waited = (float(log.first_s[1]) - at) / step
    assert steps - 0.5 < waited - 0.5 < steps + 1.0, "half of a step, perhaps one that was planned, and its own"


def capacity(kind: Kind) -> Capacity:
    """A way on one H100, or two, with a rate to begin with."""
    memory, prefill = kind is Kind.OFFLOADED, kind.divides_roles
    way = Way(
        kind=kind,
        chunk=1024,
        compute=CATALOGUE["h100"],
        compute_workers=1,
        memory=CATALOGUE["h20"] if memory else None,
        memory_workers=int(memory),
        prefill=CATALOGUE["h100"] if prefill else None,
        prefill_workers=int(prefill),
        lanes=2 if kind is Kind.OFFLOADED else 1,
    )
    return Capacity(
        way=way,
        requests_s=1.0,
        batch=64,
        step_s=0.0,
        chunk_step_s=0.0,
        prompt_share=0.0,
        compute_busy=0.0,
        memory_busy=0.0,
        usd_per_hour=1.0,
        prompt_usd=0.5,
    )


@pytest.mark.parametrize("limits", [(0.03, 1.0), (math.inf, 0.3), (0.012, math.inf)])
@pytest.mark.parametrize("kind", list(Kind))
def test_a_run_ends_early_only_if_the_whole_run_misses_the_slos(kind: Kind, limits: tuple[float, float]) -> None:
    found, slo = capacity(kind), Slo(tbt_s=limits[0], ttft_s=limits[1])
    course = Course(SMALL, workload.of_lengths(800, 120), [], prices.load("paper"), slo)
    kept, ended = set(), 0
    for rate in (2.0, 8.0, 16.0, 32.0, 128.0):
        short = course.simulate(found, rate, 300)
        whole = simulate(course.deployment(found), course.arrivals(300, rate), System(kind.system))
        assert course.within_slos(short) == course.within_slos(whole), rate
        kept.add(course.within_slos(whole))
        ended += short.steps < whole.steps
    assert False in kept
    assert ended or math.isinf(slo.ttft_s), "some of the runs whose first tokens are late end early"


def test_the_tokens_of_a_split_sequence_are_where_its_segments_are() -> None:
    """Counted token by token, also where segments of one worker are apart."""
    random = np.random.default_rng(2)
    for _ in range(50):
        sizes = random.integers(1, 9, random.integers(2, 6)).tolist()
        homes = random.integers(0, 3, len(sizes)).tolist()
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
        stops = [*starts[1:], None]
        found = SplitSequence(list(zip(homes, starts, stops, strict=True)))
        position = starts[-1] + int(random.integers(0, 7))
        held = {home: 0 for home in homes}
        for token in range(position):
            held[homes[int(np.searchsorted(starts, token, side="right")) - 1]] += 1
        last = held.pop(homes[-1])
        assert dict(zip(found.homes, found.tokens, strict=True)) == held
        assert position - found.elsewhere == last
