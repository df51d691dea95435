"""Limits the prompt tokens of a step while sequences decode, so that no step takes too long. Pure.

A chunk after a long prefix takes longer than a chunk at the beginning of a prompt. With chunks of a fixed size, the
time between tokens of decoding sequences would grow with the prefix. So chunks shrink instead: adaptive chunking
(Mnemosyne, Agrawal et al., 2024, section 4.2). Mnemosyne predicts the time of a step from a profile; here, the
prediction is fitted to the steps that have run: a constant, a time per prompt row, and a time per pair of a row and a
token that it attends to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.core.steps import SequenceStep, StepPlan
from lamina.schedule.batches import PromptBatch

FIRST = 32  # most prompt tokens before any step was measured
LEAST = 4  # least prompt tokens, however little time is left
FURTHER = 2  # most prompt tokens, as a multiple of the most of steps not yet forgotten: predictions reach no further
FORGET = 0.9  # weight of earlier steps with chunks, per such step
LEARN = 0.2  # weight of the latest step in a mean
MISSED = 0.005  # share of the steps with chunks that may exceed the bound; its 99th percentile then keeps it
STEP = 0.1  # of the bound, by which a time above the bound changes the reserve
FIRST_RESERVE, MOST_RESERVE = 0.25, 0.6
LEAST_SHARE = 0.25  # least share that prompts get of the time that the bound leaves beside decoding, by predicted times
BORROWED = 0.8  # share of that time for prompts of another lane: the step also waits for chunks before theirs
_UNITS = np.array([1.0, 1e2, 1e6])  # units of constant, rows and pairs, in which the equations are well conditioned


class StepTimes:
    """Predicts the seconds of a step from its prompt tokens, and from its pairs of a row and a token it attends to."""

    def __init__(self) -> None:
        self.most_tokens = 0.0  # most prompt tokens of a step; falls as steps are forgotten
        self._alone: float | None = None  # mean seconds of steps without prompts
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)  # normal equations of steps with prompts
        self._coefficients: tuple[float, float, float] | None = None  # None: to be solved for

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Record that a step took ``seconds``."""
        self.add_sample(*_work(plan), seconds)

    def of_plan(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a step."""
        return self.predict(*_work(plan))

    def add_sample(self, tokens: int, pairs: float, seconds: float) -> None:
        self._coefficients = None
        if not tokens:
            before = seconds if self._alone is None else self._alone
            self._alone = before + LEARN * (seconds - before)
            return
        self.most_tokens = max(FORGET * self.most_tokens, tokens)
        row = np.array([1.0, tokens, pairs]) / _UNITS
        self._products = FORGET * self._products + np.outer(row, row)
        self._sums = FORGET * self._sums + row * seconds

    def predict(self, tokens: int, pairs: float) -> float:
        """Return the predicted seconds; 0 if nothing was measured."""
        alpha, beta, gamma = self.coefficients
        return alpha + beta * tokens + gamma * pairs

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a step, of each of its prompt tokens, and of each pair; 0 if nothing was measured."""
        if self._coefficients is None:
            alpha, beta, gamma = (self._solve() / _UNITS).tolist()
            self._coefficients = alpha, beta, gamma
        return self._coefficients

    def _solve(self) -> npt.NDArray[np.float64]:
        """Solve least squares without negative coefficients: they are left out, the most negative first."""
        products, sums = self._products.copy(), self._sums.copy()
        weight = max(float(products[0, 0]), 1.0)
        if self._alone is not None:  # counts as much as all steps with prompts together
            products[0, 0] += weight
            sums[0] += weight * self._alone
        left = list(range(3))
        parts = np.zeros(3)
        while left:
            chosen = np.ix_(left, left)
            some = np.linalg.solve(products[chosen] + 1e-9 * weight * np.eye(len(left)), sums[left])
            if some.min() >= 0:
                parts[left] = some
                break
            del left[int(some.argmin())]
        return parts


class Reserve:
    """The share of a bound that predicted times leave free, so that few measured times exceed the bound.

    It grows with each error of a prediction that exceeds it, and shrinks a little with each other one, such that it
    stands still where the share ``MISSED`` of errors exceeds it (stochastic approximation of a quantile: Robbins and
    Monro, 1951; with steps of constant size it follows changes). Whatever the errors are, in any order, the number of
    those that exceed it is then ``MISSED`` of all, give or take ``MOST_RESERVE / STEP + 1``, while none exceeds
    ``MOST_RESERVE - STEP``.
    """

    def __init__(self) -> None:
        self.share = FIRST_RESERVE

    def note_error(self, error: float) -> None:
        """Record by how much a time has exceeded its prediction, as a share of the bound."""
        self.share += STEP * ((error > self.share) - MISSED)
        self.share = max(0.0, min(MOST_RESERVE, self.share))


@dataclass(frozen=True, slots=True)
class _Latest:
    """A lane's latest step: its number, its time in slices, whether a sequence decoded, whether it had chunks."""

    number: int
    busy_s: float
    decodes: bool
    chunks: bool


class Pace:
    """Bounds the time between tokens of decoding sequences. A lane's next tokens take the time of its own step and,
    since lanes share replicas, of the other lanes' steps.

    Attributes:
        replicas: number of replicas that the lanes share, each stage counted as one.
    """

    def __init__(self, bound_s: float, replicas: int = 1) -> None:
        self._bound_s, self.replicas = bound_s, replicas
        self._times, self._reserve = StepTimes(), Reserve()
        self._latest: dict[int, _Latest] = {}  # by lane
        self._steps = 0
        self._told: dict[int, float] = {}  # by lane: when the step before the running one ended
        self._ended: list[tuple[int, float | None]] = []  # lanes of steps that have ended, and predictions to compare

    def set_replicas(self, replicas: int) -> None:
        self.replicas = replicas

    def on_lane_begins(self, lane: int, now: float) -> None:
        """Record that a lane begins a step after a pause."""
        self._told[lane] = now

    def on_step_done(self, plan: StepPlan, busy_s: float, waited_s: float) -> None:
        """Record a completed step, before the next ``set_time``: ``busy_s`` in slices, ``waited_s`` for attention."""
        others, decodes = self._others(plan.lane), bool(plan.decoding.sequences)
        predicted_s = None
        if decodes and self._times.most_tokens and (plan.chunks or any(last.chunks for last in others)):
            predicted_s = self._times.of_plan(plan) + self._shared_s(others)
        self._ended.append((plan.lane, predicted_s))
        self._times.note_step(plan, busy_s + waited_s)
        self._steps += 1
        self._latest[plan.lane] = _Latest(self._steps, busy_s, decodes, bool(plan.chunks))

    def set_time(self, now: float) -> None:
        """Compare the time between the tokens of steps that have ended with what was predicted."""
        for lane, predicted_s in self._ended:
            between_s = now - self._told.get(lane, now)
            self._told[lane] = now
            if predicted_s is not None and predicted_s <= self._bound_s:  # else no chunk was small enough
                self._reserve.note_error((between_s - predicted_s) / self._bound_s)
        self._ended.clear()

    def budget(
        self, lane: int, decodes: bool, prompts: PromptBatch, most: int, chunks: Sequence[SequenceStep] | None = None
    ) -> int:
        """Return the number of tokens of ``prompts`` for the lane's next step, at most ``most``.

        Args:
            lane: Number of the lane.
            decodes: Whether sequences of the lane decode in that step.
            prompts: Prompts, of this lane or of another one.
            most: Most tokens.
            chunks: The lane's own chunks in that step, if the prompts are another lane's.
        """
        others = self._others(lane)
        if not decodes and not any(last.decodes for last in others):
            return most
        bound_s = self._bound_s * (BORROWED if decodes and chunks is not None else 1.0)
        return self._most(others, bound_s, most, lambda tokens: self._seconds(prompts, tokens, chunks or ()))

    def tokens(self, lane: int, start: int, most: int) -> int:
        """Return how many tokens of a prompt may run from position ``start`` on in a step of a lane, at most ``most``,
        beside sequences that decode there."""
        times = self._times
        return self._most(
            self._others(lane), self._bound_s, most, lambda tokens: times.predict(tokens, attended_pairs(start, tokens))
        )

    def _others(self, lane: int) -> list[_Latest]:
        """Return the latest steps of the other lanes."""
        old = self._steps - 2 * len(self._latest)  # lanes whose latest step is older are not in use
        return [last for one, last in self._latest.items() if one != lane and last.number > old]

    def _most(self, others: Sequence[_Latest], bound_s: float, most: int, seconds: Callable[[int], float]) -> int:
        """Return the most tokens, at most ``most``, whose predicted ``seconds`` leave the reserve of the bound free, or
        take ``LEAST_SHARE`` of the time beside decoding."""
        free_s, alone_s = bound_s - self._shared_s(others), self._times.predict(0, 0.0)
        left = max(free_s - self._reserve.share * bound_s, alone_s + LEAST_SHARE * (free_s - alone_s))
        reach = int(FURTHER * self._times.most_tokens)
        high = min(most, max(LEAST, reach) if reach else FIRST)
        low = min(LEAST, high)
        while low < high:
            middle = (low + high + 1) // 2
            if seconds(middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def _shared_s(self, others: Sequence[_Latest]) -> float:
        """Return the seconds for which other lanes' steps keep a lane from the replicas."""
        return sum(last.busy_s for last in others) / self.replicas

    def _seconds(self, prompts: PromptBatch, budget: int, chunks: Sequence[SequenceStep]) -> float:
        split = [(one.cached, tokens) for one, tokens in prompts.split(budget).items()]
        split += [(chunk.start, len(chunk.tokens)) for chunk in chunks]
        return self._times.predict(
            sum(tokens for _, tokens in split), sum(attended_pairs(start, tokens) for start, tokens in split)
        )


def attended_pairs(start: int, tokens: int) -> float:
    """Return the pairs of a row of a chunk and a token that it attends to."""
    return tokens * (start + (tokens + 1) / 2)


def _work(plan: StepPlan) -> tuple[int, float]:
    """Return the prompt tokens of a step, and their pairs."""
    chunks = plan.chunks
    return sum(len(one.tokens) for one in chunks), sum(attended_pairs(one.start, len(one.tokens)) for one in chunks)
