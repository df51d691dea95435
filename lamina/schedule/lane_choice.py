"""Chooses how many lanes to use, and their order, by predicting each arrangement's speed from measured steps. Pure."""

import bisect
import math
from collections.abc import Collection

from lamina.core.pipeline import Arrangement, Pipeline

FORGET = 0.98  # weight of earlier measurements, per step
CONSTANT = 0.2  # share of a wait that does not grow with its rows
LEARN = 0.2  # weight of a step in the mean for its number of rows
WORTH = 1.04  # the arrangement changes if another is predicted this many times as fast, twice in a row
STALE = 0.8  # learned waits are dropped once measured waits are shorter than this share of them
SATURATED = 0.9  # replicas busy for this share of the time count as never idle
ROTATION = 0.6  # share of the loss by unequal steps that rotation has anyway, as first and last slices are longer
STEPS_BETWEEN_LOOKS = 8  # least steps of each lane between two evaluations


def chooser(pipeline: Pipeline) -> "LaneChooser | None":
    """Return a LaneChooser for a pipeline; None if it has only one arrangement."""
    return LaneChooser(pipeline) if len(pipeline.choices) > 1 else None


class _Waits:
    """Mean wait in seconds by rows: proportional to rows, except for a constant share for messages of any size."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def note(self, rows: int, seconds: float) -> None:
        self._weight = FORGET * self._weight + 1
        self._rows = FORGET * self._rows + rows
        self._seconds = FORGET * self._seconds + seconds

    def at(self, rows: float) -> float:
        mean = self._seconds / self._weight
        return mean * (CONSTANT + (1 - CONSTANT) * rows * self._weight / self._rows)


class StepTable:
    """Seconds of a step by rows: recent means at numbers of rows sqrt(2) apart, with linear interpolation.

    A single line does not fit: reading the weights takes constant time, until arithmetic takes longer."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # rows and seconds

    def note(self, rows: int, seconds: float) -> None:
        place = round(2 * math.log2(rows))
        known = self._means.get(place, (rows, seconds))
        self._means[place] = known[0] + LEARN * (rows - known[0]), known[1] + LEARN * (seconds - known[1])

    def at(self, rows: float) -> float:
        """Return the seconds of ``rows`` rows; 1 if nothing was measured. Slope and constant are never negative."""
        points = sorted(self._means.values()) or [(1, 1.0)]
        above = min(max(bisect.bisect(points, (rows, 0.0)), 1), len(points) - 1)
        x, y = points[above - 1] if above else points[0]
        more, longer = points[above] if above else points[0]
        slope = (longer - y) / (more - x) if more > x else 0.0
        return y + min(max(slope, 0.0), y / x) * (rows - x)


