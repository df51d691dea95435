"""Which KV moves: what a policy wishes, and all KV of workers that leave. Pure."""

import bisect
from collections.abc import Iterator, Mapping, Sequence

from lamina.core.requests import Group
from lamina.core.segments import by_worker, holding
from lamina.kv.placement import AHEAD, LEAST_SEGMENT, Placement
from lamina.kv.policies import Held, Load, Policy, View, Wish
from lamina.kv.residents import Residents
from lamina.schedule.growth import Growth
from lamina.schedule.lane import Lane
from lamina.schedule.moves import Moves

CHEAP = 32  # tokens that are computed again rather than moved: they hardly lengthen a step


class Draining:
    """Empties the closed workers of a placement."""

    def __init__(
        self,
        placement: Placement,
        residents: Residents,
        moves: Moves,
        growth: Growth,
    ) -> None:
        self._placement = placement
        self._residents = residents
        self._moves = moves
        self._growth = growth

    def begin_moves(self, lane: Lane) -> Iterator[Group]:
        """Begin what can begin with the plan that is being made for a lane. Yields the requests whose KV cannot move:
        the caller preempts each before it asks for the next."""
        for worker in sorted(self._placement.closed):
            for group, freed in self._residents.holders(worker).items():
                if not self._moves.touches(group) and not self._send_away(group, worker, freed):
                    yield group
            self._growth.move_growth_off(lane, worker)

    def _send_away(self, group: Group, worker: str, freed: int) -> bool:
        """Move a request's next range off a worker, if one can move now. False if it is to be computed again.

        ``freed``: slots that only this request has there.
        """
        movable = self._placement.moves and not group.searches and worker not in self._placement.local
        if not movable or group.computed <= CHEAP:
            return False
        part = self._moves.movable(group, worker)
        if part is None:
            return True
        tokens = part.stop - part.start
        targets = self._targets(max(freed, tokens))
        if not targets:
            return False
        if part.completion is None or holding(part.completion.segments, part.start).tokens[1] == part.stop:
            grows = group.alive[0].worker
            target = grows if targets.get(grows, 0) >= tokens else next(iter(targets))
            self._moves.try_move(group, worker, target, min(tokens, targets[target]))
        # Else it grows there until its lane's next plan, or steps in flight have yet to write the last tokens.
        return True

    def _targets(self, tokens: int) -> dict[str, int]:
        """Return the room of workers that together hold so many more tokens, most first; empty if there are none."""
        rooms = {
            worker: room
            for worker, room in self._placement.by_room().items()
            if room >= min(tokens, LEAST_SEGMENT) and worker not in self._placement.local
        }
        return rooms if sum(rooms.values()) >= tokens else {}


LOOK_STEPS = 32  # completed steps between two looks at all requests
BACK_STEPS = 256  # for so long, no tokens of a request go back where some of it came from
LEARN = 0.3  # weight of the latest measurement


