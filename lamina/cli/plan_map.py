"""`lamina plan --map`: a table and a picture of where a second kind of device pays."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lamina.config.engine_config import check_writable
from lamina.core.errors import ConfigError, LaminaError

if TYPE_CHECKING:
    from rich.table import Table

    from lamina.planning.crossover_map import Cell, Grid
    from lamina.planning.plan.cost import CostModel
    from lamina.planning.plan.hardware import Hardware
    from lamina.planning.plan.model_shapes import ModelShape
    from lamina.planning.plan.prices import Prices
    from lamina.planning.plan.ways import Slo

    Pool = Sequence[tuple[Hardware, int]]

_FULL_COLOUR = 0.5
"""Gain, of either sign, that is drawn in full colour."""

CELL_S = 900.0
"""A cell takes a minute at most."""

_WIDTH, _HEIGHT, _LEFT, _TOP = 96, 60, 112, 76

GAINS, LOSSES = "#1f9d6b", "#d1495b"
LEGEND = (
    (GAINS, f"two kinds serve more requests per dollar than one; full colour: {_FULL_COLOUR:+.0%} or more"),
    (LOSSES, "two kinds serve fewer requests per dollar than one"),
    ("none", "first line: two kinds against one, * simulated; in brackets: attention offloaded"),
    ("none", "last line, the cheapest way: offload (attention), apart (prefill), a kind alone"),
    ("none", "lengths in tokens; one only, two only, neither: which kinds keep the targets at all"),
)
"""Colour and meaning of each line of a picture's legend."""


def show(
    shape: "ModelShape",
    pools: "tuple[Pool, Pool]",
    models: "Mapping[str, CostModel]",
    prices: "Prices",
    slo: "Slo",
    picture: Path,
) -> None:
    """Print a table for every pair of kinds, and write the picture. Raises ConfigError if no pair has two kinds."""
    from lamina.cli.console import print_sentence, print_table
    from lamina.cli.plan_commands import warn_of_prices
    from lamina.observe.progress import counting_progress
    from lamina.planning import crossover_map as plan_map
    from lamina.planning.crossover_map import MOST_STEPS, confirm

    check_writable("--map", picture)
    pairs = [(one, other) for one in pools[0] for other in pools[1] if one[0] is not other[0]]
    if not pairs:
        raise ConfigError("--map compares two kinds; name different ones with --compute and --memory")
    grids, drawn = plan_map.grids(), []
    total, done = len(pairs) * sum(len(grid.workloads) for grid in grids), 0
    with counting_progress("Cells", total) as on_progress:
        for one, other in pairs:
            for grid in grids:
                found = []
                for cell in plan_map.cells(shape, grid.workloads, ([one], [other]), models, prices, slo):
                    found.append(cell)
                    on_progress(done := done + 1)
                drawn.append((f"{shape.name}, {one[0].kind} and {other[0].kind}", grid, found))
    with in_processes("Cells simulated") as run:
        checked = iter(confirm([cell for *_, found in drawn for cell in found], shape, prices, slo, run))
    drawn = [(title, grid, list(islice(checked, len(found)))) for title, grid, found in drawn]
    for title, grid, found in drawn:
        print_table(_table(title, grid, found))
        print_sentence(plan_map.crossover(found))
    devices = " and ".join(f"{most} {kind.kind}" for pool in pools for kind, most in pool)
    print_sentence(
        f"Closed form, * simulated; up to {devices}; p99 TTFT {slo.ttft_s:g} s, TBT {slo.tbt_s * 1e3:g} ms. "
        f"Prices: {prices.describe(models)}. First: two kinds against one, by attention offloaded or prefill apart. "
        "(..): by attention offloaded. Last: the cheapest way of the cell, offload, apart, or a kind alone. "
        "To simulate one cell: this command with --prompt N --output N instead of --map. Cells where two kinds pay by "
        f"the closed form are simulated, but for those of sessions and of runs of over {MOST_STEPS} steps; sides that "
        "cost over three times as much as another keep the closed form's rate.",
        style="dim",
    )
    warn_of_prices(prices, models)
    picture.write_text(svg(drawn))


One = TypeVar("One")
Done = TypeVar("Done")


