"""Published numbers of the papers (``published.toml``), and their comparison with numbers of this repository."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "published.toml"
SAME = 0.1
"""Numbers that differ by no more than this share of the published one agree."""

Number = float | tuple[float, float]


def load() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


@dataclass(frozen=True)
class Comparison:
    """One published number, or band, beside ours.

    Attributes:
        what: The quantity.
        unit: Unit of both numbers.
        source: Where the paper prints the number.
        published: The published number or band.
        ours: Our number or band.
        why: One sentence, shown where the two differ.
    """

    what: str
    unit: str
    source: str
    published: Number
    ours: Number
    why: str = ""

    @property
    def ratio(self) -> str:
        """Ours over the published number; for bands, at both ends.

        For one number beside a published band: "inside", or the ratio to the nearest end. For other percentages: the
        difference.
        """
        if isinstance(self.published, tuple) and not isinstance(self.ours, tuple) and self.is_inside:
            return "inside"
        if self.unit == "%":
            theirs, own = ends(self.published), ends(self.ours)
            points = [f"{ours - published:+.0f}" for published, ours in zip(theirs, own, strict=True)]
            return f"{', '.join(dict.fromkeys(points))} points"
        if isinstance(self.published, tuple) and isinstance(self.ours, tuple):
            return f"{self.ours[0] / self.published[0]:.2f}, {self.ours[1] / self.published[1]:.2f}"
        if isinstance(self.published, tuple):
            nearest = min(self.published, key=lambda end: abs(end - _single(self.ours)))
            return f"{_single(self.ours) / nearest:.2f}"
        if isinstance(self.ours, tuple):
            return f"{self.ours[0] / self.published:.2f} to {self.ours[1] / self.published:.2f}"
        return f"{self.ours / self.published:.2f}"

    @property
    def agrees(self) -> bool:
        """Whether the numbers are equal within ``SAME``, or percentages within a point; of two bands, at both ends.

        One number also agrees if it is inside the published band.
        """
        least, greatest = ends(self.ours)
        low, high = ends(self.published)
        if isinstance(self.published, tuple) and not isinstance(self.ours, tuple):
            return self.is_inside or self._near(least, low) or self._near(least, high)
        return self._near(least, low) and self._near(greatest, high)

    @property
    def is_inside(self) -> bool:
        """Whether our number or band lies within the published band."""
        (least, greatest), (low, high) = ends(self.ours), ends(self.published)
        return low <= least and greatest <= high

    def _near(self, ours: float, published: float) -> bool:
        return abs(ours - published) <= max(SAME * abs(published), 1.0 if self.unit == "%" else 0.0)


def ends(number: Number) -> tuple[float, float]:
    """Return both ends of a band, or a number twice."""
    return number if isinstance(number, tuple) else (number, number)


def _single(number: Number) -> float:
    assert not isinstance(number, tuple)
    return number
