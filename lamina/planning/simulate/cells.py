"""Cells of the planner's map, simulated: both sides at the highest load within the SLOs."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lamina.planning.plan.crossover_map import PAYS, SIDES, Cell, side
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.reuse import Sessions
from lamina.planning.plan.ways import Capacity, Slo
from lamina.planning.plan.workload import TracedRequest, Workload
from lamina.planning.simulate.trial import MOST, WORSE, Course

ROUNDS, TOLERANCE, TURNOVERS = 6, 0.1, 8
"""How the highest load of a cell is found: to TOLERANCE, in runs half as long as those of plans, since all requests are
alike."""

MOST_STEPS = 50_000
"""Limit on the steps of a run. A step takes the simulator up to 0.5 ms, and a cell takes 12 to 24 runs: with more
steps, a cell would take minutes."""


def can_simulate(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> bool:
    """False if a run would be too long: of more than ``MOST_STEPS``, or of sessions that are idle between turns."""
    if isinstance(cell.workload.reuse, Sessions) and cell.workload.reuse.resumed:
        return False
    course = _course(cell, shape, prices, slo)
    return max(course.steps(one) for one in (*_near(cell).values(), *cell.seconds)) <= MOST_STEPS


def _near(cell: Cell) -> dict[str, Capacity]:
    """Return the sides that cost at most ``WORSE`` times the cheapest by the closed form."""
    sides = _sides(cell)
    least = min((found.usd_per_request for found in sides.values()), default=0.0)
    return {name: found for name, found in sides.items() if found.usd_per_request <= WORSE * least}


def _sides(cell: Cell) -> dict[str, Capacity]:
    return {name: found for name in SIDES if (found := getattr(cell, name)) is not None}


def _course(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> Course:
    return Course(shape, cell.workload, trace(cell.workload), prices, slo, turnovers=TURNOVERS)


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
    found: Sequence[Cell],
    shape: ModelShape,
    prices: Prices,
    slo: Slo,
    run: Callable[[Callable[[Cell], Cell], Sequence[Cell]], Iterable[Cell]] = map,
) -> list[Cell]:
    """Return the cells, with the simulator's rates where two kinds pay by the closed form and a run is not too long, so
    that no gain is shown that the simulator contradicts. ``run``: calls a function with each cell, such as
    ``Pool.imap``."""
    chosen = [place for place, cell in enumerate(found) if pays(cell) and can_simulate(cell, shape, prices, slo)]
    each = partial(simulate, shape=shape, prices=prices, slo=slo)
    cells = list(found)
    for place, cell in zip(chosen, run(each, [found[place] for place in chosen]), strict=True):
        cells[place] = cell
    return cells


def pays(cell: Cell) -> bool:
    """Return whether two kinds cost less than one, by more than the closed form is off."""
    return max(cell.gain or 0.0, cell.offloading or 0.0) > PAYS


def simulate(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> Cell:
    """Return the cell with the simulator's rates in place of the closed form's.

    The cheapest way of each side is simulated, and on one kind also those that come next, of which the cheapest is
    kept: no gain is over a way that the closed form overrates. Sides that hold no load are left out, and prefill apart
    where it costs more than offloading. Those that cost more than ``WORSE`` times another by the closed form keep its
    rate.
    """
    course = _course(cell, shape, prices, slo)
    near = _near(cell)
    kept = {name: found for name, found in _sides(cell).items() if name not in near}
    for one in (*near.values(), *cell.seconds):
        name = side(one.way)
        rivals = [kept[other] for other in ((name,) if name == "alone" else ("offloaded", "apart")) if other in kept]
        most_usd = min((rival.usd_per_request for rival in rivals), default=math.inf)
        if name in near and (trial := course.most(one, most_usd, rounds=ROUNDS, tolerance=TOLERANCE)) is not None:
            found = replace(one, requests_s=trial.requests_s)
            if name not in kept or found.usd_per_request < kept[name].usd_per_request:
                kept[name] = found
    alone, offloaded, apart = (kept.get(name) for name in SIDES)
    return Cell(cell.workload, alone, offloaded, apart, simulated=True)
