"""How memory workers that leave are emptied while their requests run. Pure.

With every plan, until nothing is left on such a worker:

1. Sequences of the planned lane that would grow there go on elsewhere with their next token (``Growth.leave``).
2. What they and the prefixes that they share have there follows range by range while they decode
   (``lamina.schedule.moves``), to where the request grows now if that has room.
3. A request is dropped, and computed again elsewhere, if it has so few tokens that this is cheaper, if they fit on no
   other worker, or if they cannot move. A prompt that runs is left alone until it can move.
"""

from collections.abc import Callable

from lamina.groups import Group
from lamina.placement.map import LEAST_SEGMENT, Placement
from lamina.placement.relocation import Relocations
from lamina.schedule.growth import Growth
from lamina.schedule.lane import Lane
from lamina.schedule.moves import Moves
from lamina.segments import holding

CHEAP = 32  # tokens that are computed again rather than moved: they hardly lengthen a step


class Draining:
    """Empties the closed workers of a placement."""

    def __init__(
        self,
        placement: Placement,
        relocations: Relocations,
        moves: Moves,
        growth: Growth,
        drop: Callable[[Group], None],
    ) -> None:
        """``drop`` gives up the KV of a request, which is then admitted elsewhere."""
        self._placement = placement
        self._relocations = relocations
        self._moves = moves
        self._growth = growth
        self._drop = drop

    def follow(self, lane: Lane) -> None:
        """Begin what can begin with the plan that is being made for a lane."""
        for worker in sorted(self._placement.closed):
            for group, freed in self._relocations.holders(worker).items():
                if not self._relocations.is_moving(group) and not self._moves.touches(group):
                    self._send_away(group, worker, freed)
            self._growth.leave(lane, worker)

    def _send_away(self, group: Group, worker: str, freed: int) -> None:
        """Move a request's next range off a worker, or drop the request. ``freed``: what only it has there."""
        movable = self._placement.moves and not group.searches and worker not in self._placement.local
        if not movable or group.computed <= CHEAP:
            self._drop(group)
            return
        part = self._moves.movable(group, worker)
        if part is None:
            return
        tokens = part.stop - part.start
        targets = self._targets(max(freed, tokens))
        if not targets:
            self._drop(group)
        elif part.completion is None or holding(part.completion.segments, part.start).tokens[1] == part.stop:
            grows = group.alive[0].worker
            target = grows if targets.get(grows, 0) >= tokens else next(iter(targets))
            self._moves.try_move(group, worker, target, min(tokens, targets[target]))
        # Else it grows there until its lane's next plan, or steps in flight have yet to write the last tokens.

    def _targets(self, tokens: int) -> dict[str, int]:
        """The room of workers that together hold so many more tokens, most first; empty if there are none."""
        rooms = {
            worker: room
            for worker, room in self._placement.by_room().items()
            if room >= min(tokens, LEAST_SEGMENT) and worker not in self._placement.local
        }
        return rooms if sum(rooms.values()) >= tokens else {}
