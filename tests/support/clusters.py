"""A brute-force model of a cluster, which checks every plan of a scheduler against slabs, segments and tokens."""

import dataclasses
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from lamina.core import steps as spills
from lamina.core.requests import Completion, Group
from lamina.core.steps import LAST_DRAWN, Admission, Fetch, Fork, KvMove, SequenceStep, StepPlan
from lamina.core.types import Request, Segment
from lamina.memory.slab import Slab
from lamina.schedule.admission import SHARE
from lamina.schedule.limits import Limits
from lamina.schedule.policy import FIFO, Policy
from tests.support.schedules import ATTENTIONS, LIMITS, client, request, scheduler

MANY = Limits(max_num_seqs=16, max_num_batched_tokens=16, max_model_len=32)  # as memory allows


class MemoryModel:
    """A memory worker: applies plans to a real slab and checks every position."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.slab = Slab[tuple[int, int]](capacity)
        self.here: dict[int, dict[int, int]] = {}  # by sequence and first token of a segment: where it ends

    def apply(self, plan: StepPlan) -> None:
        for switch in plan.switches:
            for segment in switch.segments:
                self.switch(switch.carrier, segment)
        for fork in plan.forks:
            self.fork(fork)
        for sequence in plan.released:
            self.forget(sequence)
        self.finish_move(plan.moves)
        for admission in plan.admitted:
            for segment in admission.segments:
                self.begin(segment)
        for segment in plan.grown:
            self.end(segment.sequence, segment.tokens[0])
            self.grow(segment)
        for fetch in plan.fetches:
            self.fetch(fetch)
        for step in plan.sequences:
            self.run(step)

    def fork(self, fork: Fork) -> None:
        for start, stop in self.here.get(fork.parent, {}).items():
            if start < fork.tokens:
                child, tokens = (fork.child, start), min(fork.tokens, stop) - start
                if child not in self.slab or len(self.slab.slots(child)) < tokens:
                    self.slab.fork((fork.parent, start), child, tokens)
                self.here.setdefault(fork.child, {})[start] = stop if stop < fork.tokens else sys.maxsize

    def fetch(self, fetch: Fetch) -> None:
        if fetch.worker == self.name:
            if not fetch.start:
                self.begin(Segment(fetch.child, self.name, fetch.heads, (0, None)))
            assert len(self.slab.slots((fetch.child, 0))) == fetch.start
            self.slab.append((fetch.child, 0), len(fetch.blocks) * spills.BLOCK)

    def run(self, step: SequenceStep) -> None:
        for start, stop in self.here.get(step.sequence, {}).items():
            first, last = max(step.start, start), min(step.stop, stop)
            if first < last:
                assert len(self.slab.slots((step.sequence, start))) == first - start
                self.slab.append((step.sequence, start), last - first)  # CapacityError: admission was not exact

    def begin(self, segment: Segment) -> None:
        start, stop = segment.tokens
        if segment.worker == self.name:
            self.here.setdefault(segment.sequence, {})[start] = sys.maxsize if stop is None else stop
            if (segment.sequence, start) not in self.slab:
                self.slab.open((segment.sequence, start))

    def grow(self, segment: Segment) -> None:
        """Go on in the segment that ends there, if the sequence comes back before it has a token elsewhere."""
        here = self.here.get(segment.sequence, {})
        ends = [start for start, stop in here.items() if stop == segment.tokens[0]]
        if segment.worker == self.name and ends:
            here[ends[0]] = sys.maxsize
        else:
            self.begin(segment)

    def end(self, sequence: int, position: int) -> None:
        """End a sequence's segments here at this position: another worker takes the tokens from there on."""
        for start, stop in list(self.here.get(sequence, {}).items()):
            if start >= position:
                assert not len(self.slab.slots((sequence, start)))
                self.slab.free((sequence, start))
                del self.here[sequence][start]
            else:
                self.here[sequence][start] = min(stop, position)
        if not self.here.get(sequence, True):
            del self.here[sequence]

    def switch(self, carrier: int, new: Segment) -> None:
        """Give a sequence the carrier's slots for a range of tokens, here or on another worker. Token by token."""
        sequence, (first, last) = new.sequence, new.tokens
        before = self.here.pop(sequence, {})
        if not before and new.worker != self.name:
            return
        closes, last = last is not None, sys.maxsize if last is None else last
        if not closes and new.worker == self.name:
            last = first + len(self.slab.slots((carrier, 0)))
        places = {}  # by position: the key in the slab that holds it, and the index there
        for start in before:
            for index in range(len(self.slab.slots((sequence, start)))):
                places[start + index] = (sequence, start), index
        covered = {start: stop for start, stop in before.items()}
        held = [(start, min(stop, first)) for start, stop in covered.items() if start < first]
        held += [(max(start, last), stop) for start, stop in covered.items() if stop > last and closes]
        places = {position: place for position, place in places.items() if not first <= position < last}
        if new.worker == self.name:
            held.append((first, last if closes else sys.maxsize))
            places |= {position: ((carrier, 0), position - first) for position in range(first, last)}
        joined: list[list[int]] = []
        for start, stop in sorted(held):
            if joined and joined[-1][1] == start:
                joined[-1][1] = stop
            else:
                joined.append([start, stop])
        parts = {
            (sequence, start): [
                (places[position][0], places[position][1], places[position][1] + 1)
                for position in sorted(places)
                if start <= position < stop
            ]
            for start, stop in joined
        }
        self.slab.rearrange([(sequence, start) for start in before], parts)
        if joined:
            self.here[sequence] = {start: stop for start, stop in joined}

    def finish_move(self, moves: list[KvMove]) -> None:
        for move in moves:
            self.carry(move)

    def carry(self, move: KvMove) -> None:
        """Give a carrier slots for its range: those of its parent, or new ones."""
        if move.source == self.name:
            ((first, _),) = [
                (start, stop)
                for start, stop in self.here[move.parent].items()
                if start <= move.start and move.stop <= stop
            ]
            part = (move.parent or 0, first), move.start - first, move.stop - first
            self.slab.rearrange([], {(move.sequence, 0): [part]})
        elif move.target == self.name:
            self.slab.open((move.sequence, 0))
            self.slab.append((move.sequence, 0), move.stop - move.start)

    def forget(self, sequence: int) -> None:
        self.here.pop(sequence, None)
        for key in self.slab.segments:
            if key[0] == sequence:
                self.slab.free(key)

    def holds(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return sum(len(self.slab.slots((sequence, start))) for start in self.here.get(sequence, ()))


requests = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.integers(1, 12),  # max_tokens
        st.integers(1, 3),  # n
        st.lists(st.integers(0, 14), min_size=3, max_size=3),  # tokens after which each completion stops by itself
        st.one_of(st.none(), st.integers(0, 25)),  # aborted at this turn
        st.integers(0, 10),  # arrives at this turn
    ),
    max_size=12,
)


