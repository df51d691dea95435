"""Deadlines of workers while the engine serves, and why workers failed."""

from collections.abc import Iterable, Mapping

from lamina.cluster.gather import Workers, failure, silence
from lamina.errors import DeadlineError, LaminaError, PeerLostError, TransportError
from lamina.protocol.control import ControlServer
from lamina.protocol.messages import Failed
from lamina.schedule.turn import Turn
from lamina.types import Migration, StepPlan

PROGRESS_TIMEOUT_S = 120.0  # without progress of any worker on a step; with progress, a step may take any time
MIGRATION_TIMEOUT_S = 600.0
POLL_S = 0.1
LAST_WORDS_S = 2.0  # from a worker's exit until its process status and last messages can be read


class Watch:
    """Whether workers answer, and whether steps and migrations make progress.

    Times are ``awake_s`` of the control plane: a pause of the engine's process is not held against workers.

    Attributes:
        silent: seconds without an answer, by worker, of those that are suspected.
    """

    def __init__(self, control: ControlServer, workers: Workers, turn: Turn) -> None:
        self.silent: Mapping[str, float] = {}
        self._control = control
        self._workers = workers
        self._turn = turn
        # By lane: time and worker of the last progress of a step, the least recent first.
        self._progress: dict[int, tuple[float, str]] = {}
        self._migration: tuple[Migration, float] | None = None  # the latest, with its deadline

    def began(self, plan: StepPlan) -> None:
        """A plan is about to be sent."""
        self.progressed([plan.lane], "engine")
        for migration in plan.migrations:
            self._migration = migration, self._control.liveness.awake_s + MIGRATION_TIMEOUT_S

    def progressed(self, lanes: Iterable[int], worker: str) -> None:
        """A worker has made progress on steps of these lanes."""
        for lane in lanes:
            self._progress.pop(lane, None)
            self._progress[lane] = self._control.liveness.awake_s, worker

    def check(self) -> None:
        """Raises TransportError if a worker is silent, or a step or a migration has made no progress, for too long."""
        self.silent = self._control.liveness.suspects()
        if lost := self._control.liveness.lost():
            raise silence(lost)
        now = self._control.liveness.awake_s
        if (stuck := self._stuck(now)) is not None:
            step, lane, worker = stuck
            raise TransportError(
                f"no worker has made progress on step {step} of lane {lane} for {PROGRESS_TIMEOUT_S:.0f} s; "
                f"the last was {worker}. Look at the load and the logs of the machines of the other workers"
            )
        if self._migration is not None:
            migration, deadline = self._migration
            if migration.number == self._turn.scheduler.migrating and now > deadline:
                raise TransportError(
                    f"{migration.target} did not get tokens {migration.start} to {migration.stop} of sequence "
                    f"{migration.sequence} from {migration.source} within {MIGRATION_TIMEOUT_S:.0f} s; "
                    f"check the network between the two"
                )

    def _stuck(self, now: float) -> tuple[int, int, str] | None:
        """A step without progress for too long, with its lane and the last worker that made progress there."""
        while self._progress:
            lane, (since, worker) = next(iter(self._progress.items()))
            if now - since <= PROGRESS_TIMEOUT_S:
                return None
            for step, plan in self._turn.in_flight.items():
                if plan.lane == lane:
                    return step, lane, worker
            del self._progress[lane]  # nothing runs there
        return None

    def root_cause(self, worker: str, message: Failed) -> LaminaError:
        """Why workers failed. A lost peer and a wait past its deadline are consequences: what the peer reports, its
        exit or its silence is the cause."""
        failures = {worker: message}
        failures |= {name: other for name, other in self._control.receive(POLL_S) if isinstance(other, Failed)}
        name, first = min(failures.items(), key=lambda item: item[1].kind == PeerLostError.__name__)
        ended = {worker: reason for worker, reason in self._workers.ended().items() if worker not in failures}
        if first.kind == PeerLostError.__name__ and ended:
            return exited(*next(iter(ended.items())))
        suspects = self._control.liveness.suspects()
        if first.kind in (PeerLostError.__name__, DeadlineError.__name__) and suspects:
            return silence(suspects)
        return failure(name, first)


def exited(worker: str, reason: str) -> TransportError:
    """The error of a cluster that has lost this worker's process."""
    return TransportError(
        f"worker {worker} is gone: {reason}. If it was killed for memory, give less to kv_cache_memory_bytes"
    )
