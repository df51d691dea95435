"""Chooses the memory worker for the next tokens of a sequence whose worker runs out of slots or leaves. Pure.

If no worker has free slots, it chooses the requests to preempt.

A lane whose next tokens do not all fit is *stalled*: it runs nothing until slots are free. Every stall ends, and so
does every request:

1. Requests admitted during a stall leave slots free, for ``AHEAD`` tokens of each sequence on its worker: only an
   empty worker gives its last slots to a request, and no worker counts as empty while a lane is stalled. The stalled
   lane uses the free slots in its next plan.
2. If no slots are free, each running request grows up to its ``max_tokens``, ends, or is preempted. The last one that
   is left has room, because no request is accepted that all workers together cannot hold.
3. The request with the smallest rank on a worker is never preempted for its slots (``victims``). So the running request
   with the smallest rank keeps its KV, and every step of its lane progresses it.

Other requests may be preempted repeatedly, but each time the request with the smallest rank has come closer to its end.
A preempted request keeps its rank: in order of arrival, it has the smallest rank sooner or later; with another policy,
once no requests with smaller ranks arrive.

All this also holds while workers leave. Nothing is placed on, grows on or moves to a closed worker, so a closed worker
preempts each request at most once, and each range of tokens leaves it once. Ranges move only to slots that sequences
there do not need for the next ``AHEAD`` tokens, as in 1. No worker leaves if the other workers could not hold every
request; if some of them are lost later, requests that are too long for the remaining ones end in an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from lamina.core.requests import Completion, Group, Rank
from lamina.core.segments import grown, holding
from lamina.core.types import Segment
from lamina.kv.placement import AHEAD, LEAST_SEGMENT, Placement
from lamina.schedule.lane import Lane, Residents
from lamina.schedule.moves import Moves

CHEAP = 32  # KV of at most so many tokens is recomputed, not moved: it hardly lengthens a step


class Growth:
    """Finds a memory worker with free slots for each growing sequence, or requests to preempt if no worker has any."""

    def __init__(
        self,
        placement: Placement,
        residents: Residents,
        moves: Moves,
        rank: Callable[[Group], Rank],
        lanes: Sequence[Lane],
    ) -> None:
        self._placement = placement
        self._residents = residents
        self._moves = moves
        self._rank = rank
        self._lanes = lanes

    def end_segments(self, lane: Lane) -> None:
        """Begin a new segment for each sequence of a lane whose segment is full."""
        for group, completion in lane.decoding.full():
            position = lane.decoding.position(completion.sequence)
            if holding(completion.segments, position).tokens[0] == position:  # placed before an epoch ended
                lane.decoding.begin_segment(completion)
            elif not self._grow(lane, group, completion, self._next_worker(lane, completion.worker)):
                lane.decoding.postpone(completion.sequence, AHEAD)

    def _grow(self, lane: Lane, group: Group, completion: Completion, worker: str | None) -> bool:
        """Begin a new segment of a sequence on ``worker`` at its next position. Returns False if ``worker`` is None."""
        if worker is None:
            return False
        position, before = lane.decoding.position(completion.sequence), completion.worker
        new = Segment(completion.sequence, worker, group.heads, (position, None))
        self._placement.continue_on(before, worker)
        completion.segments = grown(completion.segments, new)
        self._residents.update(group)
        lane.decoding.begin_segment(completion)
        undone = Segment(new.sequence, before, group.heads, new.tokens)  # undo an earlier move in the same plan
        lane.grown = [segment for segment in lane.grown if segment != undone]
        lane.grown.append(new)
        return True

    def note_stall(self, lane: Lane) -> bool:
        """Record whether the lane's next tokens fit. Returns whether a stall has ended."""
        stalled = self._placement.stalled
        before = lane.number in stalled
        if not self._placement.fits(lane.decoding.workers):
            stalled.add(lane.number)
            return False
        stalled.discard(lane.number)
        return before

    def find_slots(self, lane: Lane) -> Iterator[Group]:
        """Let sequences of this lane grow on other workers where theirs are about to run out of slots.

        Yields requests to preempt if no worker has free slots. The caller preempts each before it asks for the next.
        """
        placement, needed = self._placement, lane.decoding.workers
        for worker, tokens in placement.shortages(needed).items():
            lacking = tokens - AHEAD * self._spread(lane, worker, -(-tokens // AHEAD))
            if lacking <= 0:
                continue
            holders = {group: freed for group, freed in self._residents.holders(worker).items() if freed}
            if len(holders) > 1:
                yield from victims(holders, lacking, self._rank)
            elif placement.left_beside(worker, _difference(needed, placement.returning)) < 0:
                yield from self._squeeze(lane, worker)

    def _spread(self, lane: Lane, worker: str, sequences: int) -> int:
        """Let up to ``sequences`` sequences that grow on ``worker`` grow on others. Returns how many do."""
        if self._next_worker(lane, worker) is None:
            return 0
        chosen = lane.decoding.growing_on(worker)[-sequences:]
        return sum(self._grow(lane, *owner, self._next_worker(lane, worker)) for owner in chosen)

    def _next_worker(self, lane: Lane, worker: str) -> str | None:
        return self._placement.next_worker(worker, lane.number)

    def _squeeze(self, lane: Lane, worker: str) -> list[Group]:
        """Use the last slots of any worker for the only request on ``worker``, which has filled it.

        Returns the requests to preempt if no worker has a slot.
        """
        placement, needed = self._placement, lane.decoding.workers
        beyond = placement.beyond(lane.number)
        for group, completion in lane.decoding.growing_on(worker):
            if placement.left_beside(worker, needed) >= 0:
                return []
            excluded = {worker, *placement.closed, *beyond}
            others = [one for one in placement.capacities if one not in excluded]
            spare = {one: placement.left_beside(one, needed) for one in others}
            best = max(spare, key=lambda one: spare[one], default=worker)
            if spare.get(best, 0) <= 0 or not self._grow(lane, group, completion, best):
                break
        else:
            return []
        if any(placement.returning.values()):
            return []
        running = (group for own in self._lanes for group in own.running if group.alive)
        holders = {
            group: sum(self._lanes[group.lane].held(group).values())
            for group in running
            if group not in lane.dealt and not beyond.issuperset(group.workers)
        }
        chosen = victims(holders, AHEAD * needed[worker], self._rank)
        if beyond and not chosen:  # it has outgrown its replica's local memory, and continues on another replica
            return [group for group, _ in lane.decoding.growing_on(worker)[:1]]
        return chosen

    def drain(self, lane: Lane) -> Iterator[Group]:
        """Move KV off closed workers, as far as is possible in the plan being made for ``lane``.

        Yields requests to preempt, whose KV cannot move. The caller preempts each before it asks for the next.
        """
        for worker in sorted(self._placement.closed):
            for group, freed in self._residents.holders(worker).items():
                if not self._moves.touches(group) and not self._move_off(group, worker, freed):
                    yield group
            if worker in lane.decoding.workers:
                self._spread(lane, worker, len(lane.decoding.growing_on(worker)))

    def _move_off(self, group: Group, worker: str, freed: int) -> bool:
        """Move a request's next range off a worker, if one can move now. False if the request must be preempted.

        ``freed``: Slots there that no other request shares.
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
        # Else the range moves later: it grows until its lane's next plan, or steps in flight still write to it.
        return True

    def _targets(self, tokens: int) -> dict[str, int]:
        """Return free slots by worker, most first, of workers that together hold ``tokens`` more; empty if none do."""
        rooms = {
            worker: room
            for worker, room in self._placement.by_room().items()
            if room >= min(tokens, LEAST_SEGMENT) and worker not in self._placement.local
        }
        return rooms if sum(rooms.values()) >= tokens else {}


def _difference(tokens: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {place: tokens.get(place, 0) - others.get(place, 0) for place in {**tokens, **others}}


def victims(holders: Mapping[Group, int], tokens: int, rank: Callable[[Group], Rank]) -> list[Group]:
    """Return the requests to preempt to free ``tokens`` slots, or as many as possible, largest rank first.

    The request with the smallest rank is never preempted, so at least one request always progresses.

    Args:
        holders: By request with KV on a worker, the slots that its preemption frees.
        tokens: Slots needed.
        rank: Returns the rank of a request.
    """
    chosen = []
    for group in sorted(holders, key=rank, reverse=True)[:-1]:
        if tokens <= 0:
            break
        chosen.append(group)
        tokens -= holders[group]
    return chosen


def resumed(sequence: int, index: int, generated: list[int]) -> Completion:
    """Return a completion that has drawn ``generated``, without KV. The completion appends to the list itself."""
    return Completion(sequence, index, generated, known=len(generated), own=len(generated))


def requeued(group: Group, sequences: Iterator[int]) -> Group:
    """Return a copy of a preempted request for admission: its unfinished completions, with new sequence numbers.

    The copy shares the lists of generated tokens with ``group``, which must not be used any more. Beams begin with the
    tokens chosen last.
    """
    generated = [one.generated for one in group.alive]
    if group.choice is not None:
        generated = [[*generated[parent], token] for parent, token in group.choice]
    completions = [
        resumed(next(sequences), one.index, tokens) for one, tokens in zip(group.alive, generated, strict=True)
    ]
    return Group(
        group.request,
        group.max_tokens,
        completions,
        group.arrival,
        group.arrived_s,
        heads=group.heads,
        expand=group.expand,
        gave_way=group.gave_way,
        cached_tokens=group.cached_tokens,
    )
