"""State of one lane: its requests, its steps in flight, the rows of its next step. Pure."""

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lamina.core.pipeline import LaneRole
from lamina.core.requests import Completion, Group, Owner
from lamina.core.segments import forked
from lamina.core.steps import DecodeRows, Fork, SequenceStep, StepPlan
from lamina.core.types import Segment
from lamina.kv.placement import NOWHERE, Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.batches import DecodeBatch, PromptBatch
from lamina.schedule.pace import LEAST, Pace
from lamina.schedule.scratch import Room


@dataclass(eq=False, slots=True)
class Planned:
    """A step in flight, with the owners of its rows.

    Attributes:
        decoding: owners of the sequences that decode.
        prompted: owners of the sequences for which chunks draw.
        borrowed: the request of another lane of which the step runs a chunk.
    """

    plan: StepPlan
    decoding: Mapping[int, Owner]
    prompted: dict[int, Owner]
    borrowed: Group | None = None

    def drawn(self, members: Mapping[int, Owner]) -> Mapping[int, Owner]:
        """Return the completions that draw a token and continue, by sequence. ``members`` decode in the lane now."""
        if not self.prompted and self.decoding is members:
            return self.decoding
        drawn = {**self.decoding, **self.prompted}
        return {sequence: owner for sequence, owner in drawn.items() if not owner[1].finished}


