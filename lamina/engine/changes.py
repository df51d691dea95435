"""Lets workers join and leave a serving cluster, in small parts between steps."""

import contextlib
import enum
import itertools
import logging
import string
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina.cluster.conversations import Ask, Conversation, Workers, failure, silence
from lamina.cluster.joining import Fabric, link_joiners, prepare_workers
from lamina.control.agent_messages import Start
from lamina.control.messages import Failed, Forget, Stop, ToEngine, ToWorker
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError, DeadlineError, LaminaError, TransportError, UnreachableError, WorkerError
from lamina.core.topology import Member, Pool, Role, Topology, role_of
from lamina.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.5  # longest wait for the last message of a worker whose process has ended


class JoinStage(enum.Enum):
    """Progress of a joiner. One joiner at a time is linked; it becomes a member before the next one is linked."""

    PREPARING = enum.auto()
    PREPARED = enum.auto()
    LINKING = enum.auto()
    LINKED = enum.auto()


@dataclass(eq=False)
class Joiner:
    """Workers that were started and enter together: a memory worker, or the compute workers of one replica.

    Attributes:
        names: The workers, in their order within the replica.
        on_failed: Called with the reason, and whether another attempt may succeed, if they do not enter.
        conversation: The exchange of messages that prepares or links them.
        stage: Their progress.
        asked: Messages that the conversation waits for.
        answers: Messages of ``asked`` that have arrived, by worker.
        deadline: When all must have arrived, by the clock ``Liveness.awake_s``.
        members: The future members, once the workers have been prepared.
        exited_at: When one of their processes was seen to have ended, by that clock.
    """

    names: tuple[str, ...]
    pool: Pool
    started_at: float
    conversation: Conversation[Any]
    on_failed: Callable[[LaminaError, bool], None]
    stage: JoinStage = JoinStage.PREPARING
    asked: Ask | None = None
    answers: dict[str, ToEngine] = field(default_factory=dict)
    deadline: float = 0.0
    members: tuple[Member, ...] = ()
    exited_at: float | None = None

    def __str__(self) -> str:
        return " and ".join(self.names)


