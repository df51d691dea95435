"""Cells of the planner's map, simulated: both sides at the highest load within the SLOs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lamina.plan.map import PAYS, SIDES, Cell, side
from lamina.plan.models import ModelShape
from lamina.plan.prices import Prices
from lamina.plan.reuse import Sessions
from lamina.plan.ways import Slo
from lamina.plan.workload import TracedRequest, Workload
from lamina.simulate.trial import MOST, WORSE, Course

ROUNDS, TOLERANCE, TURNOVERS = 6, 0.1, 8
"""Of a cell: highest loads are found to TOLERANCE, in runs half as long as plans have, as all requests are alike."""


def can_simulate(workload: Workload) -> bool:
    """False for sessions that are idle between turns: a run would have to be far longer than they are idle."""
    return not (isinstance(workload.reuse, Sessions) and workload.reuse.resumed)


def trace(workload: Workload) -> list[TracedRequest]:
    """Requests of one length, a second apart on average, whose prompts begin alike; none if nothing is shared."""
    shared = round(workload.reuse.shared)
    if not shared:
        return []
    times = np.cumsum(np.random.default_rng(0).exponential(1.0, MOST)).tolist()
    prompt, output = round(workload.prompt), round(workload.output)
    return [
        TracedRequest(at, prompt, output, ((0, shared), (1 + place, prompt - shared))) for place, at in enumerate(times)
    ]


def confirm(
    found: Sequence[Cell], shape: ModelShape, prices: Prices, slo: Slo, on_cell: Callable[[], None] = lambda: None
) -> list[Cell]:
    """The cells of a grid, with the simulator's rates where two kinds pay by the closed form, so that no gain is shown
    that the simulator contradicts; sessions that are idle stay as they are. ``on_cell``: after each cell."""
    cells = []
    for cell in found:
        checked = pays(cell) and can_simulate(cell.workload)
        cells.append(simulate(cell, shape, prices, slo) if checked else cell)
        on_cell()
    return cells


def pays(cell: Cell) -> bool:
    """Whether two kinds cost less than one, by more than the closed form is off."""
    return max(cell.gain or 0.0, cell.offloading or 0.0) > PAYS


def simulate(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> Cell:
    """The cell with the simulator's rates in place of the closed form's.

    Of each side, the cheapest way and those that come next are simulated, and the cheapest is kept. Sides that hold no
    load are left out. Those that cost more than ``WORSE`` times another by the closed form keep its rate.
    """
    course = Course(shape, cell.workload, trace(cell.workload), prices, slo, turnovers=TURNOVERS)
    sides = {name: found for name in SIDES if (found := getattr(cell, name)) is not None}
    least = min((found.usd_per_request for found in sides.values()), default=0.0)
    near = [name for name, found in sides.items() if found.usd_per_request <= WORSE * least]
    kept = {name: found for name, found in sides.items() if name not in near}
    for one in (*(sides[name] for name in near), *cell.seconds):
        name = side(one.way)
        if name in near and (trial := course.most(one, rounds=ROUNDS, tolerance=TOLERANCE)) is not None:
            found = replace(one, requests_s=trial.requests_s)
            if name not in kept or found.usd_per_request < kept[name].usd_per_request:
                kept[name] = found
    alone, offloaded, apart = (kept.get(name) for name in SIDES)
    return Cell(cell.workload, alone, offloaded, apart, simulated=True)
