"""Maps for which workloads two kinds of devices serve at less cost per request than one kind.

Every cell of a grid is a workload whose requests all have one prompt and one output length. Its sides are the cheapest
ways to serve it within the SLOs: on one kind of device (one pool, of Lamina or of another system with chunked prefill;
or prefill and decode apart), and on two kinds (attention offloaded; or prefill on one kind and decode on the other).
Offloading to memory workers of the compute workers' kind counts as one kind.

Three grids: prompt and output lengths; sessions that are idle between turns, whose KV stays while memory is free; and
prompts with a shared prefix. ``cells`` evaluates a grid by the closed form; ``confirm`` simulates the cells in which
two kinds are cheaper.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.overheads import VLLM
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.serving import Server
from lamina.planning.plan.ways import SEGMENT, Capacity, Kind, Slo, Way, baselines, ways
from lamina.planning.plan.workload import Sessions, TracedRequest, Workload, of_lengths
from lamina.planning.simulate.trial import MOST, WORSE, Course

PROMPTS = (256, 1024, 4096, 16384, 65536)
OUTPUTS = (128, 512, 2048, 8192, 32768)

IDLE = (0.0, 0.5, 0.9, 0.98)
EARLIER = 0.9
"""Share of a prompt that earlier turns of its session had, in the grid of idle sessions."""

SHARED = (0.0, 0.5, 0.9)
OUTPUT = 512
"""Output tokens in the grids of idle sessions and of shared prefixes."""

_CHUNKS = (512, 2048)
_MOST_LANES = 3  # per replica
PAYS = 0.05
"""A gain below this is within what the closed form is off, and counts as none."""

NEAR, SECONDS = 2.0, 2
"""Ways on one kind that cost up to NEAR times the cheapest may be cheaper in the simulator; so many are kept."""

SIDES = ("alone", "offloaded", "apart")
"""What a cell compares: one kind; two, with attention offloaded; two, with prefill apart."""


@dataclass(frozen=True)
class Grid:
    """Workloads, row by row, with labels of ``rows`` and ``columns``; ``heading`` is "rows | columns"."""

    title: str
    heading: str
    rows: Sequence[str]
    columns: Sequence[str]
    workloads: Sequence[Workload]


def grids() -> list[Grid]:
    """Return the grids of a map."""
    columns = [f"{prompt}" for prompt in PROMPTS]
    return [
        Grid(
            "prompts and outputs",
            "output | prompt",
            [f"{output}" for output in OUTPUTS],
            columns,
            [of_lengths(prompt, output) for output in OUTPUTS for prompt in PROMPTS],
        ),
        Grid(
            f"sessions with {EARLIER:.0%} of the prompt from earlier turns, outputs of {OUTPUT}",
            "idle | prompt",
            [f"{idle:.0%}" for idle in IDLE],
            columns,
            [
                of_lengths(prompt, OUTPUT, Sessions(resumed=round(EARLIER * prompt), idle=idle))
                for idle in IDLE
                for prompt in PROMPTS
            ],
        ),
        Grid(
            f"a prefix that all prompts share, outputs of {OUTPUT}",
            "shared | prompt",
            [f"{share:.0%}" for share in SHARED],
            columns,
            [
                of_lengths(prompt, OUTPUT, Sessions(shared=round(share * prompt)))
                for share in SHARED
                for prompt in PROMPTS
            ],
        ),
    ]


@dataclass(frozen=True)
class Cell:
    """The cheapest ways to serve one workload; None where no way keeps the SLOs.

    Attributes:
        workload: The workload.
        alone: The cheapest way on one kind of device.
        offloaded: The cheapest way on two kinds with attention offloaded.
        apart: The cheapest way on two kinds with prefill apart from decode.
        simulated: Whether their rates are the simulator's instead of the closed form's.
        seconds: On one kind, the cheapest ways of other systems or degrees of tensor parallelism, or with stages if the
            cheapest has none and the other way round, that are ``NEAR``.
    """

    workload: Workload
    alone: Capacity | None
    offloaded: Capacity | None
    apart: Capacity | None
    simulated: bool = False
    seconds: tuple[Capacity, ...] = ()

    @property
    def sides(self) -> dict[str, Capacity]:
        """Return the ways found, by the names of ``SIDES``."""
        return {name: found for name in SIDES if (found := getattr(self, name)) is not None}

    @property
    def together(self) -> Capacity | None:
        """The cheapest way on two kinds."""
        return _cheapest([one for name, one in self.sides.items() if name != "alone"])

    @property
    def winner(self) -> str:
        """Name of the cheapest side: "offload", "apart", or the kind that serves alone; empty without any way."""
        best = _cheapest(list(self.sides.values()))
        if best is None:
            return ""
        names = {"alone": f"{best.way.compute.kind} alone", "offloaded": "offload", "apart": "apart"}
        return names[side(best.way)]

    @property
    def gain(self) -> float | None:
        """Requests per dollar on two kinds over requests per dollar on one, less 1; None unless both exist."""
        return _gain(self.alone, self.together)

    @property
    def offloading(self) -> float | None:
        """Gain by offloaded attention, see ``gain``."""
        return _gain(self.alone, self.offloaded)


def cells(
    shape: ModelShape,
    workloads: Iterable[Workload],
    pools: tuple[Sequence[tuple[Hardware, int]], Sequence[tuple[Hardware, int]]],
    models: Mapping[str, CostModel],
    prices: Prices,
    slo: Slo,
) -> Iterable[Cell]:
    """Return a cell for every workload, in order."""
    candidates = [way for way in (*baselines(shape, *pools), *ways(shape, *pools, (None, SEGMENT))) if _coarse(way)]
    server: Server | None = None
    for workload in workloads:
        server = server.serving(workload) if server else Server(shape, workload, models, prices, slo, VLLM)
        sides: dict[str, list[Capacity]] = {name: [] for name in SIDES}
        for way in candidates:
            if (found := server.evaluate(way)) is not None:
                sides[side(way)].append(found)
        alone, offloaded, apart = (_cheapest(sides[name]) for name in SIDES)
        yield Cell(workload, alone, offloaded, apart, seconds=_seconds(sides["alone"]))


def side(way: Way) -> str:
    """Return the name of the cell's attribute that a way belongs to."""
    if len(way.kinds) == 1:
        return "alone"
    return "offloaded" if way.kind is Kind.OFFLOADED else "apart"


