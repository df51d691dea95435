"""When the next step of a lane is planned behind a running one: as late as keeps its compute worker busy. Pure.

A request joins a lane with the lane's next plan. If that plan is made as soon as the step before it begins, a request
whose prompt a prefill lane has just computed waits for the rest of the running step and for the planned one. If the
plan is made shortly before the running step ends, the request waits for the running step alone. Steps that end early
wait for their successor then, so that plans are made late only while a prefill lane has a request, or had one within
the last steps: a prompt that takes less time than a step has begun and ended while the step runs.

How shortly before is learned for each lane: workers report how long they have waited for a plan
(``StepDone.starved_s``). That covers all that varies: times of steps, messages on their way, an engine without a core.
"""

import collections
import math
from dataclasses import dataclass

from lamina.schedule.pace import LEARN

FIRST_LEAD_S = 0.002  # time before the end of a step at which the next one is planned, until reports have come
LEAST_LEAD_S = 0.0003  # least such time: a plan takes as long to be made and to reach its workers
SHRINK = 0.05  # share of itself by which the lead falls with each plan that came in time
GROW = 2.0  # times that a worker has waited for a plan by which the lead grows
EXPECTED = 16  # steps of a lane after a handover in which another one is expected


@dataclass(slots=True)
class _Lane:
    """The steps of one lane.

    Attributes:
        step_s: Recent mean duration of a step; 0 if none has ended.
        lead_s: Time before the end of a step at which the next one is planned.
        in_flight: Steps that have not ended.
        begun: When the running step began.
        ended: Steps that have ended since the last ``set_time``.
        expects: Further steps in which a handover is expected.
        is_held: Whether the next plan was put off.
    """

    step_s: float = 0.0
    lead_s: float = FIRST_LEAD_S
    in_flight: int = 0
    begun: float = -math.inf
    ended: int = 0
    expects: int = 0
    is_held: bool = False

    def on_report(self, starved_s: float) -> None:
        """Learn from a step whose plan was put off."""
        self.lead_s += GROW * starved_s if starved_s else -SHRINK * self.lead_s

    def set_time(self, now: float) -> None:
        """Learn from the steps that have ended, if any have."""
        if self.ended:
            seconds = (now - self.begun) / self.ended
            self.step_s += (LEARN if self.step_s else 1.0) * (seconds - self.step_s)
            self.begun, self.ended = now, 0
            # A lead of more than a step would never put a plan off, and no report would shorten it.
            self.lead_s = max(LEAST_LEAD_S, min(self.lead_s, self.step_s))


class PlanTimes:
    """Predicts the ends of running steps, by lane. Steps of a lane run one after another."""

    def __init__(self) -> None:
        self._lanes = collections.defaultdict[int, _Lane](_Lane)
        self._put_off = set[int]()  # steps in flight whose plans were put off until shortly before their begin

    def on_planned(self, lane: int, step: int, now: float) -> None:
        """Record a step that is sent to its workers."""
        one = self._lanes[lane]
        if one.is_held and (one.in_flight or one.begun == now):  # else the lane had nothing to run meanwhile
            self._put_off.add(step)
        one.is_held = False
        one.in_flight += 1
        if one.in_flight == 1:
            one.begun = now

    def on_step_done(self, lane: int, step: int, starved_s: float) -> None:
        """Record that the running step of a lane has ended, before the next ``set_time``.

        ``starved_s``: how long its worker had nothing to run before its plan came.
        """
        one = self._lanes[lane]
        one.in_flight -= 1
        one.ended += 1
        one.expects = max(0, one.expects - 1)
        if step in self._put_off:
            self._put_off.remove(step)
            one.on_report(starved_s)

    def set_time(self, now: float) -> None:
        """Learn from the steps that have ended. ``now`` is in seconds of any monotonic clock."""
        for one in self._lanes.values():
            one.set_time(now)

    def on_handover(self) -> None:
        """Record that a request has gone from a prefill lane to one that decodes: others will follow."""
        for one in self._lanes.values():
            one.expects = EXPECTED if one.step_s else 0

    def expects_request(self, lane: int) -> bool:
        """Return whether a request may go to a lane although no prefill lane has one now."""
        return lane in self._lanes and self._lanes[lane].expects > 0

    def put_off(self, lane: int, now: float) -> float | None:
        """Return when the next step of a lane is to be planned, if that is later than ``now``; else None."""
        one = self._lanes[lane]
        due = one.begun + one.step_s - one.lead_s
        if not one.in_flight or not one.step_s or due <= now:
            return None
        one.is_held = True
        return due
