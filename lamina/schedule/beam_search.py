"""Beam search: selects which continuations are computed further and which are the answers. Pure."""

import collections
import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lamina.core.errors import RequestError
from lamina.core.outputs import Logprob
from lamina.core.requests import Completion, Group
from lamina.core.sampling import SamplingParams
from lamina.core.segments import by_worker, forked
from lamina.core.steps import Admission, Fork
from lamina.core.types import Segment
from lamina.kv.placement import Placement
from lamina.schedule.dealing import Readiness
from lamina.schedule.lane import Lane, Residents

Choice = list[tuple[int, int]]
"""Assigns to every place among a request's beams the place of the beam that continues there, and the beam's next token.
A beam that continues only once keeps its place."""


@dataclass(frozen=True)
class Hypothesis:
    """A finished answer.

    Attributes:
        score: sum of the tokens' log-probabilities over the length to the power of the length penalty.
        ended: True if its last token ended it, False if ``max_tokens`` did.
    """

    score: float
    token_ids: list[int]
    ended: bool


@dataclass(frozen=True)
class _Candidate:
    """Beam ``place`` continued with ``token``."""

    score: float  # sum of its log-probabilities
    place: int
    token: int
    hits: bool  # True if it is finished


def check_beams(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Raise RequestError if a request has more beams than the vocabulary has tokens that continue them."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    left = vocab_size - sum(token < vocab_size for token in ends)
    if params.use_beam_search and params.n > left:
        raise RequestError(
            f"n is {params.n} beams, but only {left} of the model's {vocab_size} tokens end no answer; lower n or give "
            "fewer stop_token_ids"
        )


class BeamSearch:
    """The beams of one request.

    Attributes:
        hypotheses: the finished answers, best first: ``n`` once the search is done.
        done: True once no continuation can change the hypotheses.
    """

    def __init__(self, params: SamplingParams, max_tokens: int, ends: Collection[int]) -> None:
        """``max_tokens`` is that of one answer; ``ends`` are the tokens that end an answer."""
        self._beams = params.n
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens
        self._ends = frozenset(ends)
        self._scores = [0.0]  # by place: score of the beam; a single score as long as all are equal
        self._tokens: list[list[int]] = [[]]
        self.hypotheses: list[Hypothesis] = []
        self.done = False

    @property
    def places(self) -> int:
        """Number of beams of which ``advance`` needs the continuations."""
        return len(self._scores)

    def advance(self, continuations: Sequence[Sequence[Logprob]]) -> Choice | None:
        """Continue every beam by a token; None if the search is done.

        ``continuations`` has, for every place, the ``n`` most likely tokens, and the ``n`` most likely tokens that do
        not end an answer.
        """
        length = len(self._tokens[0]) + 1
        last = length == self._max_tokens
        candidates = [
            _Candidate(score + one.logprob, place, one.token_id, last or one.token_id in self._ends)
            for place, (score, its) in enumerate(zip(self._scores, continuations, strict=True))
            for one in its
        ]
        candidates.sort(key=lambda one: -one.score)
        self._finish([one for one in candidates[: self._beams] if one.hits], length)
        running = list(itertools.islice((one for one in candidates if not one.hits), self._beams))
        self.done = last or self._is_done(running[0].score, length)
        return None if self.done else self._place_running(running)

    def _finish(self, finished: Sequence[_Candidate], length: int) -> None:
        """Keep the best of the hypotheses and of these candidates, which have ``length`` tokens."""
        norm = math.pow(length, self._length_penalty)
        self.hypotheses += [
            Hypothesis(one.score / norm, [*self._tokens[one.place], one.token], one.token in self._ends)
            for one in finished
        ]
        self.hypotheses = heapq.nlargest(self._beams, self.hypotheses, key=lambda one: one.score)

    def _is_done(self, best: float, length: int) -> bool:
        """Return whether no beam, the best of which has the score ``best``, is worth continuing."""
        if len(self.hypotheses) < self._beams:
            return False
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        norm = math.pow(self._max_tokens if longest else length, self._length_penalty)
        return best / norm <= self.hypotheses[-1].score

    def _place_running(self, running: Sequence[_Candidate]) -> Choice:
        """Give each candidate a place. A beam's best continuation gets the beam's place, to fork fewest sequences."""
        chosen: dict[int, _Candidate] = {}
        others: list[_Candidate] = []
        equal = self.places < self._beams  # the beams have the same tokens so far
        for one in running:
            if one.place in chosen or equal:
                others.append(one)
            else:
                chosen[one.place] = one
        free = (place for place in range(self._beams) if place not in chosen)
        chosen |= zip(free, others, strict=True)
        order = [chosen[place] for place in range(self._beams)]
        self._scores = [one.score for one in order]
        self._tokens = continued(self._tokens, [(one.place, one.token) for one in order])
        return [(place if equal else one.place, one.token) for place, one in enumerate(order)]


def continued(tokens: Sequence[list[int]], choice: Choice) -> list[list[int]]:
    """Return the tokens of every place after a choice. The list of a beam that keeps its place is extended."""
    lists = [tokens[parent] if parent == place else list(tokens[parent]) for place, (parent, _) in enumerate(choice)]
    for own, (_, token) in zip(lists, choice, strict=True):
        own.append(token)
    return lists


@dataclass(frozen=True)
class Changes:
    """Changes for the next plan. ``preempted`` are requests whose beams have no slots to continue."""

    forks: list[Fork] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Group] = field(default_factory=list)