def crossover(found: Sequence[Cell]) -> str:
    """Describe where two kinds are cheaper in a grid, and by which of the two ways."""
    compared = [cell for cell in found if cell.gain is not None]
    if not compared:
        return "No cell can be served both on one kind and on two."
    only = sum(cell.alone is None and cell.together is not None for cell in found)
    offloading = _best("Offloading attention", found, "offloading")
    text = f"Two kinds cost less per request in {_count(compared, 'gain')}. {offloading}."
    return text + (f" On one kind alone, nothing serves {only} more." if only else "")


def _count(found: Sequence[Cell], name: str) -> str:
    """Describe how many cells gain, and the range of their outputs and prompts."""
    paying = [cell for cell in found if (getattr(cell, name) or 0) > PAYS]
    text = f"{len(paying)} of {len(found)} cells"
    if not paying:
        return text
    lengths = (_span([getattr(cell.workload, part) for cell in paying]) for part in ("prompt", "output"))
    return text + ", with prompts of {} tokens and outputs of {}".format(*lengths)


def _best(what: str, found: Sequence[Cell], name: str) -> str:
    compared = [cell for cell in found if getattr(cell, name) is not None]
    if not compared:
        return f"{what} cannot be compared in any cell"
    best = max(compared, key=lambda cell: float(getattr(cell, name)))
    gain = getattr(best, name)
    how = " (simulated)" if best.simulated else ""
    return f"{what}: cheaper in {_count(compared, name)}; at best {gain:+.0%}{how}, with {best.workload.name}"


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def _cheapest(found: Sequence[Capacity]) -> Capacity | None:
    return min(found, key=lambda one: one.usd_per_request, default=None)


def _seconds(found: Sequence[Capacity]) -> tuple[Capacity, ...]:
    layouts: dict[tuple[Kind, int, bool], Capacity] = {}
    for one in sorted(found, key=lambda one: one.usd_per_request):
        layouts.setdefault((one.way.kind, one.way.shape.ranks, one.way.shape.stages > 1), one)
    ranked = list(layouts.values())
    return tuple(one for one in ranked[1:] if one.usd_per_request <= NEAR * ranked[0].usd_per_request)[:SECONDS]


