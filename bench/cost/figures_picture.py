"""Draws the simulated figures beside the published ones."""

from collections.abc import Sequence
from pathlib import Path

from bench.cost.page import show
from bench.cost.published import Comparison, Number, ends
from bench.pictures import axes, legend_above, save

LEAST, MOST = 0.15, 3.0
"""The axis, in times of the published number; what is beyond it is drawn at its end."""


def draw(rows: Sequence[Comparison], file: Path) -> None:
    """Draw a line for each row: the published number or band, and ours, both over the published one or its upper end.

    The numbers themselves are written beside it.
    """
    drawing, (axis,) = axes(height=0.26 * len(rows) + 1.1, width=11)
    named = set[str]()

    def line(place: int, number: Number, over: float, colour: str, width: float, what: str) -> None:
        shown = [min(max(end / over, LEAST), MOST) for end in ends(number)]
        label = None if what in named else what
        named.add(what)
        axis.plot(shown, [place, place], "-o", color=colour, linewidth=width, label=label, solid_capstyle="round")

    for place, row in enumerate(rows):
        over = ends(row.published)[1]
        line(place, row.published, over, "C5", 7, "published")
        inside = row.is_inside or row.agrees
        line(place, row.ours, over, "C2" if inside else "C1", 2, f"simulated{'' if inside else ', outside of it'}")
        unit = "" if row.unit in ("share", "times") else f" {row.unit}"
        text = f"{show(row.ours)} ({show(row.published)}){unit}"
        axis.annotate(
            text, (1, place), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center"
        )
    axis.set_yticks(range(len(rows)), [f"{row.source}: {row.what}" for row in rows], fontsize=8)
    axis.axvline(1, color="C5", linewidth=1)
    axis.set(xscale="log", xlim=(0.9 * LEAST, 1.1 * MOST), ylim=(len(rows) - 0.4, -0.6))
    ticks = (0.2, 0.5, 1, 2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set(xlabel="over the published number, or over the upper end of the published band")
    legend_above(axis, 3)
    save(drawing, file)
