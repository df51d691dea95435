"""The scheduler with disks: what comes back from one is what was copied there, and every slot is accounted for."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lamina import spills
from lamina.groups import ids_of
from lamina.placement import spill
from lamina.placement.spill import Blocks, keys_of
from lamina.schedule.limits import Limits
from lamina.schedule.suspects import Hold
from lamina.spills import Fetch, Spill
from lamina.types import StepPlan
from tests.schedule.schedules import LIMITS
from tests.schedule.test_epochs import NOBODY
from tests.schedule.test_prefixes import Caching
from tests.schedule.test_scheduler import MANY

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes", "short_blocks")
BLOCK = 2


@pytest.fixture(scope="module")
def short_blocks() -> Iterator[None]:
    """Blocks of two tokens, copied however empty a worker is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spills, "BLOCK", BLOCK)
        patch.setattr(spill, "BLOCK", BLOCK)
        patch.setattr(spill, "FULL", 0.1)
        patch.setattr(spill, "MOST_BLOCKS", 3)
        yield


class Spilling(Caching):
    """Memory workers with disks, which take their time and sometimes fail.

    Attributes:
        fetched: blocks that came back.
    """

    overcommit = 1.7

    def __init__(self, requests: list, prompts: list, random: Random, *settings: Any) -> None:
        super().__init__(requests, prompts, *settings)
        self.fetched = 0
        self._random = random
        self._disks: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        self._transfers: list[Spill | Fetch] = []

    def prompt(self, index: int) -> list[int]:
        """As in ``Caching``, of three kinds that do not begin alike."""
        first = 200 * self.prompts[index][3]
        return [token if token >= 1000 else first + token for token in super().prompt(index)]

    def _check(self, plan: StepPlan) -> None:
        for fetch in plan.fetches:
            self._computed[fetch.child] = fetch.start
        super()._check(plan)
        self._transfers += [*plan.spills, *plan.fetches]

    def transfer(self) -> None:
        """One of the copies is over."""
        if not self._transfers:
            return
        one = self._transfers.pop(self._random.randrange(len(self._transfers)))
        memory = next((memory for memory in self.memories if memory.name == one.worker), None)
        if memory is None:
            return  # lost, or it has left
        sequence = one.sequence if isinstance(one, Spill) else one.child
        complete = sequence in memory.here and self._random.random() < 0.9
        if complete:
            slots, contents = memory.slab.slots((sequence, 0)).tolist(), self.contents[memory.name]
            places = one.places if isinstance(one, Spill) else range(one.start // BLOCK, len(slots) // BLOCK)
            for place, block in zip(places, one.blocks, strict=True):
                held = slots[place * BLOCK : (place + 1) * BLOCK]
                if isinstance(one, Spill):
                    self._disks[memory.name, block] = [contents[slot] for slot in held]
                else:
                    contents |= zip(held, self._disks[memory.name, block], strict=True)
                    self.fetched += 1
                    self._computed[sequence] = one.start + len(one.blocks) * BLOCK
        failed = not complete and sequence in memory.here and self._random.random() < 0.1
        self.scheduler.disks.done(one.worker, one.number, complete, "the disk is full" if failed else "")

    def end_epoch(self, number: int, hold: Hold = NOBODY) -> None:
        self._transfers.clear()  # the workers forget them
        super().end_epoch(number, hold)

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._transfers)


