"""The scheduler with disks: what comes back from one is what was copied there, and every slot is accounted for."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import pytest

from lamina.core import steps
from lamina.core.requests import Group, ids_of
from lamina.core.steps import Fetch, Spill, StepPlan
from lamina.kv import disk as spill
from lamina.kv import prefix_cache
from lamina.kv.disk import Disks, keys_of
from lamina.kv.disk_blocks import Blocks, PlaceBlocks
from lamina.kv.placement import AHEAD
from lamina.schedule.admission import SHARE
from lamina.schedule.moves import Range
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.suspects import Hold
from tests.support.clusters import MANY, Course
from tests.support.disk_blocks import unaccounted
from tests.support.lossy_clusters import NOBODY, Moving, settled, step
from tests.support.schedules import LIMITS, plan_of, request

pytestmark = pytest.mark.usefixtures("impatient", "short_prefixes", "short_blocks", "unbounded_moves")
BLOCK = 2


@pytest.fixture(scope="module")
def short_blocks() -> Iterator[None]:
    """Blocks of two tokens, copied however empty a worker is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "BLOCK", BLOCK)
        patch.setattr(spill, "BLOCK", BLOCK)
        patch.setattr(spill, "FULL", 0.1)
        patch.setattr(spill, "MOST_BLOCKS", 3)
        yield


class Spilling(Moving):
    """Memory workers with disks, which take their time and sometimes fail. What they copy, they read at the end, from
    the slots that it had at first.

    Attributes:
        fetched: blocks that came back.
    """

    overcommit = 1.7

    def __init__(self, requests: list, prompts: list, random: Random, *settings: Any) -> None:
        super().__init__(requests, prompts, *settings)
        self.fetched = 0
        self.moved_away = set[int]()  # copies of what has moved meanwhile
        self._random = random
        self._disks: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        self._transfers: list[tuple[Spill | Fetch, list[int]]] = []

    def prompt(self, index: int) -> list[int]:
        """As in ``Caching``, of several kinds that do not begin alike."""
        first = 200 * self.prompts[index][3]
        return [token if token >= 1000 else first + token for token in super().prompt(index)]

    def _check(self, plan: StepPlan) -> None:
        for fetch in plan.fetches:
            self._computed[fetch.child] = fetch.start
        super()._check(plan)
        moved = {segment.sequence for switch in plan.switches for segment in switch.segments}
        self.moved_away |= {spill.number for spill, _ in self._transfers if _sequence(spill) in moved}
        slabs = {memory.name: memory.slab for memory in self.memories}
        begun: list[Spill | Fetch] = [*plan.spills, *plan.fetches]
        for one in begun:
            key = _sequence(one), 0
            slab = slabs[one.worker]
            self._transfers.append((one, slab.slots(key).tolist() if key in slab else []))

    def arrive(self, turn: int) -> None:
        super().arrive(turn)
        self.transfer()

    def transfer(self) -> None:
        """One of the copies is over."""
        if not self._transfers:
            return
        one, slots = self._transfers.pop(self._random.randrange(len(self._transfers)))
        memory = next((memory for memory in self.memories if memory.name == one.worker), None)
        if memory is None:
            return  # lost, or it has left
        sequence = _sequence(one)
        wanted = sequence in memory.here and one.number not in self.moved_away
        complete = wanted and self._random.random() < 0.9
        if complete:
            contents = self.contents[memory.name]
            places = one.places if isinstance(one, Spill) else range(one.start // BLOCK, len(slots) // BLOCK)
            for place, block in zip(places, one.blocks, strict=True):
                held = slots[place * BLOCK : (place + 1) * BLOCK]
                if isinstance(one, Spill):
                    self._disks[memory.name, block] = [contents[slot] for slot in held]
                else:
                    contents |= zip(held, self._disks[memory.name, block], strict=True)
                    self.fetched += 1
                    self._computed[sequence] = one.start + len(one.blocks) * BLOCK
        failed = wanted and not complete and self._random.random() < 0.1
        self.scheduler.transferred(one.worker, one.number, complete, "the disk is full" if failed else "")

    def end_epoch(self, number: int, hold: Hold = NOBODY) -> None:
        self._transfers.clear()  # the workers forget them
        super().end_epoch(number, hold)

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._transfers)


def _sequence(one: Spill | Fetch) -> int:
    return one.sequence if isinstance(one, Spill) else one.child


def chats(draw: Random) -> tuple[list[tuple[int, int, int, int]], list[Any]]:
    """Parts of prompts, and (max_tokens, n, when completions stop, when it is aborted, when it arrives)."""
    count = draw.randint(10, 40)
    prompts = [(draw.randint(7, 14), draw.randint(0, 4), draw.randint(0, 2), draw.randint(0, 6)) for _ in range(count)]
    others = [
        (
            draw.randint(1, 6),
            draw.choice([1, 1, 2]),
            [draw.randint(0, 8) for _ in range(2)],
            draw.choice([None, None, None, draw.randint(0, 12)]),
            draw.randint(0, 150),
        )
        for _ in range(count)
    ]
    return prompts, others