@dataclass(eq=False, slots=True)
class Lane:
    """The requests of one lane, by state. Dicts are ordered sets."""

    longest: int | None = None  # most tokens of the segment of a decoding sequence; None: no limit
    number: int = 0
    pace: Pace | None = None  # bounds the time of steps
    role: LaneRole = "both"
    scratch: Room = field(default_factory=Room)  # for K and V of prompts
    running: dict[Group, None] = field(default_factory=dict)  # all requests
    dealt: dict[Group, None] = field(default_factory=dict)  # requests that no plan has admitted yet
    allowance: int = 0  # prompt tokens that may still be dealt to the lane before its next plan
    prompts: PromptBatch = field(default_factory=PromptBatch)
    prompted: list[Owner] = field(default_factory=list)  # the last plan ran all tokens before their next draw
    received: dict[Group, None] = field(default_factory=dict)  # requests in ``prompted`` from ``pop_computed``
    leaving: dict[Group, None] = field(default_factory=dict)  # requests in ``prompted`` that wait for ``pop_computed``
    prompts_run: list[Group] = field(default_factory=list)  # requests whose prompts planned steps complete
    decoding: DecodeBatch = field(init=False)
    finished: list[Owner] = field(default_factory=list)  # ended, but steps in flight still run them
    ending: list[Owner] = field(default_factory=list)  # ended and retired, but not released yet
    in_flight: collections.deque[Planned] = field(default_factory=collections.deque)
    completed: int = 0  # number of completed steps; ``decoding.steps`` counts planned ones
    turn: int = 0  # attentions of the lane's planned steps
    histories: dict[int, list[int]] = field(default_factory=dict)  # for the next plan
    grown: list[Segment] = field(default_factory=list)  # for the plan that is being made
    chosen: dict[Group, None] = field(default_factory=dict)  # beam searches with a choice to apply
    due: dict[Completion, Group] = field(default_factory=dict)  # beams whose next token is known and has not run
    stepping: list[int] = field(default_factory=list)  # beams that the last plan decodes

    def __post_init__(self) -> None:
        self.decoding = DecodeBatch(self.longest)

    def pop_step(self, step: int | None) -> Planned:
        """Remove and return a completed step; None: the oldest in flight."""
        planned = self.in_flight[0]
        if step is not None and planned.plan.step != step:
            planned = next(one for one in self.in_flight if one.plan.step == step)
            if planned.plan.runs and planned is not next(one for one in self.in_flight if one.plan.runs):
                raise AssertionError(f"step {step} of lane {planned.plan.lane} was completed before an earlier one")
        self.in_flight.remove(planned)
        for chunk in planned.plan.chunks:
            if chunk.scratch is not None and chunk.draws:
                self.scratch.end(planned.prompted[chunk.draws[0]][0])
        return planned

    @property
    def prompts_left(self) -> list[Completion]:
        """Return the completions with tokens that no planned step runs, also of requests that were only dealt."""
        return [*self.prompts, *(group.completions[0] for group in self.dealt)]

    @property
    def only_decodes(self) -> bool:
        """Whether sequences decode, and none joins the next step or is released with its plan."""
        waiting = self.dealt or self.prompts or self.prompted or self.prompts_run or self.due or self.chosen
        leaving = self.ending or self.histories or self.stepping
        return not (waiting or leaving) and bool(self.decoding.workers)

    @property
    def unchanged_steps(self) -> int:
        """Number of further steps that would only be the last one again, each sequence a token further."""
        if self.finished or not self.only_decodes or not self.in_flight:
            return 0
        members = self.decoding.members
        alike = all(one.decoding is members and one.plan.runs and not one.plan.chunks for one in self.in_flight)
        return self.decoding.unchanged_steps if alike else 0

    def repeat(self, steps: int, attentions: int) -> None:
        """Record that ``steps`` of ``unchanged_steps`` were planned and have completed. ``attentions``: of a step."""
        self.decoding.count_steps(steps)
        self.completed += steps
        self.turn += steps * attentions

    def rows(self, most: int) -> tuple[DecodeRows, list[SequenceStep], dict[int, Owner]]:
        """Return the decoding rows and chunks of the next step, at most ``most`` rows, and the owners of the tokens
        that chunks draw."""
        rows = self.decoding_rows()
        self.due.clear()
        budget = most - len(rows.sequences)
        if self.pace is not None and self.prompts and budget > 0:
            budget = self.pace.budget(self.number, bool(rows.sequences), self.prompts, budget)
        return rows, *self._chunks(budget)

    def decoding_rows(self) -> DecodeRows:
        """Return the decoding rows of the next step."""
        return self.decoding.rows(still_drawn=self.completed < self.decoding.steps)

    def forks(self, leaves: Callable[[Group], bool]) -> list[Fork]:
        """Let sequences in ``prompted`` decode. Returns the forks of completions that share a prompt.

        Sequences of requests that ``leaves`` says will decode in another lane wait for ``pop_computed`` instead.
        """
        forks = []
        self.leaving = {group: None for group, _ in self.prompted if group in self.leaving or leaves(group)}
        for group, first in self.prompted:
            if group in self.leaving:
                continue
            starting = [first]
            if not group.forked:
                starting = group.completions
                for child in group.fork():
                    fork = Fork(first.sequence, child.sequence, group.prompt_length)
                    forks.append(fork)
                    further = child.segments[len(forked(first.segments, fork.child, fork.tokens)) :]
                    # Each of them ends where the next begins.
                    self.grown += [replace(segment, tokens=(segment.tokens[0], None)) for segment in further]
            for completion in starting:
                if completion.finished:
                    continue
                if completion.left:
                    self.prompts.add(group, completion)
                elif group in self.received:  # its last token was drawn elsewhere, or some steps ago, and is known
                    self.decoding.resume(group, completion, completion.goal)
                elif not group.searches:
                    self.decoding.join(group, completion, completion.goal)
        self.prompted = [owner for owner in self.prompted if owner[0] in self.leaving]
        self.received.clear()
        return forks

    def pop_computed(self, fits: Callable[[Group], bool]) -> list[Owner]:
        """Remove and return the requests whose prompts have been computed, with their first completions, if a lane that
        decodes ``fits`` them."""
        busy = {group for group, _ in self.finished}
        alive = [(group, first) for group, first in self.prompted if group.alive and group in self.running]
        ready = [
            (group, first)
            for group, first in alive
            if self.completed >= group.until and not group.lent and group not in busy and fits(group)
        ]
        self.prompted = [owner for owner in alive if owner not in ready]
        for group, _ in ready:
            del self.running[group]
            self.leaving.pop(group, None)
            for completion in group.completions:
                self.histories.pop(completion.sequence, None)
        return ready

    def continue_request(self, group: Group, first: Completion) -> None:
        self.running[group] = self.received[group] = None
        for completion in group.completions:  # steps are counted from 0 in each lane
            completion.until = 0
        self.histories |= group.histories
        self.prompted.append((group, first))

    def prompts_computed(self) -> list[Group]:
        """Return the requests whose prompts have been computed since the last call."""
        computed = [group for group in self.prompts_run if self.completed >= group.until]
        if computed:
            self.prompts_run = [group for group in self.prompts_run if self.completed < group.until]
        return computed

    def _chunks(self, budget: int) -> tuple[list[SequenceStep], dict[int, Owner]]:
        """Return the next chunks of prompts, at most ``budget`` tokens, and the completions they draw for."""
        chunks: list[SequenceStep] = []
        drawing: dict[int, Owner] = {}
        for (group, completion), count in self.prompts.share(budget, self.waits).items():
            group.until = self.decoding.steps + 1
            draws: dict[int, Owner] = {}
            if not completion.left:
                self.prompted.append((group, completion))
                self.prompts_run.append(group)
                draws = {one.sequence: (group, one) for one in group.draws_after(completion)}
                drawing |= draws
            scratch = self.scratch.add_chunk(group, completion, completion.cached - count)
            chunks.append(_chunk(group, completion, count, list(draws), scratch))
        return chunks, drawing

    def lendable(self, budget: int, others: frozenset[str] = NOWHERE, borrower: "Lane | None" = None) -> Owner | None:
        """Return the prompt of which another lane may run the next ``budget`` tokens, or None.

        Args:
            budget: Most tokens.
            others: The workers that hold KV in local memory of other replicas than that lane's. A prompt with KV on
                these alone stays in its lane, and so does a prompt with KV in local memory that was not divided.
            borrower: The other lane, which runs one chunk of a divided prompt at a time.
        """

        def stays(group: Group, one: Completion) -> bool:
            if group.stays or self.scratch.holds(group, one) or group.workers <= others:
                return True
            return borrower is not None and borrower.waits(group, one)

        return self.prompts.lendable(budget, stays)

    def waits(self, group: Group, one: Completion) -> bool:
        """Return whether a prompt that was divided must wait for a step in flight that runs a chunk of one.

        The prompt's next chunk goes to the lane that is free first. Behind a running step, it would begin later than in
        another lane, and all chunks after it would wait for its K and V.
        """
        return group.replicas > 1 and self._runs_divided

    @property
    def _runs_divided(self) -> bool:
        """Whether a step in flight runs a chunk of a prompt that was divided."""
        borrowed = (planned.borrowed for planned in self.in_flight)
        own = (group for group in self.running if group.until > self.completed)
        return any(group is not None and group.replicas > 1 for group in (*borrowed, *own))

    @property
    def runs_chunks(self) -> bool:
        """Whether a step in flight has prompt chunks."""
        return any(planned.plan.chunks for planned in self.in_flight)

    def borrow(
        self,
        lenders: Iterable["Lane"],
        most: int,
        chunks: Sequence[SequenceStep],
        others: frozenset[str],
        *,
        decodes: bool,
    ) -> tuple[SequenceStep, Group] | None:
        """Return the next chunk of a prompt of another lane, at most ``most`` tokens, and its request.

        The chunk runs one attention behind the prompt's chunk before it. Returns None if no lane lends a chunk, or if
        the lane's pace leaves no time for one.

        Args:
            chunks: The lane's own chunks of the same step.
            others: See ``lendable``.
            decodes: Whether sequences decode in the same step.
        """
        for lender in lenders:
            budget = most
            if self.pace is not None and lender.prompts:
                budget = self.pace.budget(self.number, decodes, lender.prompts, most, chunks)
                if decodes and budget <= LEAST:
                    continue
            if (owner := lender.lendable(budget, others, self)) is not None:
                group, completion = owner
                tokens = group.chunk(budget)
                lender.prompts.lend(completion, tokens)
                group.lent += 1
                return _chunk(group, completion, tokens, [], None), group
        return None

    def held(self, group: Group) -> dict[str, int]:
        """Return, by memory worker, the slots reserved for a request, without those of shared prefixes."""
        held, alone = dict[str, int](), True
        for one in group.completions:
            if not one.released:
                for worker, tokens in group.slots(one, self._reserved(group, one), alone=alone).items():
                    held[worker] = held.get(worker, 0) + tokens
                alone = False
        return held

    def _reserved(self, group: Group, completion: Completion) -> int:
        """Return the number of slots reserved for a completion alone."""
        if completion.sequence in self.decoding:
            return self.decoding.position(completion.sequence) - group.base
        return completion.own

    def is_settled(self, group: Group) -> bool:
        """True if the prompt has been computed, forked to all completions, and added to the prefix cache."""
        return (
            group.forked and self.completed >= group.until and group not in self.dealt and group not in self.prompts_run
        )

    def exist(self, group: Group, completion: Completion) -> int:
        """Return the number of tokens of a decoding completion whose KV is stored; 0 if it does not decode."""
        if completion.sequence not in self.decoding:
            return 0
        planned = self.decoding.steps - self.completed  # a resumed sequence may run in fewer
        return max(self.decoding.position(completion.sequence) - planned, completion.goal)

    def retire(self) -> list[Group]:
        """Retire finished completions that no step in flight runs. Returns the request of each."""
        done = self.completed
        retired = [
            (group, one) for group, one in self.finished if not group.lent and done >= max(group.until, one.until)
        ]
        for group, completion in retired:
            completion.retired = True
            group.seats -= 1
            if not group.seats:
                del self.running[group]
        self.ending += retired
        self.finished = [owner for owner in self.finished if not owner[1].retired]
        return [group for group, _ in retired]

    def remove_completion(self, group: Group, completion: Completion) -> None:
        """Remove an ended completion from all steps planned from now on."""
        self.decoding.leave(completion.sequence)
        self.prompts.discard(completion)
        self.histories.pop(completion.sequence, None)
        self.due.pop(completion, None)
        self.chosen.pop(group, None)
        self.finished.append((group, completion))

    def rest(self) -> None:
        """Pause the beams that the last plan decodes, until their next tokens are chosen."""
        for sequence in self.stepping:
            if sequence in self.decoding:
                self.decoding.pause(sequence)
        self.stepping.clear()

    def clear(self) -> None:
        """Remove all requests, which are dealt out again, while no step is in flight."""
        self.rest()
        for content in (
            self.dealt,
            self.running,
            self.prompts,
            self.prompted,
            self.received,
            self.leaving,
            self.prompts_run,
            self.ending,
            self.histories,
            self.chosen,
            self.due,
        ):
            content.clear()
        self.decoding, self.completed = DecodeBatch(self.longest), 0

    def take_over(self, group: Group, dealt: bool, held: bool) -> None:
        """Continue a request that may have run in another lane.

        Args:
            dealt: True if no plan has admitted the request yet.
            held: True if the request must not run before requests are dealt out again.
        """
        self.running[group] = None
        for completion in group.completions:  # steps are counted from 0 again
            completion.until = 0
        if held:
            return
        if dealt:
            self.dealt[group] = None
            return
        self.histories |= group.histories
        if group.choice is not None:
            self.chosen[group] = None
        for completion in group.alive if group.forked else group.completions[:1]:
            if completion.left:
                self.prompts.add(group, completion)
            elif group.forked and group.searches:
                if group.choice is None and not completion.answered:
                    self.due[completion] = group
            elif group.forked:
                self.decoding.join(group, completion, group.stored_tokens(completion))
            else:
                self.prompted.append((group, completion))

    def withdraw(self, owners: Mapping[int, Owner]) -> None:
        """Undo the plans of steps in flight, at the end of an epoch. ``owners`` has the sequences of all lanes."""
        for chunk in (chunk for planned in reversed(self.in_flight) for chunk in planned.plan.chunks):
            group, completion = owners[chunk.sequence]
            group.lent = 0
            if chunk.start < completion.cached:  # else an earlier chunk was undone, in another lane
                group.withdraw(completion, chunk.start)
        self.in_flight.clear()
        self.completed = self.decoding.steps
        self.rest()

    @property
    def has_ended(self) -> bool:
        return not all(group.is_forked_from(completion) for group, completion in self.ending)

    def take_ended(self) -> list[Owner]:
        """Remove and return retired completions, without those from which others will still be forked."""
        ended = [(group, completion) for group, completion in self.ending if not group.is_forked_from(completion)]
        self.ending = [owner for owner in self.ending if owner not in ended]
        return ended

    def strike(self, lost: Collection[str]) -> list[Owner]:
        """Remove and return the retired completions of requests with KV on ``lost`` workers."""
        struck = [owner for owner in self.ending if not owner[0].workers.isdisjoint(lost)]
        self.ending = [owner for owner in self.ending if owner not in struck]
        return struck

    def shrink(self, placement: Placement) -> None:
        """Release the slots that undone steps would have filled."""
        for group in self.running:
            for completion in group.alive:
                reserved = group.slots(completion, self._reserved(group, completion))
                completion.own = (
                    max(group.stored_tokens(completion), group.prompt_length + completion.known) - group.base
                )
                kept = group.slots(completion, completion.own)
                for worker, tokens in reserved.items():
                    placement.will_release(worker, tokens - kept.get(worker, 0))
                    placement.free_slots(worker, tokens - kept.get(worker, 0))


