"""Answers of compute workers to steps, in the order in which the steps ran. Pure."""

import collections

from lamina.protocol.messages import StepDone
from lamina.steps import StepPlan


class Answers:
    """Steps that have not been answered yet, and answers that arrived early.

    Consecutive steps of a lane may end on different replicas, so an answer may overtake the one to the step before,
    whose tokens come first.
    """

    def __init__(self) -> None:
        self._awaited: dict[int, collections.deque[int]] = {}  # steps with sequences, by lane
        self._early: dict[int, StepDone] = {}

    def expect(self, plan: StepPlan) -> None:
        """A step is about to be sent to its workers."""
        if plan.runs:
            self._awaited.setdefault(plan.lane, collections.deque()).append(plan.step)

    def take(self, plan: StepPlan, done: StepDone) -> list[StepDone]:
        """The answers of this lane that are usable now that ``done`` has come for ``plan``, in the order of its steps.

        A step without sequences neither waits for others nor makes others wait.
        """
        if not plan.runs:
            return [done]
        awaited = self._awaited[plan.lane]
        if not self._early and awaited[0] == done.step:  # nearly always
            awaited.popleft()
            return [done]
        self._early[done.step] = done
        ready = []
        while awaited and awaited[0] in self._early:
            ready.append(self._early.pop(awaited.popleft()))
        return ready
