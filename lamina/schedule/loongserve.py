"""LoongServe's scheduler (Wu et al., SOSP 2024, section 5) where KV stays and work moves. Pure.

An elastic instance is a lane here. Its four steps, and what each becomes:

* Dispatch: which waiting requests run their prompts now, and in which lanes (``dispatch``, Equations 1 and 2). Nothing
  is evicted: preempting the sequences of a lane that decodes means that their steps also run chunks of prompts.
* Allocation: which lanes that decode run chunks besides (``allocate``, Equations 3 and 4). No KV has to leave such a
  lane. Instead of that migration, the gain pays for *parking*, as a chunk runs one attention behind the chunk before it
  in another lane, and for *lost overlap*: a lane's sequences wait while its chunks run.
* Batching: which prompts share which lanes (``batches``, Equation 5).
* Scaling: after its prompt, a request decodes in a lane that others decode in already, as long as steps there stay
  memory bound (``lane_to_decode``). Otherwise, it starts to decode in its own lane: that is scaling up.

Equation 7 is fitted by least squares to the steps that have run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lamina.core.steps import StepPlan
from lamina.schedule.lane_choice import StepTable
from lamina.schedule.pace import LEARN, StepTimes

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

MEMORY_BOUND = 2.0  # a step is memory bound while it takes less than this many times a step of one row
UNBOUNDED = 2**62  # KV tokens beside a lane whose KV is in memory workers


@dataclass(frozen=True)
class PrefillTime:
    """Equation 7: seconds of a batch of prompts, which run in chunks, in several lanes at once.

    Attributes:
        alpha: Seconds of every chunk.
        beta: Seconds per token.
        gamma: Seconds per pair of a token and a token that it attends to.
        chunk: Most tokens of a chunk.
        parking_s: Seconds that each further lane adds, as it begins behind the lane before it.
    """

    alpha: float
    beta: float
    gamma: float
    chunk: int
    parking_s: float = 0.0

    def parts(self, lengths: Sequence[int]) -> Floats:
        """Return the chunks, tokens, pairs and prompts [n, 4] of each of n prompts; their sums describe batches."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return np.stack([np.ceil(tokens / self.chunk), tokens, tokens * (tokens + 1) / 2, np.ones_like(tokens)], -1)

    def seconds(self, batch: Floats, lanes: Ints) -> Floats:
        """Return the seconds of batches [..., 4] on at most ``lanes`` [...] lanes, as many as pay.

        The last chunk of a prompt runs in the prompt's own lane.
        """
        work = batch[..., :3] @ np.array([self.alpha, self.beta, self.gamma])
        degree = np.minimum(lanes, 1 + batch[..., 0] - batch[..., 3])
        if self.parking_s > 0:  # lane d + 1 saves work / d / (d + 1)
            degree = np.minimum(degree, np.maximum(1, np.ceil((np.sqrt(1 + 4 * work / self.parking_s) - 1) / 2)))
        return np.asarray(work / degree + self.parking_s * (degree - 1))

    def of(self, lengths: Sequence[int], lanes: int) -> float:
        """Return the seconds of these prompts on at most ``lanes`` lanes."""
        return float(self.seconds(self.parts(lengths).sum(0), np.array(lanes))) if lengths else 0.0


@dataclass(frozen=True)
class LaneLoad:
    """What a lane runs.

    Attributes:
        number: Number of the lane.
        outputs: Tokens that each of its decoding sequences has drawn.
        prompts: Tokens left of each of its prompts.
        room: KV tokens for which there is room beside it.
    """

    number: int
    outputs: Sequence[int] = ()
    prompts: Sequence[int] = ()
    room: int = UNBOUNDED

    @property
    def idle(self) -> bool:
        return not self.outputs and not self.prompts


@dataclass(frozen=True)
class Rates:
    """What measured steps say.

    Attributes:
        time: Predicts the time of prompts.
        rows: Most rows with which a step is memory bound.
        tipping_s: Time of a batch of prompts from which on it is not memory bound.
        token_s: Seconds of a decoding step.
        output: Mean tokens of completions that have ended; inf before the first has.
    """

    time: PrefillTime
    rows: int
    tipping_s: float
    token_s: float
    output: float = math.inf

    def wait_s(self, lane: LaneLoad) -> float:
        """Return how long a lane is expected to be busy: the executed time of its sequences against the mean."""
        left = max(0.0, self.output - min(lane.outputs)) if lane.outputs else 0.0
        return self.time.of(lane.prompts, 1) + (self.token_s * left if left < math.inf else left)


def until_tipping(lengths: Sequence[int], lanes: int, rates: Rates) -> int:
    """Return how many of these prompts, in order, make a batch that has just passed the tipping point on ``lanes``
    lanes, or fills a step of each."""
    count = 0
    while lanes and count < len(lengths):
        batch = lengths[:count]
        if sum(batch) >= lanes * rates.time.chunk or (count and rates.time.of(batch, lanes) > rates.tipping_s):
            break
        count += 1
    return count


