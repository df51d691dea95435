"""Changes the pools while the engine serves: adds, removes and replaces workers."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from lamina.cluster.conversations import Workers
from lamina.cluster.joining import Fabric
from lamina.cluster.pool import REMOTE, PoolChange
from lamina.control.liveness import Restarts
from lamina.control.messages import Changed, ToEngine
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError, LaminaError, WorkerError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import Member, Role, Topology
from lamina.engine.changes import Joiner, Joins, Leaves
from lamina.schedule.turn import Turn

log = logging.getLogger(__name__)

AWAIT_S = 600.0  # for another machine's worker to replace the last worker of a pool

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
        wanted: Mapping[Role, int],
    ) -> None:
        """``wanted``: target size of each pool; missing workers are started.

        ``unused``: returns the unused token slots of a host's memory workers. ``max_restarts``: see ``EngineConfig``.
        """
        self.topology = topology
        self.wanted = dict(wanted)
        self._workers = workers
        self._control, self._fabric, self._turn, self._adopt = control, fabric, turn, adopt
        self._pipeline = topology.pipeline
        self._joins = Joins(control, workers, fabric, topology, lambda host: unused(host) * fabric.slab.nbytes(1))
        self._leaves = Leaves(control, workers, turn.scheduler)
        self._resizes: dict[str, Resize] = {}
        self._restarts: Mapping[Role, Restarts] = {"compute": Restarts(max_restarts), "memory": Restarts(max_restarts)}
        self._due: list[tuple[float, Role, str]] = []  # replacements: when to start them, role, kind
        self._moving = set[str]()  # leaving members whose replacements were started
        self._awaited: dict[Role, float] = {}  # until when a worker of another machine may replace a lost one
        self._reasons: dict[Role, LaminaError] = {}  # why the latest worker of a role was lost or did not start
        for role, count in topology.sizes.items():
            for _ in range(wanted[role] - count):
                kind = fabric.launcher.default_kind(role)
                self._replace(role, kind, WorkerError(role, "it was lost with an earlier engine"))

    # -- what callers ask for

    def resize(self, changes: Mapping[Role, PoolChange], resize: Resize) -> None:
        """Start workers, or begin to remove them where a count is negative.

        Raises ConfigError, with nothing changed, if a change is impossible.
        """
        if "compute" in changes:
            self._require_single_workers()
        leavers = [name for role, one in changes.items() if one.count < 0 for name in self._leavers(role, one)]
        kinds = {role: one.kind or self._fabric.launcher.default_kind(role) for role, one in changes.items()}
        for role, change in changes.items():
            if change.count > 0:
                self._check_growth(role, kinds[role], change.count)
        self._leaves.validate_leave(leavers, self.topology)
        resize.left = sum(abs(change.count) for change in changes.values())
        for role, change in changes.items():
            self.wanted[role] += change.count
        for name in leavers:
            self._resizes[name] = resize
            self._leaves.begin_leave(name, self.topology)
        for role, change in changes.items():
            for _ in range(change.count):
                self._start(role, kinds[role], resize)

    def _require_single_workers(self) -> None:
        if self._pipeline.workers > 1:
            raise ConfigError(
                f"replicas of {self._pipeline.workers} compute workers neither join nor leave while the engine serves: "
                "scale memory alone"
            )

    def _check_growth(self, role: Role, kind: str, count: int) -> None:
        same = sum(member.role == role and member.kind == kind for member in self.topology.members)
        self._fabric.launcher.validate_pool(role, kind, same + self._joins.count(role) + count)
        if role == "memory":
            return
        replicas = len(self.topology.computes) + self._joins.count("compute") + count
        slices = len(self._fabric.memory_setup.attentions) + 1
        if self._pipeline.rotates and replicas > slices:
            raise ConfigError(
                f"the model has {slices} slices, too few for {replicas} compute workers to take turns in every step; "
                f"have at most {slices} compute workers, or start with --pipelining fixed"
            )

    def _leavers(self, role: Role, change: PoolChange) -> list[str]:
        """Return the workers to remove: the memory workers that hold least, the compute workers that joined last."""
        count = -change.count
        members = [one for one in self.topology.members if one.role == role and one.name not in self._leaves.names]
        least = 0 if role == "memory" and self.topology.local else 1
        if count > len(members) - least:
            raise ConfigError(
                f"the {role} pool has {len(members)}, of which {least} must stay: {count} cannot leave. "
                f"Let fewer leave, or add others first"
            )
        candidates = [one.name for one in members if change.kind in ("", one.kind)]
        if count > len(candidates):
            kinds = ", ".join(f"{kind}:{number}" for kind, number in Counter(one.kind for one in members).items())
            raise ConfigError(f"the {role} pool has {kinds}: {count} of kind {change.kind} cannot leave")
        if role == "compute":
            return candidates[-count:]
        placement = self._turn.scheduler.placement
        return sorted(candidates, key=lambda name: placement.held([name]))[:count]

    def _start(self, role: Role, kind: str, resize: Resize | None) -> None:
        """Start another worker for ``resize``, or as a replacement (None)."""

        def on_failed(error: LaminaError, again: bool) -> None:
            if kind == REMOTE:
                log.warning("a %s worker of another machine does not join: %s", role, error)
            elif again:
                self._start(role, kind, resize)
            elif resize is not None:
                log.warning("a %s worker does not join: %s", role, error)
                self.wanted[role] -= 1
                resize.fail(error)
            else:
                self._replace(role, kind, error)

        try:
            name = self._joins.start(role, kind, on_failed)
        except LaminaError as error:
            on_failed(error, False)
        else:
            if resize is not None:
                self._resizes[name] = resize

    def coming(self, role: Role) -> int:
        """Return how many workers of a role are joining or will be started."""
        return self._joins.count(role) + sum(one == role for _, one, _ in self._due)

    def leaving(self, role: Role) -> int:
        """Return how many members of a role are leaving."""
        return sum(member.role == role and member.name in self._leaves.names for member in self.topology.members)

    # -- losses

    def may_replace(self, role: Role) -> bool:
        """Return whether lost workers of a role are replaced; ranks and stages of a replica are not."""
        if role == "compute" and self._pipeline.workers > 1:
            return False
        return self._restarts[role].most > 0 or self._fabric.plan.is_open

    def grows(self, role: Role) -> bool:
        """Return whether a worker of a role is joining, or may still join from another machine."""
        now = self._control.liveness.awake_s
        return self.starts(role) or any(self._awaited.get(one, 0.0) > now for one in self._bringing(role))

    def starts(self, role: Role) -> bool:
        """Return whether this engine has started or will start a worker of a role that has not joined."""
        return any(self.coming(one) for one in self._bringing(role))

    def _bringing(self, role: Role) -> Sequence[Role]:
        """Return the roles whose workers add to ``role``: a compute worker with local memory adds to both."""
        return (role, "compute") if role == "memory" and self._fabric.plan.compute_setup.local else (role,)

    def on_workers_lost(self, lost: Mapping[str, LaminaError], topology: Topology, free: bool = False) -> None:
        """Start workers of the same kind for lost members. ``topology``: members of the next epoch.

        ``free``: start them at once and do not count them as restarts, during the search for a request that makes
        workers die.
        """
        members = {member.name: member for member in self.topology.members}
        self._fabric.keep_members(topology.names)
        self.topology = topology
        self._joins.interrupt(next(iter(lost)))
        for name, reason in lost.items():
            if name in self._leaves.names:
                self._leaves.on_worker_lost(name)
                self._note(name)
            elif name in self._moving:
                self._note(name)
            else:
                self._replace(members[name].role, members[name].kind, reason, free)
        for name in self._leaves.apply_topology(topology):  # they have to stay
            self.wanted[members[name].role] += 1
            self._resizes.pop(name).fail(WorkerError(name, "it stays: all others of its pool were lost"))

    def _replace(self, role: Role, kind: str, reason: LaminaError, free: bool = False) -> None:
        self._reasons[role] = reason
        if role == "compute" and self._pipeline.workers > 1:
            self.wanted[role] -= 1
            return
        now, restarts = self._control.liveness.awake_s, self._restarts[role]
        if kind == REMOTE:
            self._awaited[role] = now + AWAIT_S
            log.warning("%s; another takes its place once it comes", reason)
            return
        at = now if free and restarts.most else restarts.next(now)
        if at is not None:
            self._due.append((at, role, kind))

    def _grant_wishes(self) -> None:
        """Let workers of other machines join and leave as they wish."""
        for wish in self._workers.wishes():
            try:
                if wish.role == "compute":
                    self._require_single_workers()
                if not wish.leaver:
                    self._start(wish.role, wish.kind, None)
                elif wish.leaver in self.topology.names and wish.leaver not in self._leaves.names:
                    if wish.moves and wish.leaver not in self._moving:
                        log.warning("the machine of %s is to end: it moves to another one", wish.leaver)
                        self._moving.add(wish.leaver)
                        self._start(wish.role, wish.kind, None)
                    if self.topology.lacks([*self._leaves.names, wish.leaver]) is not None:
                        raise ConfigError(f"{wish.leaver} stays: no other {wish.role} worker is left")
                    self._leaves.validate_leave([wish.leaver], self.topology)
                    self._leaves.begin_leave(wish.leaver, self.topology)
            except LaminaError as error:
                log.warning("%s", error)

    # -- every turn of the engine

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
        now = self._control.liveness.awake_s
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            self._start(due[1], due[2], None)
        self._grant_wishes()
        self._joins.turn(self.topology, self._joined if steady else None)
        if steady:
            self._change()
        for name in self._leaves.turn(self.topology.names):
            self._note(name)
        if (missing := self.topology.lacks(())) is not None and not self.grows(missing):
            raise self._reasons[missing]

    def _change(self) -> None:
        """Make the topology changes that are possible before the next step is planned."""
        joiner = self._joins.linked
        if joiner is not None and joiner.member is not None:
            following = self._joined(joiner.member)
            if self._may_adopt(following):
                self._enter(joiner, following)
        # While a pool has no worker, those of the other one stay: a topology has members of both roles when one leaves.
        for name in self._leaves.ready if self.topology.serves and not self._joins.is_linking else ():
            following = self._left(name)
            if self._may_adopt(following):
                others = following.names
                self.topology = following
                self._leaves.part(name, self._adopt(following), others)
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
        self._note(joiner.name)

    def _note(self, name: str) -> None:
        """Record in its resize that a worker has joined or left."""
        self._moving.discard(name)
        if (resize := self._resizes.pop(name, None)) is not None:
            resize.on_member_change(name)

    def _joined(self, member: Member) -> Topology:
        replicas = len(self.topology.computes) + (member.role == "compute")
        return self.topology.joined(member, self._pipeline_of(replicas))

    def _left(self, name: str) -> Topology:
        replicas = len(self.topology.computes) - (name in self.topology.computes)
        return self.topology.left(name, self._pipeline_of(replicas))

    def _pipeline_of(self, replicas: int) -> Pipeline:
        """Return the pipeline for ``replicas``; lanes do not rotate if there are more replicas than slices."""
        if replicas == len(self.topology.computes):
            return self.topology.pipeline
        pipeline = self._pipeline.with_replicas(max(1, replicas))
        slices = len(self._fabric.memory_setup.attentions) + 1
        return pipeline if replicas <= slices else pipeline.without_rotation()

    @property
    def states(self) -> dict[str, str]:
        return {**self._joins.stages, **self._leaves.stages}

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
