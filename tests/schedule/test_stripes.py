"""Requests with heads on several workers while workers are lost, join and leave: real slabs take all plans."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.control.messages import MemorySetup
from lamina.core import steps
from lamina.core.errors import RequestError
from lamina.core.heads import HeadShards
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Fetch, Spill, StepPlan
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec, DType, Overlap, Request, Segment
from lamina.dataplane.wire import check_segments
from lamina.engine.stats import holdings
from lamina.engine.updates import segments_of
from lamina.kv import disk, prefix_cache
from lamina.kv.stripes import StripedPlacement
from lamina.memory import holdings as slots
from lamina.memory.store import KvStore
from lamina.schedule.admission import SHARE
from lamina.schedule.limits import Limits
from lamina.schedule.policy import FIFO
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.turn import Turn
from tests.support.disk_blocks import unaccounted
from tests.support.schedules import ATTENTIONS, LIMITS, client, plan_of, request
from tests.support.turn_driver import ENOUGH, FIXED, Driver

pytestmark = pytest.mark.usefixtures("impatient")

SHARDS = HeadShards(3, 3)
BLOCK = 2
SPEC = AttentionSpec(layer=0, query_heads=3, kv_heads=3, qk_dim=1, v_dim=1, scale=1.0)


@pytest.fixture(scope="module")
def short_blocks() -> Iterator[None]:
    """Blocks of two tokens, copied however empty a worker is, and short prefixes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "SHORTEST", 3)
        patch.setattr(disk, "FULL", 0.1)
        for module in (steps, disk, slots):
            patch.setattr(module, "BLOCK", BLOCK)
        yield