def dispatch(waiting: Sequence[int], lanes: Sequence[LaneLoad], rates: Rates) -> tuple[int, list[LaneLoad]]:
    """Return how many of the waiting prompts, in order, to run now, and the lanes for them.

    Idle lanes come first. More prompts run in a busy lane if that gains more of their time to the first token, per
    prompt token (Equation 2), than it costs the lane's sequences, per token drawn, and its prompts (Equation 1).
    """
    used = [lane for lane in lanes if lane.idle]
    count = until_tipping(waiting, len(used), rates)
    busy = [lane for lane in lanes if not lane.idle]
    for lane in sorted(busy, key=lambda one: (len(one.outputs), sum(one.prompts))):
        more = until_tipping(waiting[count:], 1, rates)
        seconds = rates.time.of(waiting[: count + more], len(used) + 1)
        cost = sum(seconds / max(1, tokens) for tokens in (*lane.outputs, *lane.prompts))
        gain = sum(rates.wait_s(lane) / tokens for tokens in waiting[count : count + more])
        if gain > cost:
            used.append(lane)
            count += more
    return count, used if count else []


def allocate(
    prompts: Sequence[int], used: Sequence[LaneLoad], others: Sequence[LaneLoad], time: PrefillTime
) -> list[LaneLoad]:
    """Return the lanes for these prompts: ``used``, and more lanes that decode as long as that pays.

    The lane with the fewest sequences is next.
    """
    chosen = [*used]
    for lane in sorted((one for one in others if not one.prompts), key=lambda one: len(one.outputs)):
        if not pays(prompts, len(chosen), lane.outputs, time):
            break
        chosen.append(lane)
    return chosen


def pays(prompts: Sequence[int], degree: int, outputs: Sequence[int], time: PrefillTime) -> bool:
    """Return whether prompts should run in one more lane than ``degree``, whose sequences have drawn ``outputs``.

    The gain is the prompts' time saved per token (Equation 3), less their parking. The cost (Equation 4) is the lost
    overlap: the lane's sequences wait for the chunks there.
    """
    sooner, later = (time.of(prompts, degree + more) for more in (1, 0))
    gain = sum((later - sooner) / tokens for tokens in prompts)
    return gain > sum(sooner / max(1, tokens) for tokens in outputs)


class Batch(NamedTuple):
    """Consecutive prompts that share consecutive lanes. Both ranges count from 0."""

    prompts: range
    lanes: range


def batches(lengths: Sequence[int], rooms: Sequence[int], time: PrefillTime) -> list[Batch]:
    """Return the batches with the least sum of the prompts' times (Equation 5). Lanes may be left unused.

    Args:
        lengths: Tokens of each prompt, the longest first.
        rooms: KV tokens for which there is room beside each lane, the least first.
        time: Predicts the time of a batch.

    Returns:
        No batch if the prompts do not fit.
    """
    best, splits = solve(lengths, rooms, time)
    made, prompts, lanes = list[Batch](), len(lengths), len(rooms)
    while prompts and math.isfinite(best[-1, -1]):
        first, lane = splits[prompts, lanes].tolist()
        if lane < 0:  # the last lane is not used
            lanes -= 1
            continue
        made.append(Batch(range(first, prompts), range(lane, lanes)))
        prompts, lanes = first, lane
    return made[::-1]


def solve(lengths: Sequence[int], rooms: Sequence[int], time: PrefillTime) -> tuple[Floats, Ints]:
    """Return Equation 5's table: the least sum of seconds of the first i prompts on the first k lanes [n + 1, m + 1],
    and where the last batch of each begins, its prompt and its lane [n + 1, m + 1, 2]; -1: lane k - 1 is not used."""
    n, m = len(lengths), len(rooms)
    sums = np.vstack([np.zeros(4), time.parts(lengths).cumsum(0)])
    room = np.concatenate([[0.0], np.cumsum(rooms, dtype=np.float64)])
    best, splits = np.full((n + 1, m + 1), np.inf), np.full((n + 1, m + 1, 2), -1)
    best[0] = 0.0
    for i in range(1, n + 1):
        parts = sums[i] - sums[:i]
        each = np.arange(i, 0, -1)[:, None] * time.seconds(parts[:, None], np.arange(1, m + 1))
        for k in range(1, m + 1):
            found = best[:i, :k] + each[:, k - 1 :: -1]  # by first prompt and first lane
            found[parts[:, 1, None] > room[k] - room[:k]] = np.inf
            place = int(found.argmin())
            best[i, k] = best[i, k - 1]
            if found.flat[place] < best[i, k]:
                best[i, k], splits[i, k] = found.flat[place], divmod(place, k)
    return best, splits