def events(draw: Random) -> dict[str, dict[int, Any]]:
    """What happens in which turn."""

    def some(kinds: list[int], what: Callable[[], Any]) -> dict[int, Any]:
        return {draw.randint(0, 150): what() for _ in range(draw.choice(kinds))}

    return {
        "move_several": some([0, 20, 80], lambda: [(draw.randint(0, 1000), draw.randint(1, 20))]),
        "drop": some([0, 0, 4], lambda: draw.randint(0, 20)),
        "end_epoch": some([0, 0, 1, 3], lambda: draw.randint(0, 2)),
        "join": some([0, 0, 1], lambda: draw.randint(20, 60)),
        "drain": some([0, 0, 1, 2], lambda: draw.randint(0, 5)),
        "use_lanes": some([0, 0, 3], lambda: draw.randint(1, 3)),
    }


def run(cluster: Spilling, course: Course) -> None:
    cluster.play(course, 160)
    cluster.leave()
    cluster.check_rest()
    assert not cluster.scheduler.disks.held and not cluster.scheduler.moves.in_progress
    assert not unaccounted(cluster.scheduler.disks)
    cluster.check_ends()


def spill_at_random(seeds: Iterable[int]) -> Counter[str]:
    """Schedules of chats at random; returns blocks that came back, moves, and both within one schedule."""
    counts = Counter[str]()
    for seed in seeds:
        draw = Random(seed)
        prompts, others = chats(draw)
        course = Course(
            lanes=draw.randint(1, 3),
            longest=draw.choice([None, None, 11]),
            limits=draw.choice([LIMITS, MANY]),
            capacity=draw.choice([60, 27, 35]),
            memories=draw.randint(1, 3),
            depth=draw.randint(1, 3),
            move_turns=draw.randint(1, 6),
            events=events(draw),
            clients=draw.randint(1, 5),
            share=draw.choice([0, SHARE]),
        )
        cluster = Spilling(others, prompts, draw, *course.sizes)
        run(cluster, course)
        moves = cluster.scheduler.moves.counts.moves
        counts += Counter(fetched=cluster.fetched, moves=moves, both=min(cluster.fetched, moves, 1))
        counts += Counter(cancelled=len(cluster.moved_away))
    return counts


def test_what_comes_back_from_a_disk_is_what_requests_attend_to() -> None:
    """Whatever is evicted, aborted, moved, dropped or lost while blocks are copied."""
    counts = spill_at_random([*range(40), 1140])  # in the last, members change during a disk's first copy
    assert counts["fetched"] > 20 and counts["moves"] > 30 and counts["both"] > 2, counts


@pytest.mark.slow
def test_thousands_of_blocks_come_back() -> None:
    counts = spill_at_random(range(1000, 3000))
    assert counts["fetched"] > 1000 and counts["both"] > 100 and counts["cancelled"] > 20, counts


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
        if cluster.scheduler.in_flight(0):
            cluster.complete(0)
        cluster.plan(0)
    assert [cluster.groups[index].cached_tokens for index in range(10)] == [0] * 8 + [8, 8]
    assert cluster.fetched == 8 and cluster.scheduler.disks.fetched == 8 * BLOCK
    cluster.check_rest()


def test_a_disk_gives_up_what_was_used_longest_ago_and_nothing_that_is_being_read() -> None:
    disk, keys = Blocks(3), [(bytes([number]), range(1)) for number in range(5)]
    for key in keys[:3]:
        disk.record_written([key], disk.allocate_blocks(1))
    pinned = disk.pin(keys[:1])
    disk.record_written(keys[3:4], disk.allocate_blocks(1))
    assert [key in disk for key in keys] == [True, False, True, True, False]
    assert len(disk.allocate_blocks(3)) == 2 and keys[0] in disk
    disk.unpin(pinned)
    assert disk.allocate_blocks(1) == pinned and not len(disk)


def test_tokens_are_on_disk_if_every_worker_of_a_place_has_its_heads() -> None:
    small, large, keys = Blocks(2), Blocks(6), [bytes([number]) for number in range(3)]
    place = PlaceBlocks({"small": (small, range(1)), "large": (large, range(1, 3))})
    for number, key in enumerate(keys):
        count, blocks = place.allocate_blocks(1)
        assert count == 1 and {worker: len(own) for worker, own in blocks.items()} == {"small": 1, "large": 2}
        place.record_written([key], [Spill(number, worker, 0, [0], own) for worker, own in blocks.items()])
    assert (keys[0], range(1, 3)) in large and [key in place for key in keys] == [False, True, True]
    assert place.count_kept(keys, 0) == 0 and place.count_kept(keys, 1) == 2
    assert {worker: len(own) for worker, own in place.pin(keys[1:]).items()} == {"small": 2, "large": 4}
    assert place.allocate_blocks(1) == (0, {"small": [], "large": []})
    assert (keys[0], range(1, 3)) in large, "a disk gives up nothing for keys that another disk has no room for"
    assert len(large.allocate_blocks(3)) == 2


