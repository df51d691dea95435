"""Where the sequences of a lane go on when their segments end, or when a memory worker runs out of slots. Pure.

A lane whose next tokens do not all fit is *stalled*: it runs nothing until slots have come back. Every stall ends, and
so does every request:

1. What is admitted meanwhile leaves slots free, for ``AHEAD`` tokens of each sequence on its worker: only an empty
   worker gives its last slots to a request, and none counts as empty while a lane is stalled. The stalled lane uses
   what is free in its next plan.
2. If nothing is free, requests that run only grow, each up to its ``max_tokens``, or end, or are dropped: at the latest
   when only the earliest is left it has room, as no request is accepted that all workers together cannot hold.
3. The request with the smallest rank on a worker is never preempted for its slots (``lamina.kv.preemption.victims``).
   So the first of all that run keeps what it has, and every step of its lane runs more of it.

Others may be preempted again and again, but each time the first has come closer to its end. A preempted request keeps
its rank: in order of arrival it is the first sooner or later, and with another policy once no better ones arrive.

Workers that leave (``lamina.schedule.balancing``) change none of this. Nothing is placed, grows or moves onto a closed
worker, so each of them drops a request at most once, the earliest too, and each range leaves it once. Ranges move only
to slots that the sequences there do not need for the next ``AHEAD`` tokens, as in 1. No worker leaves if the others
could not hold every request; if some of those are lost too, requests that are too long for the rest end in an error.
"""

import functools
from collections.abc import Iterator, Sequence

from lamina.core.requests import Completion, Group
from lamina.core.segments import grown, holding
from lamina.core.types import Segment
from lamina.kv.placement import AHEAD, Placement
from lamina.kv.preemption import Victim, victims
from lamina.kv.residents import Residents
from lamina.schedule.lane import Lane
from lamina.schedule.policy import Policy, rank_of


class Growth:
    """Finds decoding sequences a memory worker with free slots, or requests to preempt if no worker has any."""

    def __init__(
        self,
        placement: Placement,
        residents: Residents,
        policy: Policy,
        victim: Victim,
        lanes: Sequence[Lane],
    ) -> None:
        """``policy``, ``victim``: who is preempted. ``lanes``: all of them, also those added later."""
        self._placement = placement
        self._residents = residents
        self._rank = functools.partial(rank_of, policy)
        self._victim = victim
        self._lanes = lanes

    def turn_over(self, lane: Lane) -> None:
        """Let sequences whose segments have ended go on in the next one."""
        for group, completion in lane.decoding.full():
            position = lane.decoding.position(completion.sequence)
            if holding(completion.segments, position).tokens[0] == position:  # placed before an epoch ended
                lane.decoding.turn_over(completion)
            elif not self._grow(lane, group, completion, self._placement.next_worker(completion.worker)):
                lane.decoding.postpone(completion.sequence, AHEAD)

    def _grow(self, lane: Lane, group: Group, completion: Completion, worker: str | None) -> bool:
        """Let a sequence continue on another memory worker from its next position on. False if no other has room."""
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

    def move_growth_off(self, lane: Lane, worker: str) -> None:
        """Let the sequences of this lane that would grow on a worker go on elsewhere, as far as others have room."""
        if worker in lane.decoding.workers:
            self._spread(lane, worker, len(lane.decoding.on(worker)))

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
                yield from victims(holders, lacking, self._victim, self._rank)
            elif placement.left(worker) + placement.returning[worker] < needed.get(worker, 0):
                yield from self._squeeze(lane, worker)

    def _spread(self, lane: Lane, worker: str, sequences: int) -> int:
        """Let up to so many sequences of this lane that grow on a worker go on elsewhere. Returns how many do."""
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
        return victims(holders, AHEAD * needed[worker], self._victim, self._rank)
