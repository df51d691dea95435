"""The scheduler against a brute-force account of the workers it drives: slabs, page tables and drawn tokens."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina import spills
from lamina.errors import RequestError
from lamina.groups import Completion, Group
from lamina.memory.slab import Slab
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler
from lamina.spills import Fetch
from lamina.steps import LAST_DRAWN, Admission, Fork, Migration, SequenceStep, StepPlan
from lamina.types import Request, SamplingParams, Segment
from tests.schedule.schedules import ATTENTIONS, LIMITS, plan_of, request, scheduler

pytestmark = pytest.mark.usefixtures("impatient")

MANY = Limits(max_sequences=16, max_num_batched_tokens=16, max_model_len=32)  # as memory allows


class MemoryModel:
    """What a memory worker does with a plan, on a real slab, checking every position it is given."""

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
        for segment in plan.moved:
            if segment.worker == self.name:
                self.here[segment.sequence] = {0: sys.maxsize}
            else:
                self.forget(segment.sequence)
        self.migrate(plan.migrations)
        for admission in plan.admitted:
            for segment in admission.segments:
                self.begin(segment)
        for segment in plan.grown:
            self.end(segment.sequence, segment.tokens[0])
            self.begin(segment)
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

    def end(self, sequence: int, position: int) -> None:
        """Another segment takes the tokens from this position on."""
        for start, stop in list(self.here.get(sequence, {}).items()):
            if start >= position:
                assert not len(self.slab.slots((sequence, start)))
                self.slab.free((sequence, start))
                del self.here[sequence][start]
            else:
                self.here[sequence][start] = min(stop, position)

    def switch(self, carrier: int, new: Segment) -> None:
        """Token by token: a sequence has the range in the carrier's slots, here or elsewhere."""
        sequence, (first, last) = new.sequence, new.tokens
        before = self.here.pop(sequence, {})
        if not before and new.worker != self.name:
            return
        closes, last = last is not None, sys.maxsize if last is None else last
        if not closes and new.worker == self.name:
            last = first + len(self.slab.slots((carrier, 0)))
        places = {}  # by position: what holds it, and where in that
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

    def migrate(self, migrations: list[Migration]) -> None:
        for migration in migrations:
            key = migration.sequence, 0
            if migration.parent is not None:
                self.carry(migration)
                continue
            if migration.source == self.name:
                assert list(self.here[migration.sequence]) == [0]
                assert migration.stop <= len(self.slab.slots(key))
            if migration.target == self.name:
                if key not in self.slab:
                    self.slab.open(key)
                assert len(self.slab.slots(key)) == migration.start < migration.stop
                self.slab.append(key, migration.stop - migration.start)

    def carry(self, migration: Migration) -> None:
        """Let a carrier have slots for its range: those of its parent, or new ones."""
        if migration.source == self.name:
            ((first, _),) = [
                (start, stop)
                for start, stop in self.here[migration.parent or 0].items()
                if start <= migration.start and migration.stop <= stop
            ]
            part = (migration.parent or 0, first), migration.start - first, migration.stop - first
            self.slab.rearrange([], {(migration.sequence, 0): [part]})
        elif migration.target == self.name:
            self.slab.open((migration.sequence, 0))
            self.slab.append((migration.sequence, 0), migration.stop - migration.start)

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
        st.lists(st.integers(0, 14), min_size=3, max_size=3),  # a completion stops by itself after that many tokens
        st.one_of(st.none(), st.integers(0, 25)),  # aborted at this turn
        st.integers(0, 10),  # arrives at this turn
    ),
    max_size=12,
)