def test_places_that_share_a_disk_take_turns() -> None:
    """Both always have something to copy."""
    placement, prefixes = Mock(closed=set(), capacities=["one", "other"]), Mock()
    placement.slots_with_disk.return_value = {"memory0": 1000}
    placement.parts.side_effect = lambda place: (("memory0", range(1)),)
    placement.filled.return_value = 1.0
    prefixes.ends.return_value = []
    prefixes.pop_kept.return_value = []
    disks, copied = Disks(placement, prefixes, itertools.count(), 3.0), list[str]()
    for number in range(6):
        prefixes.pop_kept.return_value = [
            Mock(home=place, sequence=number, whole=Mock(return_value=(place, ids_of([number] * BLOCK))))
            for place in placement.capacities
        ]
        (copy,) = disks.changes().spills
        (place,) = disks._copying
        copied.append(place)
        disks.on_stored("memory0", copy.number, True, "")
    assert copied == ["one", "other"] * 3


def test_keys_of_blocks_depend_on_all_tokens_before_and_on_the_salt() -> None:
    ids = ids_of(range(3 * BLOCK + 1))
    other = ids_of([99, *range(1, 3 * BLOCK + 1)])
    keys = keys_of("", ids, len(ids))
    assert len(keys) == 3 and keys_of("", ids, 3 * BLOCK - 1) == keys[:2]
    assert not {*keys} & {*keys_of("", other, len(other)), *keys_of("tenant", ids, len(ids))}


def continued() -> tuple[Scheduler, Group]:
    """A request of 40 tokens decodes on memory0, whose disk has eight tokens more of a prompt that begins alike."""
    under_test = settled(prefix_cache=True, overcommit=3.0)
    (group,) = under_test._residents.holders("memory0")
    disk = under_test.disks._disks["memory0"]
    keys = keys_of("", ids_of(range(48)), 48)[20:]
    disk.record_written([(key, range(1)) for key in keys], disk.allocate_blocks(len(keys)))
    return under_test, group


def test_what_blocks_of_a_disk_continue_does_not_move_before_they_are_there() -> None:
    under_test, group = continued()
    assert under_test.moves.movable(group, "memory0") == Range(0, 40, node=ANY)
    under_test.submit(request("next", 49, max_tokens=2))
    assert under_test.disks.held
    part = under_test.moves.movable(group, "memory0")
    assert part is None or part.start >= 40
    (fetch,) = step(under_test).fetches
    assert (fetch.worker, fetch.start, len(fetch.blocks)) == ("memory0", 40, 4)
    under_test.transferred("memory0", fetch.number, True, "")
    plan_of(under_test)
    assert under_test.moves.movable(group, "memory0") == Range(0, 40, node=ANY) and not under_test.disks.held


@pytest.mark.parametrize("drawn", [21, 29])
def test_nothing_is_fetched_for_a_request_that_must_compute_its_tokens(drawn: int) -> None:
    """A request that comes again after a restart shares only its prompt, because its draws depend on what it drew."""
    under_test, _ = continued()
    again = request("again", 20, max_tokens=50, repetition_penalty=1.5)
    under_test.submit(again, {0: list(range(20, 20 + drawn))})
    assert not under_test.disks.held and not step(under_test).fetches


