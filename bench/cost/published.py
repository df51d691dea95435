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

        For one number beside a published band: "inside", or the ratio to the nearest end. For percentages: the
        difference.
        """
        if self.unit == "%":
            theirs, own = (one if isinstance(one, tuple) else (one, one) for one in (self.published, self.ours))
            points = [f"{ours - published:+.0f}" for published, ours in zip(theirs, own, strict=True)]
            return f"{', '.join(dict.fromkeys(points))} points"
        if isinstance(self.published, tuple) and isinstance(self.ours, tuple):
            return f"{self.ours[0] / self.published[0]:.2f}, {self.ours[1] / self.published[1]:.2f}"
        if isinstance(self.published, tuple):
            inside = self.published[0] <= _single(self.ours) <= self.published[1]
            nearest = min(self.published, key=lambda end: abs(end - _single(self.ours)))
            return "inside" if inside else f"{_single(self.ours) / nearest:.2f}"
        if isinstance(self.ours, tuple):
            return f"{self.ours[0] / self.published:.2f} to {self.ours[1] / self.published:.2f}"
        return f"{self.ours / self.published:.2f}"

    @property
    def agrees(self) -> bool:
        """Whether the numbers are equal within ``SAME``, or percentages within a point; of two bands, at both ends.

        One number also agrees if it is inside the published band.
        """
        ends = self.ours if isinstance(self.ours, tuple) else (self.ours, self.ours)
        if isinstance(self.published, tuple):
            low, high = self.published
            if isinstance(self.ours, tuple):
                return self._near(ends[0], low) and self._near(ends[1], high)
            return low <= ends[0] <= high or self._near(ends[0], low) or self._near(ends[0], high)
        return self._near(ends[0], self.published) and self._near(ends[1], self.published)

    def _near(self, ours: float, published: float) -> bool:
        return abs(ours - published) <= max(SAME * abs(published), 1.0 if self.unit == "%" else 0.0)


def _single(number: Number) -> float:
    assert not isinstance(number, tuple)
    return number
