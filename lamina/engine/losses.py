"""Detects lost workers, tracks the end of an epoch, and watches the deadlines of steps and moves."""

import collections
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from lamina.cluster.conversations import Workers, failure, silence
from lamina.control.messages import EpochEnded, Failed
from lamina.control.sockets import ControlServer
from lamina.core.errors import DeadlineError, LaminaError, TransportError
from lamina.core.steps import KvMove, StepPlan
from lamina.core.topology import Topology
from lamina.schedule.suspects import DEATHS_ALONE
from lamina.schedule.turn import Turn

GRACE_S = 2.0  # wait after a complaint: if the worker's process has not ended by then, the link counts as cut
ACKNOWLEDGE_S = 60.0  # longest time in which a worker ends an epoch: it may be inside a long slice


@dataclass
class Complaints:
    """Reports of workers that others, or the engine, cannot reach although their processes run."""

    _reasons: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._reasons)

    def report(self, reporter: str, worker: str, reason: str, now: float) -> None:
        """Record that ``reporter`` cannot reach ``worker``."""
        self._reasons.setdefault((reporter, worker), (reason, now))

    def about(self, workers: Collection[str], reporters: Collection[str]) -> dict[str, str]:
        """Return those of ``workers`` that some of ``reporters`` cannot reach, with a reason."""
        return {
            worker: f"{reporter}: {reason}"
            for (reporter, worker), (reason, _) in self._reasons.items()
            if worker in workers and reporter in reporters
        }

    def keep_members(self, topology: Topology) -> None:
        """Forget complaints by or about workers that are not members of ``topology``."""
        self._reasons = {
            pair: said
            for pair, said in self._reasons.items()
            if pair[1] in topology.names and (pair[0] in topology.names or pair[0] == "engine")
        }

    def due(self, topology: Topology, now: float, unheard: Collection[str] = ()) -> tuple[str, str] | None:
        """Return the worker to declare lost, with the reason, if a complaint is older than ``GRACE_S``.

        ``unheard``: Workers that do not answer the engine either. The last of a role is not declared lost for that: it
        may answer again, or be lost by its silence.
        """
        if not any(now - since > GRACE_S for _, since in self._reasons.values()):
            return None
        quiet = {worker for pair in self._reasons for worker in pair if worker in unheard}
        if any(topology.lacks([worker]) is not None for worker in quiet):
            return None
        worker = blamed(list(self._reasons), topology, quiet)
        return worker, next(f"{pair[0]}: {reason}" for pair, (reason, _) in self._reasons.items() if worker in pair)


def blamed(pairs: Collection[tuple[str, str]], topology: Topology, unheard: Collection[str] = ()) -> str:
    """Return the worker to declare lost, given pairs (reporter, unreachable worker).

    Either worker of a pair may be the one whose network fails, so the worker in most pairs is chosen, one of
    ``unheard`` if there are any; of several, the last memory worker, whose loss costs least. The last worker of a role
    is chosen only if no other is in any pair.
    """
    counts = collections.Counter(member for pair in set(pairs) for member in topology.members if member.name in pair)
    found = [member for member in counts if member.name in unheard] or list(counts)
    spare = [member for member in found if topology.lacks([member.name]) is None]
    return max(spare or found, key=lambda member: (counts[member], member.role == "memory", member.name)).name


