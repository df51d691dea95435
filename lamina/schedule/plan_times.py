"""When the next step of a lane is planned behind a running one: as late as keeps its compute worker busy. Pure.

A request joins a lane with the lane's next plan. If that plan is made as soon as the step before it begins, a request
whose prompt a prefill lane has just computed waits for the rest of the running step and for the planned one. If the
plan is made shortly before the running step ends, the request waits for the running step alone. Steps that end early
wait for their successor then, so that plans are made late only while a prefill lane has a request, or had one within
the last steps: a prompt that takes less time than a step has begun and ended while the step runs.
"""

import collections
import math
from dataclasses import dataclass

from lamina.schedule.pace import LEARN

MARGIN_S = 0.002  # time in which a plan is made and reaches its workers
EXPECTED = 16  # steps of a lane after a handover in which another one is expected
LATENESS = 3  # times the mean lateness of plans by which plans are due earlier


@dataclass(slots=True)
class _Durations:
    """Recent durations of a lane's steps, in seconds."""

    mean_s: float
    deviation_s: float = 0.0

    def add_sample(self, seconds: float) -> None:
        self.deviation_s += LEARN * (abs(seconds - self.mean_s) - self.deviation_s)
        self.mean_s += LEARN * (seconds - self.mean_s)

    @property
    def least_s(self) -> float:
        """Seconds that most steps take at least."""
        return max(0.0, self.mean_s - self.deviation_s)


class PlanTimes:
    """Predicts the ends of running steps, by lane. Steps of a lane run one after another."""

    def __init__(self) -> None:
        self._durations: dict[int, _Durations] = {}
        self._in_flight = collections.Counter[int]()
        self._begun: dict[int, float] = {}  # when the running step of a lane began
        self._ended = collections.Counter[int]()  # steps since the last ``set_time``
        self._expects = collections.Counter[int]()  # by lane: further steps in which a handover is expected
        self._late_s = 0.0  # mean time by which plans came after they were due: the engine may lack a core

    def on_planned(self, lane: int, now: float) -> None:
        """Record a step that is sent to its workers."""
        if (due := self.due(lane)) > self._begun.get(lane, now):
            self._late_s += LEARN * (max(0.0, now - due) - self._late_s)
        self._in_flight[lane] += 1
        if self._in_flight[lane] == 1:
            self._begun[lane] = now

    def on_step_done(self, lane: int) -> None:
        """Record that the running step of a lane has ended, before the next ``set_time``."""
        self._in_flight[lane] -= 1
        self._ended[lane] += 1
        self._expects[lane] -= self._expects[lane] > 0

    def set_time(self, now: float) -> None:
        """Learn from the steps that have ended. ``now`` is in seconds of any monotonic clock."""
        for lane, steps in self._ended.items():
            seconds = (now - self._begun[lane]) / steps
            self._durations.setdefault(lane, _Durations(seconds)).add_sample(seconds)
            self._begun[lane] = now
        self._ended.clear()

    def on_handover(self) -> None:
        """Record that a request has gone from a prefill lane to one that decodes: others will follow."""
        for lane in self._durations:
            self._expects[lane] = EXPECTED

    def expects_request(self, lane: int) -> bool:
        """Return whether a request may go to a lane although no prefill lane has one now."""
        return self._expects[lane] > 0

    def due(self, lane: int) -> float:
        """Return when the next step of a lane is to be planned; -inf if none runs there, or none has ended yet."""
        if not self._in_flight[lane] or lane not in self._durations:
            return -math.inf
        margin_s = MARGIN_S + LATENESS * self._late_s
        return self._begun[lane] + max(0.0, self._durations[lane].least_s - margin_s)
