"""How many lanes pay: from what slices and attention took, how long a round of all sequences would take. Pure."""

from collections.abc import Mapping

from lamina.engine.pipeline import Pipeline

FORGET = 0.98  # weight of what was known before, per step
WORTH = 0.9  # lanes change if a round is predicted to take less than this share of the present one
STEPS_BETWEEN_CHANGES = 32


def chooser(lanes: int | None, pipeline: Pipeline) -> "LaneChooser | None":
    """What decides how many of a pipeline's lanes to use; None if the number was asked for or there is no choice."""
    return LaneChooser(pipeline) if lanes is None and pipeline.lanes > 1 and pipeline.interchangeable else None


class LaneChooser:
    """Watches steps and says how many of a pipeline's lanes to use.

    Slices of b rows are taken to need c0 + c1 b (weights are read once, rows multiplied), attention a time that depends
    on all sequences' tokens and not on how they are dealt out. With n lanes on r replicas a round, in which every
    sequence gets one token, then takes max(n s / r, a, s + a / n), where s is the time of a lane's slices and a that of
    everybody's attention: replicas are the bottleneck, or memory workers, or no lane ever waits for another.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.active = pipeline.lanes
        self._sums: tuple[float, ...] = (0.0,) * 5  # weights, rows, rows^2, seconds, rows x seconds
        self._attention: dict[str, float] = {}  # seconds so far, by memory worker
        self._attention_before: Mapping[str, float] = {}
        self._steps = 0

    def note_slices(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` rows took ``seconds`` in slices."""
        terms = (1.0, rows, rows * rows, seconds, rows * seconds)
        self._sums = tuple(FORGET * old + new for old, new in zip(self._sums, terms, strict=True))
        self._steps += 1

    def note_attention(self, worker: str, seconds: float) -> None:
        """A memory worker has spent ``seconds`` on attention so far."""
        self._attention[worker] = seconds

    @property
    def due(self) -> bool:
        """True when ``choose`` looks at the times anew."""
        return self._steps >= STEPS_BETWEEN_CHANGES

    def choose(self, sequences: int) -> int:
        """Lanes to use for so many sequences: looked at anew every few steps, else the number in use."""
        if not self.due or not sequences:
            return self.active
        rounds = self._steps / self.active
        before = self._attention_before
        attention = max((now - before.get(name, 0.0) for name, now in self._attention.items()), default=0.0) / rounds
        self._steps, self._attention_before = 0, dict(self._attention)
        rounds_s = {n: self._round(n, sequences, attention) for n in range(1, min(self._pipeline.lanes, sequences) + 1)}
        best = min(rounds_s, key=rounds_s.__getitem__)
        if self.active not in rounds_s or rounds_s[best] < WORTH * rounds_s[self.active]:
            self.active = best
        return self.active

    def _round(self, lanes: int, sequences: int, attention: float) -> float:
        slices = self._slices(sequences / lanes)
        return max(lanes * slices / self._pipeline.replicas, attention, slices + attention / lanes)

    def _slices(self, rows: float) -> float:
        """Seconds of slices for ``rows`` rows by least squares, no slope or constant below zero."""
        weight, x, xx, y, xy = self._sums
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else 0.0
        slope = min(max(slope, 0.0), y / x)
        return (y - slope * x) / weight + slope * rows
