"""Decides which prompts run in a lane that decodes, although other lanes only run prompts. Pure.

A prompt waits while the lanes for prompts are busy. In a lane that decodes, it would begin with the next step, but
would make the steps of the sequences there longer. It runs there if its first token would come sooner by more than that
costs: its own time there and, without a bound for the time between tokens, that time for each sequence of the replica.
With a bound, its chunks are as small as ``lamina.schedule.pace`` makes them, and cost the sequences nothing. All times
are predicted from steps that have run, as for cached prefixes (``lamina.schedule.prefix_times``).

Prompts are judged until one finds no room in the next step; with a bound, while fewer prompt tokens wait than a step
has rows. Without a bound, prompts may also take no more than a share of a lane's time: while prompts come faster than
they can be computed, it would save time for each of them to run beside decoding, and every step would have a chunk.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lamina.core.requests import Completion, Group
from lamina.core.steps import StepPlan
from lamina.kv.placement import CachedPrefix, Placement
from lamina.schedule.lane import Lane
from lamina.schedule.pace import FURTHER, StepTimes, attended_pairs

SHORT = 256  # most tokens of a prompt beside decoding; of several without a bound, until as many have been measured
SHARE = 0.25  # of a lane's time that prompts may take without a bound, on average
SAVED_S = 1.0  # most seconds that a lane without prompts saves up for a burst of them
EVERY = 64  # one request of so many is judged by the times of lanes for prompts, so that a bad measurement is repeated


class Work(NamedTuple):
    """Prompt tokens to compute, and their pairs of a row and a token that it attends to."""

    tokens: int = 0
    pairs: float = 0.0

    def plus(self, other: "Work") -> "Work":
        """Return both together."""
        return Work(self.tokens + other.tokens, self.pairs + other.pairs)

    @classmethod
    def after(cls, start: int, tokens: int) -> "Work":
        """Return the work of ``tokens`` prompt tokens from position ``start`` on."""
        return cls(tokens, attended_pairs(start, tokens))

    @classmethod
    def of(cls, prompts: Iterable[Completion]) -> "Work":
        """Return what prompts have left."""
        made = cls()
        for one in prompts:
            made = made.plus(cls.after(one.cached, one.left))
        return made


class RoleTimes:
    """Predicts the times of the steps of all lanes of a role."""

    def __init__(self) -> None:
        self._steps = StepTimes()

    @property
    def reach(self) -> float:
        """Prompt tokens of a step to which predictions reach; 0 if no step with prompts was measured."""
        return FURTHER * self._steps.most_tokens

    def learn_step(self, plan: StepPlan, seconds: float) -> None:
        self._steps.note_step(plan, seconds)

    @property
    def fixed_s(self) -> float:
        """Seconds of a step without prompts."""
        return self._steps.predict(0, 0.0)

    def added_s(self, work: Work) -> float:
        """Return the seconds by which ``work`` makes steps longer."""
        return self._steps.predict(*work) - self.fixed_s

    def begins_s(self, lane: Lane) -> float:
        """Return the seconds until the next step of a lane begins. The running one is taken to be half done."""
        planned = [self._steps.of_plan(one.plan) for one in lane.in_flight if one.plan.runs]
        return sum(planned) - planned[0] / 2 if planned else 0.0


class _Queue(NamedTuple):
    """What a lane for prompts has to do.

    Attributes:
        work: All of it.
        begins_s: Seconds until its next step begins.
        left: Tokens left of each prompt, the shortest first.
        sums: Sums of the first n of ``left``, from n = 0 on.
    """

    work: Work
    begins_s: float
    left: list[int]
    sums: list[int]

    @classmethod
    def of(cls, lane: Lane, times: RoleTimes) -> "_Queue":
        prompts = lane.prompts_left
        left = sorted(one.left for one in prompts)
        return cls(Work.of(prompts), times.begins_s(lane), left, [0, *itertools.accumulate(left)])


class Load:
    """What the lanes have to do while waiting requests are dealt."""

    def __init__(
        self,
        times: "ShortPrompts",
        lanes: tuple[Sequence[Lane], Sequence[Lane]],
        taken: Sequence[int],
        replicas: int,
        others: Callable[[int], frozenset[str]],
    ) -> None:
        """Begin before the first waiting request.

        Args:
            times: Times of steps.
            lanes: Lanes that run prompts, and those that decode.
            taken: Sequences by lane.
            replicas: Number of replicas, to which lanes belong in turn.
            others: Returns the workers with local memory that do not run a lane.
        """
        self._times, self._taken, self._replicas, self._others = times, taken, replicas, others
        self._prompts, self._decoding = lanes
        self._queues = [_Queue.of(lane, times.prompts) for lane in self._prompts]
        self._ahead = Work()
        self._emptiest: Lane | None = None  # ``_candidate`` without a cached prefix, until a lane gets a prompt
        self._has_room: bool | None = None  # ``has_room``, until a lane gets a prompt

    @property
    def has_room(self) -> bool:
        """Whether a lane that decodes has room for a further prompt."""
        if self._has_room is None:
            lane, _ = self._candidate({})
            self._has_room = self._room(lane) > 0
        return self._has_room

    def _room(self, lane: Lane) -> int:
        """Return the prompt tokens that may still be dealt to a lane that decodes. With a bound, a step has so few that
        those for some steps may wait there."""
        most = lane.allowance
        if lane.pace is None:
            most = min(most, max(SHORT, int(self._times.decoding.reach))) if self._times.spare_s(lane.number) > 0 else 0
        return most - sum(one.left for one in lane.prompts_left)

    def pass_over(self, group: Group) -> None:
        """Note that a request goes to a lane for prompts. It delays those that come next by a step at most."""
        self._ahead = self._ahead.plus(Work.after(0, min(self._times.rows, group.to_run)))

    def lane_for(self, group: Group, found: Mapping[str, CachedPrefix]) -> int | None:
        """Return the lane that decodes in which the prompt of a waiting request should run; None if it should not.

        ``found``: cached prefixes of the request, by worker.
        """
        times, (lane, cached) = self._times.decoding, self._candidate(found)
        own = Work.after(cached, group.to_run - cached)
        if own.tokens > SHORT or group.searches or (room := self._room(lane)) <= 0:
            return None
        waiting, most, delayed = Work.of(lane.prompts_left), lane.allowance, 1
        if lane.pace is not None:
            most = lane.pace.tokens(lane.number, cached, most)
        elif own.tokens > room:
            self._has_room = False  # the next plan judges again, also the shorter ones behind
            return None
        else:
            delayed += sum(self._taken[one.number] for one in self._decoding if self._is_beside(one, lane))
        added_s = (times if times.reach and group.arrival % EVERY else self._times.prompts).added_s
        steps = math.ceil((waiting.tokens + own.tokens) / most)
        here_s = times.begins_s(lane) + steps * times.fixed_s + added_s(waiting.plus(own))
        longest = max((one.length for one in found.values()), default=0)
        apart_s = self._apart_s(Work.after(longest, group.to_run - longest))
        if apart_s - here_s <= delayed * added_s(own):
            return None
        self._emptiest = self._has_room = None
        if lane.pace is None:
            self._times.spend(lane.number, added_s(own))
        return lane.number

    def _candidate(self, found: Mapping[str, CachedPrefix]) -> tuple[Lane, int]:
        """Return the lane that decodes with the longest cached prefix on its replica, and that prefix's tokens.

        Of several, the one with the fewest prompt tokens left, then the fewest sequences.
        """
        if not found and self._emptiest is not None:
            return self._emptiest, 0

        def cached(lane: Lane) -> int:
            others = self._others(lane.number)
            return max((one.length for worker, one in found.items() if worker not in others), default=0)

        def order(lane: Lane) -> tuple[int, int, int, int]:
            left = sum(one.left for one in lane.prompts_left)
            return -cached(lane), left, self._taken[lane.number], lane.number

        chosen = min(self._decoding, key=order)
        self._emptiest = chosen if not found else self._emptiest
        return chosen, cached(chosen)

    def _is_beside(self, one: Lane, other: Lane) -> bool:
        return (one.number - other.number) % self._replicas == 0

    def _apart_s(self, own: Work) -> float:
        """Return the seconds to the first token of a prompt in the lane for prompts where it comes soonest."""
        times, rows, share = self._times.prompts, self._times.rows, self._times.share

        def first_s(queue: _Queue) -> float:
            work = queue.work.plus(own)
            steps, run = math.ceil(work.tokens / rows), 1.0
            if share:  # the shortest prompts do not wait for the others
                shorter = queue.sums[bisect.bisect_right(queue.left, own.tokens)]
                steps = min(steps, math.ceil((shorter + own.tokens) / (share * rows)))
                run = min(1.0, steps * rows / work.tokens)
            return queue.begins_s + steps * times.fixed_s + run * times.added_s(work)

        queued_s = times.added_s(self._ahead) + math.ceil(self._ahead.tokens / rows) * times.fixed_s
        return queued_s / len(self._prompts) + min(map(first_s, self._queues))


class ShortPrompts:
    """Learns the times of steps of both roles.

    Attributes:
        prompts: Times of lanes that only run prompts.
        decoding: Times of lanes that decode.
        rows: Rows of a step.
        share: Part of a step's rows for prompts that the shortest ones get.
    """

    def __init__(self, lanes: Sequence[Lane], placement: Placement, rows: int, first_share: float) -> None:
        """Measure nothing yet.

        Args:
            lanes: All lanes; extended when lanes are added.
            placement: Says which lanes run beside which local memory.
            rows: Rows of a step.
            first_share: Part of a step's rows for prompts that the first one gets (``PromptBatch``).
        """
        self.prompts, self.decoding = RoleTimes(), RoleTimes()
        self.rows, self.share = rows, 1 - first_share
        self._placement, self._lanes = placement, lanes
        self._spare_s: dict[int, float] = {}  # by lane: seconds that prompts may take; ``SAVED_S`` if missing

    def learn_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a completed step. Only those of lanes with one role count."""
        role = self._lanes[plan.lane].role
        if role != "both":
            (self.prompts if role == "prefill" else self.decoding).learn_step(plan, seconds)
        if plan.lane in self._spare_s:
            self._spare_s[plan.lane] = min(SAVED_S, self._spare_s[plan.lane] + SHARE * seconds)

    def spare_s(self, lane: int) -> float:
        """Return the seconds for which prompts may make the next steps of a lane longer, without a bound."""
        return self._spare_s.get(lane, SAVED_S)

    def spend(self, lane: int, seconds: float) -> None:
        """Record that a prompt will make the next steps of a lane longer by ``seconds``."""
        self._spare_s[lane] = self.spare_s(lane) - seconds

    def load(self, prompts: Sequence[int], decoding: Sequence[int], taken: Sequence[int], replicas: int) -> Load | None:
        """Return what lanes have to do now; None if no lane only runs prompts, or none has run any.

        Args:
            prompts: Lanes that run prompts.
            decoding: Lanes that decode.
            taken: Sequences by lane.
            replicas: Number of replicas, to which lanes belong in turn.
        """
        if not self.prompts.reach or self._lanes[prompts[0]].role != "prefill":
            return None
        lanes = [self._lanes[lane] for lane in prompts], [self._lanes[lane] for lane in decoding]
        return Load(self, lanes, taken, replicas, self._placement.others)
