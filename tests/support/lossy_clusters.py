"""Clusters that lose and change workers, cache prefixes and move KV, checked against what every slot holds."""

import collections
import dataclasses
import itertools
import random
from typing import Any

from hypothesis import strategies as st

from lamina.core.errors import RequestError
from lamina.core.pipeline import Pipeline
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Request
from lamina.schedule.admission import SHARE
from lamina.schedule.limits import Limits
from lamina.schedule.moves import Move
from lamina.schedule.recipients import Recipients
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.suspects import Hold
from tests.support.clusters import MANY, Cluster, Course, MemoryModel, courses, turns
from tests.support.schedules import LIMITS, plan_of, request, scheduler

NOBODY = Hold()


class Losing(Cluster):
    """A cluster whose epochs end, with or without a memory worker."""

    def __init__(
        self,
        requests: list,
        memories: int,
        lanes: int,
        depth: int,
        limits: Limits,
        capacity: int,
        longest: int | None,
    ) -> None:
        super().__init__(requests, memories, lanes, depth, limits, capacity, longest)
        workers = [Member("compute0", "compute", "cpu", ""), Member("compute1", "compute", "cpu", "")]
        workers += [Member(memory.name, "memory", "cpu", "", capacity) for memory in self.memories]
        self.hold = NOBODY
        self._numbers = itertools.count()
        self.topology = Topology(FIRST, tuple(workers), Pipeline(lanes, 2) if lanes > 1 else Pipeline(2, 2))
        self.recipients = Recipients(self.topology.computes, self.topology.pipeline)

    def submit(self, index: int, made: Request) -> None:
        try:
            super().submit(index, made)
        except RequestError:  # too long for the workers that are left
            self.unservable.add(index)

    def plan(self, lane: int) -> None:
        """Plan steps, and check that nothing that is held runs and nothing new is placed on a worker that leaves."""
        closed, before = set(self.scheduler.placement.closed), len(self._in_flight[lane])
        super().plan(lane)
        for plan in self._in_flight[lane][before:]:
            self.recipients.select(plan, 0.0)  # it knows all sequences that the plan names
            forked = {fork.child for fork in plan.forks}  # what admission has planned for them
            assert not closed & {one.worker for one in plan.grown if one.sequence not in forked}
        for step in itertools.chain.from_iterable(plan.sequences for plan in self._in_flight[lane]):
            assert self.hold.may_run(str(self._owners[step.sequence][0]))

    def release(self) -> None:
        """Nobody is held any more."""
        self.hold = NOBODY
        self.scheduler.hold_back(self.hold)

    def end_epoch(self, number: int, hold: Hold = NOBODY) -> None:
        """Memory worker ``number`` is lost, if it is not the last one; else a compute worker is, and no KV."""
        self.hold = dataclasses.replace(hold, held=frozenset(filter(self.scheduler.alive, hold.held)))
        self.scheduler.hold_back(self.hold)
        lost = [memory.name for memory in self.memories[number : number + 1] if self._is_dispensable(memory.name)]
        computes = self.topology.computes
        self.topology = self.topology.without(lost or computes[1:])
        self._in_flight = [[] for _ in self._in_flight]
        remains = self.scheduler.end_epoch(self.topology)
        self.recipients.end_epoch(self.topology, remains.kept)
        self.memories = [memory for memory in self.memories if memory.name not in lost]
        for memory in self.memories:
            kept = remains.kept[memory.name]
            assert kept.keys() <= memory.here.keys()
            for sequence in {sequence for sequence, _ in memory.slab.segments}.difference(kept):
                memory.forget(sequence)
            for sequence, tokens in kept.items():
                self.check_kept(sequence, tokens)
                for start, stop in memory.here[sequence].items():
                    memory.slab.truncate((sequence, start), max(0, min(tokens, stop) - start))
        for group in self.scheduler.stranded:
            self.unservable.add(int(group.request.request_id))
            self.scheduler.abort(group.request.request_id)

    def check_kept(self, sequence: int, tokens: int) -> None:
        """What has been computed of a sequence is kept."""
        index, _ = self._owners[sequence]
        shared = 0 if sequence in self._firsts else self.requests[index][0]
        assert tokens == max(self._computed.get(sequence, 0), shared)

    def join(self, capacity: int) -> None:
        """Another memory worker takes part from now on."""
        name = f"later{next(self._numbers)}"
        self.memories.append(MemoryModel(name, capacity))
        self.topology = self.topology.joined([Member(name, "memory", "cpu", "", capacity)], self.topology.pipeline)
        self._change()

    def _change(self, deal_again: bool = False) -> None:
        self.scheduler.change_members(self.topology, deal_again)
        self.recipients.change_members(self.topology)

    def drain(self, number: int) -> None:
        """A memory worker is to leave, if another one can hold any request."""
        name = self.memories[number % len(self.memories)].name
        if self._is_dispensable(name):
            self.scheduler.drain(name)

    def _is_dispensable(self, name: str) -> bool:
        """True if another memory worker that does not leave can hold any request."""
        capacities, closed = self.topology.capacities, self.scheduler.placement.closed
        return any(size >= 60 for other, size in capacities.items() if other != name and other not in closed)

    def leave(self) -> None:
        """Let the workers that leave go, once they are empty."""
        for memory in [one for one in self.memories if one.name in self.scheduler.placement.closed]:
            if self.scheduler.is_drained(memory.name):
                assert memory.slab.used == 0 and not memory.here
                self.memories.remove(memory)
                self.topology = self.topology.left([memory.name], self.topology.pipeline)
                self._change()

    def deal_again(self) -> bool:
        """The replicas change, if no step is in flight."""
        if any(self._in_flight):
            return False
        self._change(deal_again=True)
        return True

    @property
    def _firsts(self) -> set[int]:
        return {group.completions[0].sequence for group in self.scheduler._requests.values()}


