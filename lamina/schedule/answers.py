"""What compute workers say of steps, in the order in which the steps ran. A pure object."""

import collections

from lamina.protocol.messages import StepDone
from lamina.types import StepPlan


class Answers:
    """The steps that have not been answered yet, and answers that came too early.

    A lane's steps end on one replica after the other, and each replica answers for itself: an answer may overtake that
    to the step before, whose tokens come first.
    """

    def __init__(self) -> None:
        self._awaited: dict[int, collections.deque[int]] = {}  # steps with sequences, by lane
        self._early: dict[int, StepDone] = {}

    def expect(self, plan: StepPlan) -> None:
        """A step has been sent to its workers."""
        if plan.runs:
            self._awaited.setdefault(plan.lane, collections.deque()).append(plan.step)

    def take(self, plan: StepPlan, done: StepDone) -> list[StepDone]:
        """What may be used now that ``done`` has come for ``plan``: of its lane, in the order of its steps.

        Nothing waits for a step without sequences, nor does it wait for others.
        """
        if not plan.runs:
            return [done]
        self._early[done.step] = done
        awaited = self._awaited[plan.lane]
        ready = []
        while awaited and awaited[0] in self._early:
            ready.append(self._early.pop(awaited.popleft()))
        return ready