class Balancing:
    """Begins the moves that a policy wants."""

    def __init__(self, policy: Policy, moves: Moves, placement: Placement) -> None:
        self._policy, self._moves, self._placement, self._lanes = policy, moves, placement, moves.lanes
        self._steps = 0
        self._looked = 0
        self._wishes: list[tuple[Wish, Group]] = []
        self._came: dict[tuple[str, str], int] = {}  # by request and the worker that it left some of: at which step
        self._reads: dict[str, float] = {}  # tokens that one step of each lane reads, at the last look
        self._token_s: dict[str, float] = {}
        self._busy: dict[str, tuple[int, float]] = {}  # steps and seconds at the report before
        self._dense: dict[int, float] = {}  # seconds of a step in slices, by rows

    def note_step(self, rows: int, busy_s: float) -> None:
        """A step has completed, which spent ``busy_s`` in slices."""
        self._steps += 1
        if busy_s > 0:
            known = self._dense.get(rows, busy_s)
            self._dense[rows] = known + LEARN * (busy_s - known)

    def note_attention(self, worker: str, seconds: float) -> None:
        """A memory worker has spent ``seconds`` on attention so far."""
        steps, before = self._busy.get(worker, (self._steps, seconds))
        active = sum(bool(lane.running) for lane in self._lanes)
        read = self._reads.get(worker, 0.0) * (self._steps - steps) / max(active, 1)
        if steps < self._steps and read > 0 and seconds > before:
            known = self._token_s.get(worker, (seconds - before) / read)
            self._token_s[worker] = known + LEARN * ((seconds - before) / read - known)
        self._busy[worker] = self._steps, seconds

    @property
    def due(self) -> bool:
        """True if ``begin_moves`` will look at all requests again."""
        return self._steps >= self._looked + LOOK_STEPS

    def begin_moves(self) -> None:
        """Begin moves that the policy wants, if the bound allows more."""
        if self.due:
            self._looked = self._steps
            self._look()
        while self._wishes:
            wish, group = self._wishes[0]
            if not self._moves.may_begin(wish.source) or self._moves.touches(group):
                return
            moved = next(
                (
                    (target, tokens)
                    for target in wish.targets
                    if (tokens := self._moves.try_move(group, wish.source, target, wish.tokens))
                ),
                None,
            )
            self._wishes.pop(0)
            if moved is not None:
                target, tokens = moved
                self._came[wish.request, wish.source] = self._steps
                if wish.tokens > tokens:
                    self._wishes.insert(0, (Wish(wish.request, wish.source, (target,), wish.tokens - tokens), group))

    def _look(self) -> None:
        self._came = {key: step for key, step in self._came.items() if self._steps < step + BACK_STEPS}
        groups = {group.request.request_id: group for lane in self._lanes for group in lane.running if group.alive}
        view = self.view(list(groups.values()))
        self._reads = {worker: float(load.reads) for worker, load in view.loads.items()}
        known = self._token_s.keys() >= view.loads.keys() and len(view.loads) == len(self._placement.capacities)
        self._placement.set_speeds({worker: self._token_s[worker] for worker in view.loads} if known else {})
        self._wishes = []
        for wish in self._policy.wishes(view):
            targets = tuple(one for one in wish.targets if (wish.request, one) not in self._came)
            if targets:
                kept = Wish(wish.request, wish.source, targets, wish.tokens)
                self._wishes.append((kept, groups[wish.request]))

    def view(self, groups: Sequence[Group]) -> View:
        """Return the memory workers and who has what there."""
        placement = self._placement
        reads = dict.fromkeys(placement.capacities, 0)
        held: list[Held] = []
        for group in groups:
            lane = self._lanes[group.lane]
            if group in lane.dealt:
                continue
            for completion in group.alive:
                exist = lane.exist(group, completion)
                for worker, tokens in by_worker(completion.segments, 0, exist).items():
                    reads[worker] += tokens
            first = group.alive[0]
            for worker, tokens in by_worker(first.segments, 0, lane.exist(group, first)).items():
                held.append(Held(group.request.request_id, worker, first.worker, tokens, len(group.alive)))
        moving = self._arriving()
        loads = {
            worker: Load(
                capacity,
                max(0, placement.left(worker) - AHEAD * (placement.sequences[worker] + 1)),
                placement.sequences[worker],
                max(0, reads[worker] + moving.get(worker, 0)),  # some of what moves may be read no more
                self._token_s.get(worker) or _mean(self._token_s),
                worker not in placement.closed,
            )
            for worker, capacity in placement.capacities.items()
            if worker not in placement.local
        }
        return View(loads, [one for one in held if one.worker in loads], self._dense_s)

    def _arriving(self) -> Mapping[str, int]:
        """Tokens that a move in progress will take from one worker to another, by worker."""
        moving: dict[str, int] = {}
        for move in self._moves.in_progress:
            if move.passed is None:
                moving[move.target] = moving.get(move.target, 0) + move.tokens
                moving[move.source] = moving.get(move.source, 0) - move.tokens
        return moving

    def _dense_s(self, rows: float) -> float:
        """Seconds of a step in slices, between and beyond the numbers of rows that were measured."""
        if not self._dense:
            return 1.0
        known = sorted(self._dense)
        above = min(bisect.bisect(known, rows), len(known) - 1)
        below = max(above - 1, 0)
        low, high = known[below], known[above]
        if low == high:
            return self._dense[low]
        slope = max(0.0, (self._dense[high] - self._dense[low]) / (high - low))
        return max(self._dense[low] + slope * (rows - low), min(self._dense.values()))


def _mean(seconds: Mapping[str, float]) -> float:
    """Return what is assumed of a worker that was not measured."""
    return sum(seconds.values()) / len(seconds) if seconds else 1.0