@dataclass
class Ending:
    """Progress of the members with the end of an epoch.

    Attributes:
        topology: Topology of the next epoch.
        lost_at: When the first loss of the epoch was noticed.
        since: When the members were told to end the epoch.
    """

    topology: Topology
    lost_at: float
    since: float
    _missing: dict[str, list[str]] = field(default_factory=dict)  # by member that has answered

    def on_epoch_ended(self, worker: str, message: EpochEnded) -> bool:
        """Record that a member has ended the old epoch; return True once all have, and no old message can arrive."""
        if message.epoch == self.topology.epoch:
            self._missing[worker] = message.missing
        return self._missing.keys() >= self.topology.names and not any(self._missing.values())

    def overdue(self, now: float) -> Mapping[str, str]:
        """Return members to declare lost, with the reason: those without a reply, else the one that most wait for."""
        waited = now - self.since
        if waited < ACKNOWLEDGE_S:
            return {}
        silent = self.topology.names - self._missing.keys()
        if silent:
            return {name: f"it has not ended its steps within {waited:.0f} s" for name in silent}
        pairs = [(worker, peer) for worker, missing in self._missing.items() for peer in missing]
        worker = blamed(pairs, self.topology)
        return {worker: f"what it sends has not reached {_others(pairs, worker)} for {waited:.0f} s"}


def _others(pairs: Collection[tuple[str, str]], worker: str) -> str:
    return ", ".join(sorted({name for pair in pairs if worker in pair for name in pair} - {worker}))


PROGRESS_TIMEOUT_S = 120.0  # longest time without progress on a step; with progress, a step may take any time
MOVE_TIMEOUT_S = 600.0
POLL_S = 0.1


