"""Which sequences to move to another memory worker so that a request fits. Pure: no clock, no sockets.

A request is admitted if one memory worker has room for the tokens that it has. If none has, the pool as a whole may
still have room: moving a sequence joins the free slots of two workers. Migrating requests to make contiguous
room is the de-fragmentation of Llumnix (Sun et al., OSDI 2024), here of KV alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MOST_TRIED = 8  # only workers with most left are considered: a decision must not cost more in a larger pool


@dataclass(frozen=True)
class Movable:
    """A sequence that may be moved: it has ``reserved`` tokens, of which ``cost`` must be copied.

    ``freed`` of them have slots on its worker that no other sequence shares.
    """

    sequence: int
    reserved: int
    cost: int
    freed: int


@dataclass(frozen=True)
class Move:
    """A sequence with its source and target worker."""

    movable: Movable
    source: str
    target: str

    @property
    def sequence(self) -> int:
        """The sequence that moves."""
        return self.movable.sequence


def make_room(needed: int, left: Mapping[str, int], movable_on: Callable[[str], Sequence[Movable]]) -> tuple[Move, ...]:
    """Cheap moves after which ``needed`` tokens fit a worker; empty if impossible, or if they fit already.

    ``left``: tokens that are not reserved, by worker, most first. The moves may be made in any order, one at a time:
    each fits its target without the others.
    """
    if len(left) < 2:
        return ()
    best: tuple[Move, ...] = ()
    for source in list(left)[:MOST_TRIED]:
        shortage = needed - left[source]
        if shortage <= 0:
            return ()
        targets = {name: room for name, room in left.items() if name != source}
        movable = movable_on(source)
        for moves in (_single(source, shortage, targets, movable), _several(source, shortage, targets, movable)):
            if moves and (not best or _cost(moves) < _cost(best)):
                best = moves
    return best


def _cost(moves: Sequence[Move]) -> int:
    return sum(move.movable.cost for move in moves)


def _single(source: str, shortage: int, targets: Mapping[str, int], movable: Sequence[Movable]) -> tuple[Move, ...]:
    """The cheapest sequence that is enough by itself."""
    roomiest = max(targets, key=lambda name: targets[name])
    enough = [one for one in movable if shortage <= one.freed and one.reserved <= targets[roomiest]]
    return (Move(min(enough, key=lambda one: one.cost), source, roomiest),) if enough else ()


def _several(source: str, shortage: int, targets: Mapping[str, int], movable: Sequence[Movable]) -> tuple[Move, ...]:
    """Sequences that free most tokens for their cost, until enough are free, less those not needed in the end."""
    room = dict(targets)
    moves: list[Move] = []
    freed = 0
    for one in sorted(movable, key=lambda one: one.cost / max(one.freed, 1)):
        target = max(room, key=lambda name: room[name])
        if one.reserved > room[target]:
            continue
        moves.append(Move(one, source, target))
        room[target] -= one.reserved
        freed += one.freed
        if freed >= shortage:
            break
    if freed < shortage:
        return ()
    for move in sorted(moves, key=lambda move: -move.movable.cost):
        if freed - move.movable.freed >= shortage:
            moves.remove(move)
            freed -= move.movable.freed
    return tuple(moves)