class Cluster:
    """Compute workers that take their time, and memory workers, under a scheduler; checks every plan."""

    prefix_cache = False
    overcommit = 1.0

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
        self.scheduler = scheduler(capacities, lanes, limits, longest, self.prefix_cache, self.overcommit)
        self.groups: dict[int, Group] = {}
        self.lengths: dict[str, list[int]] = {}  # of completions that ended by themselves
        self._depth = depth
        self._in_flight: list[list[StepPlan]] = [[] for _ in range(lanes)]
        self._turns = [0] * lanes
        self._computed: dict[int, int] = {}  # tokens whose steps have completed, by sequence
        self._migrations: list[Migration] = []  # that have begun and are not done
        self._owners: dict[int, tuple[int, int]] = {}  # by sequence: its request and completion
        self._drawn: dict[tuple[int, int], list[int]] = {}  # by request and completion
        self.moved = self.grown = 0

    def drop(self, number: int) -> None:
        """The KV of one of the requests that have any is dropped."""
        holders = [group for memory in self.memories for group in self.scheduler.holders(memory.name)]
        if holders:
            self.scheduler.drop(holders[number % len(holders)])

    def migrate(self) -> None:
        """The oldest migration is done, be its sequence still there or not."""
        if self._migrations:
            self.scheduler.migrated(self._migrations.pop(0).number)

    def arrive(self, turn: int) -> None:
        for index, (prompt, max_tokens, n, _, aborted, arrival) in enumerate(self.requests):
            if arrival == turn:
                new = request(str(index), prompt, max_tokens=max_tokens, n=n)
                self.submit(index, dataclasses.replace(new, prompt_token_ids=self.prompt(index)))
            if aborted is not None and aborted == turn - arrival:
                self.scheduler.abort(str(index))

    def submit(self, index: int, made: Request) -> None:
        self.groups[index] = self.scheduler.add(made)

    def prompt(self, index: int) -> list[int]:
        return list(range(self.requests[index][0]))

    def complete(self, lane: int) -> None:
        """The oldest step of a lane ends."""
        steps, stops = self._in_flight[lane].pop(0).sequences, dict[int, int]()
        for step in steps:
            self._computed[step.sequence] = step.stop
            stops |= dict.fromkeys(step.draws, step.stop)
        for sequence, (group, completion) in self.scheduler.complete(lane).items():
            assert sequence == completion.sequence
            assert stops[sequence] == group.prompt_length + len(completion.generated)  # each token is drawn once
            self.take(group, completion)

    def take(self, group: Group, completion: Completion) -> None:
        """A completion has drawn a token."""
        token = 100 * completion.index + len(completion.generated)
        completion.generated.append(token)
        self._drawn.setdefault((int(group.request.request_id), completion.index), []).append(token)
        name = group.request.request_id
        if len(completion.generated) in (group.max_tokens, self.requests[int(name)][3][completion.index]):
            self.lengths.setdefault(name, []).append(len(completion.generated))
            self.scheduler.finish(group, completion)

    def plan(self, lane: int) -> None:
        """All the steps a lane may have in flight begin."""
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
            moved = {segment.sequence for segment in plan.moved}
            assert not (running | earlier) & {*plan.released, *moved}
            for migration in plan.migrations:
                whose = migration.sequence if migration.parent is None else migration.parent
                assert migration.stop <= self._computed.get(whose, sys.maxsize if migration.parent is not None else 0)
            self._migrations += plan.migrations
            self.moved += len(plan.moved)
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


