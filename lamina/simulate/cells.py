"""Cells of the planner's map, simulated: both sides at the highest load within the SLOs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lamina.plan.map import PAYS, Cell
from lamina.plan.models import ModelShape
from lamina.plan.prices import Prices
from lamina.plan.reuse import Sessions
from lamina.plan.ways import Capacity, Slo
from lamina.plan.workload import TracedRequest, Workload
from lamina.simulate.trial import MOST, Course

ROUNDS, TOLERANCE = 6, 0.1
"""Of a cell: highest loads are found to TOLERANCE."""


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
    """The cells of a grid, with the simulator's rates in those where two kinds pay most, and where offloading does:
    until these are cells that were simulated, so that no gain is named as the best that the simulator contradicts."""
    cells = list(found)
    for name in ("gain", "offloading"):
        while (place := _best(cells, name)) is not None and not cells[place].simulated:
            if not can_simulate(cells[place].workload):
                break
            cells[place] = simulate(cells[place], shape, prices, slo)
            on_cell()
    return cells


def simulate(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> Cell:
    """The cell with the simulator's rates in place of the closed form's; sides that hold no load are left out."""
    course = Course(shape, cell.workload, trace(cell.workload), prices, slo)

    def rate(side: Capacity | None) -> Capacity | None:
        trial = None if side is None else course.most(side, rounds=ROUNDS, tolerance=TOLERANCE)
        return None if side is None or trial is None else replace(side, requests_s=trial.requests_s)

    return Cell(cell.workload, rate(cell.alone), rate(cell.offloaded), rate(cell.apart), simulated=True)


def _best(cells: Sequence[Cell], name: str) -> int | None:
    """The cell with the largest gain above PAYS."""
    gains = [getattr(cell, name) or 0.0 for cell in cells]
    best = int(np.argmax(gains))
    return best if gains[best] > PAYS else None
