"""Moves a sequence's KV to another memory worker so that a request fits. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lamina.core.requests import Group
from lamina.core.steps import Migration
from lamina.core.types import Segment
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache

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
    """Return the cheapest sequence that is enough by itself."""
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


@dataclass(eq=False, slots=True)
class Relocation:
    """A request with a single sequence that moves to worker ``target``.

    Copy ``number``, the latest, takes tokens up to ``copied``. The scheduler sets ``arrived`` when it is complete, and
    ``position``, the tokens of KV with which the sequence resumes, when it pauses it.
    """

    group: Group
    target: str
    number: int = 0
    copied: int = 0
    arrived: bool = False
    position: int | None = None


class Relocations:
    """The requests of each memory worker, and the one that moves."""

    def __init__(
        self,
        placement: Placement,
        prefixes: PrefixCache,
        computed: Callable[[Group], int | None],
        held: Callable[[Group], Mapping[str, int]],
        drop: Callable[[Group], None],
        numbers: Iterator[int],
    ) -> None:
        """``computed``: the tokens of a request whose steps have completed; None if it cannot move now. ``held``: the
        tokens reserved for it, by worker, without those that it shares. ``drop`` gives up the KV of a request for which
        the target has no room left. ``numbers``: of migrations.
        """
        self._placement = placement
        self._prefixes = prefixes
        self._computed = computed
        self._held = held
        self._drop = drop
        self._residents: dict[str, dict[Group, None]] = {worker: {} for worker in placement.capacities}
        self._workers: dict[Group, set[str]] = {}  # with segments of a request
        self._current: Relocation | None = None
        self._begun: list[Migration] = []
        self._numbers = numbers

    @property
    def migrating(self) -> list[int]:
        """Number of the copy in progress, if any."""
        return [] if self._current is None or self._current.arrived else [self._current.number]

    def holders(self, worker: str) -> dict[Group, int]:
        """Live requests with KV on ``worker``, one that moves there included, and the tokens that each would free."""
        holders = {group: self._freed(group, worker) for group in self._residents[worker] if self._holds(group, worker)}
        current = self._current
        if current is not None and current.target == worker and current.group.alive:
            holders[current.group] = current.copied
        return holders

    def _holds(self, group: Group, worker: str) -> bool:
        """True if a request goes on and has tokens on a worker, shared ones included."""
        shared = any(node.worker == worker for node in self._prefixes.path(group))
        return bool(group.alive and (shared or self._held(group).get(worker)))

    def _freed(self, group: Group, worker: str) -> int:
        """Tokens that come back if a request leaves a worker."""
        return self._held(group).get(worker, 0) + self._prefixes.exclusive(group, worker)

    def _present(self, group: Group) -> int:
        """Tokens of a request on its only worker, with those that it shares."""
        return self._held(group).get(group.home, 0) + self._prefixes.shared(group)

    def settle(self, group: Group) -> None:
        """A request has been placed on its workers, or its segments have changed."""
        workers = group.workers
        for worker in self._workers.get(group, set()) - workers:
            self._residents.get(worker, {}).pop(group, None)  # the worker may have left
        for worker in workers:
            self._residents[worker][group] = None
        self._workers[group] = workers

    def leave(self, group: Group) -> None:
        """A request has been released. Cancels its move."""
        for worker in self._workers.pop(group) & self._residents.keys():
            del self._residents[worker][group]
        if self._current is not None and self._current.group is group:
            self._placement.release(self._current.target, self._current.copied)
            self._current = None

    def cancel(self) -> None:
        """Abort the move in progress, if any: the source still has all KV."""
        if self._current is not None:
            target, copied = self._current.target, self._current.copied
            if self._current.group.alive:  # else ``ended`` has called will_release
                self._placement.will_release(target, copied)
            self._placement.release(target, copied)
            self._current = None
        self._begun.clear()

    def follow(self) -> None:
        """The places of the placement have changed. No live request may be on another one."""
        self._residents = {worker: self._residents.get(worker, {}) for worker in self._placement.capacities}
        self._workers = {group: workers & self._residents.keys() for group, workers in self._workers.items()}

    def ended(self, group: Group) -> None:
        """A request has ended, and ``leave`` will be called once no step runs it."""
        if self._current is not None and self._current.group is group:
            self._placement.will_release(self._current.target, self._current.copied)

    def start_move(self, tokens: int, worker: str | None) -> str | None:
        """Start to move a sequence, if none moves and a move helps ``tokens`` fit on ``worker`` (None: on any).

        Returns the worker that the sequence leaves; None if no move starts.
        """
        if not self._placement.moves or self._current is not None or self._placement.left_in_all < tokens:
            return None
        left = self._reachable()
        if worker in self._placement.local:
            return None
        if worker is None:
            moves = make_room(tokens, left, self._movable)
        else:  # the only source: tried first, and no other has movable sequences
            left = {worker: left[worker], **left}
            moves = make_room(tokens, left, lambda source: self._movable(source) if source == worker else [])
        if not moves:
            return None
        move = moves[0]  # the others are planned again once this one is done
        group = next(one for one in self._residents[move.source] if one.completions[0].sequence == move.sequence)
        self._current = Relocation(group, move.target)
        self._pull(self._current, move.movable.cost)
        return move.source

    def _reachable(self) -> dict[str, int]:
        """Return the room of every worker that sequences may move to, most first."""
        return {
            worker: room for worker, room in self._placement.by_room().items() if worker not in self._placement.local
        }

    def is_empty(self, worker: str) -> bool:
        """True if nothing is on a worker, or on its way there."""
        if self._current is not None and self._current.target == worker:
            return False
        return not any(
            self._residents[place] or self._placement.idle[place] or self._placement.reserved[place]
            for place in self._placement.touching([worker])
        )

    def _movable(self, worker: str) -> list[Movable]:
        return [
            Movable(group.completions[0].sequence, self._present(group), computed, self._freed(group, worker))
            for group in self._residents[worker]
            if (computed := self._computed(group)) is not None
        ]

    def _pull(self, relocation: Relocation, stop: int) -> None:
        """Let the target copy the tokens up to ``stop`` that it lacks."""
        group, sequence = relocation.group, relocation.group.completions[0].sequence
        self._placement.reserve_on(relocation.target, stop - relocation.copied)
        relocation.number, relocation.arrived = next(self._numbers), False
        self._begun.append(
            Migration(
                relocation.number, sequence, group.completions[0].worker, relocation.target, relocation.copied, stop
            )
        )
        relocation.copied = stop

    def begun(self) -> list[Migration]:
        """Migrations for the next plan. Each is returned once."""
        begun, self._begun = self._begun, []
        return begun

    def expected(self, number: int) -> Relocation | None:
        """Return the relocation of migration ``number``; None if that is not in progress, or the request has ended."""
        current = self._current
        return None if current is None or current.number != number or not current.group.alive else current

    def is_moving(self, group: Group) -> bool:
        """True if this request is on its way to another worker."""
        return self._current is not None and self._current.group is group

    def is_paused(self, group: Group) -> bool:
        """True if no step of this request may be planned."""
        return self._current is not None and self._current.group is group and self._current.position is not None

    def finish(self, lane: int, completed: int) -> tuple[Group, int] | None:
        """End the move of a request of this lane once all its KV has arrived. ``completed``: steps of the lane so far.

        Returns the request, now on its target, and the position where it resumes; None if the move is not over. Starts
        the second copy if tokens are missing, or drops the KV if the target has no room for them.
        """
        current = self._current
        if current is None or not current.arrived or current.position is None:
            return None
        group = current.group
        if group.lane != lane or completed < group.completions[0].until or not group.alive:
            return None
        if current.position > current.copied:
            if current.position - current.copied > self._placement.left(current.target):
                self._drop(group)
            else:
                self._pull(current, current.position)
            return None
        (completion,) = group.completions
        source, own = completion.worker, current.position - self._prefixes.shared(group)
        self._placement.will_release(source, own)
        self._placement.release(source, own)
        self._prefixes.leave(group)
        self._prefixes.let_go(group)
        group.unshare()
        self._placement.go_on(source, current.target)
        completion.segments = [Segment(completion.sequence, current.target, group.heads, (0, None))]
        self._current = None
        self.settle(group)
        return group, current.position