def _chunk(group: Group, completion: Completion, tokens: int, draws: list[int], scratch: int | None) -> SequenceStep:
    """Return the chunk with the last ``tokens`` tokens of a completion that are in planned steps."""
    start = completion.cached - tokens
    known = group.known_tokens(completion, start, completion.cached)
    return SequenceStep(completion.sequence, start, known, draws, scratch)


def ran(lanes: Iterable[Lane], completion: Completion) -> int:
    """Return the number of a completion's prompt tokens whose steps have completed."""
    chunks = (chunk for own in lanes for planned in own.in_flight for chunk in planned.plan.chunks)
    starts = (chunk.start for chunk in chunks if chunk.sequence == completion.sequence)
    return min(starts, default=completion.cached)


@dataclass(frozen=True)
class Remains:
    """What the end of an epoch leaves of the requests. Compute workers keep nothing.

    Attributes:
        kept: by memory worker and sequence: tokens whose steps have completed. All other KV is dropped.
        dropped: number of requests that have lost their KV.
        recomputed: number of tokens that are computed again for these requests.
        on_trial: True if workers died while they ran requests that were retried after an earlier death.
        poison: the request that makes workers die, if this loss proves it.
    """

    kept: dict[str, dict[int, int]]
    dropped: int = 0
    recomputed: int = 0
    on_trial: bool = False
    poison: str | None = None


