"""Decides which workers a resize starts, removes or moves to another pool, and rejects impossible resizes."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lamina.cluster.joining import Fabric
from lamina.cluster.pool import Kinds, PoolChange
from lamina.cluster.refusals import refusals_of_growth, refusals_of_roles, require_none
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import COMPUTE_POOLS, Pool, Topology, role_of
from lamina.kv.placement import Placement


@dataclass(frozen=True)
class ResizePlan:
    """What a resize does.

    Attributes:
        turning: Members that change their role, with their new pool.
        leaving: Members that leave.
        joining: Pool and kinds of the workers to start; the workers of one entry join together.
    """

    turning: Mapping[str, Pool]
    leaving: Sequence[str]
    joining: Sequence[tuple[Pool, Kinds]]

    @property
    def workers(self) -> int:
        """Number of workers that join, leave or change their role."""
        return len(self.turning) + len(self.leaving) + sum(len(kinds) for _, kinds in self.joining)


@dataclass(frozen=True)
class ResizePlanner:
    """Plans resizes of the pools in their current state, and changes nothing.

    Attributes:
        fabric: How workers are set up.
        pipeline: The pipeline at the start.
        topology: The current members.
        placement: The KV that memory workers hold.
        changing: Names of the members that leave or change their role.
        coming: Number of workers of each pool that are joining or will be started.
        wanted: Target size of each pool.
    """

    fabric: Fabric
    pipeline: Pipeline
    topology: Topology
    placement: Placement
    changing: Collection[str]
    coming: Mapping[Pool, int]
    wanted: Mapping[Pool, int]

    def plan(self, changes: Mapping[Pool, PoolChange]) -> ResizePlan:
        """Return how the pools change.

        Where one of ``prefill`` and ``compute`` grows and the other one shrinks, replicas change their role, as far as
        the kinds of their workers allow. Raises ConfigError if a change is impossible.
        """
        for pool in COMPUTE_POOLS:
            if pool in changes:
                self._require_whole_replicas(pool, changes[pool].count)
        if "prefill" in changes:
            self.require_roles()
        leavers = {pool: self._leavers(pool, one) for pool, one in changes.items() if one.count < 0}
        turning = self._turners(changes, leavers)
        growths = {pool: one.count - [*turning.values()].count(pool) for pool, one in changes.items() if one.count > 0}
        kinds = {pool: changes[pool].kind or self.fabric.launcher.default_kind(pool) for pool in growths}
        for pool, count in growths.items():
            if count:
                self._check_growth(pool, kinds[pool], count)
        if any(growths.values()):
            self.require_links({pool: change.count for pool, change in changes.items()})
        leaving = [name for names in leavers.values() for name in names if name not in turning]
        joining = list[tuple[Pool, Kinds]]()
        for pool, count in growths.items():
            each = together(pool, self.pipeline)
            joining += [(pool, (kinds[pool],) * each)] * (count // each)
        return ResizePlan(turning, leaving, joining)

    def unfinished_turns(self) -> dict[str, Pool]:
        """Return the workers whose role an earlier engine was to change, with their new pool.

        The target sizes of that engine count them in their new pool, so that one pool lacks workers and the other one
        has too many.
        """
        sizes = self.topology.sizes
        for grown, shrunk in (COMPUTE_POOLS, COMPUTE_POOLS[::-1]) if self.pipeline.is_uniform else ():
            spare = sizes[shrunk] - max(self.wanted[shrunk], self._least(shrunk))
            if (count := min(self.wanted[grown] - sizes[grown], spare)) > 0:
                return dict.fromkeys(self._leavers(shrunk, PoolChange(-count)), grown)
        return {}

    def unfinished_leaves(self, turning: Mapping[str, Pool]) -> dict[str, Pool]:
        """Return the workers that an earlier engine was to let leave, with their pool: a pool has more workers than its
        target size. ``turning``: the workers that change their role."""
        leaving = dict[str, Pool]()
        for pool, size in self.topology.sizes.items():
            members = [name for name in self.topology.names if self.topology.pool_of(name) == pool]
            going = sum(name in turning for name in members)
            coming = [*turning.values()].count(pool)
            each, least = together(pool, self.pipeline), self._least(pool)
            spare = min(size - going + coming - self.wanted[pool], size - going - least) // each * each
            if spare > 0:
                leaving |= dict.fromkeys(self._leavers(pool, PoolChange(-spare)), pool)
        return leaving

    def _require_whole_replicas(self, pool: Pool, count: int) -> None:
        workers = self.pipeline.shape_in(pool).workers
        if count % workers:
            raise ConfigError(
                f"a replica has {workers} compute workers, and {abs(count)} is no multiple of that; "
                f"give {pool} a multiple of {workers}"
            )

    def require_roles(self) -> None:
        """Raise ConfigError if this cluster cannot have a prefill pool."""
        plan = self.fabric.plan
        local = plan.compute_setup.local  # also while all replicas are lost
        require_none(refusals_of_roles(plan.config, self.pipeline, plan.limits, local))

    def require_least(self, pool: Pool, size: int) -> None:
        """Raise ConfigError if a pool is to have too few workers to serve, also while all of them are lost."""
        if size < (least := self._least(pool)):
            raise ConfigError(f"the {pool} pool must have {least} at least, not {size}")

    def _turners(self, changes: Mapping[Pool, PoolChange], leavers: Mapping[Pool, Sequence[str]]) -> dict[str, Pool]:
        """Return the workers that change pools instead of leaving, with their new pool."""
        if not self.pipeline.is_uniform:
            return {}
        for grown, shrunk in (COMPUTE_POOLS, COMPUTE_POOLS[::-1]):
            growth = changes.get(grown)
            if growth is not None and growth.count > 0 and shrunk in leavers:
                kinds = {member.name: member.kind for member in self.topology.members}
                wrong = [name for name in leavers[shrunk] if growth.kind not in ("", kinds[name])]
                apart = self.topology.whole_replicas(wrong)
                fitting = [name for name in leavers[shrunk] if name not in apart]
                workers = self.pipeline.shape.workers
                count = min(len(fitting), growth.count) // workers * workers
                return dict.fromkeys(fitting[len(fitting) - count :], grown)
        return {}

    def _check_growth(self, pool: Pool, kind: str, count: int) -> None:
        role = role_of(pool)
        coming = sum(workers for one, workers in self.coming.items() if role_of(one) == role)
        same = sum(member.role == role and member.kind == kind for member in self.topology.members)
        self.fabric.launcher.validate_pool(role, kind, same + coming + count)
        replicas = (len(self.topology.computes) + coming + count) // self.pipeline.shape.workers
        slices = len(self.fabric.memory_setup.attentions) + 1
        require_none(refusals_of_growth(self.pipeline, role, kind, replicas, slices))

    def require_links(self, growth: Mapping[Pool, int]) -> None:
        """Raise ConfigError if the arena of a member has too little room for its links once each pool has grown by
        ``growth``. Beyond that, workers that join would take the room of lost ones, which could not be replaced."""
        sizes = {pool: size + growth.get(pool, 0) for pool, size in self.wanted.items()}
        needed = {pool: self._links_in(pool, sizes) for pool in sizes}
        for name in sorted(self.topology.names & self.fabric.arenas.keys()):
            room = self.fabric.arenas[name].leases
            for nbytes, links in needed[self.topology.pool_of(name)].items():
                if links > room.get(nbytes, 0):
                    raise ConfigError(
                        f"{name} has room for {room.get(nbytes, 0)} links of {nbytes} bytes, and would need {links}; "
                        "let fewer workers join, or start the cluster with more"
                    )

    def _links_in(self, pool: Pool, sizes: Mapping[Pool, int]) -> Mapping[int, int]:
        """Return how many links each worker of a pool has if the pools have these sizes, by their bytes."""
        prefills, computes = sizes["prefill"], sizes["prefill"] + sizes["compute"]
        own = {"prefill": 0, "compute": prefills, "memory": None}[pool]
        pipeline = self.pipeline.with_workers(prefills, sizes["compute"])
        return self.fabric.arena(own, pipeline, computes, sizes["memory"]).leases

    def _least(self, pool: Pool) -> int:
        """Return how many workers must stay in a pool."""
        return {"prefill": 0, "compute": self.pipeline.shape.workers, "memory": 0 if self.topology.local else 1}[pool]

    def _leavers(self, pool: Pool, change: PoolChange) -> list[str]:
        """Return the workers to remove: the memory workers that hold least, the compute workers that joined last."""
        count, topology = -change.count, self.topology
        members = [
            one for one in topology.members if topology.pool_of(one.name) == pool and one.name not in self.changing
        ]
        least = self._least(pool)
        if count > len(members) - least:
            raise ConfigError(
                f"the {pool} pool has {len(members)}, of which {least} must stay: {count} cannot leave. "
                f"Let fewer leave, or add others first"
            )
        apart = topology.whole_replicas([one.name for one in members if change.kind not in ("", one.kind)])
        candidates = [one.name for one in members if one.name not in apart]
        if count > len(candidates):
            found = ", ".join(f"{kind}:{number}" for kind, number in Counter(one.kind for one in members).items())
            raise ConfigError(f"the {pool} pool has {found}: {count} of kind {change.kind} cannot leave")
        if pool != "memory":
            return candidates[-count:]
        return sorted(candidates, key=lambda name: self.placement.held([name]))[:count]


def together(pool: Pool, pipeline: Pipeline) -> int:
    """Return how many workers of a pool join together: one memory worker, or all workers of a replica."""
    return 1 if pool == "memory" else pipeline.shape_in(pool).workers
