"""Stripes of workers with some heads each, against counting the slots of every worker."""

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import RequestError
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.segments import grown
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Partition, Segment
from lamina.kv.stripes import StripedPlacement, stripes
from lamina.kv.stripes import placement as partitioned


@given(workers=st.integers(1, 9), shards=st.integers(1, 9))
def test_a_stripe_has_every_shard_once_and_all_stripes_load_all_workers_alike(workers: int, shards: int) -> None:
    names = [f"memory{index}" for index in range(workers)]
    found = stripes(names, shards)
    load = Counter[str]()
    for stripe in found:
        assert [shard for _, part in stripe for shard in part] == list(range(shards))
        assert len({worker for worker, _ in stripe}) == len(stripe) == min(workers, shards)
        load.update({worker: len(part) for worker, part in stripe})
    assert bool(found) == (min(workers, shards) > 1)
    assert len(set(load.values())) <= 1 and load.keys() <= set(names)


def topology(capacities: dict[str, int]) -> Topology:
    members = [Member("compute0", "compute", "cpu", "")]
    members += [Member(name, "memory", "cpu", "", capacity) for name, capacity in capacities.items()]
    return Topology(FIRST, tuple(members), Pipeline(1, 1))


class Pool:
    """A placement and what was reserved on it."""

    def __init__(self, capacities: list[int], shards: int, longest: int | None, partition: Partition) -> None:
        self.shards, self.longest, self.partition = shards, longest, partition
        self.workers = {f"memory{index}": capacity for index, capacity in enumerate(capacities)}
        self.placement = StripedPlacement(self.workers, HeadShards(shards, shards), longest, partition=partition)
        self.held: list[tuple[str, int, int]] = []  # place, tokens, sequences
        self.joined = 0

    def reserve(self, tokens: int, sequences: int) -> None:
        placement = self.placement
        spans = placement.reserve(tokens, sequences)
        if spans is not None:
            assert sum(part for _, part in spans) == tokens
            bounded = self.longest is None or not placement.splits(tokens)
            assert bounded or max(part for _, part in spans) <= (self.longest or 0)
            assert self.partition != "request" or len(spans) == 1
            assert self.partition == "auto" or {place for place, _ in spans} <= self.workers.keys(), "all heads there"
            self.held += [(place, part, 0) for place, part in spans[:-1]] + [(*spans[-1], sequences)]
        elif not any(placement.reserved.values()) and not placement.closed:
            assert tokens > placement.total

    def grow(self, tokens: int, sequences: int) -> None:
        rows = Counter[str]()
        for place, _, count in self.held:
            rows[place] += count
        if self.placement.grow(rows):
            self.held = [(place, part + count, count) for place, part, count in self.held]

    def end(self, tokens: int, sequences: int) -> None:
        if self.held:
            self.release([self.held[tokens % len(self.held)]])

    def release(self, ended: list[tuple[str, int, int]]) -> None:
        for one in ended:
            place, tokens, count = one
            self.placement.will_release(place, tokens)
            self.placement.remove_growing(place, count)
            self.placement.free_slots(place, tokens)
            self.held.remove(one)

    def close(self, tokens: int, sequences: int) -> None:
        """All workers but one take requests."""
        for worker in self.workers:
            self.placement.open(worker)
        self.placement.close(sorted(self.workers)[tokens % len(self.workers)])

    def change(self, tokens: int, sequences: int) -> None:
        """One joins, or one is lost with everything that it holds a part of."""
        self.joined += 1
        one = {f"later{self.joined}": tokens}
        now = {**self.workers, **one} if sequences > 1 else dict(list(self.workers.items())[1:])
        if len(now) > 1:
            lost = self.placement.lost(topology(now))
            self.release([one for one in self.held if one[0] in lost])
            self.workers = now
            self.placement.apply_topology(topology(now))

    def check(self) -> None:
        used = Counter[str]()
        for place, tokens, _ in self.held:
            for segment in self.placement.expand([Segment(0, place, (0, self.shards), (0, None))]):
                used[segment.worker] += tokens * (segment.heads[1] - segment.heads[0])
        for worker, capacity in self.workers.items():
            assert used[worker] <= capacity * self.shards
            assert self.placement.held([worker]) == math.ceil(used[worker] / self.shards)
        slots = sum(self.workers.values()) * self.shards
        assert self.placement.left_in_all == (slots - used.total()) // self.shards


