"""Plans for whole requests: the closed form against the simulator, what fits, and what is recommended."""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli import plan_ways as table
from lamina.cli.console import show_rate
from lamina.cli.plan_commands import launch_command
from lamina.core.errors import UserError
from lamina.core.pipeline import ONE, Shape
from lamina.planning.crossover_map import trace
from lamina.planning.plan import hardware, model_shapes, prices, workload
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.serving import Server
from lamina.planning.plan.ways import Capacity, Kind, Slo, Way, baselines, rivals, shortlist, ways
from lamina.planning.plan.workload import Sessions, TracedRequest
from lamina.planning.simulate import Arrivals, State, System, draw, simulate
from lamina.planning.simulate.result import RequestLog
from lamina.planning.simulate.trial import Course, Trial

CATALOGUE = hardware.load()
RENTS = prices.load("paper")
SMALL = model_shapes.find("Llama-2-13B")


def server(served: workload.Workload, slo: Slo | None = None, shape: model_shapes.ModelShape = SMALL) -> Server:
    costs = {kind: CostModel(shape, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}
    return Server(shape, served, costs, RENTS, slo or Slo())


Pool = list[tuple[hardware.Hardware, int]]


def pools(compute: int = 2, memory: int = 2) -> tuple[Pool, Pool]:
    return [(CATALOGUE["h100"], compute)], [(CATALOGUE["h20"], memory)]


def of_kind(kind: Kind) -> list[Way]:
    """The ways of a system, or of the one that Lamina is compared with."""
    every = (*baselines(SMALL, *pools(1, 1)), *ways(SMALL, *pools(1, 1)))
    return [way for way in every if way.kind is kind]


@pytest.mark.parametrize("kind", list(Kind))
def test_the_closed_form_is_what_the_simulator_serves(kind: Kind) -> None:
    """The cheapest way of each system, at the highest load within the SLOs: within a fifth; 10% is the aim."""
    served = workload.of_lengths(800, 100)
    place = server(served)
    found = [one for way in of_kind(kind) if (one := place.evaluate(way))]
    best = shortlist(found)[0]
    # All requests are alike: short runs show as much.
    trial = Course(SMALL, served, [], RENTS, Slo(), turnovers=4).highest_load(best)
    assert trial is not None
    assert trial.requests_s == pytest.approx(best.requests_s, rel=0.2)


def test_copies_with_kv_of_their_own_serve_as_many_times_as_much_as_one() -> None:
    """Two copies on two devices, by the closed form and in the simulator, whose requests are of one engine."""
    served = workload.of_lengths(800, 100)
    place, course = server(served), Course(SMALL, served, [], RENTS, Slo(), turnovers=4)
    one, two = (next(way for way in ways(SMALL, pools(copies)[0], []) if way.kind is Kind.LOCAL) for copies in (1, 2))
    assert (one.replicas, two.replicas) == (1, 2) and "h100:2 with local memory, 2 x TP1" in two.describe()
    rates = []
    for way in (one, two):
        found = place.evaluate(way)
        assert found is not None
        trial = course.highest_load(found)
        assert trial is not None
        assert trial.requests_s == pytest.approx(found.requests_s, rel=0.2)
        rates.append(trial.requests_s)
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.1)


