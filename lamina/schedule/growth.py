"""Which worker takes the next tokens of a sequence whose segment ends or whose memory worker runs out of slots or
leaves, and which requests are preempted if no worker has room. Pure.

A lane whose next tokens do not all fit is *stalled*: it runs nothing until slots are free. Every stall ends, and so
does every request:

1. What is admitted meanwhile leaves slots free, for ``AHEAD`` tokens of each sequence on its worker: only an empty
   worker gives its last slots to a request, and none counts as empty while a lane is stalled. The stalled lane uses
   what is free in its next plan.
2. If nothing is free, requests that run only grow, each up to its ``max_tokens``, or end, or are preempted: at the
   latest when only the earliest is left it has room, as no request is accepted that all workers together cannot hold.
3. The request with the smallest rank on a worker is never preempted for its slots (``victims``). So the first of all
   that run keeps what it has, and every step of its lane runs more of it.

Others may be preempted again and again, but each time the first has come closer to its end. A preempted request keeps
its rank: in order of arrival it is the first sooner or later, and with another policy once no better ones arrive.

Workers that leave change none of this. Nothing is placed, grows or moves onto a closed worker, so each of them preempts
a request at most once, the earliest too, and each range leaves it once. Ranges move only to slots that the sequences
there do not need for the next ``AHEAD`` tokens, as in 1. No worker leaves if the others could not hold every request;
if some of those are lost too, requests that are too long for the rest end in an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from lamina.core.requests import Completion, Group
from lamina.core.segments import grown, holding
from lamina.core.types import Segment
from lamina.kv.placement import AHEAD, LEAST_SEGMENT, Placement
from lamina.schedule.lane import Lane, Residents
from lamina.schedule.moves import Moves
from lamina.schedule.policy import Rank

CHEAP = 32  # tokens that are computed again rather than moved: they hardly lengthen a step


class Growth:
    """Finds sequences a memory worker with free slots, or requests to preempt if no worker has any."""

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
        """Let sequences of a lane whose segments are full continue in their next segment."""
        for group, completion in lane.decoding.full():
            position = lane.decoding.position(completion.sequence)
            if holding(completion.segments, position).tokens[0] == position:  # placed before an epoch ended
                lane.decoding.turn_over(completion)
            elif not self._grow(lane, group, completion, self._placement.next_worker(completion.worker)):
                lane.decoding.postpone(completion.sequence, AHEAD)

    def _grow(self, lane: Lane, group: Group, completion: Completion, worker: str | None) -> bool:
        """Let a sequence continue on ``worker`` from its next position on. False without a worker."""
        if worker is None:
            return False
        position, before = lane.decoding.position(completion.sequence), completion.worker
        new = Segment(completion.sequence, worker, group.heads, (position, None))
        self._placement.go_on(before, worker)
        completion.segments = grown(completion.segments, new)
        self._residents.update(group)
        lane.decoding.turn_over(completion)
        undone = Segment(new.sequence, before, group.heads, new.tokens)  # undo an earlier move in the same plan
        lane.grown = [segment for segment in lane.grown if segment != undone]
        lane.grown.append(new)
        return True

    def note_stall(self, lane: Lane) -> bool:
        """Record whether the lane's next tokens fit. True if the lane was stalled and is not any more."""
        stalled = self._placement.stalled
        before = lane.number in stalled
        if not self._placement.fits(lane.decoding.workers):
            stalled.add(lane.number)
            return False
        stalled.discard(lane.number)
        return before

    def find_slots(self, lane: Lane) -> Iterator[Group]:
        """Let sequences of this lane continue elsewhere where memory workers are about to run out of slots.

        Yields requests to preempt if no worker has room: the caller preempts each before it asks for the next.
        """
        placement, needed = self._placement, lane.decoding.workers
        for worker, tokens in placement.shortages(needed).items():
            lacking = tokens - AHEAD * self._spread(lane, worker, -(-tokens // AHEAD))
            if lacking <= 0:
                continue
            holders = {group: freed for group, freed in self._residents.holders(worker).items() if freed}
            if len(holders) > 1:
                yield from victims(holders, lacking, self._rank)
            elif placement.left(worker) + placement.returning[worker] < needed.get(worker, 0):
                yield from self._squeeze(lane, worker)

    def _spread(self, lane: Lane, worker: str, sequences: int) -> int:
        """Let up to so many sequences of this lane that grow on a worker continue elsewhere. Returns how many do."""
        if self._placement.next_worker(worker) is None:
            return 0
        chosen = lane.decoding.on(worker)[-sequences:]
        return sum(self._grow(lane, *owner, self._placement.next_worker(worker)) for owner in chosen)

    def _squeeze(self, lane: Lane, worker: str) -> list[Group]:
        """Use the last slots of all workers for the only request on a worker, which it has filled. Returns requests to
        preempt if there are none."""
        placement, needed = self._placement, lane.decoding.workers
        for group, completion in lane.decoding.on(worker):
            if needed.get(worker, 0) <= placement.left(worker):
                return []
            others = [one for one in placement.capacities if one != worker and one not in placement.closed]
            spare = {one: placement.left(one) - needed.get(one, 0) for one in others}
            best = max(spare, key=lambda one: spare[one], default=worker)
            if spare.get(best, 0) <= 0 or not self._grow(lane, group, completion, best):
                break
        else:
            return []
        if any(placement.returning.values()):
            return []
        running = (group for own in self._lanes for group in own.running if group.alive)
        holders = {
            group: sum(self._lanes[group.lane].held(group).values()) for group in running if group not in lane.dealt
        }
        return victims(holders, AHEAD * needed[worker], self._rank)

    def drain(self, lane: Lane) -> Iterator[Group]:
        """Begin to empty closed workers, as far as the plan that is being made for a lane can.

        Yields the requests whose KV cannot move: the caller preempts each before it asks for the next.
        """
        for worker in sorted(self._placement.closed):
            for group, freed in self._residents.holders(worker).items():
                if not self._moves.touches(group) and not self._move_off(group, worker, freed):
                    yield group
            if worker in lane.decoding.workers:
                self._spread(lane, worker, len(lane.decoding.on(worker)))

    def _move_off(self, group: Group, worker: str, freed: int) -> bool:
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


def victims(holders: Mapping[Group, int], tokens: int, rank: Callable[[Group], Rank]) -> list[Group]:
    """Return the requests to preempt so that ``tokens`` slots are freed, or as many as can, the largest rank first.

    The request with the smallest rank is never preempted: so there is always one that ends.

    Args:
        holders: Requests with KV on one worker, and how many slots each would free.
    """
    chosen = []
    for group in sorted(holders, key=rank, reverse=True)[:-1]:
        if tokens <= 0:
            break
        chosen.append(group)
        tokens -= holders[group]
    return chosen


def resumed(sequence: int, index: int, generated: list[int]) -> Completion:
    """Return a completion that has drawn these tokens, of which no worker has KV. It adds to the list."""
    return Completion(sequence, index, generated, known=len(generated), own=len(generated))


def again(group: Group, sequences: Iterator[int]) -> Group:
    """Return a preempted request, to be admitted again: its completions that go on, under new sequence numbers.

    They share the lists of generated tokens with ``group``, which must not add to them any more. Beams begin with the
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
        heads=group.heads,
        expand=group.expand,
        gave_way=group.gave_way,
        cached_tokens=group.cached_tokens,
    )
