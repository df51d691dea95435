"""Pictures of measurements in one style, as SVG; needs matplotlib (``pip install matplotlib``)."""

import io
import re
from pathlib import Path

import matplotlib
from cycler import cycler

matplotlib.use("svg")
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#2f7ed8", "#e07b00", "#1f9d6b", "#b04fc4", "#d1495b", "#8a8d91")
"""Legible on white and on near-black alike."""

INK = "#010203"
"""Stands for the page's own text colour in a figure."""

STYLE = "svg{color:#1b1f24}@media(prefers-color-scheme:dark){svg{color:#e3e6ea}}"
"""The text colour of a figure in a file of its own."""

rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "lamina",  # the same figure is the same file
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
    }
)


def axes(columns: int = 1, height: float = 3.3, width: float | None = None) -> tuple[Figure, list[Axes]]:
    """A figure with so many plots beside each other."""
    drawing = Figure(figsize=(width or (6.2 if columns == 1 else 4.6 * columns), height), layout="constrained")
    return drawing, [drawing.add_subplot(1, columns, index + 1) for index in range(columns)]


def legend_above(axis: Axes, columns: int) -> None:
    """Put the legend above the plot, where it covers nothing."""
    axis.legend(fontsize=8, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def svg(drawing: Figure, name: str) -> str:
    """The figure as an SVG element that takes the page's text colour; identifiers get ``name`` before them."""
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    image = buffer.getvalue()
    image = image[image.index("<svg") :].replace(INK, "currentColor")
    prefix = re.sub(r"\W", "", name)
    for pattern in (r'(\bid=")', r"(url\(#)", r'(href="#)'):
        image = re.sub(pattern, rf"\g<1>{prefix}-", image)
    for size in ("width", "height"):  # the view box and the page decide
        image = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", image, count=1)
    return image


def save(drawing: Figure, file: Path) -> None:
    """Write a figure: as SVG for light and dark pages, or as PNG on white."""
    if file.suffix != ".svg":
        drawing.savefig(file, dpi=110, facecolor="white")
        return
    opening, rest = svg(drawing, file.stem).split(">", 1)
    file.write_text(f"{opening}><style>{STYLE}</style>{rest}")
