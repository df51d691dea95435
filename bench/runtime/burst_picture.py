"""Draws what ``bench.runtime.burst`` has measured, as SVG for light and dark pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, LEFT, RIGHT = 860, 150, 20
BAR, PANEL, GAP, LINE = 26, 110, 34, 16
PARTS = ("#4c78a8", "#54a24b", "#b279a2")
COMPUTE, MEMORY, WAITING = "#4c78a8", "#54a24b", "#e45756"
STYLE = "svg{color:#1b1f24}@media(prefers-color-scheme:dark){svg{color:#e3e6ea}}text{fill:currentColor}"


@dataclass(frozen=True)
class Sample:
    """Workers and waiting requests of a system at a moment (``at`` seconds)."""

    at: float
    compute: int
    memory: int
    waiting: int

    @property
    def workers(self) -> int:
        return self.compute + self.memory


def draw(parts: Mapping[str, float], systems: Mapping[str, Sequence[Sample]], burst_at: float) -> str:
    """A bar with the seconds of each part of a join, and a panel for each system: workers over time, and requests that
    wait."""
    title = f"a memory worker serves {sum(parts.values()) * 1e3:.0f} ms after it is requested"
    shapes = [_text(LEFT, 20, title)]
    y = _bar(shapes, parts, 30.0)
    everything = [sample for samples in systems.values() for sample in samples]
    if everything:
        end, top = max(one.at for one in everything), max(one.workers for one in everything)
        most = max(1, *(one.waiting for one in everything))
        for name, samples in systems.items():
            y += GAP
            _panel(shapes, name, _corners(samples), (y, end, top, most, burst_at))
            y += PANEL
        shapes += [_text(LEFT, y + 20, "0 s"), _text(WIDTH - RIGHT, y + 20, f"{end:.0f} s", "end")]
        legend = ("compute workers", COMPUTE), ("memory workers", MEMORY), (f"waiting requests, up to {most}", WAITING)
        for place, (what, colour) in enumerate(legend):
            _key(shapes, LEFT + 60 + 190 * place, y + 20, what, colour)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 36:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="12"><style>{STYLE}</style>{"".join(shapes)}</svg>\n'
    )


def _bar(shapes: list[str], parts: Mapping[str, float], y: float) -> float:
    """The parts one after another, with a legend below. Returns the bottom."""
    total, x, bottom = sum(parts.values()), float(LEFT), y + BAR + LINE
    for (part, seconds), colour in zip(parts.items(), PARTS, strict=True):
        width = seconds / total * (WIDTH - LEFT - RIGHT)
        shapes.append(f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
        _key(shapes, LEFT, bottom, f"{part}: {seconds * 1e3:.0f} ms", colour)
        x, bottom = x + width, bottom + LINE
    return bottom


def _corners(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples at which counts change."""
    counts = [(one.compute, one.memory, one.waiting) for one in samples]
    last = len(samples) - 1
    return [one for n, one in enumerate(samples) if n in (0, last) or not counts[n - 1] == counts[n] == counts[n + 1]]


def _panel(shapes: list[str], name: str, samples: Sequence[Sample], axes: tuple[float, float, int, int, float]) -> None:
    """``axes``: the panel's top, seconds to the right edge, workers and waiting requests to the top, the burst."""
    y, end, top, most, burst_at = axes

    def points(values: Sequence[int], full: int) -> list[str]:
        return [
            f"{LEFT + sample.at / end * (WIDTH - LEFT - RIGHT):.1f},{y + PANEL - value / full * PANEL:.1f}"
            for sample, value in zip(samples, values, strict=True)
        ]

    floor, compute, both = ([0 for _ in samples], [one.compute for one in samples], [one.workers for one in samples])
    for lower, upper, colour in ((floor, compute, COMPUTE), (compute, both, MEMORY)):
        outline = " ".join([*points(upper, top), *reversed(points(lower, top))])
        shapes.append(f'<polygon points="{outline}" fill="{colour}" opacity="0.8"/>')
    waiting = " ".join(points([one.waiting for one in samples], most))
    shapes.append(f'<polyline points="{waiting}" fill="none" stroke="{WAITING}" stroke-width="2"/>')
    x = LEFT + burst_at / end * (WIDTH - LEFT - RIGHT)
    shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + PANEL}" stroke="#888888" stroke-dasharray="3"/>')
    shapes.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y + PANEL}" y2="{y + PANEL}" stroke="#888888"/>')
    shapes.append(_text(LEFT - 12, y + PANEL / 2, name, "end"))
    shapes.append(_text(LEFT - 12, y + PANEL / 2 + LINE, f"up to {max(both)} workers", "end"))


def _key(shapes: list[str], x: float, y: float, what: str, colour: str) -> None:
    shapes.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="12" height="10" fill="{colour}"/>')
    shapes.append(_text(x + 18, y, what))


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{text}</text>'