def _gain(alone: Capacity | None, together: Capacity | None) -> float | None:
    return alone.usd_per_request / together.usd_per_request - 1 if alone and together else None


def _coarse(way: Way) -> bool:
    """Return whether a map considers a way: two chunk lengths; with two pools powers of two, equal ranks, no stages, no
    rotation.

    Not three pools.
    """
    if len(way.pools) == 1:
        return way.chunk in _CHUNKS
    if way.shape.stages > 1:
        return False
    counts = [count for _, count in way.pools]
    if any(count & (count - 1) for count in counts) or (way.rotates and way.replicas > 1):
        return False
    if way.kind.divides_roles:
        return way.memory is None and way.prefill_shape is None
    return way.chunk in _CHUNKS and way.lanes <= _MOST_LANES * way.replicas


ROUNDS, TOLERANCE, TURNOVERS = 6, 0.1, 8
"""How the highest load of a cell is found: to TOLERANCE, in runs half as long as those of plans, since all requests are
alike."""

MOST_STEPS = 50_000
"""Limit on the steps of a run. A step takes the simulator up to 0.5 ms, and a cell takes 12 to 24 runs: with more
steps, a cell would take minutes."""


def can_simulate(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> bool:
    """Return False if a simulation would exceed ``MOST_STEPS``, or for sessions that are idle between turns."""
    if isinstance(cell.workload.reuse, Sessions) and cell.workload.reuse.resumed:
        return False
    course = _course(cell, shape, prices, slo)
    return max(course.steps(one) for one in (*_near(cell).values(), *cell.seconds)) <= MOST_STEPS


def _near(cell: Cell) -> dict[str, Capacity]:
    """Return the sides that cost at most ``WORSE`` times as much as the cheapest side by the closed form."""
    least = min((found.usd_per_request for found in cell.sides.values()), default=0.0)
    return {name: found for name, found in cell.sides.items() if found.usd_per_request <= WORSE * least}


def _course(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> Course:
    return Course(shape, cell.workload, trace(cell.workload), prices, slo, turnovers=TURNOVERS, engine=VLLM)


def trace(workload: Workload) -> list[TracedRequest]:
    """Return requests of one length, one per second on average, with a shared prefix; empty without a prefix."""
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
    """Return the cells, with simulated rates where two kinds are cheaper and the simulation is not too long.

    ``run``: maps a function over cells, such as ``Pool.imap``.
    """
    chosen = [place for place, cell in enumerate(found) if pays(cell) and can_simulate(cell, shape, prices, slo)]
    each = partial(simulate, shape=shape, prices=prices, slo=slo)
    cells = list(found)
    for place, cell in zip(chosen, run(each, [found[place] for place in chosen]), strict=True):
        cells[place] = cell
    return cells


def pays(cell: Cell) -> bool:
    """Return whether two kinds cost less than one by more than the closed form's error."""
    return max(cell.gain or 0.0, cell.offloading or 0.0) > PAYS


def simulate(cell: Cell, shape: ModelShape, prices: Prices, slo: Slo) -> Cell:
    """Return the cell with simulated rates.

    Simulates the cheapest way of each side, and ``seconds`` too, of which the cheapest is kept, so that no gain is
    compared to a way that the closed form overrates. Drops sides that keep the SLOs at no load, and prefill apart if it
    costs more than offloading. Sides that cost more than ``WORSE`` times the cheapest keep the closed form's rate.
    """
    course = _course(cell, shape, prices, slo)
    near = _near(cell)
    kept = {name: found for name, found in cell.sides.items() if name not in near}
    for one in (*near.values(), *cell.seconds):
        name = side(one.way)
        rivals = [kept[other] for other in ((name,) if name == "alone" else ("offloaded", "apart")) if other in kept]
        most_usd = min((rival.usd_per_request for rival in rivals), default=math.inf)
        if (
            name in near
            and (trial := course.highest_load(one, most_usd, rounds=ROUNDS, tolerance=TOLERANCE)) is not None
        ):
            found = replace(one, requests_s=trial.requests_s)
            if name not in kept or found.usd_per_request < kept[name].usd_per_request:
                kept[name] = found
    alone, offloaded, apart = map(kept.get, SIDES)
    return Cell(cell.workload, alone, offloaded, apart, simulated=True)