@settings(max_examples=300, deadline=None)
@given(
    requests=requests,
    memories=st.integers(1, 3),
    lanes=st.integers(1, 3),
    depth=st.integers(1, 3),
    switches=st.dictionaries(st.integers(0, 20), st.integers(1, 3), max_size=4),
    limits=st.sampled_from([LIMITS, MANY]),
    spare=st.sampled_from([0, 3, 100]),
    longest=st.sampled_from([None, None, 5, 11]),
    migration_turns=st.integers(1, 6),
    drops=st.dictionaries(st.integers(0, 30), st.integers(0, 20), max_size=8),
)
def test_every_request_ends_and_every_slot_comes_back(
    requests: list,
    memories: int,
    lanes: int,
    depth: int,
    switches: dict[int, int],
    limits: Limits,
    spare: int,
    longest: int | None,
    migration_turns: int,
    drops: dict[int, int],
) -> None:
    """Whatever is planned ahead, grows or moves to other memory workers, or is dropped and computed again, and however
    often the number of lanes changes. The longest request may need all slots."""
    cluster = Cluster(requests, memories, lanes, depth, limits, -(-53 // memories) + spare, longest)
    for turn in itertools.count():
        assert turn < 2000, "the scheduler does not come to rest"
        if turn in switches:
            cluster.scheduler.use_lanes(min(switches[turn], lanes))
        cluster.arrive(turn)
        if turn % migration_turns == 0:
            cluster.migrate()
        if turn in drops:
            cluster.drop(drops[turn])
        for lane in range(lanes):
            if cluster.scheduler.in_flight(lane) and (turn + lane) % 2:  # steps overlap turns
                cluster.complete(lane)
            cluster.plan(lane)
        if turn > 20 and not cluster.busy:
            break
    assert all(memory.slab.used == 0 and not memory.here for memory in cluster.memories)
    assert all(reserved == 0 for reserved in cluster.scheduler.placement.reserved.values())
    for index, (_, _, n, stops, aborted, _) in enumerate(requests):
        if aborted is None:
            most = cluster.groups[index].max_tokens
            assert sorted(cluster.lengths[str(index)]) == sorted(min(stop or most, most) for stop in stops[:n])


def test_a_completion_that_ended_goes_to_another_lane_with_those_to_be_forked_from_it() -> None:
    larger, smaller = (4, 8, 3, [0, 0, 0], None, 0), (4, 8, 2, [1, 0, 0], None, 0)
    cluster = Cluster([larger, smaller], memories=1, lanes=2, depth=1, limits=MANY)
    cluster.scheduler.use_lanes(1)
    cluster.arrive(0)
    cluster.plan(0)
    cluster.scheduler.use_lanes(2)  # the larger request goes to lane 0, the other, with its first completion, to lane 1
    cluster.complete(0)
    cluster.plan(0)
    cluster.plan(1)
    assert cluster.groups[0].lane == 0 and cluster.groups[1].lane == 1
    assert [len(memory.here) for memory in cluster.memories] == [4]


def turn_of(under_test: Scheduler, lanes: Iterable[int], depth: int) -> list[StepPlan]:
    plans = []
    for lane in lanes:
        while under_test.in_flight(lane) < depth and (plan := under_test.plan(lane)) is not None:
            plans.append(plan)
    return plans


def draw_all(under_test: Scheduler, lane: int, requests: list) -> None:
    """The oldest step of a lane ends."""
    for group, completion in under_test.complete(lane).values():
        completion.generated.append(7)
        stops = requests[int(group.request.request_id)][3]
        if len(completion.generated) in (group.max_tokens, stops[completion.index]):
            under_test.finish(group, completion)


@settings(max_examples=300, deadline=None)
@given(
    requests=requests,
    lanes=st.integers(1, 5),
    depth=st.integers(1, 3),
    switches=st.dictionaries(st.integers(0, 20), st.integers(1, 5), max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_lanes_that_are_not_plannable_have_nothing_to_plan(
    requests: list, lanes: int, depth: int, switches: dict[int, int], random: Random
) -> None:
    """Asking only those gives the plans that asking every lane in every turn gives."""
    asked, all_asked = (scheduler({"memory0": 60, "memory1": 40}, lanes) for _ in range(2))
    pair = (asked, all_asked)
    for turn in range(120):
        for index, (prompt, max_tokens, n, _, aborted, arrival) in enumerate(requests):
            for one in pair:
                if arrival == turn:
                    one.add(request(str(index), prompt, max_tokens=max_tokens, n=n))
                if aborted is not None and aborted == turn - arrival:
                    one.abort(str(index))
        lane = random.randrange(lanes)
        if asked.migrating and random.random() < 0.3:
            number = asked.migrating[0]
            for one in pair:
                one.migrated(number)
        if asked.in_flight(lane):
            for one in pair:
                draw_all(one, lane, requests)
        if turn in switches:
            for one in pair:
                one.use_lanes(min(switches[turn], lanes))
        assert turn_of(asked, asked.plannable(depth), depth) == turn_of(all_asked, range(lanes), depth)


def test_a_step_without_sequences_may_end_before_the_one_it_was_planned_behind() -> None:
    """A compute worker answers a plan that only releases at once, while the step before still runs."""
    under_test = scheduler({"memory0": 100})
    for name, tokens in (("short", 2), ("long", 3)):
        under_test.add(request(name, 2, max_tokens=tokens))
    plans = [under_test.plan(0), under_test.plan(0)]
    last = plans[0]
    for plan in plans:  # both draw twice, and "short" ends; meanwhile the last token of "long" is being drawn
        assert plan is not None
        behind = under_test.plan(0)
        for group, completion in under_test.complete(0, plan.step).values():
            completion.generated.append(7)
            if len(completion.generated) == group.max_tokens:
                under_test.finish(group, completion)
        last = last if behind is None else behind
    release = under_test.plan(0)
    assert release is not None and release.released and not release.sequences
    assert under_test.complete(0, release.step) == {}
    assert last is not None
    (drawn,) = under_test.complete(0, last.step).values()
    assert drawn[0].request.request_id == "long"


def test_a_step_with_sequences_does_not_complete_before_an_earlier_one() -> None:
    under_test = scheduler({"memory0": 1000})
    under_test.add(request("a", 3, max_tokens=5))
    first = plan_of(under_test)
    second = plan_of(under_test)
    with pytest.raises(AssertionError, match="before an earlier one"):
        under_test.complete(0, second.step)
    assert first.runs and second.runs


def test_a_long_prompt_is_cut_into_chunks_and_decoding_goes_on_beside_it() -> None:
    under_test = scheduler({"memory0": 100})
    under_test.add(request("short", 2, max_tokens=9))
    under_test.plan(0)
    for _, completion in under_test.complete(0).values():
        completion.generated.append(7)
    under_test.add(request("long", 20, max_tokens=2))
    chunks = []
    for _ in range(3):
        plan = under_test.plan(0)
        assert plan is not None
        decode, prompt = plan.sequences
        assert decode.tokens == [7] and decode.draws == [decode.sequence]
        chunks.append((prompt.start, len(prompt.tokens), bool(prompt.draws)))
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
    assert chunks == [(0, 7, False), (7, 7, False), (14, 6, True)]


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        (0, {}, "empty"),
        (32, {}, "32 tokens; this runtime takes at most 31"),
        (4, {"n": 5}, "n is 5"),
        (20, {"n": 3, "max_tokens": 8}, "may need 41 KV tokens; 2 memory workers hold 40 in all"),
    ],
)
def test_what_can_never_be_served_is_refused_with_figures(prompt: int, params: dict, says: str) -> None:
    under_test = scheduler({"memory0": 30, "memory1": 10})
    with pytest.raises(RequestError, match=says):
        under_test.add(request("r", prompt, **params))
    assert under_test.plan(0) is None


def test_more_completions_than_a_step_has_rows_are_refused_though_all_lanes_together_have_room() -> None:
    under_test = scheduler({"memory0": 1000}, lanes=2, limits=Limits(64, 32, 32))
    under_test.add(request("most", 4, n=32, max_tokens=2))
    with pytest.raises(RequestError, match="n is 33; this runtime decodes 32 sequences of a request"):
        under_test.add(request("more", 4, n=33, max_tokens=2))


def test_requests_spread_over_lanes_and_memory_workers() -> None:
    under_test = scheduler({"memory0": 100, "memory1": 100}, lanes=2)
    for name in "abcd":
        under_test.add(request(name, 2, max_tokens=4))
    seen = []
    for _ in range(3):
        for lane in (0, 1):
            plan = under_test.plan(lane)
            if plan is None:
                continue
            seen += [(lane, admission.segments[0].worker) for admission in plan.admitted]
            for _, completion in under_test.complete(lane).values():
                completion.generated.append(1)
    assert sorted(lane for lane, _ in seen) == [0, 0, 1, 1]
    assert sorted(memory for _, memory in seen) == ["memory0", "memory0", "memory1", "memory1"]


def test_the_id_of_an_aborted_request_is_free_at_once_even_while_its_step_runs() -> None:
    under_test = scheduler({"memory0": 20})
    under_test.add(request("same", 2, max_tokens=4))
    under_test.plan(0)
    under_test.abort("same")
    under_test.add(request("same", 3, max_tokens=1))
    assert under_test.complete(0) == {}
    plan = under_test.plan(0)
    assert plan is not None and len(plan.released) == 1 and len(plan.admitted) == 1
    ((group, completion),) = under_test.complete(0).values()
    under_test.finish(group, completion)
    assert under_test.plan(0) is not None
    under_test.complete(0)
    assert under_test.plan(0) is None and under_test.placement.reserved == {"memory0": 0}


def test_the_id_of_a_finished_request_is_free_at_once_even_while_a_step_planned_ahead_runs() -> None:
    under_test = scheduler({"memory0": 20})
    under_test.add(request("same", 2, max_tokens=4))
    assert under_test.plan(0) is not None and under_test.plan(0) is not None
    ((group, completion),) = under_test.complete(0).values()
    under_test.finish(group, completion)  # by a stop string, say: the next token is being drawn in vain
    again = under_test.add(request("same", 3, max_tokens=1))
    assert under_test.complete(0) == {}
    assert under_test.plan(0) is not None
    ((group, completion),) = under_test.complete(0).values()
    assert group is again
    under_test.finish(group, completion)
    assert under_test.plan(0) is not None
    under_test.complete(0)
    assert under_test.plan(0) is None and under_test.placement.reserved == {"memory0": 0}


def test_without_max_tokens_a_request_gets_what_memory_workers_hold() -> None:
    under_test = scheduler({"memory0": 20, "memory1": 12})
    group = under_test.add(Request("r", None, [1] * 10, SamplingParams(max_tokens=None, n=2)))
    assert (group.max_tokens, group.tokens) == (12, 32)
    alone = under_test.add(Request("s", None, [1] * 10, SamplingParams(max_tokens=None)))
    assert (alone.max_tokens, alone.tokens) == (22, 31)


def calls_a_row(lanes: int, memories: int) -> float:
    """Functions called, ours and the interpreter's, for every sequence planned and completed in a busy cluster."""
    limits = Limits(max_sequences=8 * lanes, max_num_batched_tokens=64, max_model_len=64)
    under_test = scheduler({f"memory{index}": 400 for index in range(memories)}, lanes, limits)
    random = Random(0)
    for index in range(24 * lanes):
        under_test.add(request(str(index), random.randint(1, 8), max_tokens=random.randint(4, 24)))
    calls = rows = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    while under_test.waiting or under_test.running:
        sys.setprofile(count)
        for lane in under_test.plannable(2):
            while under_test.in_flight(lane) < 2 and (plan := under_test.plan(lane)) is not None:
                rows += len(plan.sequences)
        sys.setprofile(None)  # the looks over all lanes are this test's own
        done = random.choice([lane for lane in range(lanes) if under_test.in_flight(lane)])
        sys.setprofile(count)
        for group, completion in under_test.complete(done).values():
            completion.generated.append(7)
            if len(completion.generated) == group.max_tokens:
                under_test.finish(group, completion)
        sys.setprofile(None)
    return calls / rows


def test_sequences_that_go_on_are_not_looked_at_one_by_one() -> None:
    """The contract of ``complete``: while nobody joins or leaves, the same object says who has drawn."""
    under_test = scheduler({"memory0": 100})
    for name in "ab":
        under_test.add(request(name, 2, max_tokens=6))
    drawn = []
    for _ in range(6):
        assert under_test.plan(0) is not None
        drawn.append(under_test.complete(0))
        for _, completion in drawn[-1].values():
            completion.generated.append(7)
    assert all(same is drawn[1] for same in drawn[1:4])
    for group, completion in drawn[-1].values():
        under_test.finish(group, completion)
    assert under_test.plan(0) is not None
    assert under_test.complete(0) == {}


def test_what_a_decision_costs_does_not_grow_with_the_cluster() -> None:
    small = calls_a_row(lanes=4, memories=4)
    assert calls_a_row(lanes=40, memories=40) < 1.2 * small