NO_CHANGES = Changes()


class Beams:
    """Forks and releases the sequences of beams as they are chosen, and adds chosen beams to the next step."""

    def __init__(
        self,
        placement: Placement,
        residents: Residents,
        sequences: Iterator[int],
        lanes: Sequence[Lane],
        ready: Readiness,
    ) -> None:
        """``sequences`` yields numbers of new sequences. ``lanes`` is extended when lanes are added."""
        self._placement = placement
        self._residents = residents
        self._sequences = sequences
        self._lanes = lanes
        self._ready = ready

    def choose(self, group: Group, choice: Choice) -> None:
        """Let the next plan of a request's lane apply ``choice``."""
        group.choice = choice
        self._lanes[group.lane].chosen[group] = None
        self._ready.note_change(group.lane)

    def join_step(self, lane: Lane) -> Changes:
        """Add the beams of the lane whose next token is known to the step that is being planned.

        Removes sequences that have drawn their last token first.
        """
        lane.decoding.remove_ended()
        if not (lane.chosen or lane.due or lane.stepping):
            return NO_CHANGES
        lane.rest()
        changes = Changes()
        chosen, lane.chosen = lane.chosen, {}
        for group in chosen:
            if group.choice is not None:
                self._follow(group, group.choice, changes, lane)
        lane.stepping = [completion.sequence for completion in lane.due]
        for completion, group in lane.due.items():
            lane.decoding.resume(group, completion, group.stored_tokens(completion))
        return changes

    def _follow(self, group: Group, choice: Choice, changes: Changes, lane: Lane) -> None:
        """Apply the choice of a request. If its workers lack slots, the request is preempted instead."""
        position = group.stored_tokens(group.completions[0])
        numbers = [
            one.sequence if parent == place else next(self._sequences)
            for place, (one, (parent, _)) in enumerate(zip(group.completions, choice, strict=True))
        ]
        parents = [group.completions[parent] for parent, _ in choice]
        segments = [
            parent.segments if parent.sequence == number else forked(parent.segments, number, position)
            for parent, number in zip(parents, numbers, strict=True)
        ]
        if not self._reserve(group, segments):
            changes.preempted.append(group)
            return
        forks = [(parent.sequence, number) for parent, number in zip(parents, numbers, strict=True)]
        changes.forks.extend(Fork(parent, number, position) for parent, number in forks if parent != number)
        tokens = continued([one.generated for one in group.completions], choice)
        for one, number, where, generated in zip(group.completions, numbers, segments, tokens, strict=True):
            self._placement.continue_on(one.worker, where[-1].worker)
            if one.sequence != number:
                changes.released.append(one.sequence)
                changes.admitted.append(_admission(group, one, number, where))
            one.sequence, one.segments, one.generated, one.answered = number, where, generated, False
            lane.due[one] = group
        group.choice = None
        self._residents.update(group)

    def _reserve(self, group: Group, segments: list[list[Segment]]) -> bool:
        """Reserve slots for beams with these segments. If a worker has too few, change nothing and return False."""
        change = collections.Counter[str]()
        for one, after in zip(group.completions, segments, strict=True):
            change.update(by_worker(after, group.base, group.base + one.own))
            change.subtract(group.slots(one, one.own))
        if not self._placement.fits(change):
            return False
        for worker, tokens in sorted(change.items(), key=lambda one: one[1]):  # release before reserving
            if tokens > 0:
                self._placement.reserve_on(worker, tokens)
            else:
                self._placement.will_release(worker, -tokens)
                self._placement.free_slots(worker, -tokens)
        return True


def _admission(group: Group, completion: Completion, sequence: int, segments: list[Segment]) -> Admission:
    request, segments = group.request, group.expand(segments)
    return Admission(
        sequence,
        1,
        group.prompt_length,
        segments,
        request.params,
        request.seed,
        [],
        [completion.index],
        request.request_id,
    )
