"""Who takes part in a cluster: members, replicas and lanes. Pure and immutable.

A lost member ends the epoch: engine, workers and simulator apply the topology of the next one, and ``worker.loop``
keeps messages of the two epochs apart. Members that join, and members that leave once they have no work, change the
topology within an epoch, since no message in flight has to be dropped.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from lamina.core.pipeline import Pipeline

Role = Literal["compute", "memory"]

Pool = Literal["prefill", "compute", "memory"]
"""Workers that scale together. Those of ``prefill`` are compute workers whose replicas only run prompts."""

COMPUTE_POOLS: tuple[Pool, Pool] = ("prefill", "compute")


def role_of(pool: Pool) -> Role:
    """Return the role of a pool's workers."""
    return "memory" if pool == "memory" else "compute"


def may_run(offered: Pool, pool: Pool) -> bool:
    """Return whether a machine that offers to run a worker of pool ``offered`` may run one of ``pool``."""
    return offered == pool or (offered, pool) == ("compute", "prefill")


class Epoch(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A period in which no member is lost: number ``number``, from 1, of the engine's ``incarnation``.

    Numbers only grow, also when another engine takes over the workers: links derive their message counts from them.
    """

    incarnation: int
    number: int

    @property
    def next(self) -> "Epoch":
        return Epoch(self.incarnation, self.number + 1)


FIRST = Epoch(0, 1)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker.

    Attributes:
        name: never used again for another worker.
        kind: kind of its device, or ``remote``, or a name of ``--kind``: a worker in its place has the same kind.
        capacity: token slots. A compute worker that has some is in both pools. The local memory of a replica's stages
            counts as that of the first stage (``Pipeline.home``): the others have as many slots, and 0 here.
        scratch: tokens that its scratch memory holds (``lamina.compute.local_memory``).
        device: what it runs on, as its greeting says: "cpu", "cuda:INDEX" or "emulated".
    """

    name: str
    role: Role
    kind: str
    host: str
    capacity: int = 0
    scratch: int = 0
    device: str = "cpu"

    @property
    def roles(self) -> frozenset[Role]:
        """Its role, and memory if it has token slots."""
        return frozenset((self.role, "memory")) if self.capacity else frozenset((self.role,))


_Known = TypeVar("_Known")
Place = dict[str, str]
"""Where a compute worker is: its ``role`` (a ``LaneRole``), ``replica``, ``stage`` and ``rank``. The last two are empty
if the replica has one."""


class Topology(msgspec.Struct, frozen=True, dict=True):
    """Members and pipeline. Compute workers are in the order of ``pipeline``: by replica, then stage, then rank.

    The first ``pipeline.prefill`` replicas only run prompts.
    """

    epoch: Epoch
    members: tuple[Member, ...]
    pipeline: Pipeline

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(member.name for member in self.members)

    @functools.cached_property
    def computes(self) -> tuple[str, ...]:
        """The compute workers, by their numbers in the pipeline."""
        return tuple(member.name for member in self.members if member.role == "compute")

    @property
    def replicas(self) -> tuple[tuple[str, ...], ...]:
        """The compute workers of each replica, by their numbers in the pipeline."""
        computes, order = self.computes, self.pipeline
        each = map(order.workers_in, range(order.replicas) if computes else ())
        return tuple(computes[numbers.start : numbers.stop] for numbers in each)

    @property
    def scratch(self) -> tuple[tuple[str, int], ...]:
        """By replica, the name of its first compute worker and the tokens that its scratch memory holds."""
        tokens = {member.name: member.scratch for member in self.members}
        return tuple((each[0], min(tokens[name] for name in each)) for each in self.replicas)

    @functools.cached_property
    def capacities(self) -> Mapping[str, int]:
        """Token slots by worker that holds KV."""
        return {member.name: member.capacity for member in self.members if "memory" in member.roles}

    @property
    def slabs(self) -> dict[str, int]:
        """Token slots by worker with a slab: ``capacities``, and those of a replica's later stages."""
        return self.by_slab(self.capacities)

    @functools.cached_property
    def memories(self) -> tuple[str, ...]:
        """The memory workers, without the compute workers that hold KV too."""
        return tuple(member.name for member in self.members if member.role == "memory")

    @functools.cached_property
    def local(self) -> frozenset[str]:
        """The compute workers that hold KV."""
        return frozenset(member.name for member in self.members if member.role == "compute" and member.capacity)

    def beyond(self, lane: int) -> frozenset[str]:
        """Return the compute workers that hold KV which a lane should not use: those of other replicas.

        A lane that only runs prompts should not use its own either, since the requests are decoded elsewhere.
        """
        if not self.local:
            return frozenset()
        if self.pipeline.role(lane) == "prefill":
            return self.local.intersection(self.prefills)
        computes = self.computes
        return self.local.difference(computes[number] for number in self.pipeline.workers_of(lane))

    @property
    def most_tokens(self) -> int:
        """The most tokens that a request may have. Unless KV spreads over replicas, it may use local memory of one."""
        capacities = self.capacities
        if self.pipeline.spreads:
            return sum(capacities.values())
        own = max((sum(capacities.get(name, 0) for name in each) for each in self.replicas), default=0)
        return own + sum(capacities[name] for name in self.memories)

    @property
    def prefills(self) -> tuple[str, ...]:
        """The compute workers of replicas that only run prompts."""
        return self.computes[: self.pipeline.workers_in(self.pipeline.prefill).start]

    def pool_of(self, name: str) -> Pool:
        """Return the pool of a member."""
        if name in self.prefills:
            return "prefill"
        return "compute" if name in self.computes else "memory"

    @property
    def places(self) -> dict[str, Place]:
        """Where each compute worker is in the pipeline."""
        return {name: self._place(number) for number, name in enumerate(self.computes)}

    def _place(self, number: int) -> Place:
        order = self.pipeline
        replica, ranks = order.replica_at(number), order.ranks_at(number)
        return {
            "role": order.role(replica),
            "replica": str(replica),
            "stage": str(order.place(number)) if order.shape_of(replica).stages > 1 else "",
            "rank": str(number - ranks.start) if len(ranks) > 1 else "",
        }

    @property
    def sizes(self) -> dict[Pool, int]:
        """How many workers each pool has."""
        prefills = len(self.prefills)
        return {"prefill": prefills, "compute": len(self.computes) - prefills, "memory": len(self.memories)}

    @functools.cached_property
    def _holders(self) -> dict[str, tuple[str, ...]]:
        return self.pipeline.holders(self.computes)

    def holders(self, worker: str) -> tuple[str, ...]:
        """Return the workers with KV of the segments on ``worker``: itself, or a worker of each stage of its replica,
        which has K and V of its own layers."""
        return self._holders.get(worker, (worker,))

    def by_slab(self, known: Mapping[str, _Known]) -> dict[str, _Known]:
        """Return what is ``known`` of workers that segments name, by worker that has their KV."""
        return {name: each for worker, each in known.items() for name in self.holders(worker)}

    def lacks(self, lost: Collection[str]) -> Role | None:
        """Return the role that has no member once ``lost`` are gone; None if both roles have one."""
        left = {role for member in self.members if member.name not in lost for role in member.roles}
        return next((role for role in ("compute", "memory") if role not in left), None)

    @functools.cached_property
    def serves(self) -> bool:
        """True if both roles have a member; otherwise requests wait."""
        return self.lacks(()) is None

    def ranks_of(self, name: str) -> tuple[str, ...]:
        """Return the ranks of the stage of a compute worker, in order."""
        numbers = self.pipeline.ranks_at(self.computes.index(name))
        return self.computes[numbers.start : numbers.stop]

    def whole_replicas(self, names: Collection[str]) -> frozenset[str]:
        """Return these members, and the compute workers that share a replica with any of them."""
        return frozenset(names).union(*(each for each in self.replicas if not set(each).isdisjoint(names)))

    def without(self, lost: Collection[str]) -> "Topology":
        """Return the topology of the next epoch, without ``lost``, a result of ``whole_replicas``.

        If no compute worker is left, the pipeline is that of a single replica.
        """
        members = tuple(member for member in self.members if member.name not in lost)
        prefills = sum(name not in lost for name in self.prefills)
        computes = sum(member.role == "compute" for member in members) - prefills
        return Topology(self.epoch.next, members, self.pipeline.with_workers(prefills, computes))

    def joined(self, joiners: Sequence[Member], pipeline: Pipeline) -> "Topology":
        """Return the topology with more members, in the same epoch.

        Args:
            joiners: A memory worker, or all compute workers of a replica.
            pipeline: The pipeline with the replicas that there are then. If more of them only run prompts, the joiners
                do; else they come last.

        Raises ValueError if a joiner is a member already.
        """
        if again := self.names & {joiner.name for joiner in joiners}:
            raise ValueError(f"{', '.join(sorted(again))} is a member already")
        members = (*self.members, *joiners)
        if pipeline.prefill > self.pipeline.prefill:
            return self._with_prefills((*self.prefills, *(joiner.name for joiner in joiners)), members, pipeline)
        return Topology(self.epoch, members, pipeline)

    def turned(self, names: Collection[str], pipeline: Pipeline) -> "Topology":
        """Return the topology in which a replica has changed its role, in the same epoch.

        A replica that only ran prompts then decodes; another one then only runs prompts.

        Args:
            names: All compute workers of the replica.
            pipeline: The pipeline after the change.
        """
        prefills = [name for name in self.prefills if name not in names]
        if len(prefills) == len(self.prefills):
            prefills += [name for name in self.computes if name in names]
        return self._with_prefills(prefills, self.members, pipeline)

    def _with_prefills(self, prefills: Sequence[str], members: Sequence[Member], pipeline: Pipeline) -> "Topology":
        """Return the topology of these members in which ``prefills`` come first."""
        by_name = {member.name: member for member in members}
        first = tuple(by_name[name] for name in prefills)
        return Topology(self.epoch, (*first, *(one for one in members if one.name not in prefills)), pipeline)

    def left(self, leavers: Collection[str], pipeline: Pipeline) -> "Topology":
        """Return the topology without idle members, in the same epoch.

        Args:
            leavers: A memory worker, or all compute workers of a replica.
            pipeline: The pipeline with the replicas that remain.

        Raises ValueError if a role would have no member.
        """
        if role := self.lacks(leavers):
            raise ValueError(f"no {role} worker is left without {', '.join(sorted(leavers))}")
        return Topology(self.epoch, tuple(member for member in self.members if member.name not in leavers), pipeline)
