"""How the beams of a request go on after a choice: which sequences are forked, which end, and when they run. Pure.

The next token of a beam is known only once the continuations of all of the request's beams have been compared. So beams
are never planned ahead: they take part in one step, pause, and take part again once the choice is made, while other
sequences of the lane run in every step.

A beam that goes on keeps its sequence; one that two beams continue is forked, and one that none continues is released.
Slots are reserved as if beams shared nothing but the prompt, so that a choice changes no reservation.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lamina.groups import Completion, Group
from lamina.placement.map import Placement
from lamina.placement.relocation import Relocations
from lamina.schedule.beam_search import Choice, continued
from lamina.schedule.lane import Lane
from lamina.schedule.readiness import Readiness
from lamina.segments import by_worker, forked
from lamina.steps import Admission, Fork
from lamina.types import Segment


@dataclass(frozen=True)
class Changes:
    """What the next plan says of beams."""

    forks: list[Fork] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)


class Beams:
    """Lets the beams of lanes take part in steps."""

    def __init__(
        self,
        placement: Placement,
        relocations: Relocations,
        sequences: Iterator[int],
        lanes: Sequence[Lane],
        ready: Readiness,
        drop: Callable[[Group], None],
    ) -> None:
        """``sequences``: numbers of new sequences. ``lanes``: all of them, also those added later. ``drop`` gives up
        the KV of a request."""
        self._placement = placement
        self._relocations = relocations
        self._sequences = sequences
        self._lanes = lanes
        self._ready = ready
        self._drop = drop

    def choose(self, group: Group, choice: Choice) -> None:
        """The continuations of all beams of a request have been compared."""
        group.choice = choice
        self._lanes[group.lane].chosen[group] = None
        self._ready.note_change(group.lane)

    def begin(self, lane: Lane) -> Changes:
        """Let those beams of the lane take part in the step that is being planned that know their next token.

        Sequences that have drawn their last token leave first.
        """
        lane.decoding.let_go()
        lane.rest()
        changes = Changes()
        chosen, lane.chosen = lane.chosen, {}
        for group in chosen:
            if group.choice is not None:
                self._follow(group, group.choice, changes, lane)
        lane.stepping = [completion.sequence for completion in lane.due]
        for completion, group in lane.due.items():
            lane.decoding.resume(group, completion, group.kept(completion))
        return changes

    def _follow(self, group: Group, choice: Choice, changes: Changes, lane: Lane) -> None:
        """Let the beams of a request continue as chosen. If these are on other workers, which have no room, its KV is
        dropped."""
        position = group.kept(group.completions[0])
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
            self._drop(group)
            return
        forks = [(parent.sequence, number) for parent, number in zip(parents, numbers, strict=True)]
        changes.forks.extend(Fork(parent, number, position) for parent, number in forks if parent != number)
        tokens = continued([one.generated for one in group.completions], choice)
        for one, number, where, generated in zip(group.completions, numbers, segments, tokens, strict=True):
            self._placement.go_on(one.worker, where[-1].worker)
            if one.sequence != number:
                changes.released.append(one.sequence)
                changes.admitted.append(_admission(group, one, number, where))
            one.sequence, one.segments, one.generated, one.answered = number, where, generated, False
            lane.due[one] = group
        group.choice = None
        self._relocations.settle(group)

    def _reserve(self, group: Group, segments: list[list[Segment]]) -> bool:
        """Reserve slots where beams have these segments. False, and nothing changes, if a worker has too few."""
        change = collections.Counter[str]()
        for one, after in zip(group.completions, segments, strict=True):
            change.update(by_worker(after, group.base, group.base + one.own))
            change.subtract(group.slots(one, one.own))
        if not self._placement.fits(change):
            return False
        for worker, tokens in sorted(change.items(), key=lambda one: one[1]):  # first those that come back
            if tokens > 0:
                self._placement.reserve_on(worker, tokens)
            else:
                self._placement.will_release(worker, -tokens)
                self._placement.release(worker, -tokens)
        return True


def _admission(group: Group, completion: Completion, sequence: int, segments: list[Segment]) -> Admission:
    """What workers are told of a new beam."""
    request, segments = group.request, group.expand(segments)
    return Admission(sequence, 1, group.prompt_length, segments, request.params, request.seed, [], [completion.index])