class Watch:
    """Watches whether workers reply, and whether steps and moves make progress.

    Times are ``awake_s`` of the control plane, which does not count pauses of the engine's process.

    Attributes:
        silent: Seconds without a reply, by suspected worker.
    """

    def __init__(self, control: ControlServer, workers: Workers, turn: Turn, topology: Topology) -> None:
        self.silent: Mapping[str, float] = {}
        self._control = control
        self._workers = workers
        self._turn = turn
        self._topology = topology
        self._complaints = Complaints()
        self._failures: dict[str, Failed] = {}  # by worker: its message about its own failure
        self._left = set[str]()  # workers that have left in this epoch
        self._cut: dict[str, str] = {}  # by worker of ``_left``: why a member could not reach it, and stopped its steps
        # By lane: time and worker of the last progress of a step, the least recent first.
        self._progress: dict[int, tuple[float, str]] = {}
        # Parts of moves in progress, by number, source and target, with their deadlines.
        self._moves: dict[tuple[int, str, str], tuple[KvMove, float]] = {}

    def apply_topology(self, topology: Topology) -> None:
        """Watch only members of ``topology`` from now on."""
        if topology.epoch == self._topology.epoch:
            self._left = (self._left | self._topology.names) - topology.names
            self._cut |= self._complaints.about(self._left, topology.names)
        else:
            self._left, self._cut = set(), {}
        self._topology = topology
        self._complaints.keep_members(topology)
        self._failures = {worker: message for worker, message in self._failures.items() if worker in topology.names}

    def began(self, plan: StepPlan) -> None:
        """Record that a plan is about to be sent."""
        self.progressed([plan.lane], "engine")
        for move in plan.moves:
            self._moves[move.number, move.source, move.target] = move, self._control.liveness.awake_s + MOVE_TIMEOUT_S

    def moved(self, number: int, source: str, target: str) -> None:
        """Record that a part of a move has arrived."""
        self._moves.pop((number, source, target), None)

    def progressed(self, lanes: Iterable[int], worker: str) -> None:
        """Record that a worker has made progress on steps of these lanes."""
        for lane in lanes:
            self._progress.pop(lane, None)
            self._progress[lane] = self._control.liveness.awake_s, worker

    def failed(self, worker: str, message: Failed) -> None:
        """Record why a worker cannot continue."""
        self._failures[worker] = message

    def complain(self, reporter: str, worker: str, reason: str) -> None:
        """Record that ``reporter`` cannot reach ``worker``, whose process may still run.

        A member that did not know yet that ``worker`` has left has stopped its steps until the epoch ends.
        """
        if worker in self._topology.names:
            self._complaints.report(reporter, worker, reason, self._control.liveness.awake_s)
        elif worker in self._left and reporter in self._topology.names:  # else the epoch has ended without it
            self._cut[worker] = f"{reporter}: {reason}"

    @property
    def ended(self) -> dict[str, str]:
        """Return members whose processes have exited, with the known reason."""
        return {worker: reason for worker, reason in self._workers.ended().items() if worker in self._topology.names}

    @property
    def died(self) -> set[str]:
        """Return members that have ended by themselves: their processes have exited, or they reported a failure."""
        failed = {name for name, message in self._failures.items() if message.kind != DeadlineError.__name__}
        return failed | self.ended.keys()

    def lost(self) -> dict[str, LaminaError]:
        """Return lost workers with the cause; some of their processes may still run.

        They are members, or have left in this epoch, which must end because a member has stopped its steps.
        """
        self.silent = self._control.liveness.suspects()
        if not (self.silent or self._failures or self._complaints or self._cut or self._workers.ended()):
            return {}  # nearly always
        lost: dict[str, LaminaError] = {worker: exited(worker, reason) for worker, reason in self.ended.items()}
        silent = {worker: s for worker, s in self._control.liveness.lost().items() if worker in self._topology.names}
        lost |= {worker: silence({worker: s}) for worker, s in silent.items()}
        lost |= {worker: self._cause(worker, message) for worker, message in self._failures.items()}
        lost |= {
            worker: TransportError(f"worker {worker} was lost as it left: {reason}")
            for worker, reason in self._cut.items()
        }
        if lost or not self._complaints:
            return lost
        liveness = self._control.liveness
        if (due := self._complaints.due(self._topology, liveness.awake_s, liveness.unheard())) is not None:
            worker, reason = due
            lost[worker] = TransportError(f"worker {worker} cannot be reached, although its process runs: {reason}")
        return lost

    def _cause(self, worker: str, message: Failed) -> LaminaError:
        """Return why a worker failed. A missed deadline is blamed on a silent worker, if there is one."""
        if message.kind == DeadlineError.__name__ and self.silent:
            return silence(self.silent)
        return failure(worker, message)

    def raise_if_stalled(self) -> None:
        """Raise TransportError if a step or a move has made no progress for too long."""
        now = self._control.liveness.awake_s
        if (stuck := self._stuck(now)) is not None:
            step, lane, worker = stuck
            raise TransportError(
                f"no worker has made progress on step {step} of lane {lane} for {PROGRESS_TIMEOUT_S:.0f} s; "
                f"the last was {worker}. Look at the load and the logs of the machines of the other workers"
            )
        if self._moves:
            going = set(self._turn.scheduler.moves.numbers)
            self._moves = {one: begun for one, begun in self._moves.items() if one[0] in going}
        for move, deadline in self._moves.values():
            if now > deadline:
                raise TransportError(
                    f"{move.target} did not get tokens {move.start} to {move.stop} of sequence "
                    f"{move.sequence} from {move.source} within {MOVE_TIMEOUT_S:.0f} s; "
                    f"check the network between the two"
                )

    def _stuck(self, now: float) -> tuple[int, int, str] | None:
        """Return a step without progress for too long, with its lane and the last worker that made progress there."""
        while self._progress:
            lane, (since, worker) = next(iter(self._progress.items()))
            if now - since <= PROGRESS_TIMEOUT_S:
                return None
            for step, plan in self._turn.in_flight.items():
                if plan.lane == lane:
                    return step, lane, worker
            del self._progress[lane]  # the lane has no step
        return None


def exited(worker: str, reason: str) -> TransportError:
    """Return the error of a cluster that has lost this worker's process."""
    return TransportError(
        f"worker {worker} is gone: {reason}. If it was killed for memory, give less to kv_cache_memory_bytes"
    )


def poisonous(lost: Mapping[str, LaminaError]) -> str:
    """Return the error of a request that ran alone when workers died. ``lost``: the workers that died last."""
    last = "; ".join(str(why).partition("\n")[0] for why in lost.values())
    return (
        f"the request is not run again: {DEATHS_ALONE} times in a row, a worker died while it ran nothing but this "
        f"request. The last time: {last}. Change the request; the workers' logs may show what they died of"
    )