class Caching(Losing):
    """Prompts begin alike, and some with what others generate; every slot is known by the tokens up to its own."""

    prefix_cache = True

    def __init__(self, requests: list, prompts: list, memories: int, *settings: Any) -> None:
        self.prompts = prompts
        requests = [(len(self.prompt(index)), *one) for index, one in enumerate(requests)]
        super().__init__(requests, memories, *settings)
        self.contents = collections.defaultdict[str, dict[int, tuple[int, ...]]](dict)
        self.hits = 0

    def prompt(self, index: int) -> list[int]:
        """Return a prompt: the first tokens that all share, those of a completion, then others."""
        alike, generated, other, number = self.prompts[index]
        return [*range(alike), *range(generated), *(1000 + number for _ in range(other))]

    def plan(self, lane: int) -> None:
        running = len(self._in_flight[lane])
        super().plan(lane)
        for plan in self._in_flight[lane][running:]:
            self._check(plan)

    def _check(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            if fork.child not in self._owners or fork.parent not in self._owners:  # else: of one request
                assert self._computed[fork.parent] >= fork.tokens
                self._computed[fork.child] = fork.tokens
                self.hits += fork.child in self._owners
        for move in plan.moves:
            part = slice(move.start, move.stop) if move.parent is None else slice(None)
            slots = {
                memory.name: memory.slab.slots((move.sequence, 0))[part].tolist()
                for memory in self.memories
                if memory.name in (move.source, move.target)
            }
            for source, target in zip(slots[move.source], slots[move.target], strict=True):
                self.contents[move.target][target] = self.contents[move.source][source]
        placement = self.scheduler.placement
        for memory in self.memories:
            for step in plan.sequences:
                for first in memory.here.get(step.sequence, ()):
                    slots = memory.slab.slots((step.sequence, first)).tolist()
                    self._attend(memory.name, slots, step.sequence, first, max(step.start - first, 0))
            used, capacity = memory.slab.used, placement.capacities[memory.name]
            assert used <= placement.reserved[memory.name] + placement.idle[memory.name] <= capacity

    def _attend(self, name: str, slots: list[int], sequence: int, first: int, old: int) -> None:
        """A sequence's next tokens attend to those before, whoever computed them: ``old`` ones of a segment."""
        tokens = self.tokens_of(sequence)
        keys = [tuple(tokens[: position + 1]) for position in range(first, first + len(slots))]
        contents = self.contents[name]
        assert [contents[slot] for slot in slots[:old]] == keys[:old]
        contents |= zip(slots[old:], keys[old:], strict=True)

    def tokens_of(self, sequence: int) -> list[int]:
        """The first tokens of a sequence, drawn already or not."""
        index, completion = self._owners[sequence]
        return [*self.prompt(index), *(100 * completion + number for number in range(40))]

    def check_kept(self, sequence: int, tokens: int) -> None:
        """A cached prefix is kept too: ``_attend`` and ``check_rest`` compare what it holds."""

    def check_rest(self) -> None:
        """All slots are free, or cached for others, and each counts once."""
        placement, prefixes = self.scheduler.placement, self.scheduler.prefixes
        assert not any(placement.reserved.values()) and not any(placement.returning.values())
        for memory in self.memories:
            assert memory.here.keys() == prefixes.sequences(memory.name).keys()
            assert (memory.slab.used, len(memory.here)) == prefixes.idle().get(memory.name, (0, 0))
        cached = {one: tokens for memory in self.memories for one, tokens in prefixes.sequences(memory.name).items()}
        for sequence, tokens in cached.items():
            path: dict[int, tuple[int, ...]] = {}
            for memory in self.memories:
                for start in memory.here.get(sequence, ()):
                    slots = memory.slab.slots((sequence, start)).tolist()
                    path |= {start + place: self.contents[memory.name][slot] for place, slot in enumerate(slots)}
            assert sorted(path) == list(range(tokens))
            assert all(path[tokens - 1][: position + 1] == key for position, key in path.items())


shared_prefix_requests = st.lists(
    st.tuples(
        st.tuples(st.integers(1, 14), st.integers(0, 6), st.integers(0, 3), st.integers(0, 2)),
        st.integers(1, 10),  # max_tokens
        st.integers(1, 3),  # n
        st.lists(st.integers(0, 12), min_size=3, max_size=3),  # a completion stops by itself after that many tokens
        st.one_of(st.none(), st.none(), st.integers(0, 25)),  # aborted at this turn
        st.integers(0, 25),  # arrives at this turn
    ),
    max_size=14,
)


LOSSES = courses(
    drop=turns(st.integers(0, 20), 5),
    end_epoch=turns(st.integers(0, 2), 3, last=40),
    join=turns(st.integers(20, 60), 2),
    drain=turns(st.integers(0, 5), 3),
)


class Moving(Caching):
    """Ranges of requests move at random. What a step reads must be there until it has completed."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.read: dict[int, list[tuple[str, int, tuple[int, ...]]]] = {}  # by step
        self._reading: list[tuple[str, int, tuple[int, ...]]] = []
        self.begun: list[Move] = []

    def plan(self, lane: int) -> None:
        super().plan(lane)
        closed = self.scheduler.placement.closed  # what leaves these workers goes wherever there is room
        moving = [move for move in self.scheduler.moves.in_progress if move.source not in closed]
        self.begun += [move for move in moving if move not in self.begun]

    def move(self, number: int, tokens: int) -> int:
        """One of the requests moves some tokens from one worker to another, if it can."""
        names = [memory.name for memory in self.memories]
        pairs = list(itertools.permutations(names, 2))
        groups = [group for lane in self.scheduler._lanes for group in lane.running]
        if not groups or not pairs:
            return 0
        source, target = pairs[number % len(pairs)]
        return self.scheduler.moves.try_move(groups[number % len(groups)], source, target, tokens)

    def move_several(self, moves: list[tuple[int, int]]) -> None:
        for number, tokens in moves:
            self.move(number, tokens)

    def finish_move(self) -> None:
        """One of the moves is done, not always the oldest."""
        if self._moves:
            self.scheduler.on_move_done(self._moves.pop(self.turn % len(self._moves)).number)

    def _check(self, plan: StepPlan) -> None:
        self._reading = []
        super()._check(plan)
        self.read[plan.step] = self._reading

    def _attend(self, name: str, slots: list[int], sequence: int, first: int, old: int) -> None:
        super()._attend(name, slots, sequence, first, old)
        self._reading += [(name, slot, self.contents[name][slot]) for slot in slots]

    def complete(self, lane: int) -> None:
        """The oldest step of a lane ends, and has read what it was to read."""
        for name, slot, key in self.read.pop(self._in_flight[lane][0].step):
            if name in self.scheduler.placement.capacities:
                assert self.contents[name][slot] == key
        super().complete(lane)
        if self.scheduler.balancing is not None:
            self.scheduler.balancing.note_step(lane, 3, 1.0)


def settled(**settings: Any) -> Scheduler:
    """A request of 40 tokens on the first of two workers, which decodes."""
    under_test = scheduler({"memory0": 100, "memory1": 100}, limits=Limits(4, 64, 100), **settings)
    under_test.submit(request("long", 40, max_tokens=50, n=2))
    step(under_test)
    step(under_test)
    return under_test


def step(under_test: Scheduler) -> StepPlan:
    plan = plan_of(under_test)
    for _, completion in under_test.complete(0).values():
        completion.generated.append(7)
    return plan


def play_out(cluster: Moving, course: Course) -> None:
    cluster.play(course, 40)
    cluster.leave()
    cluster.check_rest()
    assert not cluster.scheduler.moves.in_progress
    cluster.check_ends()


def random_course(draw: random.Random, lanes: int, longest: int | None, events: dict[str, dict[int, Any]]) -> Course:
    return Course(
        memories=draw.randint(2, 4),
        lanes=lanes,
        depth=draw.randint(1, 3),
        limits=draw.choice([LIMITS, MANY]),
        capacity=draw.choice([60, 60, 27]),
        longest=longest,
        move_turns=draw.randint(1, 3),
        events=events,
        clients=draw.randint(1, 5),
        share=draw.choice([0, SHARE]),
    )


def random_events(draw: random.Random, most: int = 25) -> dict[str, dict[int, Any]]:
    """What happens in which turn; ``most``: turns with moves."""

    def turn() -> int:
        return draw.randint(0, 40)

    return {
        "move_several": {
            turn(): [(draw.randint(0, 1000), draw.randint(1, 20)) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(0, most))
        },
        "use_lanes": {turn(): draw.randint(1, 3) for _ in range(draw.choice([0, 0, 2]))},
        "drop": {turn(): draw.randint(0, 20) for _ in range(draw.choice([0, 0, 3]))},
        "end_epoch": {turn(): draw.randint(0, 2) for _ in range(draw.choice([0, 0, 2]))},
        "drain": {turn(): draw.randint(0, 5) for _ in range(draw.choice([0, 0, 1]))},
    }


def random_requests(draw: random.Random) -> tuple[list[tuple[int, int, int, int]], list[Any]]:
    """Parts of prompts, and (max_tokens, n, when completions stop, when it is aborted, when it arrives)."""
    count = draw.randint(0, 14)
    prompts = [(draw.randint(1, 14), draw.randint(0, 6), draw.randint(0, 3), draw.randint(0, 2)) for _ in range(count)]
    others = [
        (
            draw.randint(1, 10),
            draw.choice([1, 1, 2, 3]),
            [draw.randint(0, 12) for _ in range(3)],
            draw.choice([None, None, None, draw.randint(0, 25)]),
            draw.randint(0, 25),
        )
        for _ in range(count)
    ]
    return prompts, others
