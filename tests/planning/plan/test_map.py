"""The map of where two kinds pay: its cells against all ways evaluated one by one, its words and its picture."""

import dataclasses
import math
import re
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli.plan_map import LEGEND, svg
from lamina.core.errors import UserError
from lamina.planning import crossover_map as plan_map
from lamina.planning import crossover_map as simulated
from lamina.planning.crossover_map import Cell, Grid, cells, crossover
from lamina.planning.plan import hardware, model_shapes, prices, workload
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.overheads import VLLM
from lamina.planning.plan.serving import Server
from lamina.planning.plan.ways import Capacity, Kind, Slo, Way, baselines, ways
from lamina.planning.plan.workload import Sessions

CATALOGUE = hardware.load()
RENTS = prices.load("paper")
SMALL = model_shapes.find("Llama-2-13B")
POOLS = [(CATALOGUE["h100"], 1)], [(CATALOGUE["h20"], 2)]
COSTS = {kind: CostModel(SMALL, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}


def test_a_cell_has_the_cheapest_of_both_sides() -> None:
    served = workload.of_lengths(400, 800)
    (cell,) = cells(SMALL, [served], POOLS, COSTS, RENTS, Slo())
    assert cell.alone is not None and cell.together is not None and cell.gain is not None
    place = Server(SMALL, served, COSTS, RENTS, Slo())
    candidates = (*baselines(SMALL, *POOLS), *ways(SMALL, *POOLS))
    every = [one for way in candidates if (one := place.evaluate(way)) is not None]
    alone = [one for one in every if len(one.way.kinds) == 1]
    together = [one for one in every if len(one.way.kinds) > 1]
    assert cell.offloaded is not None and cell.offloading is not None and cell.gain >= cell.offloading
    # The map tries fewer chunks and counts: it finds nothing cheaper than all ways, and nothing much dearer.
    for found, best in ((cell.alone, alone), (cell.together, together)):
        least = min(one.usd_per_request for one in best)
        assert least <= found.usd_per_request * (1 + 1e-9) and found.usd_per_request < 1.2 * least
    assert cell.gain == pytest.approx(cell.alone.usd_per_request / cell.together.usd_per_request - 1)


def test_stages_serve_on_one_kind() -> None:
    """Weights of 140 GB on GPUs of 80 GB: the cheapest of all ways has stages, and so has that of the cell."""
    shape, served = model_shapes.find("Llama-3-70B"), workload.of_lengths(1024, 128)
    costs = {kind: CostModel(shape, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}
    pools = [(CATALOGUE["h100"], 4)], [(CATALOGUE["h20"], 1)]
    (cell,) = cells(shape, [served], pools, costs, RENTS, Slo())
    place = Server(shape, served, costs, RENTS, Slo(), VLLM)
    alone = [one for way in ways(shape, *pools) if len(way.kinds) == 1 and (one := place.evaluate(way)) is not None]
    best = min(alone, key=lambda one: one.usd_per_request)
    assert cell.alone is not None and cell.alone.way.shape.stages > 1 and best.way.shape.stages > 1
    assert cell.alone.usd_per_request < 1.2 * best.usd_per_request


def cell_of(prompt: int, output: int, alone: float | None, together: float | None) -> Cell:
    """A cell whose requests cost so many dollars on one kind and on two."""

    class Priced:
        way, batch, found = Way(kind=Kind.ONE_POOL, chunk=512, compute=CATALOGUE["h100"], compute_workers=1), 8, 0.0

        def __init__(self, usd: float) -> None:
            self.usd_per_request = usd

    one, two = (None if usd is None else cast(Capacity, Priced(usd)) for usd in (alone, together))
    return Cell(workload.of_lengths(prompt, output), one, two, None)


def test_the_crossover_in_words() -> None:
    found = [cell_of(100, 400, 1.3, 1.0), cell_of(100, 100, 1.02, 1.0), cell_of(800, 100, 1.0, 2.0)]
    assert crossover([*found, cell_of(9000, 100, None, 1.0)]) == (
        "Two kinds cost less per request in 1 of 3 cells, with prompts of 100 tokens and outputs of 400. Offloading "
        "attention: cheaper in 1 of 3 cells, with prompts of 100 tokens and outputs of 400; at best +30%, with prompts "
        "of 100 tokens, outputs of 400. On one kind alone, nothing serves 1 more."
    )
    assert crossover([cell_of(1, 1, None, 1.0)]) == "No cell can be served both on one kind and on two."


def test_no_gain_is_named_as_the_best_that_the_simulator_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell of the largest gain is simulated, and then the next one, until the largest gain is a simulated one."""

    def halved(cell: Cell, **_: object) -> Cell:
        assert cell.gain is not None and not cell.simulated
        return dataclasses.replace(cell_of(1, 1, (cell.gain + 1) / 2, 1.0), workload=cell.workload, simulated=True)

    monkeypatch.setattr(simulated, "simulate", halved)
    found = [cell_of(1, 1, 1.6, 1.0), cell_of(2, 1, 1.5, 1.0), cell_of(3, 1, 1.2, 1.0), cell_of(4, 1, 0.5, 1.0)]
    checked = simulated.confirm(found, SMALL, RENTS, Slo())
    assert [cell.simulated for cell in checked] == [True, True, True, False]
    assert [cell.gain for cell in checked] == pytest.approx([-0.2, -0.25, -0.4, -0.5])
    idle = dataclasses.replace(found[0], workload=workload.of_lengths(100, 1, Sessions(resumed=50, idle=0.5)))
    assert simulated.confirm([idle], SMALL, RENTS, Slo()) == [idle]
    endless = dataclasses.replace(found[0], workload=workload.of_lengths(100, 10**6))
    assert simulated.confirm([endless], SMALL, RENTS, Slo()) == [endless]


def as_if_simulated(cell: Cell, **_: object) -> Cell:
    """In a process of its own."""
    return dataclasses.replace(cell, simulated=True)


def test_the_command_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_map, "PROMPTS", (200, 2000))
    monkeypatch.setattr(plan_map, "OUTPUTS", (100,))
    monkeypatch.setattr(simulated, "simulate", as_if_simulated)
    picture = tmp_path / "map.svg"
    line = ["plan", "--model", "Llama-2-13B", "--compute", "h100:1", "--memory", "h20:1", "--prices", "paper"]
    output = CliRunner().invoke(app, [*line, "--map", str(picture)], catch_exceptions=False).output
    assert (
        "output | prompt" in output
        and "2000" in output
        and "h100 and h20" in output
        and "Two kinds cost less" in output
        and "* simulated" in output
    )
    drawn = ElementTree.fromstring(picture.read_text())
    cells = len(plan_map.PROMPTS) * (len(plan_map.OUTPUTS) + len(plan_map.IDLE) + len(plan_map.SHARED))
    svg = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{svg}rect[@class='cell']")) == cells
    texts = [label.text or "" for label in drawn.findall(f"{svg}text")]
    winners = [text for text in texts if re.fullmatch("offload|apart|(h100|h20) alone", text)]
    assert len(winners) == cells and all(meaning in texts for _, meaning in LEGEND)
    assert all(winner in output for winner in winners)
    assert "idle | prompt" in output and "shared | prompt" in output
    with pytest.raises(UserError, match="--map has a grid"):
        CliRunner().invoke(app, [*line, "--map", str(picture), "--prompt", "5"], catch_exceptions=False)
    with pytest.raises(UserError, match="--map compares two kinds"):
        same = ["plan", "--model", "Llama-2-13B", "--compute", "h100:1", "--memory", "h100:1", "--prices", "paper"]
        CliRunner().invoke(app, [*same, "--map", str(picture)], catch_exceptions=False)


@pytest.mark.slow
def test_a_cell_is_simulated() -> None:
    """Both sides have the rates of the simulator, within a fifth of the closed form's."""
    served = workload.of_lengths(400, 100, Sessions(shared=200))
    (cell,) = cells(SMALL, [served], POOLS, COSTS, RENTS, Slo())
    measured = simulated.simulate(cell, SMALL, RENTS, Slo())
    assert measured.simulated and measured.alone is not None and cell.alone is not None
    assert measured.alone.requests_s == pytest.approx(cell.alone.requests_s, rel=0.2)
    assert measured.offloaded is not None and cell.offloaded is not None
    assert measured.offloaded.requests_s == pytest.approx(cell.offloaded.requests_s, rel=0.2)


def test_the_simulator_chooses_between_the_best_ways_of_a_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form's second, of another degree of tensor parallelism, wins if the simulator has it cheaper."""
    shape, served = model_shapes.find("Llama-3-70B"), workload.of_lengths(1000, 200)
    costs = {kind: CostModel(shape, CATALOGUE[kind], Fits.load(CATALOGUE[kind])) for kind in ("h100", "h20")}
    four = [(CATALOGUE["h100"], 4)], [(CATALOGUE["h20"], 4)]
    (cell,) = cells(shape, [served], four, costs, RENTS, Slo())
    assert cell.alone is not None and cell.seconds
    second = cell.seconds[0]
    assert cell.alone.usd_per_request <= second.usd_per_request <= plan_map.NEAR * cell.alone.usd_per_request
    assert second.way.shape.ranks != cell.alone.way.shape.ranks or second.way.kind != cell.alone.way.kind

    class Run:
        def __init__(self, requests_s: float) -> None:
            self.requests_s = requests_s

    limits: dict[int, float] = {}

    def most(_: object, one: Capacity, most_usd: float, **__: float) -> Run | None:
        limits[id(one)] = most_usd
        return None if plan_map.side(one.way) == "offloaded" else Run(one.requests_s / (1 if one is second else 2))

    monkeypatch.setattr("lamina.planning.simulate.trial.Course.highest_load", most)
    measured = simulated.simulate(cell, shape, RENTS, Slo())
    assert measured.alone == second and measured.offloaded is None and measured.simulated
    # The second is run only as long as it may be cheaper than the first, whose rate was half of the closed form's.
    assert limits[id(cell.alone)] == math.inf and limits[id(second)] == pytest.approx(2 * cell.alone.usd_per_request)


def test_the_picture_says_which_side_serves_alone() -> None:
    found = [cell_of(100, 100, 1.0, None), cell_of(200, 100, None, 1.0), cell_of(300, 100, None, None)]
    grid = Grid("lengths", "output | prompt", ["100"], ["100", "200", "300"], [cell.workload for cell in found])
    text = svg([("a & b", grid, found)])
    labels = [label.text for label in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert (
        labels[0] == "a & b: two kinds (offloading) against one"
        and labels[-2 - len(LEGEND) : -len(LEGEND)] == ["neither", "(-)"]
        and {"one only", "two only"} <= set(labels)
    )