@contextmanager
def in_processes(what: str) -> "Iterator[Callable[[Callable[[One], Done], Sequence[One]], Iterable[Done]]]":
    """Yield a map function that runs in one process per core, under a progress bar. ``what``: name of the items."""
    from lamina.observe.progress import counting_progress

    # Processes that are not forked: numpy's threads would be. Ctrl-C is for this one, which ends them.
    context, ignored = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with context.Pool(len(os.sched_getaffinity(0)), signal.signal, ignored) as pool:

        def run(simulate: "Callable[[One], Done]", things: "Sequence[One]") -> "Iterator[Done]":
            found = pool.imap(simulate, things)
            with counting_progress(what, len(things)) as on_progress:
                for done in range(1, len(things) + 1):
                    try:
                        yield found.next(CELL_S)
                    except multiprocessing.TimeoutError as error:
                        raise LaminaError(
                            f"{what}: {done} of {len(things)} did not end within {CELL_S:.0f} s; if the machine ran "
                            "out of memory, let lamina use fewer cores (taskset)"
                        ) from error
                    on_progress(done)

        yield run


def _table(title: str, grid: "Grid", found: "Sequence[Cell]") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{title}: requests per dollar on both over those on one; {grid.title}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in (grid.heading, *grid.columns):
        table.add_column(heading, justify="right")
    for place, label in enumerate(grid.rows):
        row = found[place * len(grid.columns) : (place + 1) * len(grid.columns)]
        table.add_row(label, *("\n".join(_lines(cell)) for cell in row))
    return table


def _lines(cell: "Cell") -> tuple[str, str, str]:
    """Return what a cell shows: its gain, that of offloading, and its cheapest way."""
    return _text(cell), f"({_percent(cell.offloading)})", cell.winner


def _text(cell: "Cell") -> str:
    mark = "*" if cell.simulated else ""
    if cell.gain is not None:
        return _percent(cell.gain) + mark
    return ("one only" if cell.alone else "two only" if cell.together else "neither") + mark


def _percent(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:+.0%}" if abs(gain) >= 0.005 else "0%"


def svg(drawn: "Sequence[tuple[str, Grid, Sequence[Cell]]]") -> str:
    """Draw a heat map for every pair and grid, below each other; text takes the colour of a light or dark page."""
    parts, top, width = [], 0, 0
    for title, grid, found in drawn:
        width = max(width, _LEFT + _WIDTH * len(grid.columns) + 16)
        parts.append(_label(8, top + 20, f"{title}: two kinds (offloading) against one", "start", 14))
        parts.append(_label(8, top + 37, grid.title, "start"))
        parts.append(_label(8, top + _TOP - 8, grid.heading, "start"))
        for place, cell in enumerate(found):
            row, column = divmod(place, len(grid.columns))
            x, y = _LEFT + column * _WIDTH, top + _TOP + row * _HEIGHT
            if row == 0:
                parts.append(_label(x + _WIDTH / 2, y - 8, grid.columns[column], "middle"))
            if column == 0:
                parts.append(_label(x - 8, y + _HEIGHT / 2 + 4, grid.rows[row], "end"))
            gain = cell.gain or 0.0
            depth = min(1.0, abs(gain) / _FULL_COLOUR)
            colour = GAINS if gain > 0 else LOSSES
            parts.append(
                f'<rect class="cell" x="{x}" y="{y}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" fill="{colour}" '
                f'fill-opacity="{0.75 * depth:.2f}" stroke="currentColor" stroke-opacity="0.2"/>'
            )
            for line, text in enumerate(filter(None, _lines(cell))):
                parts.append(_label(x + _WIDTH / 2, y + 18 + 16 * line, text, "middle", 11 if line else 12))
        top += _TOP + _HEIGHT * len(grid.rows) + 24
    for colour, meaning in LEGEND:
        parts.append(
            f'<rect x="8" y="{top}" width="14" height="14" fill="{colour}" fill-opacity="0.75" '
            f'stroke="currentColor" stroke-opacity="{0 if colour == "none" else 0.2}"/>'
        )
        parts.append(_label(30, top + 12, meaning, "start"))
        top += 20
    top += 8
    style = "svg{color:#1b1f24}@media(prefers-color-scheme:dark){svg{color:#e3e6ea}}text{fill:currentColor}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" font-family="system-ui, sans-serif">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def _label(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