@pytest.mark.parametrize(("cached", "fetches"), [(48 - BLOCK, True), (48 - BLOCK + 1, False), (48, False)])
def test_blocks_are_fetched_for_a_block_more_than_another_worker_has_cached(
    cached: int, fetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test, _ = continued()
    monkeypatch.setattr(under_test.prefixes, "find", lambda group: {"memory1": SimpleNamespace(length=cached)})
    under_test.submit(request("next", 49, max_tokens=2))
    assert bool(under_test.disks.held) is fetches


@pytest.mark.parametrize(("lacking", "fetches"), [(0, True), (1, False)])
def test_blocks_are_fetched_if_the_worker_has_room_for_them_and_for_the_request_to_grow(
    lacking: int, fetches: bool
) -> None:
    under_test, _ = continued()
    placement, needed = under_test.placement, 48 - 40 + AHEAD
    placement.reserve_on("memory0", placement.room("memory0") - needed + lacking)
    under_test.submit(request("next", 49, max_tokens=2))
    assert bool(under_test.disks.held) is fetches


@pytest.mark.parametrize(("lacking", "fetches"), [(0, True), (1, False)])
def test_blocks_are_fetched_if_what_they_continue_can_be_kept_too(lacking: int, fetches: bool) -> None:
    """No request uses the cached prefix, so that its slots must be reserved as well."""
    under_test, _ = continued()
    under_test.abort("long")
    step(under_test)
    placement, needed = under_test.placement, 48 + AHEAD
    assert not placement.reserved["memory0"]
    placement.reserve_on("memory0", placement.room("memory0") - needed + lacking)
    under_test.submit(request("next", 49, max_tokens=2))
    assert bool(under_test.disks.held) is fetches


@pytest.mark.parametrize("changes", [False, True])
def test_blocks_that_a_small_disk_has_given_up_are_not_copied_again(changes: bool) -> None:
    """Copy to a disk of one block, so that every copy overwrites the one before, also while members change."""
    under_test = settled(prefix_cache=True, overcommit=1.03)
    copied = []
    while (copying := under_test.disks._copying.get("memory0")) is not None:
        copied += copying.spills[0].places
        assert len(copied) < 30
        under_test.transferred("memory0", copying.number, True, "")
        if changes:
            under_test.disks.on_places_changed()
        step(under_test)
    assert copied == [*range(40 // BLOCK)]


def test_nothing_is_fetched_behind_tokens_that_move() -> None:
    under_test, group = continued()
    assert under_test.moves.try_move(group, "memory0", "memory1", 30) == 30
    under_test.submit(request("next", 49, max_tokens=2))
    assert not under_test.disks.held and under_test.waiting == 1
    under_test.on_move_done(step(under_test).moves[0].number)
    assert step(under_test).switches
    under_test.submit(request("another", 49, max_tokens=2))
    assert not under_test.disks.held, "some of what they continue is on the other worker"


def test_a_request_with_the_id_of_a_suspect_waits_for_its_blocks_and_then_until_it_may_run() -> None:
    """The suspect was aborted, and its id is used again."""
    under_test, _ = continued()
    under_test.submit(request("next", 49, max_tokens=2))
    assert under_test.disks.held
    under_test.hold_back(Hold(held=frozenset({"next"})))
    (fetch,) = step(under_test).fetches
    under_test.transferred("memory0", fetch.number, True, "")
    assert not step(under_test).admitted and not under_test.disks.held and under_test.waiting == 1
    under_test.hold_back(NOBODY)
    assert [len(one.segments) for one in step(under_test).admitted] == [1] and under_test.waiting == 0


def test_a_cached_prefix_too_short_for_a_fork_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "SHORTEST", 50)
    under_test, _ = continued()
    under_test.submit(request("short", 41, max_tokens=2))
    assert not under_test.disks.held and not step(under_test).fetches


def test_a_prefix_on_several_workers_is_not_copied() -> None:
    under_test, group = continued()
    spill = under_test.disks._copying["memory0"].spills[0]
    under_test.moves.try_move(group, "memory0", "memory1", 30)
    under_test.transferred("memory0", spill.number, False, "")
    plan = step(under_test)
    assert [one.sequence for one in plan.spills] == [spill.sequence], "it has not moved yet"
    under_test.on_move_done(plan.moves[0].number)
    assert step(under_test).switches
    under_test.transferred("memory0", spill.number + 1, False, "")  # as the worker says once it has the switch
    assert not step(under_test).spills


class Newcomer(Chats):
    """The tenth prompt is one that no disk has."""

    def prompt(self, index: int) -> list[int]:
        return super().prompt(index) if index < 9 else [*range(9000, 9020)]


def test_slots_of_a_fetch_that_ends_in_an_idle_cluster_go_to_who_waits_for_them() -> None:
    arrivals = [*range(0, 160, 20), 200, 201]  # the ninth fetches its prompt and is aborted, the tenth needs the slots
    others: list[Any] = [(2, 1, [0], None, turn) for turn in arrivals]
    others[8:] = [(2, 1, [0], None, 200), (2, 1, [0], None, 201)]
    cluster = Newcomer(others, [(0, 0, 9, 0)] * 10, Sound(1), 1, 1, 2, LIMITS, 27, None)
    for turn in range(300):
        super(Spilling, cluster).arrive(turn)
        if turn == 203:
            cluster.scheduler.abort(cluster.groups[8].request.request_id)
        if not 200 <= turn < 210:
            cluster.transfer()
        if cluster.scheduler.in_flight(0):
            cluster.complete(0)
        cluster.plan(0)
        if turn == 205:
            assert cluster.scheduler.placement.reserved["memory0"] == 8, "the fetch has not ended"
    cluster.check_rest()
    assert len(cluster.groups[9].completions[0].generated) == 2
