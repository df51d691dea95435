"""Sequences on their way from one memory worker to another. A pure object: no clock, no sockets.

One moves at a time. It keeps its reservation where it is and gets a second one where it goes, so that neither side ever
runs out of slots. Two migrations bring it over: the first what its completed steps have left, while it decodes
on; then it pauses until no step of it is in flight, and the next brings what has come since. A second pull of the few
tokens of a pause is simpler than decoding at both places at once, and right at any speed of the network.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from lamina.groups import Group
from lamina.placement.map import Placement
from lamina.placement.migration import Movable, make_room
from lamina.types import Migration


@dataclass(eq=False, slots=True)
class Relocation:
    """A request with a single sequence, on its way to worker ``target``.

    Migration ``number``, the latest, brings tokens up to ``copied``; ``arrived`` says that they are there. The sequence
    pauses since those it had at first were, and goes on at ``position``.
    """

    group: Group
    target: str
    number: int = 0
    copied: int = 0
    arrived: bool = False
    position: int | None = None


class Relocations:
    """Which requests live where, and the one that moves."""

    def __init__(self, placement: Placement, computed: Callable[[Group], int | None]) -> None:
        """``computed``: the tokens of a request whose steps have completed; None if it cannot move now."""
        self._placement = placement
        self._computed = computed
        self._residents: dict[str, dict[Group, None]] = {worker: {} for worker in placement.capacities}
        self._current: Relocation | None = None
        self._begun: list[Migration] = []
        self._numbers = itertools.count(1)

    @property
    def migrating(self) -> int | None:
        """Number of the migration that is under way; None if there is none."""
        return None if self._current is None or self._current.arrived else self._current.number

    def settle(self, group: Group) -> None:
        """A request lives at ``group.memory`` from now on."""
        self._residents[group.memory][group] = None

    def leave(self, group: Group) -> None:
        """A request has been released, wherever it was going."""
        del self._residents[group.memory][group]
        if self._current is not None and self._current.group is group:
            self._placement.release(self._current.target, group.tokens)
            self._current = None

    def make_room(self, tokens: int, worker: str | None) -> str | None:
        """Begin to move a sequence, if nothing moves and that helps to fit ``tokens`` on ``worker`` (None: on any).

        Returns the worker that the sequence leaves; None if none does.
        """
        if self._current is not None or self._placement.left_in_all < tokens:
            return None
        left = self._placement.by_room()
        if worker is None:
            moves = make_room(tokens, left, self._movable)
        else:  # looked at first, and no other has what could be moved
            left = {worker: left[worker], **left}
            moves = make_room(tokens, left, lambda source: self._movable(source) if source == worker else [])
        if not moves:
            return None
        move = moves[0]  # what else it takes is decided again once this is done
        group = next(one for one in self._residents[move.source] if one.completions[0].sequence == move.sequence)
        self._placement.reserve_on(move.target, group.tokens)
        self._current = Relocation(group, move.target)
        self._pull(self._current, move.movable.cost)
        return move.source

    def _movable(self, worker: str) -> list[Movable]:
        return [
            Movable(group.completions[0].sequence, group.tokens, computed)
            for group in self._residents[worker]
            if (computed := self._computed(group)) is not None
        ]

    def _pull(self, relocation: Relocation, stop: int) -> None:
        """Let the target pull what it lacks of the tokens up to ``stop``."""
        group, sequence = relocation.group, relocation.group.completions[0].sequence
        relocation.number, relocation.arrived = next(self._numbers), False
        self._begun.append(
            Migration(relocation.number, sequence, group.memory, relocation.target, relocation.copied, stop)
        )
        relocation.copied = stop

    def begun(self) -> list[Migration]:
        """Migrations to be told of by the next plan, once."""
        begun, self._begun = self._begun, []
        return begun

    def expected(self, number: int) -> Relocation | None:
        """What migration ``number`` belongs to; None if it is not awaited, or the request has ended."""
        current = self._current
        return None if current is None or current.number != number or not current.group.alive else current

    def is_paused(self, group: Group) -> bool:
        """True if no step of it may be planned."""
        return self._current is not None and self._current.group is group and self._current.position is not None

    def finish(self, lane: int, completed: int) -> tuple[Group, int] | None:
        """The request of this lane that has arrived with all it has, and lives at its target from now on; and where
        it goes on. ``completed`` steps of the lane have, by its count.

        Where something is missing it is pulled first.
        """
        current = self._current
        if current is None or not current.arrived or current.position is None:
            return None
        group = current.group
        if group.lane != lane or completed < group.completions[0].until or not group.alive:
            return None
        if current.position > current.copied:
            self._pull(current, current.position)
            return None
        self._placement.release(group.memory, group.tokens)
        del self._residents[group.memory][group]
        group.memory = current.target
        self._current = None
        self.settle(group)
        return group, current.position