class Joins:
    """All joiners. The engine's thread owns it.

    A worker that is lost interrupts the linking of a joiner, which is then ended: it may be linked with the lost one,
    and it is started again within a second, unless it has to load weights. If one worker of a joiner fails, all are
    ended.
    """

    def __init__(
        self,
        control: ControlServer,
        workers: Workers,
        fabric: Fabric,
        topology: Topology,
        promised: Callable[[str], int],
    ) -> None:
        """``promised``: returns the bytes of slabs and scratch memory on a host that workers may still use."""
        self._control, self._workers, self._fabric, self._promised = control, workers, fabric, promised
        self._joiners: list[Joiner] = []
        self._numbers = {"compute": _numbers(topology.computes), "memory": _numbers(topology.memories)}
        self._members = topology.names
        self._stale: tuple[type[ToEngine], set[str]] | None = None  # replies to an aborted conversation, to ignore

    def __bool__(self) -> bool:
        """Return whether a worker is joining."""
        return bool(self._joiners)

    @property
    def stages(self) -> Mapping[str, str]:
        return {name: joiner.stage.name.lower() for joiner in list(self._joiners) for name in joiner.names}

    def count(self, pool: Pool) -> int:
        """Return how many workers of a pool are joining."""
        return sum(len(joiner.names) for joiner in self._joiners if joiner.pool == pool)

    def start(
        self, pool: Pool, kinds: Sequence[str], on_failed: Callable[[LaminaError, bool], None]
    ) -> tuple[str, ...]:
        """Start a worker of each of these kinds; they enter together. Return their new names.

        Raises LaminaError if one cannot be started. Then none is left.
        """
        role = role_of(pool)
        started: dict[str, str] = {}
        try:
            for kind in kinds:
                name = f"{role}{next(self._numbers[role])}"
                self._start_process(name, pool, kind)
                started[name] = kind
        except LaminaError as error:
            for name in started:
                self._control.dismiss(name)
                _end_process(self._workers, self._control, name, (), str(error))
            raise
        conversation = prepare_workers(self._control, self._fabric, started, pool, self._promised)
        joiner = Joiner(tuple(started), pool, time.monotonic(), conversation, on_failed)
        self._joiners.append(joiner)
        self._advance(joiner, None)
        return joiner.names

    def _start_process(self, name: str, pool: Pool, kind: str) -> None:
        bootstrap = self._control.admit(name)
        try:
            self._fabric.launcher.start(Start(pool, kind, bootstrap))
        except OSError as error:
            self._control.dismiss(name)
            raise WorkerError(name, f"its process cannot be started: {error}") from error
        except LaminaError:
            self._control.dismiss(name)
            raise

    def handle_join_message(self, worker: str, message: ToEngine) -> bool:
        """Handle a worker's message about joining; return False for other messages."""
        if self._stale is not None and isinstance(message, self._stale[0]) and worker in self._stale[1]:
            self._stale[1].remove(worker)
            self._stale = self._stale if self._stale[1] else None
            return True
        for joiner in list(self._joiners):
            asked = joiner.asked
            if asked is not None and worker in asked.names and isinstance(message, asked.kind):
                joiner.answers[worker] = message
                if joiner.answers.keys() >= set(asked.names):
                    self._advance(joiner, joiner.answers)
                return True
        if (own := next((one for one in self._joiners if worker in one.names), None)) is None:
            return False
        if isinstance(message, Failed):
            self._fail(own, failure(worker, message))
        return True

    def _advance(self, joiner: Joiner, answers: dict[str, Any] | None) -> None:
        joiner.asked, joiner.answers = None, {}
        try:
            joiner.asked = next(joiner.conversation) if answers is None else joiner.conversation.send(answers)
            joiner.deadline = self._control.liveness.awake_s + joiner.asked.timeout_s
        except StopIteration as done:
            if joiner.stage is JoinStage.PREPARING:
                joiner.stage, joiner.members = JoinStage.PREPARED, done.value
            else:
                joiner.stage = JoinStage.LINKED
        except LaminaError as error:
            self._fail(joiner, error)

    def turn(
        self, topology: Topology, joined: Callable[[Sequence[Member], Pool], Topology] | None, missing: int
    ) -> None:
        """Detect failed joiners, and begin to link the next one.

        Args:
            joined: Returns the topology with more members in a pool; None: no joiner may be linked now.
            missing: Number of workers that the pools are to have and ``topology`` lacks.
        """
        self._members = topology.names
        if not self._joiners:
            return
        self._look_for_failures()
        if self._stale is not None:
            self._stale = (self._stale[0], left) if (left := self._stale[1] & topology.names) else None
        if joined is None or self._stale is not None or self._current is not None:
            return
        for joiner in self._joiners:
            if joiner.stage is JoinStage.PREPARED:
                joiner.stage = JoinStage.LINKING
                joiner.conversation = link_joiners(
                    self._control, self._fabric, joined(joiner.members, joiner.pool), joiner.members, missing
                )
                self._advance(joiner, None)
                return

    @property
    def _current(self) -> Joiner | None:
        """Return the joiner that is being linked or has been linked, and is not yet a member."""
        late = (JoinStage.LINKING, JoinStage.LINKED)
        return next((joiner for joiner in self._joiners if joiner.stage in late), None)

    def _look_for_failures(self) -> None:
        now, ended, silent = self._control.liveness.awake_s, self._workers.ended(), self._control.liveness.lost()
        for joiner in list(self._joiners):
            gone, quiet = ([name for name in joiner.names if name in those] for those in (ended, silent))
            if gone:
                joiner.exited_at = now if joiner.exited_at is None else joiner.exited_at
                if now - joiner.exited_at >= LAST_WORDS_S:
                    self._fail(joiner, WorkerError(gone[0], ended[gone[0]]))
            elif quiet:
                self._fail(joiner, silence({name: silent[name] for name in quiet}))
            elif joiner.asked is not None and now > joiner.deadline:
                asked = joiner.asked
                late = ", ".join(name for name in asked.names if name not in joiner.answers)
                what = f"no {asked.kind.__name__} from {late} within {asked.timeout_s:.0f} s"
                self._fail(joiner, DeadlineError(f"{joiner} cannot join: {what}"))

    @property
    def is_linking(self) -> bool:
        """Whether a joiner is being linked or has been linked, and is not yet a member. Then no member may leave."""
        return self._current is not None

    @property
    def linked(self) -> Joiner | None:
        """The joiner that may become a member now; None if no joiner is linked, or a process of it has ended."""
        current = self._current
        enters = current is not None and current.stage is JoinStage.LINKED and current.exited_at is None
        return current if enters else None

    def entered(self, joiner: Joiner) -> None:
        """Record that the workers of ``joiner`` have become members."""
        self._joiners.remove(joiner)
        log.info("%s: joined %.2f s after the start", joiner, time.monotonic() - joiner.started_at)

    def interrupt(self, lost: str) -> None:
        """Fail the joiner that is being linked, if any, because member ``lost`` is lost."""
        if (current := self._current) is not None:
            self._fail(current, TransportError(f"{current}: joining when {lost} was lost"), again=True)

    def _fail(self, joiner: Joiner, error: LaminaError, again: bool = False) -> None:
        self._joiners.remove(joiner)
        joiner.conversation.close()
        if joiner.asked is not None and (left := set(joiner.asked.names).difference(joiner.answers, joiner.names)):
            self._stale = joiner.asked.kind, left
        linked = joiner.stage in (JoinStage.LINKING, JoinStage.LINKED)
        for name in joiner.names:
            self._control.dismiss(name)
            _end_process(self._workers, self._control, name, self._members if linked else (), str(error))
        joiner.on_failed(error, again)

    def close(self) -> None:
        for joiner in list(self._joiners):
            joiner.conversation.close()
            joiner.on_failed(TransportError("the engine has stopped"), False)
        self._joiners.clear()


