"""Workers on their way out of a cluster that serves: drained, parted from the others, stopped and forgotten."""

import contextlib
import enum
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lamina.cluster.conversations import Workers
from lamina.control.messages import Forget, Stop, ToWorker
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError, TransportError, UnreachableError
from lamina.core.topology import Role, Topology
from lamina.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

STOP_S = 10.0  # for a worker that was told to stop to exit


class Stage(enum.Enum):
    """How far a leaver is. Up to DRAINING it is a member."""

    DRAINING = enum.auto()
    PARTING = enum.auto()  # the others end their links to it
    STOPPING = enum.auto()


@dataclass(eq=False)
class Leaver:
    """A worker that leaves.

    Attributes:
        change: number of the Change that leaves it out.
        waiting: members that have not applied it.
        deadline: for its process to exit.
    """

    name: str
    role: Role
    stage: Stage = Stage.DRAINING
    change: int = 0
    waiting: set[str] = field(default_factory=set)
    deadline: float = 0.0


class Leaves:
    """All leavers. The engine's thread owns it."""

    def __init__(self, control: ControlServer, workers: Workers, scheduler: Scheduler) -> None:
        self._control, self._workers, self._scheduler = control, workers, scheduler
        self._leavers: dict[str, Leaver] = {}

    @property
    def names(self) -> Collection[str]:
        """All leavers that are members."""
        return {leaver.name for leaver in self._leavers.values() if leaver.stage is Stage.DRAINING}

    @property
    def parted(self) -> Collection[str]:
        """All leavers that are members no more."""
        return self._leavers.keys() - self.names

    @property
    def stages(self) -> Mapping[str, str]:
        """How far each leaver is."""
        return {leaver.name: leaver.stage.name.lower() for leaver in list(self._leavers.values())}

    def validate_leave(self, names: Sequence[str], topology: Topology) -> None:
        """Raises ConfigError, with the figures, if the others have no room for what these memory workers hold."""
        placement = self._scheduler.placement
        going = [name for name in names if name in topology.capacities]
        staying = topology.capacities.keys() - placement.closed - set(going)
        if not going:
            return
        held = placement.held(going)
        left = sum(placement.left(name) for name in staying)
        if held > left:
            hold = "holds" if len(going) == 1 else "hold"
            raise ConfigError(
                f"{', '.join(going)} {hold} {held} tokens, and the memory workers that stay have room for {left}. "
                "Wait until requests have ended, or add memory workers first"
            )
        most = max((group.tokens for group in self._scheduler.requests), default=0)
        total = sum(placement.capacities[name] for name in staying)
        if most > total:
            raise ConfigError(
                f"a request in progress may need {most} KV tokens, and the memory workers that stay hold {total}. "
                "Wait until it has ended, or add memory workers first"
            )

    def begin_leave(self, name: str, topology: Topology) -> None:
        """Let a member go once nothing depends on it."""
        role: Role = "memory" if name in topology.capacities else "compute"
        self._leavers[name] = Leaver(name, role)
        if role == "memory":
            self._scheduler.drain(name)

    @property
    def ready(self) -> list[str]:
        """Members that may leave now, once no step in flight needs them."""
        return [
            leaver.name
            for leaver in self._leavers.values()
            if leaver.stage is Stage.DRAINING and (leaver.role == "compute" or self._scheduler.is_drained(leaver.name))
        ]

    def part(self, name: str, change: int, others: Collection[str]) -> None:
        """Note that ``name`` has stopped being a member with Change number ``change``, which all ``others`` get."""
        leaver = self._leavers[name]
        leaver.stage, leaver.change, leaver.waiting = Stage.PARTING, change, set(others)

    def note_changed(self, worker: str, number: int) -> None:
        """A member has applied a Change, and all before it."""
        for leaver in self._leavers.values():
            if leaver.stage is Stage.PARTING and number >= leaver.change:
                leaver.waiting.discard(worker)

    def on_worker_lost(self, name: str) -> None:
        """A leaver was lost before it had left."""
        del self._leavers[name]

    def apply_topology(self, topology: Topology) -> list[str]:
        """Members were lost. Returns the leavers that stay, since nobody else of their pool is left."""
        back = []
        for leaver in list(self._leavers.values()):
            others = [one.name for one in topology.members if one.role == leaver.role and one.name not in self.names]
            if leaver.stage is Stage.DRAINING and not others:
                del self._leavers[leaver.name]
                back.append(leaver.name)
                if leaver.role == "memory":
                    self._scheduler.resume(leaver.name)
        return back

    def turn(self, members: Collection[str]) -> list[str]:
        """Stop those that nobody has a link to any more. Returns those whose processes have ended."""
        left = []
        for leaver in [one for one in self._leavers.values() if one.stage is not Stage.DRAINING]:
            leaver.waiting &= set(members)
            if leaver.stage is Stage.PARTING and not leaver.waiting:
                leaver.stage, leaver.deadline = Stage.STOPPING, self._control.liveness.awake_s + STOP_S
                self._tell([leaver.name], Stop())
            late = self._control.liveness.awake_s > leaver.deadline
            if leaver.stage is Stage.STOPPING and (late or leaver.name in self._workers.ended()):
                self._end(leaver, members)
                del self._leavers[leaver.name]
                left.append(leaver.name)
        return left

    def _end(self, leaver: Leaver, members: Collection[str]) -> None:
        try:
            self._workers.kill_worker(leaver.name)
        except TransportError as error:  # it may still write into its leases: nobody else gets them
            log.warning("%s", error)
            return
        log.info("%s has left", leaver.name)
        self._tell(sorted(members), Forget([leaver.name]))

    def _tell(self, workers: Sequence[str], message: ToWorker) -> None:
        with contextlib.suppress(UnreachableError):  # the engine's watch notices it
            self._control.send(workers, message)