@dataclass(frozen=True)
class Course:
    """A cluster's size, and what happens to it.

    Attributes:
        events: by method name and turn, the arguments of the call.
        clients: number of clients whose requests alternate.
        share: steps between two comparisons of the clients' seats.
    """

    memories: int
    lanes: int
    depth: int
    limits: Limits
    capacity: int
    longest: int | None
    move_turns: int
    events: dict[str, dict[int, Any]]
    clients: int = 1
    share: int = SHARE

    @property
    def sizes(self) -> tuple[int, int, int, Limits, int, int | None]:
        """Arguments of a cluster."""
        return self.memories, self.lanes, self.depth, self.limits, self.capacity, self.longest


def courses(**events: st.SearchStrategy[dict[int, Any]]) -> st.SearchStrategy[Course]:
    """A strategy for courses with these events, and with changes of the number of lanes."""
    return st.builds(
        Course,
        memories=st.integers(1, 3),
        lanes=st.integers(1, 3),
        depth=st.integers(1, 3),
        limits=st.sampled_from([LIMITS, MANY]),
        capacity=st.sampled_from([60, 60, 27]),
        longest=st.sampled_from([None, None, 5, 11]),
        move_turns=st.integers(1, 6),
        events=st.fixed_dictionaries({"use_lanes": turns(st.integers(1, 3), 4)} | events),
        clients=st.integers(1, 5),
        share=st.sampled_from([0, SHARE]),
    )