def _numbers(names: Iterable[str]) -> "itertools.count[int]":
    """Return an endless counter of numbers for workers started later, beyond those in ``names``."""
    return itertools.count(1 + max((int(name.lstrip(string.ascii_lowercase)) for name in names), default=-1))


STOP_S = 10.0  # time in which a worker exits after it was told to stop


class LeaveStage(enum.Enum):
    """Progress of a leaver. It is a member until the end of DRAINING."""

    DRAINING = enum.auto()
    PARTING = enum.auto()  # members close their links to it
    STOPPING = enum.auto()


@dataclass(eq=False)
class Leaver:
    """A worker that leaves.

    Attributes:
        name: Name of the worker.
        role: Its role.
        stage: Its progress.
        change: Number of the topology change without it.
        waiting: Members that have not applied the change.
        deadline: When its process must have exited, by the clock ``Liveness.awake_s``.
    """

    name: str
    role: Role
    stage: LeaveStage = LeaveStage.DRAINING
    change: int = 0
    waiting: set[str] = field(default_factory=set)
    deadline: float = 0.0


class Leaves:
    """All leavers. The engine's thread owns it."""

    def __init__(self, control: ControlServer, workers: Workers, scheduler: Scheduler) -> None:
        self._control, self._workers, self._scheduler = control, workers, scheduler
        self._leavers: dict[str, Leaver] = {}

    def __bool__(self) -> bool:
        """Return whether a worker is leaving."""
        return bool(self._leavers)

    @property
    def names(self) -> Collection[str]:
        """Names of leavers that are members."""
        return {*self.draining}

    @property
    def parted(self) -> Collection[str]:
        """Names of leavers that are no longer members."""
        return self._leavers.keys() - self.names

    @property
    def stages(self) -> Mapping[str, str]:
        return {leaver.name: leaver.stage.name.lower() for leaver in list(self._leavers.values())}

    def validate_leave(self, names: Sequence[str], topology: Topology) -> None:
        """Raise ConfigError if the remaining memory workers have too little free KV for the leavers' tokens."""
        placement = self._scheduler.placement
        going = [name for name in names if name in topology.capacities]
        staying = topology.capacities.keys() - self.names - set(going)
        if not going:
            return
        held, left = placement.held(going), placement.left_on(staying)
        if held > left:
            hold = "holds" if len(going) == 1 else "hold"
            raise ConfigError(
                f"{', '.join(going)} {hold} {held} tokens, and the memory workers that stay have room for {left}. "
                "Wait until requests have ended, or add memory workers first"
            )
        most = max((group.tokens for group in self._scheduler.requests), default=0)
        total = placement.together(staying)
        if most > total:
            raise ConfigError(
                f"a request in progress may need {most} KV tokens, and the memory workers that stay hold {total}. "
                "Wait until it has ended, or add memory workers first"
            )

    def begin_leave(self, name: str, topology: Topology) -> None:
        """Begin to move the KV of a member to others; it leaves once it holds no KV and runs no step."""
        role: Role = "memory" if name in topology.capacities else "compute"
        self._leavers[name] = Leaver(name, role)
        if role == "memory":
            self._scheduler.drain(name)

    @property
    def draining(self) -> list[str]:
        """Names of leavers that are members, in the order in which they began to leave."""
        return [leaver.name for leaver in self._leavers.values() if leaver.stage is LeaveStage.DRAINING]

    def are_drained(self, names: Collection[str]) -> bool:
        """Return whether all these leavers hold no KV, so that they may leave once no step in flight needs them."""
        holders = [name for name in names if self._leavers[name].role == "memory"]
        return all(self._scheduler.is_drained(name) for name in holders)

    def part(self, name: str, change: int, others: Collection[str]) -> None:
        """Record that ``name`` is no member after topology change ``change``, which all ``others`` receive."""
        leaver = self._leavers[name]
        leaver.stage, leaver.change, leaver.waiting = LeaveStage.PARTING, change, set(others)

    def note_changed(self, worker: str, number: int) -> None:
        """Record that ``worker`` has applied topology change ``number`` and all earlier ones."""
        for leaver in self._leavers.values():
            if leaver.stage is LeaveStage.PARTING and number >= leaver.change:
                leaver.waiting.discard(worker)

    def on_worker_lost(self, name: str) -> None:
        """Forget a leaver that was lost before it had left."""
        del self._leavers[name]

    def apply_topology(self, topology: Topology) -> list[str]:
        """Apply a loss of members. Returns leavers that stay because no other worker of one of their roles is left."""
        back, own = [], {member.name: member.roles for member in topology.members}
        for leaver in list(self._leavers.values()):
            if leaver.stage is not LeaveStage.DRAINING or leaver.name not in self._leavers:
                continue
            others = {role for name in own.keys() - self.names for role in own[name]}
            if not own[leaver.name] <= others:
                for name in topology.whole_replicas([leaver.name]):
                    back.append(name)
                    if self._leavers.pop(name).role == "memory":
                        self._scheduler.resume(name)
        return back

    def turn(self, members: Collection[str]) -> list[str]:
        """Stop leavers that no member is linked to. Returns leavers whose processes have ended."""
        left = []
        for leaver in [one for one in self._leavers.values() if one.stage is not LeaveStage.DRAINING]:
            leaver.waiting &= set(members)
            if leaver.stage is LeaveStage.PARTING and not leaver.waiting:
                leaver.stage, leaver.deadline = LeaveStage.STOPPING, self._control.liveness.awake_s + STOP_S
                _tell(self._control, [leaver.name], Stop())
            late = self._control.liveness.awake_s > leaver.deadline
            if leaver.stage is LeaveStage.STOPPING and (late or leaver.name in self._workers.ended()):
                if _end_process(self._workers, self._control, leaver.name, members):
                    log.info("%s has left", leaver.name)
                del self._leavers[leaver.name]
                left.append(leaver.name)
        return left


def _end_process(
    workers: Workers, control: ControlServer, name: str, linked: Collection[str], reason: str = ""
) -> bool:
    """End a worker's process, and tell the workers linked to it. Returns False if it cannot be ended."""
    try:
        workers.kill_worker(name, reason=reason)
    except TransportError as error:  # the worker may still write into its leases, which stay reserved
        log.warning("%s", error)
        return False
    if linked:
        _tell(control, sorted(linked), Forget([name]))
    return True


def tell_to_stop(control: ControlServer, workers: Sequence[str]) -> list[str]:
    """Tell workers to stop; return those that could be reached."""
    try:
        control.send(workers, Stop())
    except UnreachableError as error:
        log.info("not all workers could be told to stop: %s", error)
        return [worker for worker in workers if worker not in error.workers]
    return list(workers)


def _tell(control: ControlServer, workers: Sequence[str], message: ToWorker) -> None:
    with contextlib.suppress(UnreachableError):  # ``losses.Watch`` detects it
        control.send(workers, message)
