"""Changes the pools while the engine serves: adds, removes and replaces workers."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from lamina.cluster.conversations import Workers
from lamina.cluster.joining import Fabric
from lamina.cluster.pool import REMOTE, PoolChange, parse_computes
from lamina.cluster.pool import kinds as kinds_of
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

Kinds = tuple[str, ...]
"""The kind of each worker that joins together with others: one memory worker, or all workers of a replica."""

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
        self._due: list[tuple[float, Role, Kinds]] = []  # replacements: when to start them
        self._offers = 0  # compute workers of other machines that wait for the rest of a replica
        self._vacant: list[Kinds] = []  # lost replicas that workers of other machines belonged to
        self._moving = set[str]()  # members in whose place others were started, and that leave
        self._awaited: dict[Role, float] = {}  # until when a worker of another machine may take a lost one's place
        self._reasons: dict[Role, LaminaError] = {}  # why the latest worker of a role was lost or did not start
        for role in topology.sizes:
            for kinds in self._missing(role):
                self._replace(role, kinds, WorkerError(role, "it was lost with an earlier engine"))

    def _missing(self, role: Role) -> list[Kinds]:
        """Return the kinds of the workers that an earlier engine has lost: of whole replicas."""
        each = self._pipeline.workers if role == "compute" else 1
        count = (self.wanted[role] - self.topology.sizes[role]) // each
        default: Kinds = (self._fabric.launcher.default_kind(role),) * each
        if count <= 0 or each == 1:
            return [default] * count
        planned = kinds_of(parse_computes(self._fabric.plan.config))
        lost = Counter(tuple(planned[first : first + each]) for first in range(0, len(planned), each))
        kind_by_name = {member.name: member.kind for member in self.topology.members}
        lost.subtract(tuple(kind_by_name[name] for name in replica) for replica in self.topology.replicas)
        return [*lost.elements(), *[default] * count][:count]

    # -- what callers ask for

    def resize(self, changes: Mapping[Role, PoolChange], resize: Resize) -> None:
        """Start workers, or begin to remove them where a count is negative.

        Raises ConfigError, with nothing changed, if a change is impossible.
        """
        if "compute" in changes:
            self._require_single_workers()
        leavers = [name for role, one in changes.items() if one.count < 0 for name in self._leavers(role, one)]
        added = {role: one.kind or self._fabric.launcher.default_kind(role) for role, one in changes.items()}
        for role, change in changes.items():
            if change.count > 0:
                self._check_growth(role, added[role], change.count)
        self._leaves.validate_leave(leavers, self.topology)
        resize.left = sum(abs(change.count) for change in changes.values())
        for role, change in changes.items():
            self.wanted[role] += change.count
        for name in leavers:
            self._resizes[name] = resize
            self._leaves.begin_leave(name, self.topology)
        for role, change in changes.items():
            for _ in range(change.count):
                self._start(role, (added[role],), resize)

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
            found = ", ".join(f"{kind}:{number}" for kind, number in Counter(one.kind for one in members).items())
            raise ConfigError(f"the {role} pool has {found}: {count} of kind {change.kind} cannot leave")
        if role == "compute":
            return candidates[-count:]
        placement = self._turn.scheduler.placement
        return sorted(candidates, key=lambda name: placement.held([name]))[:count]

    def _start(self, role: Role, kinds: Kinds, resize: Resize | None) -> None:
        """Start workers that enter together, on behalf of ``resize`` or as a replacement."""

        def on_failed(error: LaminaError, again: bool) -> None:
            if REMOTE in kinds:
                log.warning("a %s worker of another machine does not join: %s", role, error)
                self._await(role, kinds)
            elif again:
                self._start(role, kinds, resize)
            elif resize is not None:
                log.warning("a %s worker does not join: %s", role, error)
                self.wanted[role] -= 1
                resize.fail(error)
            else:
                self._replace(role, kinds, error)

        try:
            names = self._joins.start(role, kinds, on_failed)
        except LaminaError as error:
            on_failed(error, False)
        else:
            if resize is not None:
                self._resizes.update(dict.fromkeys(names, resize))

    def coming(self, role: Role) -> int:
        """Return how many workers of this role are on their way, or are to be started."""
        return self._joins.count(role) + sum(len(kinds) for _, one, kinds in self._due if one == role)

    def leaving(self, role: Role) -> int:
        """Return how many members of a role are leaving."""
        return sum(member.role == role and member.name in self._leaves.names for member in self.topology.members)

    # -- losses

    def may_replace(self, role: Role) -> bool:
        """Return whether lost workers of this role are ever replaced."""
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

    def on_workers_lost(
        self, lost: Mapping[str, LaminaError], topology: Topology, uncounted: Collection[str] = ()
    ) -> None:
        """Members are lost, whole replicas of them, and the epoch of ``topology`` begins. Workers of the same kinds are
        started for them.

        Args:
            uncounted: Members that are replaced at once, and not counted as losses: the search for a request that makes
                workers die is going on, or the engine has ended them because of the loss of others.
        """
        members = {member.name: member for member in self.topology.members}
        replicas = {name: replica for replica in self.topology.replicas for name in replica}
        replaced = set[str]()
        self._fabric.keep_members(topology.names)
        self.topology = topology
        self._joins.interrupt(next(iter(lost)))
        for name, reason in lost.items():
            if name in self._leaves.names:
                self._leaves.on_worker_lost(name)
                self._note(name)
            elif name in self._moving:
                self._note(name)
            elif name not in replaced:
                together = replicas.get(name, (name,))
                replaced.update(together)
                kinds = tuple(members[one].kind for one in together)
                self._replace(members[name].role, kinds, reason, all(one in uncounted for one in together))
        for name in self._leaves.apply_topology(topology):  # they have to stay
            self.wanted[members[name].role] += 1
            self._resizes.pop(name).fail(WorkerError(name, "it stays: all others of its pool were lost"))

    def _replace(self, role: Role, kinds: Kinds, reason: LaminaError, free: bool = False) -> None:
        self._reasons[role] = reason
        now, restarts = self._control.liveness.awake_s, self._restarts[role]
        if REMOTE in kinds:
            self._awaited[role] = now + AWAIT_S
            self._await(role, kinds)
            log.warning("%s; another takes its place once enough workers of other machines come", reason)
            return
        at = now if free and restarts.most else restarts.next(now)
        if at is not None:
            self._due.append((at, role, kinds))

    def _start_offered(self, role: Role, kind: str) -> None:
        """Start a worker of another machine that has offered itself, once enough have for a whole replica."""
        if role == "memory":
            self._start(role, (kind,), None)
            return
        self._offers += 1
        kinds = self._vacant[0] if self._vacant else (kind,) * self._pipeline.workers
        if self._offers >= kinds.count(REMOTE):
            self._offers -= kinds.count(REMOTE)
            del self._vacant[:1]
            self._start(role, kinds, None)

    def _await(self, role: Role, kinds: Kinds) -> None:
        """Remember the kinds of a replica that starts once enough workers of other machines have offered themselves."""
        if role == "compute":
            self._vacant.append(kinds)

    def _grant_wishes(self) -> None:
        """Let workers of other machines join and leave as they wish."""
        for wish in self._workers.wishes():
            try:
                if wish.leaver and wish.role == "compute":
                    self._require_single_workers()
                if not wish.leaver:
                    self._start_offered(wish.role, wish.kind)
                elif wish.leaver in self.topology.names and wish.leaver not in self._leaves.names:
                    if wish.moves and wish.leaver not in self._moving:
                        log.warning("the machine of %s is to end: it moves to another one", wish.leaver)
                        self._moving.add(wish.leaver)
                        self._start(wish.role, (wish.kind,), None)
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
            _, role, kinds = due
            self._start(role, kinds, None)
        self._grant_wishes()
        self._joins.turn(self.topology, self._joined if steady else None)
        if steady:
            self._change()
        for name in self._leaves.turn(self.topology.names):
            self._note(name)
        if (missing := self.topology.lacks(())) is not None and not self.grows(missing):
            raise self._reasons[missing]

    def _change(self) -> None:
        """Make the changes that can be made between the steps planned so far and the next ones."""
        if (joiner := self._joins.linked) is not None:
            following = self._joined(joiner.members)
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
        for name in joiner.names:
            self._note(name)

    def _note(self, name: str) -> None:
        """Record in its resize that a worker has joined or left."""
        self._moving.discard(name)
        if (resize := self._resizes.pop(name, None)) is not None:
            resize.on_member_change(name)

    def _joined(self, joiners: Sequence[Member]) -> Topology:
        computes = len(self.topology.computes) + sum(joiner.role == "compute" for joiner in joiners)
        return self.topology.joined(joiners, self._pipeline_of(computes // self._pipeline.workers))

    def _left(self, name: str) -> Topology:
        replicas = len(self.topology.replicas) - (name in self.topology.computes)
        return self.topology.left(name, self._pipeline_of(replicas))

    def _pipeline_of(self, replicas: int) -> Pipeline:
        """Return the pipeline for so many replicas; lanes do not rotate if there are more replicas than slices."""
        if replicas == len(self.topology.replicas):
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
