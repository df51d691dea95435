"""Changes the pools while the engine serves: adds, removes and replaces workers."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from lamina.cluster.conversations import Wish, Workers
from lamina.cluster.joining import Fabric
from lamina.cluster.pool import REMOTE, Kinds, PoolChange
from lamina.cluster.scratch import untouched_bytes
from lamina.control.messages import Changed, ToEngine
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError, LaminaError, WorkerError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import COMPUTE_POOLS, Member, Pool, Role, Topology, role_of
from lamina.engine.changes import Joiner, Joins, Leaves
from lamina.engine.replacements import RETRY_S, Replacements, fitting, lost_replicas
from lamina.engine.resizing import ResizePlanner, together
from lamina.schedule.turn import Turn

log = logging.getLogger(__name__)

Adopt = Callable[[Topology], int]
"""Switches the cluster to a topology without ending the epoch; returns the number of the Change."""


@dataclass(eq=False)
class Resize:
    """Workers that join or leave on one request.

    Attributes:
        future: Has their names once all have joined or left.
        left: Number of workers that have not.
        done: Names of workers that have.
    """

    future: "Future[list[str]]" = field(default_factory=Future)
    left: int = 0
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # its caller cannot cancel it

    def on_member_change(self, name: str) -> None:
        """Record that a worker has joined or left."""
        self.left -= 1
        self.done.append(name)
        if not self.left and not self.future.done():
            self.future.set_result(self.done)

    def fail(self, error: LaminaError) -> None:
        """Fail because a worker did not join or leave; there is no retry."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            log.warning("%s", error)  # another one has failed before


