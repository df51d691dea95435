"""Which prompts run in lanes that decode, against simulations in which that request is forced to either pool."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lamina.core.requests import Group
from lamina.core.steps import StepPlan
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, Result, simulate
from lamina.schedule.dealing import Dealer
from lamina.schedule.short_prompts import SAVED_S, SHARE, Load, ShortPrompts

CATALOGUE = hardware.load()


def apart(**changes: Any) -> Deployment:
    """One replica that runs prompts, and one that decodes."""
    values = {"compute_workers": 1, "memory_workers": 2, "lanes": 2, "prefix_cache": False, **changes}
    memory = None if values.get("local") else CATALOGUE["a100"]
    values |= {"memory_workers": 0} if memory is None else {}
    a100 = CATALOGUE["a100"]
    return Deployment(
        model=model_shapes.find("Llama-3-8B"), compute=a100, prefill=a100, prefill_workers=1, memory=memory, **values
    )


@dataclass
class Decisions:
    """What ``Load.lane_for`` says, or is made to say, of one request."""

    request: str
    forced: bool | None = None
    chosen: bool | None = None

    def lane_for(self, load: Load, group: Group, found: Any) -> int | None:
        lane = LANE_FOR(load, group, found)
        if group.request.request_id != self.request:
            return None  # the others run where they would
        if self.chosen is None or lane is not None:
            self.chosen = lane is not None
        if self.forced is None:
            return lane
        return load._candidate(found)[0].number if self.forced else None


LANE_FOR = Load.lane_for


def run(deployment: Deployment, arrivals: Arrivals, decisions: Decisions, monkeypatch: pytest.MonkeyPatch) -> Result:
    def lane_for(load: Load, group: Group, found: Any) -> int | None:
        return decisions.lane_for(load, group, found)

    with monkeypatch.context() as patch:
        patch.setattr(Load, "lane_for", lane_for)
        return simulate(deployment, arrivals)


def beside(decoding: int, long: int, short: int, at_s: float = 3.0) -> Arrivals:
    """``decoding`` sequences, some long prompts at ``at_s``, and a short one, the last request, right after."""
    warm = [(0.005 * number, 100 + number % 7, 300) for number in range(decoding)]
    warm += [(1.0 + 0.2 * number, 500 + 150 * number, 2) for number in range(8)]
    requests = [*warm, *((at_s, 12_000, 4) for _ in range(long)), (at_s + 0.01, short, 4)]
    come, prompt, output = (np.array(each) for each in zip(*requests, strict=True))
    return Arrivals(come, prompt, output)


@pytest.mark.parametrize(
    ("local", "decoding", "long", "short"),
    [(True, 16, 1, 100), (False, 1, 0, 40), (True, 64, 1, 250), (False, 16, 4, 250)],
)
def test_a_prompt_runs_beside_decoding_if_that_saves_more_than_it_costs_the_others(
    local: bool, decoding: int, long: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated both ways: the seconds by which its first token comes sooner, and those by which the others end later,
    all together."""
    arrivals, deployment = beside(decoding, long, short), apart(local=local)
    name = str(len(arrivals) - 1)
    there, here = (run(deployment, arrivals, Decisions(name, forced), monkeypatch).log for forced in (False, True))
    gain_s = float(there.first_s[-1] - here.first_s[-1])
    cost_s = float((here.end_s[:decoding] - there.end_s[:decoding]).sum())
    assert not 0.5 < gain_s / cost_s < 2, "too close to call"
    decisions = Decisions(name)
    run(deployment, arrivals, decisions, monkeypatch)
    assert decisions.chosen == (gain_s > cost_s)


def bursts(seconds: float) -> Arrivals:
    """Long prompts that keep the replica for prompts busy, and twenty short ones every ten seconds."""
    draw = np.random.default_rng(5)
    requests = [(come, 16_000, 60) for come in np.arange(0.0, seconds, 1.5).tolist()]
    for burst in np.arange(8.0, seconds, 10.0).tolist():
        requests += [(burst + 0.01 * number, int(draw.integers(50, 250)), 60) for number in range(20)]
    come, prompt, output = (np.array(each) for each in zip(*sorted(requests), strict=True))
    return Arrivals(come, prompt, output)


def gaps_s(result: Result) -> list[float]:
    """Return the mean time between tokens, and its 90th and 99th percentiles."""
    times, counts = result.log.gaps
    every = np.repeat(times, counts)
    return [float(every.mean()), *np.quantile(every, [0.9, 0.99]).tolist()]


def first_s(result: Result) -> list[float]:
    """Return the mean time to the first token of short prompts, and its 90th percentile."""
    log = result.log
    times = (log.first_s - log.arrivals.arrival_s)[log.arrivals.prompt < 1000]
    return [float(times.mean()), float(np.quantile(times, 0.9))]


@pytest.mark.parametrize("bound_ms", [None, 50])
def test_short_prompts_do_not_wait_for_long_ones(bound_ms: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, arrivals = apart(local=bound_ms is None, slo_tbt_ms=bound_ms), bursts(12.0)
    chosen = simulate(deployment, arrivals)
    monkeypatch.setattr(Load, "lane_for", lambda load, group, found: None)
    never = simulate(deployment, arrivals)
    for after, before in zip(first_s(chosen), first_s(never), strict=True):
        assert after < 0.4 * before
    mean_s, _, most_s = gaps_s(chosen)
    assert mean_s < 1.2 * gaps_s(never)[0]
    assert bound_ms is None or most_s < 1e-3 * bound_ms


@pytest.mark.slow
@pytest.mark.parametrize("bound_ms", [None, 50])
def test_under_lasting_overload_few_prompts_are_judged_and_decoding_keeps_most_of_its_time(
    bound_ms: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more short prompts come than both replicas can compute."""
    draw, judged, dealt = np.random.default_rng(5), 0, 0
    plain, beside = list[float](), list[float]()
    lane_for, deal, learn_step = Load.lane_for, Dealer.deal, ShortPrompts.learn_step

    def count_judged(load: Load, group: Group, found: Any) -> int | None:
        nonlocal judged
        judged += 1
        return lane_for(load, group, found)

    def count_dealt(dealer: Dealer) -> None:
        nonlocal dealt
        dealt += 1
        deal(dealer)

    def note_step(times: ShortPrompts, plan: StepPlan, seconds: float) -> None:
        if times._lanes[plan.lane].role == "decode":
            (beside if plan.chunks else plain).append(seconds)
        learn_step(times, plan, seconds)

    monkeypatch.setattr(Load, "lane_for", count_judged)
    monkeypatch.setattr(Dealer, "deal", count_dealt)
    monkeypatch.setattr(ShortPrompts, "learn_step", note_step)
    requests = [(0.0, 100, 900)] * 8 + [(come, 4000, 2) for come in np.arange(0.0, 12.0, 0.6).tolist()]
    requests += [(come, int(draw.integers(50, 250)), 2) for come in np.arange(1.0, 12.0, 1 / 160).tolist()]
    come, prompt, output = (np.array(each) for each in zip(*sorted(requests), strict=True))
    simulate(apart(slo_tbt_ms=bound_ms), Arrivals(come, prompt, output))
    if bound_ms is not None:
        assert judged < 10 * dealt  # of 32 that wait
        assert np.quantile(beside, 0.99) < 1.05e-3 * bound_ms
        return
    added_s = sum(beside) - len(beside) * sum(plain) / len(plain)
    assert added_s < 1.5 * SHARE * sum(plain + beside) + SAVED_S