class Striped(Driver):
    """With a prefix cache and disks. Every memory worker is told of everything.

    Attributes:
        blocks: By worker and block of its disk, the tokens and the shard whose KV it has, and all tokens before.
        fetched: Blocks that came back.
    """

    failing = 0.1  # share of transfers
    overcommit = 2.0

    def __init__(
        self, capacities: list[int], depth: int, chance: random.Random, longest: int | None, clients: int, most: int
    ) -> None:
        """``most``: Most output tokens of a request."""
        super().__init__(FIXED, depth, chance, longest, clients=clients)
        self.most = most
        self.blocks: dict[tuple[str, int], tuple[list[int], int]] = {}
        self.transfers: list[Spill | Fetch] = []
        self.fetched = 0
        self.stores = {f"memory{number}": self.store(number, room) for number, room in enumerate(capacities)}
        rooms = dict(zip(self.stores, capacities, strict=True))
        self.placement = StripedPlacement(rooms, SHARDS, longest)
        self.turn = Turn(
            LIMITS,
            self.placement,
            FIXED,
            attentions=ATTENTIONS,
            kv_heads=SHARDS.heads,
            plan_ahead=depth > 1,
            prefix_cache=True,
            overcommit=self.overcommit,
        )
        members = [Member("compute0", "compute", "cpu", "")]
        members += [Member(name, "memory", "cpu", "", room) for name, room in rooms.items()]
        self.topology = Topology(FIRST, tuple(members), FIXED)
        self.leaving = ""
        self.joined = len(capacities)

    @staticmethod
    def store(number: int, capacity: int) -> KvStore:
        setup = MemorySetup([SPEC], DType.FLOAT32, capacity, 1, Overlap(), False, head_shards=SHARDS.count)
        return KvStore(f"memory{number}", setup)

    def come(self, name: str) -> None:
        """It begins like others, or like none."""
        first, length = 100 * self.chance.choice([0, int(name)]), self.chance.randint(1, 20)
        params = SamplingParams(n=self.chance.randint(1, 3), max_tokens=self.chance.randint(1, self.most))
        try:
            ids, asks = [*range(first, first + length)], client(int(name), self.clients)
            self.live[name] = self.turn.scheduler.submit(Request(name, None, ids, params, client=asks))
        except RequestError:  # too long for the workers that are left
            self.ended[name] += 1

    def on_plan(self, plan: StepPlan) -> None:
        for store in self.stores.values():
            store.apply(plan)
        disks = self.turn.scheduler.disks
        for spill in plan.spills:
            leaves = [one for one in self.turn.scheduler.prefixes.ends() if one.sequence == spill.sequence]
            for leaf in leaves:  # none if the same plan evicts it
                self.note_blocks(spill, spill.sequence, list(leaf.whole()[1]), spill.places)
        for fetch in plan.fetches:
            ids, first = list(disks._coming[fetch.number].ids), fetch.start // BLOCK
            self.note_blocks(fetch, fetch.child, ids, range(first, len(ids) // BLOCK))
        self.transfers += [*plan.spills, *plan.fetches]
        self.check()

    def note_blocks(self, one: Spill | Fetch, sequence: int, ids: list[int], places: Sequence[int]) -> None:
        """A worker writes or reads the blocks of all its shards of these places, tokens of a sequence with slots."""
        if one.worker not in self.stores:
            return
        held = self.stores[one.worker].held
        segment = held.segments[sequence][0]  # later ones are of tokens drawn elsewhere
        shards = [key[1] % SHARDS.count for key in held.keys(segment)]
        wanted = [(ids[: (place + 1) * BLOCK], shard) for place in places for shard in shards]
        assert all(len(held.slab.slots(key)) >= (places[-1] + 1) * BLOCK for key in held.keys(segment))
        if isinstance(one, Spill):
            self.blocks |= zip([(one.worker, block) for block in one.blocks], wanted, strict=True)
        else:
            assert [self.blocks[one.worker, block] for block in one.blocks] == wanted
            self.fetched += len(wanted)

    def transfer(self) -> None:
        """A worker has copied or fetched its part of something, or could not."""
        if self.transfers:
            one = self.transfers.pop(self.chance.randrange(len(self.transfers)))
            if one.worker in self.stores:
                sequence = one.sequence if isinstance(one, Spill) else one.child
                held = sequence in self.stores[one.worker].held.segments
                complete = held and self.chance.random() >= self.failing
                fails = held and not complete and self.chance.random() < 0.1
                self.turn.scheduler.transferred(one.worker, one.number, complete, "the disk is full" if fails else "")

    def check(self, resting: bool = False) -> None:
        """Slots that are in use are reserved or idle, and all of them at rest, when only what is idle is left; running
        sequences are all there; callers and operators are told of memory workers that take part."""
        taken = Counter[str]()
        for place in self.placement.capacities:
            tokens = self.placement.reserved[place] + self.placement.idle[place]
            for segment in self.placement.expand([Segment(0, place, SHARDS.whole, (0, None))]):
                taken[segment.worker] += tokens * (segment.heads[1] - segment.heads[0])
        idle = self.turn.scheduler.prefixes.idle()
        for name, store in self.stores.items():
            assert store.slab.used <= taken[name] <= store.slab.capacity
            assert not resting or store.slab.used == taken[name]
            assert not resting or (store.used_tokens, store.sequences) == idle.get(name, (0, 0))
        for plan in self.turn.in_flight.values():
            for step in plan.sequences:
                held = [one for store in self.stores.values() for one in store.held.segments.get(step.sequence, [])]
                check_segments(step.sequence, held, SHARDS)
        for group in self.live.values():  # as they were when they drew their last tokens: some have lost KV since
            assert {segment.worker for segment in segments_of(group)} <= self.stores.keys()
        scheduler = self.turn.scheduler
        for name, requests in holdings(scheduler.moves.lanes, scheduler.prefixes, self.placement).items():
            assert max(requests.values()) <= self.stores[name].slab.capacity // SHARDS.count

    def lose(self) -> None:
        """A memory worker with everything on it."""
        name = self.chance.choice(list(self.stores))
        if len(self.stores) < 2 or name == self.leaving:
            return
        del self.stores[name]
        self.topology = self.topology.without([name])
        self.unanswered.clear()
        self.transfers.clear()
        remains = self.turn.end_epoch(self.topology)
        for kept, store in self.stores.items():
            store.truncate(remains.kept[kept])
        for group in self.turn.scheduler.stranded:
            self.turn.scheduler.abort(group.request.request_id)
            self.end(group.request.request_id)
        self.turn.begin_epoch()
        self.check()

    def join(self) -> None:
        number, room = self.joined, self.chance.randint(30, 60)
        self.joined += 1
        self.stores[f"memory{number}"] = self.store(number, room)
        member = Member(f"memory{number}", "memory", "cpu", "", room)
        self.topology = self.topology.joined([member], FIXED)
        self.turn.change_members(self.topology)

    def leave(self) -> None:
        """One is drained, and goes when it is empty."""
        scheduler = self.turn.scheduler
        if self.leaving and scheduler.is_drained(self.leaving):
            assert self.stores.pop(self.leaving).slab.used == 0
            self.topology = self.topology.left([self.leaving], FIXED)
            self.leaving = ""
            self.turn.change_members(self.topology)
        elif not self.leaving and len(self.stores) > 2 and self.chance.random() < 0.2:
            self.leaving = self.chance.choice(list(self.stores))
            scheduler.drain(self.leaving)


@example(  # grows there and back at once
    capacities=[30, 33], depth=1, requests=11, longest=6, changes=0.0, seed=1, clients=1, share=SHARE, most=8
)
@example(  # fills places that share a worker, on which each has room for itself alone
    capacities=[39, 31, 47, 43],
    depth=1,
    requests=3,
    longest=None,
    changes=0.15,
    seed=1711173980,
    clients=1,
    share=0,
    most=60,
)
@given(
    capacities=st.lists(st.integers(30, 60), min_size=2, max_size=4),
    depth=st.integers(1, 2),
    requests=st.integers(1, 25),
    longest=st.sampled_from([None, 6]),
    changes=st.sampled_from([0.0, 0.15]),
    seed=st.integers(0, 2**32),
    clients=st.integers(1, 5),
    share=st.sampled_from([0, SHARE]),
    most=st.sampled_from([8, 40]),
)
def test_every_head_of_every_token_is_somewhere_while_workers_come_and_go(
    capacities: list[int],
    depth: int,
    requests: int,
    longest: int | None,
    changes: float,
    seed: int,
    clients: int,
    share: int,
    most: int,
    short_blocks: None,
) -> None:
    chance = random.Random(seed)
    with mock.patch("lamina.schedule.admission.SHARE", share):
        driver = Striped(capacities, depth, chance, longest, clients, most)
        for number in range(requests):
            driver.come(str(number))
            if chance.random() < changes:
                chance.choice([driver.lose, driver.join, driver.leave, driver.go])()
            driver.transfer()
            driver.turn_once()
        for _ in range(ENOUGH):
            if not driver.live and not driver.turn.in_flight and not driver.leaving and not driver.transfers:
                break
            driver.leave()
            driver.transfer()
            driver.turn_once()
    assert driver.ended == Counter(map(str, range(requests)))
    for _ in range(9):
        driver.plan()  # what has ended is released
        driver.answer()
    driver.check(resting=not any(driver.placement.reserved.values()))
    assert not driver.turn.scheduler.disks.held and not unaccounted(driver.turn.scheduler.disks)


class Chats(Striped):
    """Six prompts of 13 tokens, again and again, and large disks that work."""

    failing = 0.0
    overcommit = 5.0

    def come(self, name: str) -> None:
        first = 100 * (int(name) % 6)
        sent = Request(name, None, [*range(first, first + 13)], SamplingParams(n=1, max_tokens=2))
        self.live[name] = self.turn.scheduler.submit(sent)


def test_heads_that_were_evicted_come_back_from_the_disks_of_all_workers(short_blocks: None) -> None:
    driver = Chats([30, 32], 1, random.Random(1), None, 1, 2)
    found = []
    for number in range(12):
        driver.come(str(number))
        found.append(driver.live[str(number)])
        for _ in range(60):
            driver.transfer()
            driver.turn_once()
        assert not driver.live
    assert driver.fetched and driver.fetched == SHARDS.count * driver.turn.scheduler.disks.fetched // BLOCK
    assert [one.cached_tokens for one in found[:6]] == [0] * 6 and sum(one.cached_tokens for one in found[6:]) > 48
    assert not unaccounted(driver.turn.scheduler.disks)


def test_a_sequence_waits_for_slots_that_are_about_to_be_free_and_suffice() -> None:
    """Slots of one worker alone are free, but tokens there would have all their heads on that worker."""
    placement = StripedPlacement({"memory0": 40, "memory1": 60}, HeadShards(2, 2))
    under_test = Scheduler(Limits(4, 64, 100), placement, 1, ATTENTIONS, 2, FIFO)
    group = under_test.submit(request("0", 30, max_tokens=40))
    plan_of(under_test)
    stripe = group.completions[0].worker
    for _, completion in under_test.complete(0).values():
        completion.generated.append(7)
    placement.reserve_on(stripe, placement.left(stripe))  # as if for another request, of which one token is released
    placement.will_release(stripe, 1)
    assert under_test.plan(0) is None and not under_test.dropped
    placement.free_slots(stripe, 1)
    plan = plan_of(under_test)
    assert plan.decoding.sequences and not plan.grown
