"""Estimates from measured steps how long a request takes in a lane, beside what runs there. Pure."""

from collections.abc import Sequence

from lamina.core.steps import StepPlan
from lamina.schedule.lane import Lane
from lamina.schedule.lane_choice import StepTable
from lamina.schedule.pace import LEARN


class LaneTimes:
    """Predicts seconds from the mean time of a prompt token, the times of steps by rows, and the mean output."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        """``lanes`` is extended when lanes are added."""
        self._prompts_s = self._prompt_tokens = 0.0  # of steps with prompts; each counts less than the one after it
        self._lanes = lanes
        self._steps = StepTable()  # steps without prompts, by sequences
        self._measured = False
        self._output = 0.0  # recent tokens of a completion; 0 if none has ended

    @property
    def token_s(self) -> float:
        """Recent seconds per prompt token; 0 if no prompt has run."""
        return self._prompts_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def add_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a completed step that took ``seconds``."""
        if tokens := sum(len(chunk.tokens) for chunk in plan.chunks):
            self._prompts_s += seconds - LEARN * self._prompts_s
            self._prompt_tokens += tokens - LEARN * self._prompt_tokens
        elif plan.decoding.sequences:
            self._steps.note(len(plan.decoding.sequences), seconds)
            self._measured = True

    def note_output(self, tokens: int) -> None:
        """Record that a completion has ended after ``tokens`` tokens."""
        self._output += (LEARN if self._output else 1.0) * (tokens - self._output)

    def seconds(self, lanes: Sequence[int], tokens: int, sequences: int) -> float:
        """Return the seconds that a request is expected to take on the replica of ``lanes``, until its last token.

        Its prompt runs after those of the lanes, and each of its tokens takes a step with their sequences. Until a
        prompt has run, as after a restart of the engine, each prompt token counts as a second.

        Args:
            lanes: The lanes of the replica.
            tokens: Prompt tokens of the request that would be computed there.
            sequences: Sequences of the lanes.
        """
        groups = (group for lane in lanes for group in self._lanes[lane].running if group.alive and not group.forked)
        prompts_s = (self.token_s or 1.0) * (tokens + sum(group.completions[0].left for group in groups))
        return prompts_s + (self._output * self._steps.at(sequences + 1) if self._measured else 0.0)
