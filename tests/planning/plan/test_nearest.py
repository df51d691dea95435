"""Targets that no way keeps: the error names the least that some way keeps, and those are kept."""

import dataclasses
import math
import re
import shlex
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli.plan_refusals import unkept
from lamina.core.errors import ConfigError
from lamina.planning.plan import hardware, model_shapes, prices, workload
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.nearest import Reach, nearest, seconds
from lamina.planning.plan.serving import Server
from lamina.planning.plan.ways import Kind, Slo, Way, ways

CATALOGUE = hardware.load()
SHAPE = model_shapes.find("Llama-3-8B")
POOLS = [(CATALOGUE["h100"], 2)], [(CATALOGUE["h20"], 2)]
WAYS = list(ways(SHAPE, *POOLS))
FIRST, SECOND = WAYS[0], next(way for way in WAYS if way.kind is Kind.LOCAL)


def test_the_target_that_is_missed_is_named_with_its_best_value() -> None:
    reached = [Reach(FIRST, 6.31, 0.02), Reach(SECOND, 7.0, 0.01)]
    missed, instead = nearest(reached, Slo(ttft_s=1.0, tbt_s=0.1))
    assert missed == f"At low load, the shortest p99 TTFT is 6.4 s, with {FIRST.describe()}."
    assert instead == f"Give --slo-ttft 9.5s for {FIRST.describe()}: 50% more than at low load."
    # The way with the shortest TTFT misses the other target.
    missed, instead = nearest(reached, Slo(ttft_s=1.0, tbt_s=0.015))
    assert "6.4 s" in missed and instead.startswith(f"Give --slo-ttft 11s for {SECOND.describe()}:")


def test_both_targets_are_missed() -> None:
    reached = [Reach(FIRST, 6.0, 0.04), Reach(SECOND, 9.0, 0.03)]
    *missed, instead = nearest(reached, Slo(ttft_s=1.0, tbt_s=0.02))
    assert len(missed) == 2 and "TTFT is 6 s" in missed[0] and "TBT is 30 ms" in missed[1]
    assert instead.startswith(f"Give --slo-ttft 9s --slo-tbt 60ms for {FIRST.describe()}:")


def test_each_target_is_kept_but_not_both() -> None:
    reached = [Reach(FIRST, 0.5, 0.3), Reach(SECOND, 3.0, 0.01)]
    missed, instead = nearest(reached, Slo(ttft_s=1.0, tbt_s=0.1))
    assert "no way keeps both" in missed
    options = f"--slo-ttft 4.5s for {SECOND.describe()}, or --slo-tbt 450ms for {FIRST.describe()}"
    assert instead.startswith(f"Give {options}:")


@pytest.mark.parametrize(
    ("ttft_s", "message"),
    [(0.5, f"in the simulator at a useful load: {FIRST.describe()} keeps both"), (3.0, "p99 TTFT is 3 s, .* 4.5s")],
)
def test_ways_that_miss_the_targets_in_the_simulator_are_judged_by_their_times_there(
    ttft_s: float, message: str
) -> None:
    course = SimpleNamespace(reach=lambda capacity: Reach(FIRST, ttft_s, 0.05))
    error = unkept(Slo(ttft_s=1.0, tbt_s=0.1), course, [SimpleNamespace()])  # type: ignore[arg-type,list-item]
    assert re.search(message.replace("+", "[+]"), str(error)), error


@given(st.floats(1e-6, 1e5))
def test_times_are_rounded_up_by_less_than_a_tenth(value: float) -> None:
    number, unit = re.fullmatch(r"([\d.]+) (m?s)", seconds(value)).groups()  # type: ignore[union-attr]
    shown = float(number) * {"s": 1.0, "ms": 1e-3}[unit]
    assert value * (1 - 1e-6) <= shown <= value * 1.1 + 1e-9


@pytest.mark.parametrize("lengths", [(2000, 200), (20_000, 10), (50_000, 1), (10, 3000)])
@pytest.mark.parametrize("kind", [Kind.OFFLOADED, Kind.LOCAL, Kind.PREFILL])
def test_the_closed_form_keeps_what_a_way_reaches_and_nothing_less(kind: Kind, lengths: tuple[int, int]) -> None:
    served = workload.of_lengths(*lengths)
    costs = {kind: CostModel(SHAPE, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}

    def keeps(way: Way, slo: Slo) -> bool:
        return Server(SHAPE, served, costs, prices.load("paper"), slo).evaluate(way) is not None

    place = Server(SHAPE, served, costs, prices.load("paper"), Slo())
    several = [way for way in WAYS if way.kind is kind]
    for way in several[:: max(1, len(several) // 5)]:
        found = place.reach(way)
        assert found and all(one.way == way for one in found)
        for one in found:
            assert keeps(way, Slo(ttft_s=one.ttft_s * 1.0001, tbt_s=one.tbt_s * 1.0001))
        for name in ("ttft_s", "tbt_s"):
            least = min(getattr(one, name) for one in found)
            less = dataclasses.replace(Slo(ttft_s=math.inf, tbt_s=math.inf), **{name: least * 0.99})
            assert not keeps(way, less), (way.describe(), name)


@pytest.mark.parametrize(("prompt", "shared"), [(2000, 1000), (20_000, 16_000)])
def test_a_way_apart_keeps_what_it_reaches_beside_cached_prefixes(prompt: int, shared: int) -> None:
    """With tensor-parallel ranks, replicas that decode attend to the prefixes of prompts that run elsewhere."""
    served = workload.of_lengths(prompt, 30, workload.Sessions(shared=shared))
    costs = {kind: CostModel(SHAPE, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}
    apart = [way for way in WAYS if way.kind is Kind.PREFILL]
    assert any(way.shape.ranks > 1 for way in apart)
    for way in apart:
        (found,) = Server(SHAPE, served, costs, prices.load("paper"), Slo()).reach(way)
        slo = Slo(ttft_s=found.ttft_s * 1.0001, tbt_s=found.tbt_s * 1.0001)
        assert Server(SHAPE, served, costs, prices.load("paper"), slo).evaluate(way) is not None, way.describe()


def test_a_plan_with_the_targets_that_its_error_names_succeeds() -> None:
    line = "plan --model Llama-3-8B --compute h100:1 --prices paper --prompt 128000 --output 300"
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, [*shlex.split(line), "--slo-ttft", "1s"], catch_exceptions=False)
    (instead,) = re.findall(r"Give --slo-ttft (\S+) for", str(refused.value))
    done = CliRunner().invoke(app, [*shlex.split(line), "--slo-ttft", instead], catch_exceptions=False)
    assert "Rent one pool: h100:1" in done.output