def test_one_pool_has_as_many_copies_as_the_budget_allows() -> None:
    """All that there are, without one; one of them, if the budget allows none: plans then say why."""
    for most, copies in ((8, 8), (5, 5), (0, 1)):
        every = ways(SMALL, *pools(8, 8), affords=lambda way: way.compute_workers <= most)  # noqa: B023
        local = [way for way in every if way.kind is Kind.LOCAL and way.shape.stages == 1]
        found = {way.shape.ranks: way.compute_workers for way in local}
        assert found == {degree: max(copies // degree, 1) * degree for degree in (1, 2, 4, 8)}


def test_a_pool_that_only_decodes_keeps_all_of_each_sequence() -> None:
    """Where nine tenths of all prompts are the same, too: the room for KV limits the load as the simulator says."""
    served = workload.of_lengths(4000, 200, Sessions(shared=3600))
    found = [
        one
        for way in ways(SMALL, *pools(1, 1), longest_prompt=4000)
        if way.kind is Kind.PREFILL and (one := server(served).evaluate(way))
    ]
    best = shortlist(found)[0]
    trial = Course(SMALL, served, trace(served), RENTS, Slo(), turnovers=4).highest_load(best)
    assert trial is not None and trial.requests_s == pytest.approx(best.requests_s, rel=0.2)


@pytest.mark.parametrize("early", [Shape(2), pytest.param(ONE, marks=pytest.mark.slow)])
def test_prefixes_on_a_replica_that_decodes_cost_what_the_simulator_says(early: Shape) -> None:
    """Half of each prompt is cached where tensor-parallel ranks decode, which attend to it for those that prefill."""
    served, slo = workload.of_lengths(2000, 30, Sessions(shared=1000)), Slo(tbt_s=0.1, ttft_s=2.0)
    way = Way(
        kind=Kind.PREFILL,
        scratch=True,
        chunk=4096,
        prefill=CATALOGUE["h100"],
        prefill_workers=2,
        compute=CATALOGUE["h20"],
        compute_workers=2,
        shape=Shape(2),
        prefill_shape=None if early == Shape(2) else early,
    )
    found = server(served, slo).evaluate(way)
    assert found is not None and found.found == 1000
    course = Course(SMALL, served, trace(served), RENTS, slo)
    for factor, holds in ((0.9, True), (1.1, False)):
        result = course.simulate(found, factor * found.requests_s, 1000)
        assert course.within_slos(result) == holds and result.prefix_hit > 0.45 * result.prefix_queried


@pytest.mark.parametrize(
    ("shared", "lanes", "early"),
    [(0, 3, ONE), pytest.param(1000, 6, ONE, marks=pytest.mark.slow), (0, 2, Shape(2)), (0, 4, Shape(1, 2))],
)
def test_prefill_apart_with_memory_workers_serves_what_the_simulator_says(
    shared: int, lanes: int, early: Shape
) -> None:
    """Memory workers store K and V of prompts, and attend to what is cached of these and to what decodes. Two workers
    run prompts: two copies of the weights, or one of two ranks or stages."""
    served = workload.of_lengths(2000, 100, Sessions(shared=shared) if shared else None)
    way = Way(
        kind=Kind.PREFILL,
        scratch=True,
        chunk=4096,
        prefill=CATALOGUE["h100"],
        prefill_workers=2,
        compute=CATALOGUE["h100"],
        compute_workers=1,
        memory=CATALOGUE["h20"],
        memory_workers=2,
        lanes=lanes,
        prefill_shape=None if early == ONE else early,
    )
    slo = Slo(tbt_s=0.1, ttft_s=2.0)
    found = server(served, slo).evaluate(way)
    assert found is not None and found.found == shared
    course = Course(SMALL, served, trace(served), RENTS, slo)
    for factor, holds in ((0.85, True), (1.2, False)):
        assert course.within_slos(course.simulate(found, factor * found.requests_s, 400)) == holds


@pytest.mark.parametrize(
    ("degree", "stages", "prompt", "output"), [(2, 4, 1000, 200), (2, 6, 200, 400), (1, 12, 1000, 200)]
)
def test_stages_serve_what_the_simulator_says(degree: int, stages: int, prompt: int, output: int) -> None:
    """A model of 140 GB on GPUs of 24 GB: bubbles, and steps that wait for each other, with random arrivals.

    With long outputs, a replica decodes as many sequences as a step has rows, the most that the runtime accepts.
    """
    served, slo = workload.of_lengths(prompt, output), Slo(tbt_s=0.6, ttft_s=10.0)
    shape = model_shapes.find("Llama-3-70B")
    costs = {"rtx4090": CostModel(shape, CATALOGUE["rtx4090"], Fits.load(CATALOGUE["rtx4090"]))}
    way = Way(
        kind=Kind.LOCAL,
        chunk=256,
        compute=CATALOGUE["rtx4090"],
        compute_workers=degree * stages,
        shape=Shape(degree, stages),
    )
    market = prices.load("runpod")
    found = Server(shape, served, costs, market, slo).evaluate(way)
    assert found is not None
    trial = Course(shape, served, [], market, slo, turnovers=4).highest_load(found)
    assert trial is not None and trial.requests_s == pytest.approx(found.requests_s, rel=0.15)


def test_plans_have_the_stages_that_weights_need() -> None:
    """With memory workers, as few as hold the weights; with KV beside the weights, more too."""
    shape, small = model_shapes.find("Llama-3-70B"), [(CATALOGUE["rtx4090"], 8)]
    every = list(ways(shape, small, small))
    fits = [way for way in every if way.shape.ranks * way.shape.stages * 0.9 * 25.77e9 > shape.weight_bytes]
    assert {(way.shape.ranks, way.shape.stages) for way in fits if way.kind is Kind.OFFLOADED} == {
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    }
    assert {(way.shape.ranks, way.shape.stages) for way in fits if way.kind is Kind.LOCAL} == {
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    }
    roomy = {way.shape.stages for way in ways(SMALL, *pools(8, 1)) if way.kind is Kind.LOCAL and way.shape.ranks == 1}
    assert roomy == {1, 2, 3, 4, 6, 8}
    assert {way.shape.stages for way in ways(SMALL, *pools(8, 1)) if way.kind is not Kind.LOCAL} == {1}


def test_pools_with_prefill_apart_have_degrees_of_their_own() -> None:
    apart = [way for way in ways(SMALL, *pools(4, 4)) if way.kind is Kind.PREFILL and way.compute.kind == "h20"]
    found = {(early.ranks, late.ranks) for early, late in (way.shapes for way in apart if way.memory)}
    assert found == {(early, late) for early in (1, 2, 4) for late in (1, 2)}  # one H20 at least has the KV
    found = {(early.ranks, late.ranks) for early, late in (way.shapes for way in apart if way.has_local)}
    assert found == {(early, late) for early in (1, 2, 4) for late in (1, 2, 4)}
    other = next(way for way in apart if way.memory and [shape.ranks for shape in way.shapes] == [4, 2])
    assert other.describe() == "h100:4 prefill in TP4, h20:2 decode in TP2, h20:1 memory, 2 fixed lanes"
    assert "--prefill h100:4/tp4 --compute h20:2/tp2 " in launch_command(other, SMALL, "Llama-2-13B", "")


SERVED, BOUNDS = workload.of_lengths(800, 100), Slo(tbt_s=0.1, ttft_s=2.0)


@pytest.fixture(scope="module")
def best() -> Capacity:
    """The cheapest way to serve ``SERVED`` within ``BOUNDS``."""
    place = server(SERVED, BOUNDS)
    return shortlist([one for way in ways(SMALL, *pools(1, 1)) if (one := place.evaluate(way))])[0]


@pytest.fixture(scope="module")
def course() -> Course:
    return Course(SMALL, SERVED, [], RENTS, BOUNDS)


@pytest.fixture(scope="module")
def trial(best: Capacity, course: Course) -> Trial:
    """``best`` at the highest load within ``BOUNDS``."""
    found = course.highest_load(best)
    assert found is not None
    return found


def test_what_is_served_is_within_the_slos_and_more_is_not(best: Capacity, course: Course, trial: Trial) -> None:
    assert trial.result.ttft_s.p99 <= 2 and trial.result.tbt_s.p99 <= 0.1
    assert abs(trial.result.growth) <= 0.06 and trial.requests_s == pytest.approx(trial.rate, rel=2 * trial.error)
    assert not course.within_slos(course.simulate(best, 1.5 * trial.requests_s, trial.requests))
    # The dollars of prompts and of outputs are those of the pools.
    spent = trial.usd_per_million_in * SERVED.prompt + trial.usd_per_million_out * SERVED.output
    assert spent * trial.requests_s * 3600 / 1e6 == pytest.approx(trial.capacity.usd_per_hour)


def test_a_plan_and_a_longer_simulation_with_other_requests_agree_within_the_stated_error(
    best: Capacity, course: Course, trial: Trial
) -> None:
    assert 0 < trial.error < 0.25
    requests, scale = [TracedRequest(float(at), 800, 100) for at in range(2)], 1 + 2 * trial.error
    for factor, holds in ((1 / scale, True), (scale, False)):
        arrivals = draw(requests, 3 * trial.requests, 7, factor * trial.rate)
        assert course.within_slos(simulate(course.deployment(best), arrivals, System(best.way.kind.system))) == holds


def test_ways_that_cannot_compete_are_given_up_by_what_the_simulator_says() -> None:
    """The closed form has no say: a way that holds its load is given up if another was simulated to be far cheaper."""
    served = workload.of_lengths(800, 100)
    slo = Slo(tbt_s=0.1, ttft_s=2.0)
    place = server(served, slo)
    way = Way(kind=Kind.ONE_POOL, chunk=2048, compute=CATALOGUE["h100"], compute_workers=1)
    assert (one := server(served).evaluate(way)) is not None  # at a load that 0.1 s between tokens rule out
    course = Course(SMALL, served, [], RENTS, slo)
    assert place.evaluate(way) is None or place.evaluate(way) != one
    with mock.patch.object(course, "simulate", wraps=course.simulate) as simulate:
        assert course.highest_load(one, 1e-3 * one.usd_per_request) is None and simulate.call_count == 1


def test_the_search_is_for_ways_that_the_closed_form_s_error_lets_be_rivals(best: Capacity) -> None:
    found = [dataclasses.replace(best, requests_s=best.requests_s / times) for times in (1.0, 1.6, 1.7, 3.0)]
    assert rivals(found, best.usd_per_request) == found[:2], "1.5 times the cost, and 10% too expensive by the form"
    assert rivals(found, 1.1 * best.usd_per_request) == found[:3] and rivals(found, math.inf) == found


def test_the_load_of_a_way_that_the_closed_form_overrates_is_found(best: Capacity) -> None:
    """A closed form that is ten times too high leads to about the same load."""
    course = Course(SMALL, SERVED, [], RENTS, BOUNDS, turnovers=4)
    trial, found = (
        course.highest_load(best),
        course.highest_load(dataclasses.replace(best, requests_s=10 * best.requests_s)),
    )
    assert trial is not None and found is not None and found.requests_s == pytest.approx(trial.requests_s, rel=0.1)


def test_the_slowest_steps_are_those_with_late_chunks_of_long_prompts() -> None:
    """Two of a hundred prompts are long: the mean chunk hardly changes, the 99th percentile of steps does."""
    short = [TracedRequest(float(second), 500, 100) for second in range(98)]
    long = [TracedRequest(98.0 + second, 30_000, 100) for second in range(2)]
    way = Way(
        kind=Kind.OFFLOADED,
        chunk=512,
        compute=CATALOGUE["h100"],
        compute_workers=1,
        memory=CATALOGUE["h20"],
        memory_workers=1,
    )
    found = [
        server(workload.of_requests("some long", requests), Slo(tbt_s=9, ttft_s=99)).evaluate(way)
        for requests in (short, [*short, *long])
    ]
    without, some = (one for one in found if one)
    chunk = np.array([512.0])
    last = 40 * float(server(workload.of_lengths(1, 1)).models["h20"].prefix_attention_seconds(chunk, 29_000)[0])
    assert some.chunk_step_s - without.chunk_step_s > 0.5 * last


@pytest.mark.parametrize("kind", list(Kind))
def test_what_a_prefix_cache_finds_is_not_computed(kind: Kind) -> None:
    """Sessions that fit beside the batch are as good as shorter prompts; those that do not, as nothing in common."""
    chosen = [way for way in of_kind(kind) if way.chunk >= 1024]

    def best(served: workload.Workload) -> float:
        place = server(served, Slo(tbt_s=1.0))
        return max(one.requests_s for way in chosen if (one := place.evaluate(way)))

    plain = best(workload.of_lengths(8000, 50))
    none_idle, all_idle = (
        best(workload.of_lengths(8000, 50, Sessions(resumed=7200, idle=idle))) for idle in (0.0, 0.9999)
    )
    assert all_idle == pytest.approx(plain, rel=0.03)
    assert none_idle > 1.5 * plain
    assert none_idle <= best(workload.of_lengths(800, 50)) * 1.001


def test_long_sequences_over_several_workers() -> None:
    """Parts of a long sequence are attended to at once: late chunks take less, and steps of few sequences too."""
    served, slo = workload.of_lengths(60_000, 100), Slo(tbt_s=9, ttft_s=999)
    way = next(
        one
        for one in ways(SMALL, *pools(1, 4), segments=(4096,))
        if one.kind is Kind.OFFLOADED and one.memory_workers == 4 and one.chunk == 512 and one.lanes == 1
    )
    place = server(served, slo)
    parted, whole = place.evaluate(way), place.evaluate(dataclasses.replace(way, segment=None))
    assert parted is not None and whole is not None and "KV in parts of 4096" in way.describe()
    assert parted.chunk_step_s < 0.6 * whole.chunk_step_s and parted.requests_s > whole.requests_s
    course = Course(SMALL, served, [], RENTS, slo)
    times = [course.simulate(one, 0.8 * whole.requests_s, 12).tbt_s.p50 for one in (parted, whole)]
    assert times[0] < times[1]


def test_prompts_count() -> None:
    """One way, the same outputs after longer prompts: fewer requests, and a larger share of the compute pool's time."""
    way = next(way for way in ways(SMALL, *pools()) if way.kind is Kind.OFFLOADED and way.memory_workers == 2)
    found = [server(workload.of_lengths(prompt, 200)).evaluate(way) for prompt in (100, 400, 1600)]
    rates, shares = [one.requests_s for one in found if one], [one.prompt_share for one in found if one]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True) and shares == sorted(shares)


@pytest.mark.parametrize("kind", [Kind.LOCAL, Kind.OFFLOADED])
def test_prompts_cause_nearly_all_of_the_cost_where_a_sequence_seldom_decodes(kind: Kind) -> None:
    """Computing 40,000 tokens takes seconds, and ten steps take a quarter of a second, also those with chunks alone."""
    place = server(workload.of_lengths(40_000, 10), Slo(tbt_s=1.0, ttft_s=1000.0))
    shares = [one.prompt_share for way in of_kind(kind) if (one := place.evaluate(way))]
    assert len(shares) > 5 and min(shares) > 0.9


def test_every_system_on_every_kind_competes() -> None:
    place = server(workload.of_lengths(500, 100))
    every = list(ways(SMALL, *pools()))
    kept = shortlist([one for way in every if (one := place.evaluate(way))])
    seen = {(one.way.kind, one.way.compute.kind) for one in kept}
    assert {(Kind.LOCAL, "h100"), (Kind.LOCAL, "h20"), (Kind.OFFLOADED, "h100"), (Kind.PREFILL, "h100")} <= seen
    assert [len(one.way.pools) for one in kept].count(3) == 1 and sum(len(way.pools) == 3 for way in every) > 1
    assert all(one.usd_per_hour > 0 for one in kept)
    assert {way.shape.ranks for way in every if way.kind is Kind.LOCAL} == {1, 2}
    assert not any(way.kind is Kind.ONE_POOL for way in every), "a system to compare with, which plans do not advise"


def test_a_request_that_fits_no_memory_pool_is_an_error_with_the_figures() -> None:
    long = workload.of_requests("long", [TracedRequest(0, 400_000, 10), TracedRequest(1, 10, 10)])
    place = server(long, shape=model_shapes.find("LLaMA-65B"))
    way = Way(
        kind=Kind.OFFLOADED,
        chunk=512,
        compute=CATALOGUE["h100"],
        compute_workers=2,
        memory=CATALOGUE["h20"],
        memory_workers=8,
        shape=Shape(2),
        lanes=1,
    )
    room = place.models["h20"].kv_tokens
    assert place.unfit(way) == f"the longest request has 400010 tokens; 8 h20 hold {8 * room}"
    assert place.evaluate(way) is None
    # A sequence may continue on other workers: what all of them hold fits.
    assert 2 * room < 8 * room - 10 and place.serving(workload.of_lengths(2 * room, 10)).unfit(way) is None


def plan(line: str) -> str:
    """The output of `lamina plan LINE`."""
    return CliRunner().invoke(app, ["plan", *shlex.split(line)], catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A trace, and the plan for it."""
    trace = tmp_path_factory.mktemp("plan") / "trace.jsonl"
    random = np.random.default_rng(0)
    rows = (
        {
            "timestamp": 100 * i,
            "input_length": int(random.integers(50, 800)),
            "output_length": int(random.integers(20, 80)),
        }
        for i in range(300)
    )
    trace.write_text("\n".join(map(json.dumps, rows)))
    line = f"--model Llama-2-13B --compute h100:1 --memory h20:1 --prices paper --trace {trace} --json"
    with pytest.MonkeyPatch.context() as patch:
        for bound in ("FEWEST", "MOST"):
            patch.setattr(f"lamina.planning.simulate.trial.{bound}", 300)  # requests of a run
        return trace, json.loads(plan(line))


def test_what_is_recommended_is_the_cheapest_that_was_simulated(planned: tuple[Path, dict[str, Any]]) -> None:
    _, found = planned
    costs = [way["usd_per_request"] for way in found["ways"]]
    ties = [
        way for way in found["ways"] if way["usd_per_request"] <= min(costs) * (1 + found["ways"][0]["error"] + 0.1)
    ]
    assert len(costs) >= 3 and found["ways"][0] in ties and costs[len(ties) :] == sorted(costs)[len(ties) :]
    assert found["ways"][0]["way"] in found["recommended"][0]
    one_pool = found["ways"][0]["system"] in ("chunked-prefill", "local")
    assert found["recommended"][0].startswith("Rent one pool" if one_pool else "Rent two pools")
    slo = found["slo"]
    for way in found["ways"]:
        assert way["way"] not in found["given_up"]
        simulated = way["simulated"]
        assert simulated["ttft_s"]["p99"] <= slo["ttft_s"] and simulated["tbt_s"]["p99"] <= slo["tbt_s"]
        assert simulated["stalled_s"]["p99"] <= slo["ttft_s"] + slo["tbt_s"]


@pytest.mark.parametrize(("stall_s", "kept"), [(0.02, True), (5.0, False)])
def test_requests_that_wait_between_prefill_and_decoding_are_not_within_the_slos(stall_s: float, kept: bool) -> None:
    """Each waits once, for seconds, in hundreds of gaps: no percentile of all gaps shows that."""
    course = Course(SMALL, workload.of_lengths(800, 300), [], RENTS, Slo(tbt_s=0.1, ttft_s=2.0))
    one = next(way for way in ways(SMALL, *pools(1, 1)) if way.kind is Kind.PREFILL)
    found = server(workload.of_lengths(800, 300)).evaluate(one)
    assert found is not None
    log = RequestLog(Arrivals(np.arange(50.0), np.full(50, 800), np.full(50, 300)))
    for index in range(50):
        for token in range(300):
            now = index + 0.1 + 0.02 * token + (stall_s if token else 0)
            log.draw(now, np.array([index]))
        log.end(index, State.FINISHED, now)
    result = dataclasses.replace(course.simulate(found, 1.0, 10), log=log)
    assert result.ttft_s.p99 <= 2 and result.tbt_s.p99 <= 0.1
    assert course.within_slos(result) is kept
    served = workload.of_lengths(800, 300)
    printed = table.cells(Trial(capacity=found, rate=1.0, error=0.1, result=result, requests=50, workload=served))
    shown = dict(zip(table.HEADINGS, printed[1:], strict=True))
    assert (shown["TTFT p99"], shown["stall p99"]) == ("0.10 s", f"{0.1 + 0.02 + stall_s:.2f} s")
    assert shown["model"].startswith(f"{found.requests_s:.2f} (")


@pytest.mark.parametrize(
    ("rate", "shown"), [(21.349, "21.35"), (1.0, "1.00"), (0.4056, "0.406"), (0.01979, "0.0198"), (0.0, "0.00")]
)
def test_low_rates_have_three_significant_digits(rate: float, shown: str) -> None:
    """Plans of long contexts serve a request a minute."""
    assert show_rate(rate) == shown


def test_simulate_repeats_a_plan_without_a_trace_on_hardware_and_at_prices_of_one_s_own(tmp_path: Path) -> None:
    mine, market = tmp_path / "my devices.toml", tmp_path / "my prices.toml"
    mine.write_text("[h100]\nmemory_gb_s = 2000\n")
    market.write_text("[kinds.h100]\nusd_per_hour = 2\nsource = 'a test'\ndate = '2025-01'\n")
    files = f"--hardware {shlex.quote(str(mine))} --prices {shlex.quote(str(market))}"
    found = json.loads(plan(f"--model Llama-2-13B --compute h100:1 --prompt 700 --output 20 {files} --json"))
    (warning,) = found["price_warnings"]
    assert "2025-01 for h100, more than 90 days ago" in warning
    for way in found["ways"]:
        done = CliRunner().invoke(app, [*shlex.split(way["simulate"])[1:], "--json"], catch_exceptions=False)
        repeated = json.loads(done.stdout)
        assert repeated["tbt_s"] == way["simulated"]["tbt_s"] and repeated["usd_per_hour"] == way["usd_per_hour"]
        assert repeated["served_requests_s"] == way["requests_s"]


def test_simulate_repeats_what_plan_printed(planned: tuple[Path, dict[str, Any]]) -> None:
    _, found = planned
    for way in found["ways"]:
        words = shlex.split(way["simulate"])
        assert words[0] == "lamina"
        done = CliRunner().invoke(app, [*words[1:], "--json"], catch_exceptions=False)
        repeated = json.loads(done.stdout)
        for name in ("tokens_s", "ttft_s", "tbt_s", "steps", "usd_per_hour"):
            assert repeated[name] == way["simulated"][name], (way["way"], name)
        assert repeated["served_requests_s"] == way["requests_s"] <= repeated["offered_requests_s"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--slo-tbt 1ms",
            r"keeps p99 TTFT 2 s and p99 TBT 1 ms at any load. At low load, the shortest p99 TBT is [\d.]+ ms, with ",
        ),
        ("--slo-ttft 20ms", "keeps p99 TTFT 20 ms and p99 TBT 100 ms at any load"),
        ("--budget 1", r"costs \$1.00/h or less; the cheapest .* costs \$4.63/h. Raise --budget"),
        ("--prompt 900000 --output 10", "no way to serve fits: .*the longest request has 900010 tokens"),
        ("--prompt 110000 --output 10", "room for a batch: a request has 110005 tokens of KV .* leaves 5% of"),
        ("--prompt 0", "prompts of 0 tokens"),
        ("--context 100 --prompt 5", "--context plans for decoding alone"),
        ("--trace x.csv --prompt 5", "give only one of them"),
        ("--model gpt-oss-120b --weight-dtype fp8", "stored as int4 already"),
    ],
)
def test_what_no_way_serves_is_refused(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(f"--model Llama-2-13B --compute h100:1 --memory h20:1 --prices paper {line}")


def test_a_trace_without_a_rate_is_refused_with_the_lengths_to_give_instead(tmp_path: Path) -> None:
    trace = tmp_path / "one.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    with pytest.raises(UserError, match=r"has 1 requests, all at one time.*--prompt 4808 --output 10 instead"):
        plan(f"--model Llama-2-13B --compute h100:1 --prices paper --trace {trace}")


def test_a_plan_says_that_requests_are_longer_than_the_model_allows() -> None:
    line = "--model Llama-2-13B --compute h100:1 --prices paper --output 4 --json --prompt"
    longer, shorter = (json.loads(plan(f"{line} {prompt}"))["notes"] for prompt in (4100, 4000))
    assert any("supports 4096 tokens; the longest request has 4104" in note for note in longer)
    assert not any("supports" in note for note in shorter)