def turns(arguments: st.SearchStrategy[Any], most: int, last: int = 30) -> st.SearchStrategy[dict[int, Any]]:
    """Events at ``most`` turns."""
    return st.dictionaries(st.integers(0, last), arguments, max_size=most)


class Cluster:
    """Slow compute workers and memory workers under a scheduler. Checks every plan."""

    prefix_cache = False
    overcommit = 1.0
    window = 0
    policy: Policy = FIFO

    def __init__(
        self,
        requests: list,
        memories: int,
        lanes: int,
        depth: int,
        limits: Limits = LIMITS,
        capacity: int = 60,
        longest: int | None = None,
    ) -> None:
        self.requests = requests
        self.limits = limits
        self.memories = [MemoryModel(f"memory{index}", capacity) for index in range(memories)]
        capacities = {memory.name: capacity for memory in self.memories}
        self.scheduler = scheduler(
            capacities, lanes, limits, longest, self.prefix_cache, self.overcommit, self.window, self.policy
        )
        self.groups: dict[int, Group] = {}
        self.lengths: dict[str, list[int]] = {}  # of completions that ended by themselves
        self.unservable = set[int]()  # requests that the workers left cannot hold
        self._depth = depth
        self._in_flight: list[list[StepPlan]] = [[] for _ in range(lanes)]
        self._turns = [0] * lanes
        self._computed: dict[int, int] = {}  # tokens whose steps have completed, by sequence
        self._moves: list[KvMove] = []  # begun and not done
        self._owners: dict[int, tuple[int, int]] = {}  # by sequence: its request and completion
        self._drawn: dict[tuple[int, int], list[int]] = {}  # by request and completion
        self.grown = self.turn = 0
        self.clients = 1

    def play(self, course: Course, least: int) -> None:
        """Play all turns of a course, at least ``least``, until nothing is left to do."""
        self.clients = course.clients
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lamina.schedule.admission.SHARE", course.share)
            self._play(course, least)

    def _play(self, course: Course, least: int) -> None:
        for self.turn in itertools.count():
            assert self.turn < 2000, "the scheduler does not come to rest"
            self.arrive(self.turn)
            if self.turn % course.move_turns == 0:
                self.finish_move()
            for method, by_turn in course.events.items():
                if self.turn in by_turn:
                    getattr(self, method)(by_turn[self.turn])
            self.leave()
            for lane in range(course.lanes):
                if self.scheduler.in_flight(lane) and (self.turn + lane) % 2:  # steps overlap turns
                    self.complete(lane)
                self.plan(lane)
            if self.turn > least and not self.busy:
                return

    def check_ends(self) -> None:
        """Check that completions that were served and not aborted ended after the right number of tokens."""
        for index, (_, _, n, stops, aborted, _) in enumerate(self.requests):
            if aborted is None and index not in self.unservable:
                most = self.groups[index].max_tokens
                assert sorted(self.lengths[str(index)]) == sorted(min(stop or most, most) for stop in stops[:n])

    def use_lanes(self, active: int) -> None:
        self.scheduler.use_lanes(min(active, len(self._in_flight)))

    def leave(self) -> None:
        """Let empty workers that are to leave do so."""

    def drop(self, number: int) -> None:
        """Drop the KV of a request that has some."""
        holders = [group for memory in self.memories for group in self.scheduler._residents.holders(memory.name)]
        if holders:
            self.scheduler.preempt(holders[number % len(holders)])

    def finish_move(self) -> None:
        """Complete the oldest move, whether its sequence still exists or not."""
        if self._moves:
            self.scheduler.on_move_done(self._moves.pop(0).number)

    def arrive(self, turn: int) -> None:
        for index, (prompt, max_tokens, n, _, aborted, arrival) in enumerate(self.requests):
            if arrival == turn:
                new = request(str(index), prompt, client(index, self.clients), max_tokens=max_tokens, n=n)
                self.submit(index, dataclasses.replace(new, prompt_token_ids=self.prompt(index)))
            if aborted is not None and aborted == turn - arrival:
                self.scheduler.abort(str(index))

    def submit(self, index: int, made: Request) -> None:
        self.groups[index] = self.scheduler.submit(made)

    def prompt(self, index: int) -> list[int]:
        return list(range(self.requests[index][0]))

    def complete(self, lane: int) -> None:
        """Complete the oldest step of a lane, after all that run earlier chunks of its prompts in other lanes."""
        oldest = self._in_flight[lane][0]
        chunks = {chunk.sequence for chunk in oldest.chunks}
        for other, plans in enumerate(self._in_flight):
            while any(plan.step < oldest.step and chunks & {one.sequence for one in plan.chunks} for plan in plans):
                self.complete(other)
        self.attend(oldest)
        steps, stops = self._in_flight[lane].pop(0).sequences, dict[int, int]()
        for step in steps:
            self._computed[step.sequence] = step.stop
            stops |= dict.fromkeys(step.draws, step.stop)
        for sequence, (group, completion) in self.scheduler.complete(lane).items():
            assert sequence == completion.sequence
            assert stops[sequence] == group.prompt_length + len(completion.generated)  # each token is drawn once
            self.take(group, completion)

    def attend(self, plan: StepPlan) -> None:
        """Compute a step, just before it completes: here nothing."""

    def take(self, group: Group, completion: Completion) -> None:
        """Note that a completion has drawn a token."""
        token = 100 * completion.index + len(completion.generated)
        completion.generated.append(token)
        self._drawn.setdefault((int(group.request.request_id), completion.index), []).append(token)
        name = group.request.request_id
        if len(completion.generated) in (group.max_tokens, self.requests[int(name)][3][completion.index]):
            self.lengths.setdefault(name, []).append(len(completion.generated))
            self.scheduler.end_completion(group, completion)

    def plan(self, lane: int) -> None:
        """Begin all steps that a lane may have in flight."""
        while self.scheduler.in_flight(lane) < self._depth and (plan := self.scheduler.plan(lane)) is not None:
            assert plan.turn == self._turns[lane]
            self._turns[lane] += ATTENTIONS if plan.sequences else 0
            assert sum(len(step.tokens) for step in plan.sequences) <= self.limits.max_num_batched_tokens
            assert sum(len(step.draws) for step in plan.sequences) <= self.limits.max_sequences
            earlier = {draw for other in self._in_flight[lane] for step in other.sequences for draw in step.draws}
            for admission in plan.admitted:
                for index in (i for i, group in self.groups.items() if self._admits(group, admission)):
                    for place, completion in enumerate(admission.indices):
                        self._owners[admission.sequence + place] = index, completion
            for step in plan.sequences:
                assert (step.tokens == [LAST_DRAWN]) == (step.sequence in earlier)
                if step.tokens != [LAST_DRAWN]:
                    index, completion = self._owners[step.sequence]
                    known = [*self.prompt(index), *self._drawn.get((index, completion), ())]
                    assert step.tokens == known[step.start : step.stop]
            running = {step.sequence for other in self._in_flight[lane] for step in other.sequences}
            assert not (running | earlier) & {*plan.released}
            for move in plan.moves:
                assert move.stop <= self._computed.get(move.parent, sys.maxsize)
            self._moves += plan.moves
            for memory in self.memories:
                memory.apply(plan)
            for step in plan.sequences:
                assert sum(memory.holds(step.sequence) for memory in self.memories) == step.stop
            for child in {fork.child for fork in plan.forks}.difference(plan.released):
                assert any(child in memory.here for memory in self.memories)
            self.grown += len(plan.grown)
            self._in_flight[lane].append(plan)

    def _admits(self, group: Group, admission: Admission) -> bool:
        current = self.scheduler._requests.get(group.request.request_id, group)
        return admission.sequence in [one.sequence for one in current.completions]

    @property
    def busy(self) -> bool:
        held = self.scheduler.waiting or any(self.scheduler.placement.reserved.values()) or any(self._in_flight)
        return bool(held)