class LaneChooser:
    """Decides from measured steps how many of a pipeline's lanes to use, and in which order.

    A lane alternates between a replica, where a step of b rows takes c0 + c1 b (weights are read once, rows
    multiplied), and a wait for attention and its messages, which grows with b too. That is a closed queueing network
    with the lanes as customers. If all steps take the same time, n lanes on r replicas make n / (slices + wait) steps a
    second, until the replicas or the memory workers are never idle. The more step times vary, the closer is the rate to
    mean value analysis for memoryless service times (Reiser and Lavenberg 1980). In fixed order, each replica has n / r
    customers, which visit its stages in turn. In rotational order, all lanes visit all replicas in turn, so that one
    long step delays all lanes behind it.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.active = pipeline.first_arrangement
        self._slices, self._waits = StepTable(), _Waits()
        # By memory worker: completed steps and total seconds of attention, at its latest report and at the last report
        # that was used; seconds per step between them.
        self._attention: dict[str, tuple[int, float]] = {}
        self._attention_before: dict[str, tuple[int, float]] = {}
        self._attention_per_step: dict[str, float] = {}
        self._completed = 0  # steps since the start
        self._steps = self._rows = self._decoding = 0  # counts since the last evaluation
        self._seconds = self._squares = 0.0
        self._seen: list[tuple[int, float]] = []  # rows and waits since the last evaluation
        self._since: float | None = None
        self._best = pipeline.first_arrangement  # best arrangement at the last evaluation

    def note_step(self, rows: int, decoding: int, busy_s: float, waited_s: float) -> None:
        """Record a completed step.

        Args:
            rows: rows of the step.
            decoding: rows of decoding sequences.
            busy_s: seconds in slices.
            waited_s: seconds between slices, waiting for attention; 0 if unknown.
        """
        self._slices.note(rows, busy_s)
        self._seconds += busy_s
        self._squares += busy_s * busy_s
        if waited_s > 0:
            self._seen.append((rows, waited_s))
        self._steps += 1
        self._completed += 1
        self._rows += rows
        self._decoding += decoding

    def note_attention(self, worker: str, seconds: float) -> None:
        """Record that a memory worker has spent ``seconds`` in total on attention."""
        self._attention[worker] = self._completed, seconds

    def set_memory_workers(self, workers: Collection[str]) -> None:
        """Drop the measurements of memory workers other than ``workers``."""
        for figures in (self._attention, self._attention_before, self._attention_per_step):
            for worker in figures.keys() - set(workers):
                del figures[worker]

    @property
    def due(self) -> bool:
        """True if ``choose`` will evaluate the arrangements again."""
        return self._steps >= STEPS_BETWEEN_LOOKS * self.active.lanes

    def choose(self, sequences: int, now: float) -> Arrangement:
        """Return the arrangement to use, evaluated again when ``due``.

        Args:
            sequences: sequences that would decode once all prompts are done.
            now: seconds of any monotonic clock.
        """
        if not self.due or not sequences:
            return self.active
        lanes, steps = self.active.lanes, self._steps
        attention = self._busiest()
        rows, decoding = self._rows / steps, self._decoding / steps
        prompts = max(0.0, 1.0 - decoding * lanes / sequences)
        unequal = min(1.0, max(0.0, steps * self._squares / self._seconds**2 - 1)) if self._seconds else 0.0
        self._note_waits(now)
        self._steps = self._rows = self._decoding = 0
        self._seconds = self._squares = 0.0

        def speed(one: Arrangement) -> float:
            # Decoding rows are spread over the lanes. Prompt rows fill steps as far as prompts are waiting; otherwise
            # their number per round of lanes stays the same.
            more = one.lanes / lanes
            chunks = (rows - decoding) * (prompts + (1 - prompts) / more)
            each = decoding / more + chunks
            progress = 1 + prompts * (more - 1)
            return progress * self._rate(one, each, attention * each / rows, unequal) / one.lanes

        least = self._pipeline.stage_count
        allowed = [one for one in self._pipeline.choices if one.lanes <= max(sequences, least)]
        best_before, self._best = self._best, max(allowed, key=speed)
        if self._best == best_before and speed(self._best) > WORTH * speed(self.active):
            self.active = self._best
        return self.active

    def _busiest(self) -> float:
        """Return the seconds that the busiest memory worker spends on attention per step."""
        for worker, (steps, seconds) in self._attention.items():
            steps_before, seconds_before = self._attention_before.get(worker, (0, 0.0))
            if steps > steps_before:
                self._attention_per_step[worker] = (seconds - seconds_before) / (steps - steps_before)
                self._attention_before[worker] = steps, seconds
        return max(self._attention_per_step.values(), default=0.0)

    def _note_waits(self, now: float) -> None:
        """Learn from measured waits.

        If replicas were hardly idle, lanes also waited for each other, and measured waits are only an upper bound: they
        can only invalidate learned waits. While waits are unknown, the time of attention stands for them, so that fewer
        lanes are tried, which makes waits measurable.
        """
        elapsed = now - self._since if self._since is not None else 0.0
        if self._seconds < SATURATED * elapsed * self._pipeline.stage_count:
            for rows, seconds in self._seen:
                self._waits.note(rows, seconds)
        elif self._waits.known:
            bound = sum(seconds for _, seconds in self._seen)
            if bound < STALE * sum(self._waits.at(rows) for rows, _ in self._seen):
                self._waits = _Waits()
        self._seen.clear()
        self._since = now

    def _rate(self, one: Arrangement, rows: float, attention: float, unequal: float) -> float:
        """Return the steps per second of all lanes together.

        Args:
            one: the arrangement.
            rows: rows of each step.
            attention: seconds of the busiest memory worker per step.
            unequal: squared coefficient of variation of step times, at most 1.
        """
        replicas, stages, slices = self._pipeline.replicas, self._pipeline.shape.stages, self._slices.at(rows)
        wait = max(self._waits.at(rows) if self._waits.known else 0.0, attention)
        visited, customers, systems = (
            (replicas, one.lanes, 1) if one.rotates else (stages, one.lanes // replicas, replicas)
        )
        equal = min(visited / slices, customers / (slices + wait))
        memoryless = _mean_value(customers, visited, slices / visited, wait)
        share = max(unequal, ROTATION) if one.rotates else unequal
        rate = systems * (equal + share * (memoryless - equal))
        return min(rate, 1 / attention) if attention else rate


def _mean_value(customers: int, stations: int, demand: float, wait: float) -> float:
    """Return the throughput of a closed network: equal stations with ``demand`` seconds each, and a wait outside."""
    queue, rate = 0.0, 0.0
    for number in range(1, customers + 1):
        response = demand * (1 + queue)
        rate = number / (stations * response + wait)
        queue = rate * response
    return rate