def lane_to_decode(own: int, decoding: Sequence[tuple[int, int]], rows: int, most: int) -> int:
    """Return the lane to decode a request in: the fullest in which others decode already, or else its own.

    Args:
        own: The lane of its prompt.
        decoding: Lanes, and how many sequences each decodes.
        rows: Sequences of the request.
        most: Most sequences of a step that is memory bound.
    """
    able = [(taken, -lane) for lane, taken in decoding if taken and taken + rows <= most]
    return -max(able)[1] if able else own


@dataclass(frozen=True)
class Spread:
    """The lane that a request is dealt to, and all lanes of its batch."""

    home: int
    lanes: frozenset[int]


class FourSteps:
    """The four steps on measured times; a ``LanePolicy``."""

    def __init__(self, chunk: int, attentions: int) -> None:
        """``chunk``: rows of a step. ``attentions``: attentions of the model."""
        self._chunk, self._attentions = chunk, attentions
        self._times, self._slices = StepTimes(), StepTable()
        self._token_s = 0.0  # recent seconds of a decoding step
        self._output: float | None = None  # recent tokens of a completion
        self._rates: Rates | None = None
        self._patience: float | None = None  # when the first waiting request runs wherever it is

    def note_step(self, plan: StepPlan, rows: int, busy_s: float, waited_s: float) -> None:
        """Learn from a completed step. Arguments are those of ``StepDone``."""
        self._times.note_step(plan, busy_s + waited_s)
        self._slices.note(rows, busy_s)
        if not plan.chunks:
            self._token_s += (LEARN if self._token_s else 1.0) * (busy_s + waited_s - self._token_s)
        self._rates = None

    def note_output(self, tokens: int) -> None:
        """Record that a completion has ended after ``tokens`` tokens."""
        before = tokens if self._output is None else self._output
        self._output = before + LEARN * (tokens - before)
        self._rates = None

    @property
    def memory_bound_rows(self) -> int:
        """Most rows, in steps of twice as many, with which a step is memory bound."""
        return self.rates().rows

    def rates(self) -> Rates:
        """Return what the steps so far say. All times are 0 before the first."""
        if self._rates is None:
            alpha, beta, gamma = self._times.coefficients
            parking_s = (alpha + beta * self._chunk) / self._attentions
            time = PrefillTime(alpha, beta, gamma, self._chunk, parking_s)
            output, rows = math.inf if self._output is None else self._output, self._memory_bound_rows()
            self._rates = Rates(time, rows, time.of([rows], 1), self._token_s, output)
        return self._rates

    def _memory_bound_rows(self) -> int:
        rows = 1
        while 2 * rows <= self._chunk and self._slices.at(2 * rows) <= MEMORY_BOUND * self._slices.at(1):
            rows *= 2
        return rows

    def deal(self, waiting: Sequence[int], lanes: Sequence[LaneLoad], now: float) -> list[Spread]:
        """Return where the first of the waiting requests run; the others wait on.

        A lane may turn out to be busy for longer than was expected. Once the first request has waited for the shortest
        expected time and no lane is idle, it runs in the lane with the least to do.
        """
        rates = self.rates()
        count, used = dispatch(waiting, lanes, rates)
        if not count:
            least = min(lanes, key=lambda one: (len(one.prompts), len(one.outputs)))
            if self._patience is None:
                self._patience = now + min(map(rates.wait_s, lanes))
            if now < self._patience:
                return []
            count, used = 1, [least]
        self._patience = None
        chosen = allocate(waiting[:count], used, [lane for lane in lanes if lane not in used], rates.time)
        return _spread(waiting[:count], sorted(chosen, key=lambda lane: lane.room), rates.time)

    def worth(self, lane: LaneLoad, allocated: frozenset[int], left: int, degree: int) -> int:
        """Return whether a lane should run a chunk of another lane's prompt.

        Args:
            lane: The lane.
            allocated: Lanes of the prompt's batch.
            left: Tokens left of the prompt.
            degree: Lanes that run the prompt.

        Returns:
            0: no, since that does not pay. 2: yes, before all prompts for which it is 1.
        """
        time = self.rates().time
        if time.beta and not pays([left], degree, lane.outputs, time):
            return 0
        return 2 if lane.number in allocated else 1


def _spread(prompts: Sequence[int], lanes: Sequence[LaneLoad], time: PrefillTime) -> list[Spread]:
    """Return the lanes of each prompt. Of a batch's lanes, the least busy is the home of its prompts."""
    order = sorted(range(len(prompts)), key=lambda place: -prompts[place])
    roomiest = Spread(lanes[-1].number, frozenset([lanes[-1].number]))
    spreads = [roomiest] * len(prompts)
    for batch in batches([prompts[place] for place in order], [lane.room for lane in lanes], time):
        own = [lanes[place] for place in batch.lanes]
        home = min(own, key=lambda lane: (len(lane.prompts), len(lane.outputs)))
        for place in batch.prompts:
            spreads[order[place]] = Spread(home.number, frozenset(lane.number for lane in own))
    return spreads