class Pools:
    """Changes the members between steps. The engine's thread owns it."""

    def __init__(
        self,
        control: ControlServer,
        workers: Workers,
        fabric: Fabric,
        topology: Topology,
        turn: Turn,
        adopt: Adopt,
        unused: Callable[[str], int],
        max_restarts: int,
        wanted: Mapping[Pool, int],
    ) -> None:
        """``wanted``: target size of each pool; missing workers are started.

        ``unused``: returns the unused token slots of a host's memory workers. ``max_restarts``: see ``EngineConfig``.
        """
        self.topology = topology
        self.wanted = dict(wanted)
        self._workers = workers
        self._control, self._fabric, self._turn, self._adopt = control, fabric, turn, adopt
        self._pipeline = topology.pipeline
        self._unused = unused
        self._joins = Joins(control, workers, fabric, topology, self._promised)
        self._leaves = Leaves(control, workers, turn.scheduler)
        self._resizes: dict[str, Resize] = {}
        self._replacements = Replacements(max_restarts)
        self._turning = dict[str, Pool]()  # members that change their role, and the pool that they are to be in
        self._moving = set[str]()  # leaving members whose replacements were started
        self._turning |= self._planner.unfinished_turns()
        self._resume_leaves()
        for pool in topology.sizes:
            for kinds in self._missing(pool):
                self._replace(pool, kinds, WorkerError(pool, "it was lost with an earlier engine"))

    def _promised(self, host: str) -> int:
        """Return the bytes of slabs and scratch memory on a host that workers may still use."""
        fabric, tokens = self._fabric, {one.name: one.scratch for one in self.topology.members if one.scratch}
        copies = untouched_bytes(fabric.plan, fabric.loaded, tokens, fabric.greetings)
        return self._unused(host) * fabric.slab.nbytes(1) + copies[host]

    def _resume_leaves(self) -> None:
        """Let the workers leave that an earlier engine was to let leave, if the others have room for their KV."""
        leaving = self._planner.unfinished_leaves(self._turning)
        try:
            self._leaves.validate_leave([*leaving], self.topology)
        except ConfigError as error:
            log.warning("the pools stay larger than an earlier engine was to make them: %s", error)
            for pool in leaving.values():
                self.wanted[pool] += 1
        else:
            for name in leaving:
                self._leaves.begin_leave(name, self.topology)

    def _missing(self, pool: Pool) -> list[Kinds]:
        """Return the kinds of the workers that an earlier engine has lost: of whole replicas."""
        each, turning = together(pool, self._pipeline), [*self._turning.values()].count(pool)
        count = (self.wanted[pool] - self.topology.sizes[pool] - turning) // each
        default: Kinds = (self._fabric.launcher.default_kind(pool),) * each
        if count <= 0 or each == 1:
            return [default] * count
        return lost_replicas(pool, count, default, self._fabric.plan.config, self.topology)

    # -- what callers ask for

    def resize(self, changes: Mapping[Pool, PoolChange], resize: Resize) -> None:
        """Start workers, or begin to remove them where a count is negative or a size is smaller.

        Replicas change their role instead where ``ResizePlanner.plan`` says so. Raises ConfigError, with nothing
        changed, if a change is impossible.
        """
        sizes = {pool: self._coming_size(pool) for pool in changes}
        relative = {pool: change.from_size(sizes[pool]) for pool, change in changes.items()}
        plan = self._planner.plan({pool: change for pool, change in relative.items() if change.count})
        self._leaves.validate_leave(plan.leaving, self.topology)
        for pool, change in changes.items():
            if change.is_size:
                self._planner.require_least(pool, change.count)
        for pool, change in changes.items():
            self.wanted[pool] = change.count if change.is_size else self.wanted[pool] + change.count
            if change.is_size:  # without the workers that may come from other machines for lost ones
                self._replacements.drop_vacancies(pool)
        if not plan.workers:
            resize.future.set_result([])
            return
        resize.left = plan.workers
        self._turning |= plan.turning
        for name in (*plan.turning, *plan.leaving):
            self._resizes[name] = resize
        for name in plan.leaving:
            self._leaves.begin_leave(name, self.topology)
        for pool, kinds in plan.joining:
            self._start(pool, kinds, resize)

    def _coming_size(self, pool: Pool) -> int:
        """Return the size of a pool once the workers that join, leave or change their role have done so."""
        turned = [*self._turning.values()].count(pool)
        turning = sum(self.topology.pool_of(name) == pool for name in self._turning)
        return self.topology.sizes[pool] + self.coming(pool) - self.leaving(pool) + turned - turning

    @property
    def _planner(self) -> ResizePlanner:
        placement, changing = self._turn.scheduler.placement, {*self._leaves.names, *self._turning}
        coming = {pool: self.coming(pool) for pool in self.wanted}
        return ResizePlanner(self._fabric, self._pipeline, self.topology, placement, changing, coming, self.wanted)

    def _start(self, pool: Pool, kinds: Kinds, resize: Resize | None, added: int | None = None) -> None:
        """Start workers that enter together, for ``resize``, or as a replacement (None).

        ``added``: By how much ``wanted`` has grown for them; by default, by all of them.
        """

        def on_failed(error: LaminaError, again: bool) -> None:
            is_remote = REMOTE in kinds
            if again and not is_remote:
                self._start(pool, kinds, resize, added)
                return
            if resize is None and not is_remote:
                self._replace(pool, kinds, error)
                return
            log.warning("a %s worker%s does not join: %s", pool, " of another machine" * is_remote, error)
            if resize is None:
                self._replacements.add_vacancy(pool, kinds, self._control.liveness.awake_s + RETRY_S)
            else:
                self.wanted[pool] -= len(kinds) if added is None else added
                resize.fail(error)

        try:
            names = self._joins.start(pool, kinds, on_failed)
        except LaminaError as error:
            on_failed(error, False)
        else:
            if resize is not None:
                self._resizes.update(dict.fromkeys(names, resize))

    def coming(self, pool: Pool) -> int:
        """Return how many workers of a pool are joining or will be started."""
        return self._joins.count(pool) + self._replacements.count(pool)

    def leaving(self, pool: Pool) -> int:
        """Return how many members of a pool are leaving."""
        names = self._leaves.names
        return sum(member.name in names and self._pool_to_be(member.name) == pool for member in self.topology.members)

    def _pool_to_be(self, name: str) -> Pool:
        """Return the pool of a member, once it has changed its role where it is to."""
        return self._turning.get(name) or self.topology.pool_of(name)

    # -- losses

    def may_replace(self, role: Role) -> bool:
        """Return whether lost workers of a role are replaced."""
        return self._replacements.may_restart(role) or self._fabric.plan.is_open

    def grows(self, role: Role) -> bool:
        """Return whether a worker of a role is joining, or may still join from another machine."""
        now = self._control.liveness.awake_s
        return self.starts(role) or any(self._replacements.awaits(role_of(one), now) for one in self._bringing(role))

    def starts(self, role: Role) -> bool:
        """Return whether this engine has started or will start a worker of a role that has not joined."""
        return any(self.coming(one) for one in self._bringing(role))

    def _bringing(self, role: Role) -> Sequence[Pool]:
        """Return the pools whose workers add to ``role``: a compute worker with local memory adds to both roles."""
        if role == "compute":
            return COMPUTE_POOLS
        return ("memory", "compute") if self._fabric.plan.compute_setup.local else ("memory",)

    def on_workers_lost(
        self, lost: Mapping[str, LaminaError], topology: Topology, uncounted: Collection[str] = ()
    ) -> None:
        """Members are lost, whole replicas of them, and the epoch of ``topology`` begins. Workers of the same kinds are
        started for them. ``lost`` may also have workers that have left, for which nothing is done.

        Args:
            uncounted: Members that are replaced at once, and not counted as losses: the search for a request that makes
                workers die is going on, or the engine has ended them because of the loss of others.
        """
        members = {member.name: member for member in self.topology.members}
        pools = {name: self._pool_to_be(name) for name in members}
        replicas = {name: replica for replica in self.topology.replicas for name in replica}
        replaced = set[str]()
        self._fabric.keep_members(topology.names)
        self.topology = topology
        self._joins.interrupt(next(iter(lost)))
        for name, reason in lost.items():
            if name not in members:
                continue
            if self._turning.pop(name, None) is not None:  # the worker in its place has the other role from the start
                self._note(name)
            if name in self._leaves.names:
                self._leaves.on_worker_lost(name)
                self._note(name)
            elif name in self._moving:
                self._note(name)
            elif name not in replaced:
                together = replicas.get(name, (name,))
                replaced.update(together)
                kinds = tuple(members[one].kind for one in together)
                self._replace(pools[name], kinds, reason, all(one in uncounted for one in together))
        for name in self._leaves.apply_topology(topology):  # they have to stay
            if name not in self._moving:
                self.wanted[pools[name]] += 1
            if (resize := self._resizes.pop(name, None)) is not None:  # else it had asked to leave by itself
                resize.fail(WorkerError(name, "it stays: all others of its pool were lost"))

    def _replace(self, pool: Pool, kinds: Kinds, reason: LaminaError, free: bool = False) -> None:
        self._replacements.add(pool, kinds, reason, self._control.liveness.awake_s, free)

    def _fill_vacancies(self) -> None:
        """Start replacements of lost workers, some of them of other machines, once enough agents wait."""
        now, launcher = self._control.liveness.awake_s, self._fabric.launcher
        while (found := self._replacements.pop_vacancy(launcher.offers(), now)) is not None:
            self._start(*found, None)

    def _start_offered(self) -> None:
        """Start workers on agents that offer more than lost workers need, once there are enough for a whole replica."""
        launcher = self._fabric.launcher
        for pool in launcher.offers():
            each, offers = together(pool, self._pipeline), launcher.offers()
            if pool not in offers or self._replacements.has_vacancy(pool) or fitting(offers, pool) < each:
                continue
            # Fewer come than the pool is to have where lost workers are not replaced.
            added = max(0, self._coming_size(pool) + each - self.wanted[pool])
            try:
                if pool == "prefill":
                    self._planner.require_roles()
                self._planner.require_links({pool: added})
            except ConfigError as error:
                launcher.refuse_offers(pool, str(error))
                continue
            self.wanted[pool] += added
            self._start(pool, (REMOTE,) * each, Resize(left=each), added)

    def _let_wishers_leave(self) -> None:
        for wish in self._workers.wishes():
            if wish.leaver in self.topology.names and wish.leaver not in self._leaves.names:
                try:
                    self._let_leave(wish)
                except LaminaError as error:
                    log.warning("%s", error)

    def _let_leave(self, wish: Wish) -> None:
        """Begin to let a worker of another machine leave, with its replica. Raises ConfigError if it has to stay."""
        name, pool = wish.leaver, self._pool_to_be(wish.leaver)
        replica = self.topology.whole_replicas([name])
        leavers = [member for member in self.topology.members if member.name in replica]
        if wish.moves and name not in self._moving:
            log.warning("the machine of %s is to end: it moves to another one", " and ".join(sorted(replica)))
            self._moving |= replica
            self._start(pool, tuple(member.kind for member in leavers), None)
        if self.topology.lacks([*self._leaves.names, *replica]) is not None:
            raise ConfigError(f"{name} stays: no other {role_of(pool)} worker is left")
        self._leaves.validate_leave([member.name for member in leavers], self.topology)
        for member in leavers:
            self._leaves.begin_leave(member.name, self.topology)
        if not wish.moves:
            self.wanted[pool] -= len(leavers)

    # -- every turn of the engine

    @property
    def is_calm(self) -> bool:
        """True if no worker joins, leaves, changes its role or is to be replaced."""
        changes = self._joins or self._leaves or self._turning or self._replacements or self._turn.is_paused
        return not changes and self.topology.serves

    def handle_member_message(self, worker: str, message: ToEngine) -> bool:
        """Handle a worker's message about joins and topology changes; return False for other messages."""
        if isinstance(message, Changed):
            self._leaves.note_changed(worker, message.number)
            return True
        return self._joins.handle_join_message(worker, message)

    def turn(self, steady: bool) -> None:
        """Admit linked joiners, and release leavers that hold no KV. ``steady``: no epoch is ending.

        Raises the reason if a role has no worker and none is joining.
        """
        for pool, kinds in self._replacements.pop_due(self._control.liveness.awake_s):
            self._start(pool, kinds, None)
        self._fill_vacancies()
        self._start_offered()
        self._let_wishers_leave()
        sizes = self.topology.sizes
        coming = sum(max(0, count - sizes[pool] + self.leaving(pool)) for pool, count in self.wanted.items())
        self._joins.turn(self.topology, self._joined if steady else None, coming)
        if steady:
            self._change()
        for name in self._leaves.turn(self.topology.names):
            self._note(name)
        if (missing := self.topology.lacks(())) is not None and not self.grows(missing):
            raise self._replacements.reason(missing)

    def _change(self) -> None:
        """Make the topology changes that are possible before the next step is planned."""
        self._turn.resume()  # what steps were to complete for may be gone, such as a joiner that has died
        if (joiner := self._joins.linked) is not None:
            following = self._joined(joiner.members, joiner.pool)
            if self._may_adopt(following):
                self._enter(joiner, following)
        for name in [] if self._joins.is_linking else list(self._turning):
            if name in self._turning and self._may_adopt(following := self._turned(name)):
                self._turn_role(name, following)
        for name in [] if self._joins.is_linking else self._leaves.draining:
            if name in self._turning or name not in self.topology.names:
                continue
            leavers = self.topology.whole_replicas([name])
            if not self._leaves.are_drained(leavers):
                continue
            if self.topology.lacks(leavers) is not None:
                continue  # a topology has members of both roles when one leaves: those that were lost come back first
            following = self._left(leavers)
            if self._may_adopt(following):
                others = following.names
                self.topology = following
                change = self._adopt(following)
                for one in leavers:
                    self._leaves.part(one, change, others)
                self._fabric.keep_members(others)

    def _may_adopt(self, following: Topology) -> bool:
        """Return False while steps in flight depend on the replicas; no steps are planned until they complete."""
        if following.pipeline == self.topology.pipeline or not self._turn.in_flight:
            return True
        self._turn.pause()
        return False

    def _enter(self, joiner: Joiner, following: Topology) -> None:
        self._joins.entered(joiner)
        self.topology = following
        self._adopt(following)
        for name in joiner.names:
            self._note(name)

    def _turn_role(self, name: str, following: Topology) -> None:
        replica = self.topology.whole_replicas([name])
        self.topology = following
        self._adopt(following)
        log.info("%s are now in the %s pool", ", ".join(sorted(replica)), following.pool_of(name))
        for one in replica:
            del self._turning[one]
            self._note(one)

    def _note(self, name: str) -> None:
        """Record in its resize that a worker has joined, left or changed its role."""
        self._moving.discard(name)
        if (resize := self._resizes.pop(name, None)) is not None:
            resize.on_member_change(name)

    def _joined(self, joiners: Sequence[Member], pool: Pool) -> Topology:
        return self.topology.joined(joiners, self._pipeline_with({pool: len(joiners)}))

    def _left(self, leavers: Collection[str]) -> Topology:
        pool = self.topology.pool_of(next(iter(leavers)))
        return self.topology.left(leavers, self._pipeline_with({pool: -len(leavers)}))

    def _turned(self, name: str) -> Topology:
        """Return the topology in which the replica of ``name`` has its other role."""
        replica, pool = self.topology.whole_replicas([name]), self.topology.pool_of(name)
        count = len(replica)
        pipeline = self._pipeline_with({pool: -count, self._turning[name]: count})
        return self.topology.turned(replica, pipeline)

    def _pipeline_with(self, changes: Mapping[Pool, int]) -> Pipeline:
        """Return the pipeline once the pools have so many workers more; lanes do not rotate if there are more replicas
        than slices."""
        if changes.keys() <= {"memory"}:
            return self.topology.pipeline
        sizes = self.topology.sizes
        pipeline = self._pipeline.with_workers(*(sizes[pool] + changes.get(pool, 0) for pool in COMPUTE_POOLS))
        replicas = pipeline.replicas
        slices = len(self._fabric.memory_setup.attentions) + 1
        return pipeline if replicas <= slices else pipeline.without_rotation()

    @property
    def states(self) -> dict[str, str]:
        return {**dict.fromkeys(self._turning, "turning"), **self._joins.stages, **self._leaves.stages}

    def close(self) -> None:
        stopped = WorkerError("engine", "it has stopped")
        self._joins.close()
        for resize in self._resizes.values():
            if not resize.future.done():
                resize.fail(stopped)
        self._resizes.clear()

    @property
    def strangers(self) -> Collection[str]:
        """Names of workers with a process that are not members."""
        return [*self._joins.stages, *self._leaves.parted]
