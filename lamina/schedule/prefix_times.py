"""Decides which cached prefixes a prompt uses, and which it computes again. Pure.

A prompt that keeps what it computes in scratch memory (``lamina.schedule.scratch``) asks other workers for attention to
its cached prefix alone: in every layer of every chunk, they receive q of all rows, and the replica waits for their
answer. Before a long prompt, asking for attention to a short prefix takes longer than computing the prefix again. Both
times are predicted from the steps that have run.
"""

from lamina.core.requests import Group
from lamina.core.steps import StepPlan
from lamina.schedule.pace import StepTimes

LEAST_STEPS = 8  # steps that have asked for attention to a prefix before one is computed again
EVERY = 64  # one request of so many uses its prefix in any case, so that its time stays known


class PrefixTimes:
    """Predicts the time that a cached prefix costs and saves, from steps without decoding sequences."""

    def __init__(self) -> None:
        self._compute, self._waits = StepTimes(), StepTimes()
        self._asked = 0  # measured steps that have asked for attention to a prefix

    def note_step(self, plan: StepPlan, busy_s: float, waited_s: float) -> None:
        """Record a completed step with chunks: ``busy_s`` in slices, ``waited_s`` for attention of other workers."""
        if plan.decoding.sequences:
            return
        asked = [(len(chunk.tokens), chunk.before_scratch) for chunk in plan.chunks if chunk.before_scratch]
        self._compute.note_step(plan, busy_s)
        self._waits.add_sample(sum(rows for rows, _ in asked), sum(rows * before for rows, before in asked), waited_s)
        self._asked += bool(asked)

    def pays(self, group: Group, hit: int) -> bool:
        """Return whether a request should use a cached prefix of ``hit`` tokens."""
        if self._asked < LEAST_STEPS or group.arrival % EVERY == 0:
            return True
        tokens = group.completions[0].goal - hit
        saved_s = self._compute.predict(hit, hit * (hit / 2 + tokens)) - self._compute.predict(0, 0)
        asking_s = self._waits.predict(tokens, tokens * hit) - self._waits.predict(0, 0)
        return saved_s >= asking_s