chats = st.lists(
    st.tuples(
        st.tuples(st.integers(4, 14), st.integers(0, 4), st.integers(0, 2), st.integers(0, 3)),
        st.integers(1, 5),  # max_tokens
        st.integers(1, 2),  # n
        st.lists(st.integers(0, 6), min_size=2, max_size=2),  # a completion stops by itself after that many tokens
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),  # aborted at this turn
        st.integers(0, 80),  # arrives at this turn
    ),
    min_size=6,
    max_size=16,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=chats,
    random=st.randoms(use_true_random=False),
    memories=st.integers(1, 3),
    lanes=st.integers(1, 3),
    depth=st.integers(1, 3),
    switches=st.dictionaries(st.integers(0, 30), st.integers(1, 3), max_size=4),
    limits=st.sampled_from([LIMITS, MANY]),
    capacity=st.sampled_from([60, 27, 27]),
    longest=st.sampled_from([None, None, 11]),
    migration_turns=st.integers(1, 6),
    ends=st.dictionaries(st.integers(0, 40), st.integers(0, 2), max_size=3),
    joins=st.dictionaries(st.integers(0, 30), st.integers(20, 60), max_size=2),
    leaves=st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=3),
    drops=st.dictionaries(st.integers(0, 60), st.integers(0, 20), max_size=5),
)
def test_what_comes_back_from_a_disk_is_what_requests_attend_to(
    requests: list,
    random: Random,
    memories: int,
    lanes: int,
    depth: int,
    switches: dict[int, int],
    limits: Limits,
    capacity: int,
    longest: int | None,
    migration_turns: int,
    ends: dict[int, int],
    joins: dict[int, int],
    leaves: dict[int, int],
    drops: dict[int, int],
) -> None:
    """Whatever is evicted, aborted, moved, dropped or lost while blocks are copied."""
    prompts, others = [one[0] for one in requests], [one[1:] for one in requests]
    cluster = Spilling(others, prompts, random, memories, lanes, depth, limits, capacity, longest)
    for turn in itertools.count():
        assert turn < 2000, "the scheduler does not come to rest"
        if turn in switches:
            cluster.scheduler.use_lanes(min(switches[turn], lanes))
        cluster.arrive(turn)
        cluster.transfer()
        if turn % migration_turns == 0:
            cluster.migrate()
        if turn in drops:
            cluster.drop(drops[turn])
        if turn in ends:
            cluster.end_epoch(ends[turn])
        if turn in joins:
            cluster.join(joins[turn])
        if turn in leaves:
            cluster.drain(leaves[turn])
        cluster.leave()
        for lane in range(lanes):
            if cluster.scheduler.in_flight(lane) and (turn + lane) % 2:
                cluster.complete(lane)
            cluster.plan(lane)
        if turn > 90 and not cluster.busy:
            break
    cluster.leave()
    cluster.check_rest()
    assert not cluster.scheduler.disks.held
    event(f"fetched: {min(cluster.fetched, 3)}")
    for index, (_, _, n, stops, aborted, _) in enumerate(cluster.requests):
        if aborted is None and index not in cluster.unservable:
            most = cluster.groups[index].max_tokens
            assert sorted(cluster.lengths[str(index)]) == sorted(min(stop or most, most) for stop in stops[:n])


class Chats(Spilling):
    """Eight prompts of nine tokens, again and again, and large disks that work."""

    overcommit = 5.0

    def prompt(self, index: int) -> list[int]:
        return [1000 * (index % 8) + number for number in range(9)]


class Sound(Random):
    """No disk fails."""

    def random(self) -> float:
        return 0.05


def test_chats_that_were_evicted_come_back_from_the_disk() -> None:
    arrivals = [*range(0, 160, 20), 200, 220]
    cluster = Chats(
        [(2, 1, [0], None, turn) for turn in arrivals], [(0, 0, 9, 0)] * 10, Sound(1), 1, 1, 2, LIMITS, 27, None
    )
    for turn in range(260):
        cluster.arrive(turn)
        cluster.transfer()
        if cluster.scheduler.in_flight(0):
            cluster.complete(0)
        cluster.plan(0)
    assert [cluster.groups[index].cached_tokens for index in range(10)] == [0] * 8 + [8, 8]
    assert cluster.fetched == 8 and cluster.scheduler.disks.fetched == 8 * BLOCK
    cluster.check_rest()


def test_a_disk_gives_up_what_was_used_longest_ago_and_nothing_that_is_being_read() -> None:
    disk, keys = Blocks(3), [bytes([number]) for number in range(5)]
    for key in keys[:3]:
        disk.put([key], disk.take(1))
    pinned = disk.pin(keys[:1])
    disk.put(keys[3:4], disk.take(1))
    assert [key in disk for key in keys] == [True, False, True, True, False]
    assert len(disk.take(3)) == 2 and keys[0] in disk
    disk.unpin(pinned)
    assert disk.take(1) == pinned and not len(disk)


def test_keys_of_blocks_depend_on_all_tokens_before_and_on_the_salt() -> None:
    ids = ids_of(range(3 * BLOCK + 1))
    other = ids_of([99, *range(1, 3 * BLOCK + 1)])
    keys = keys_of("", ids, len(ids))
    assert len(keys) == 3 and keys_of("", ids, 3 * BLOCK - 1) == keys[:2]
    assert not {*keys} & {*keys_of("", other, len(other)), *keys_of("tenant", ids, len(ids))}
