"""Runs steps of simulated lanes that only repeat the last one, a token further, without planning each of them.

Between two changes of its batch, a lane runs the same sequences again and again; the turn says how many such steps are
certain to follow (``Turn.unchanged_steps``). These are given to the virtual cluster directly. Before the turn decides
anything, it is told how many have run (``Turn.repeat``): results are those of steps planned one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lamina import _native
from lamina.core.steps import StepPlan
from lamina.planning.simulate.scenario import Ints
from lamina.schedule.turn import Turn

LEAST_STEPS = 4
"""Fewer steps than this are planned one by one."""


@dataclass(slots=True)
class Repeat:
    """Steps of one lane that repeat a planned one.

    Attributes:
        plan: The step that they repeat.
        homes: Memory worker of each of its sequences.
        requests: Request of each of its sequences.
        after: The times of the step so many steps behind ``plan``.
        continue_for: Steps whose tokens end no request; requests may end before their ``max_tokens``.
        behind: Steps behind ``plan`` that the cluster has been given.
        left: Further steps that are certain to follow.
        passed: Steps that have completed and of which the turn was not told.
        busy_s: Seconds that compute workers spent in their slices.
    """

    plan: StepPlan
    homes: Ints
    requests: Ints
    after: Callable[[int], _native.StepTimes]
    continue_for: int
    behind: int = 0
    left: int = 0
    passed: int = 0
    busy_s: float = 0.0

    def next_times(self, busy_s: float) -> _native.StepTimes:
        """Record that a step of the lane has completed; return the times of the next one to give to the cluster."""
        self.behind += 1
        self.left -= 1
        self.continue_for -= 1
        self.passed += 1
        self.busy_s += busy_s
        return self.after(self.behind)


class Repeats:
    """The lanes that repeat their steps now."""

    def __init__(self, turn: Turn, lanes: int) -> None:
        self._turn = turn
        self._known: list[Repeat | None] = [None] * lanes

    def current(self, lane: int) -> Repeat | None:
        """Return the repeated step of a lane if another one is certain to follow."""
        known = self._known[lane]
        return known if known is not None and known.left else None

    def tell_turn(self) -> int:
        """Tell the turn of all steps that have completed, and repeat none from now on. Return their number."""
        told = 0
        for lane, known in enumerate(self._known):
            if known is None:
                continue
            if known.passed:
                self._turn.repeat(lane, known.passed, known.busy_s)
                told += known.passed
            known.left, known.passed, known.busy_s = 0, 0, 0.0
        return told

    def begin_repeating(self, lane: int, last: StepPlan, homes: Ints, make: Callable[[], "Repeat | None"]) -> None:
        """Let a lane repeat its steps if enough are certain to follow.

        Args:
            lane: The lane.
            last: The last step planned for it.
            homes: Memory worker of each of its sequences.
            make: Returns what repeats ``last``; None if its times depend on other lanes.
        """
        if (steps := self._turn.unchanged_steps(lane)) < LEAST_STEPS:
            return
        known = self._known[lane]
        if known is None or known.plan is not last or known.homes is not homes:
            known = self._known[lane] = make()
        if known is not None:
            known.left = min(steps, known.continue_for)