CALLS = (Pool.reserve, Pool.reserve, Pool.grow, Pool.grow, Pool.end, Pool.close, Pool.change)


@given(
    capacities=st.lists(st.integers(1, 200), min_size=2, max_size=5),
    shards=st.integers(2, 5),
    divided=st.sampled_from([(None, "auto"), (17, "auto"), (None, "request"), (None, "token"), (17, "token")]),
    script=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(1, 120), st.integers(1, 3)), max_size=60),
)
def test_no_worker_is_ever_given_more_than_it_has(
    capacities: list[int],
    shards: int,
    divided: tuple[int | None, Partition],
    script: list[tuple[Any, int, int]],
) -> None:
    pool = Pool(capacities, shards, *divided)
    for call, tokens, sequences in script:
        call(pool, tokens, sequences)
        pool.check()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_request_for_one_worker_is_refused_if_it_is_too_long_for_any(shards: int) -> None:
    """Whether or not ranks share its heads."""
    pool, heads = {"memory0": 50, "memory1": 40}, HeadShards(4, shards)
    one = partitioned("request", pool, heads, None, topology(pool))
    one.require_possible(50)
    with pytest.raises(RequestError, match="51 KV tokens; a memory worker, which is to hold all of it, has 50"):
        one.require_possible(51)
    partitioned("auto", pool, heads, None, topology(pool)).require_possible(88)


def test_an_equal_part_of_a_requests_tokens_is_on_every_worker_with_all_heads() -> None:
    pool = {"memory0": 5000, "memory1": 5000}
    placed = partitioned("token", pool, HeadShards(4, 2), None, topology(pool))
    assert sorted(placed.reserve(3000, 1) or []) == [("memory0", 1500), ("memory1", 1500)]


def test_tokens_are_divided_evenly_among_all_workers() -> None:
    pool = {f"memory{index}": 1000 for index in range(3)}
    spans = partitioned("token", pool, HeadShards(1), None, topology(pool)).reserve(901, 1)
    assert spans is not None and sorted(tokens for _, tokens in spans) == [299, 301, 301]
    assert len({worker for worker, _ in spans}) == 3


def test_requests_on_the_ranks_of_a_replica_have_its_memory_and_what_all_share() -> None:
    """Two replicas of two ranks, which hold four heads each, beside a memory worker."""
    members = [Member(f"compute{number}", "compute", "cpu", "", 100) for number in range(4)]
    members.append(Member("memory0", "memory", "cpu", "", 80))
    whole = Topology(FIRST, tuple(members), Pipeline(4, 2, shape=Shape(2)))
    one = partitioned("auto", whole.capacities, HeadShards(8, 2), None, whole)
    replicas = ["compute0[0:1]+compute1[1:2]", "compute2[0:1]+compute3[1:2]"]
    assert {place: one.capacities[place] for place in replicas} == dict.fromkeys(replicas, 200)
    assert [one.beyond(lane) for lane in (0, 3)] == [{replicas[1]}, {replicas[0]}]
    one.require_possible(280)
    with pytest.raises(RequestError, match="281 KV tokens"):
        one.require_possible(281)
    spans = one.reserve(150, 1, one.beyond(1))
    assert spans == [(replicas[1], 150)]
    assert one.expand([Segment(0, replicas[1], (0, 8), (0, None))]) == [
        Segment(0, "compute2", (0, 4), (0, None)),
        Segment(0, "compute3", (4, 8), (0, None)),
    ]
    one.apply_topology(whole.without(["compute0", "compute1"]))
    assert one.beyond(0) == one.beyond(1) == frozenset() and one.reserved[replicas[1]] == 150


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_have_the_segments_that_places_stand_for(workers: int, shards: int) -> None:
    """Workers add one segment after another, and know no places. Stripes from before a worker joined share parts."""
    capacities = {f"memory{index}": 100 for index in range(workers)}
    under_test = StripedPlacement(capacities, HeadShards(shards, shards))
    for place in list(under_test.capacities):
        under_test.reserve_on(place, 1)
    under_test.apply_topology(topology({**capacities, "joined": 100}))
    draw, on_places, on_workers = Random(0), list[Segment](), list[Segment]()
    for position in range(100):
        new = Segment(1, draw.choice(list(under_test.capacities)), (0, shards), (position, None))
        on_places = grown(on_places, new)
        for part in under_test.expand([new]):
            on_workers = grown(on_workers, part)
    assert set(under_test.expand(on_places)) == set(on_workers)
    assert under_test.collect(on_workers) == on_places