def kept(lanes: Sequence[Lane], prefixes: PrefixCache, workers: Iterable[str]) -> dict[str, dict[int, int]]:
    """Return ``Remains.kept`` for the present state, in which no step is in flight, and mark what it leaves out."""
    kept: dict[str, dict[int, int]] = {worker: {} for worker in workers}
    for group in (group for own in lanes for group in own.running if group not in own.dealt):
        completions = group.alive if group.forked else group.completions[:1]
        for completion in completions:
            for segment in completion.segments:
                kept[segment.worker][completion.sequence] = group.stored_tokens(completion)
    for group, completion in itertools.chain.from_iterable(own.ending for own in lanes):
        if length := prefixes.keepable(group, completion):
            for segment in completion.segments:
                kept[segment.worker][completion.sequence] = length
        else:  # unless others are forked from it, workers drop it: a worker that leaves now may stay after all
            completion.dropped = not group.is_forked_from(completion)
    for worker in kept:
        kept[worker] |= prefixes.sequences(worker)
    return kept


class Residents:
    """The requests with KV on each memory worker, and the memory workers of each request."""

    def __init__(self, placement: Placement, prefixes: PrefixCache, lanes: Sequence[Lane]) -> None:
        self._placement = placement
        self._prefixes = prefixes
        self._lanes = lanes
        self._groups: dict[str, dict[Group, None]] = {worker: {} for worker in placement.capacities}
        self._workers: dict[Group, set[str]] = {}

    def update(self, group: Group) -> None:
        """Record the workers of a request that has been placed, or whose segments have changed."""
        workers = group.workers
        for worker in self._workers.get(group, set()) - workers:
            self._groups.get(worker, {}).pop(group, None)  # the worker may have left
        for worker in workers:
            self._groups[worker][group] = None
        self._workers[group] = workers

    def forget_request(self, group: Group) -> None:
        for worker in self._workers.pop(group) & self._groups.keys():
            del self._groups[worker][group]

    def on_places_changed(self) -> None:
        """Adapt to the places of the placement. No live request may have KV on a removed place."""
        self._groups = {worker: self._groups.get(worker, {}) for worker in self._placement.capacities}
        self._workers = {group: workers & self._groups.keys() for group, workers in self._workers.items()}

    def holders(self, worker: str) -> dict[Group, int]:
        """Return the live requests with KV on ``worker``, and the tokens that each would free there."""
        holders: dict[Group, int] = {}
        for group in self._groups[worker]:
            reserved = self._lanes[group.lane].held(group).get(worker, 0)
            if group.alive and (reserved or any(one.worker == worker for one in self._prefixes.path(group))):
                holders[group] = reserved + self._prefixes.exclusive(group, worker)
        return holders

    def is_empty(self, worker: str) -> bool:
        """Return whether no KV is on a worker or reserved there."""
        return not any(
            self._groups[place] or self._placement.idle[place] or self._placement.reserved[place]
            for place in self._placement.places_on(worker)
        )
