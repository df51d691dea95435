"""Pools that grow where RDMA pins arenas: the workers that ``ResizePlanner`` accepts find room in all arenas."""

from collections import Counter
from collections.abc import Sequence
from typing import cast
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.cluster.joining import Fabric
from lamina.cluster.pool import PoolChange
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.topology import FIRST, Member, Pool, Topology, role_of
from lamina.core.types import AttentionSpec, DType
from lamina.dataplane.leases import PINNED_SPARE_LINKS, Lease, Leases, messages
from lamina.engine.resizing import ResizePlanner, together

Step = tuple[Pool, int, bool]
"""A pool, how many groups of workers that join together it gets or loses, and whether the loss is a failure."""


class Arenas:
    """Members with pinned arenas whose leases are really allocated. Failed workers are replaced last."""

    def __init__(self, shape: Shape, local: bool, pools: dict[Pool, int]) -> None:
        sizes = messages([AttentionSpec(0, 4, 2, 16, 16, 1.0)], DType.FLOAT32, 16, 256, shape.ranks, lends=local)
        plan = Mock(greetings={}, config=Mock(transport="tcp", compute="cpu:1", prefill=None))
        self.fabric = Fabric(Mock(default_kind=lambda pool: "cpu"), plan, Mock(), Mock(attentions=[]), sizes)
        self.pipeline = Pipeline(2 * shape.stages, 1, shape=shape, lends=local)
        self.local, self.born, self.arenas = local, Counter[str](), dict[str, Leases]()
        self.leases = dict[tuple[str, str], Lease]()
        self.topology = Topology(FIRST, (), self.pipeline)
        self.wanted = {pool: count * together(pool, self.pipeline) for pool, count in pools.items()}
        for pool, count in self.wanted.items():
            groups = (self.made(pool) for _ in range(count // together(pool, self.pipeline)))
            for group in groups:
                self.topology = self.topology.joined(group, self.with_counts(pool, len(group)))
        self.allocate(self.topology.names, missing=0)

    def made(self, pool: Pool) -> list[Member]:
        """Return members of a pool that join together."""
        role, capacity = role_of(pool), 60 if self.local or pool == "memory" else 0
        numbers = range(self.born[role], self.born[role] + together(pool, self.pipeline))
        self.born[role] = numbers.stop
        self.fabric.pinned.update(names := [f"{role}{number}" for number in numbers])
        return [Member(name, role, "cpu", "", capacity) for name in names]

    def with_counts(self, pool: Pool, more: int) -> Pipeline:
        sizes = Counter(self.topology.sizes) + Counter({pool: more}) - Counter({pool: -more})
        return self.pipeline.with_workers(sizes["prefill"], sizes["compute"])

    def allocate(self, joiners: frozenset[str], missing: int) -> None:
        """Make the arenas of joiners, and lease the parts for their links. Raises TransportError if one has no room."""
        for member in self.topology.members:
            if member.name in joiners:
                self.arenas[member.name] = Leases(self.fabric.register_message(member, self.topology, missing).arena)
        for pair, slots in self.fabric.link_slots(self.topology, joiners).items():
            for owner, peer, nbytes in (*zip(pair, pair[::-1], slots[:2], strict=True),):
                self.leases[owner, peer] = self.arenas[owner].lease(nbytes)

    def drop(self, names: frozenset[str]) -> None:
        for owner, peer in [pair for pair in self.leases if not names.isdisjoint(pair)]:
            self.arenas[owner].end_lease(self.leases.pop((owner, peer)))
        pool = self.topology.pool_of(next(iter(names)))
        self.topology = self.topology.left(names, self.with_counts(pool, -len(names)))
        for name in names:
            del self.fabric.arenas[name]

    def join(self, pool: Pool, count: int) -> None:
        """Let groups of workers join a pool one after the other."""
        for _ in range(count // together(pool, self.pipeline)):
            group = self.made(pool)
            self.topology = self.topology.joined(group, self.with_counts(pool, len(group)))
            missing = sum(max(0, self.wanted[one] - size) for one, size in self.topology.sizes.items())
            self.allocate(frozenset(member.name for member in group), missing)

    def resize(self, changes: dict[Pool, PoolChange]) -> bool:
        """Change the pools as planned; return False if that is refused."""
        placement = Mock(held=lambda names: 0)
        planner = ResizePlanner(self.fabric, self.pipeline, self.topology, placement, (), Counter(), self.wanted)
        try:
            plan = planner.plan(changes)
        except ConfigError:
            return False
        for pool, change in changes.items():
            self.wanted[pool] += change.count
        assert not plan.turning
        for replica in {self.topology.whole_replicas([name]) for name in plan.leaving}:
            self.drop(replica)
        for pool, kinds in plan.joining:
            self.join(pool, len(kinds))
        return True

    def fail(self, pool: Pool) -> None:
        """Lose the first worker of a pool, with its replica, unless a role would have no member."""
        first = next((name for name in self.topology.names if self.topology.pool_of(name) == pool), None)
        if first and self.topology.lacks(lost := self.topology.whole_replicas([first])) is None:
            self.drop(lost)

    def replace(self) -> None:
        """Let workers join for all that have failed."""
        for pool, size in self.topology.sizes.items():
            self.join(pool, self.wanted[pool] - size)


POOLS = st.sampled_from(cast(Sequence[Pool], ("compute", "memory")))


@given(
    st.sampled_from([Shape(), Shape(2), Shape(1, 2, (0, 1))]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(POOLS, st.integers(-4, 9), st.booleans()), min_size=1, max_size=8),
)
@example(Shape(), True, 1, 0, [("compute", 9, False)])
@example(Shape(), False, 2, 5, [("memory", -4, False), ("compute", 8, False), ("compute", 2, False)])
@example(
    Shape(), False, 1, 1, [("memory", 8, False), ("memory", -4, False), ("memory", -4, False), ("memory", 9, False)]
)
def test_workers_that_may_join_find_room_for_their_links(
    shape: Shape, local: bool, computes: int, memories: int, steps: Sequence[Step]
) -> None:
    """Also lost workers that are replaced after others have joined."""
    under_test = Arenas(
        shape, local, {"prefill": 0, "compute": computes, "memory": memories if local else memories + 1}
    )
    for pool, count, fails in steps:
        if fails:
            under_test.fail(pool)
        elif count:
            under_test.resize({pool: PoolChange(count * together(pool, under_test.pipeline), "cpu")})
    under_test.replace()


@pytest.mark.parametrize("pool", ["compute", "memory"])
@pytest.mark.parametrize("local", [False, True])
def test_pools_may_grow_by_the_spare_links(local: bool, pool: Pool) -> None:
    under_test = Arenas(Shape(), local, {"prefill": 0, "compute": 2, "memory": 1 - local})
    assert not under_test.resize({pool: PoolChange(PINNED_SPARE_LINKS + 1, "cpu")})
    assert under_test.resize({pool: PoolChange(PINNED_SPARE_LINKS, "cpu")})
