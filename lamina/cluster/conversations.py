"""Collects workers' replies while a cluster is brought up, and turns workers' failures into exceptions."""

import platform
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from lamina.control.agent_messages import Start
from lamina.control.messages import (
    Connected,
    Failed,
    Granted,
    Hello,
    Linked,
    LoadProgress,
    ModelLoaded,
    Registered,
    Resources,
    SlabReady,
    ToEngine,
)
from lamina.control.sockets import ControlServer
from lamina.core.errors import DeadlineError, LaminaError, TransportError, WorkerError, user_error
from lamina.core.topology import Pool, Role

POLL_S = 0.2
START_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 1800.0
CONNECT_TIMEOUT_S = 60.0

OnProgress = Callable[[str, LoadProgress], None]
"""Called with a worker's name and its progress."""

MessageT = TypeVar("MessageT", Hello, Resources, ModelLoaded, SlabReady, Registered, Granted, Linked, Connected)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Ask:
    """Expects one message of type ``kind`` from each of the workers ``names`` within ``timeout_s``."""

    kind: type[ToEngine]
    names: Sequence[str]
    timeout_s: float


Conversation = Generator[Ask, dict[str, Any], ResultT]
"""Talks with workers: sends something, yields whose answers it needs, and is sent them by the worker's name.

``converse`` waits for them. An engine that serves goes on serving meanwhile: see ``engine.changes``.
"""


def converse(gather: "Gather", conversation: Conversation[ResultT]) -> ResultT:
    """Run a conversation to its end and return its result. Raises its errors and those of ``Gather.all``."""
    answers: dict[str, Any] | None = None
    while True:
        try:
            asked = next(conversation) if answers is None else conversation.send(answers)
        except StopIteration as done:
            result: ResultT = done.value
            return result
        answers = gather.all(asked.kind, asked.names, asked.timeout_s)


class Wish(NamedTuple):
    """A request from another machine to the engine that ``leaver`` leaves, with its replica.

    ``moves``: the leaver's machine will be shut down, and new workers of the same kinds replace them elsewhere. Such a
    wish is repeated until the worker has left.
    """

    leaver: str
    moves: bool = False


class Workers(Protocol):
    """Watches and ends worker processes, wherever they run."""

    def ended(self) -> Mapping[str, str]:
        """Return workers that have exited, with the known reason."""
        ...

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        """End a worker at once. It can then write to nobody, and ``ended`` leaves it out.

        Args:
            worker: Name of the worker.
            cut: Its peers close their connections to it. An unreachable worker may then run on for a while if it
                shares memory with no remaining worker: ``ended`` names workers that must be ended with it.
            reason: Told to whoever started the worker.

        Raises TransportError if the worker cannot be ended.
        """
        ...

    def wishes(self) -> Sequence[Wish]:
        """Return the wishes since the last call."""
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...


class Launcher(Workers, Protocol):
    """Starts, watches and ends worker processes."""

    def default_kind(self, pool: Pool) -> str:
        """Return the kind of added workers if none is named."""
        ...

    def offers(self) -> Sequence[Pool]:
        """Return the pool of each agent of another machine that waits for a worker to run, first come first."""
        ...

    def refuse_offers(self, pool: Pool, reason: str) -> None:
        """Send away the agents that wait for a worker of a pool, which this cluster cannot have."""
        ...

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        """Raise ConfigError for an unknown kind, or if a pool cannot have ``count`` workers of it."""
        ...

    def start(self, worker: Start) -> None:
        """Start a worker. Raises OSError, and ConfigError if this machine has no device of its kind left."""
        ...

    def kill(self, reason: str = "") -> None:
        """End all workers at once. ``reason``: told to whoever started them elsewhere."""
        ...


class Gather:
    """Waits for one message from each of several workers while watching for failed and exited workers."""

    def __init__(self, control: ControlServer, workers: Workers, on_progress: OnProgress) -> None:
        self._control = control
        self._workers = workers
        self._on_progress = on_progress

    def all(self, kind: type[MessageT], names: Sequence[str], timeout_s: float) -> dict[str, MessageT]:
        """Return one message of type ``kind`` by worker. Raises DeadlineError, WorkerError and workers' UserErrors."""
        answers: dict[str, MessageT] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(names):
            for worker, message in self._control.receive(POLL_S):
                if isinstance(message, kind):
                    answers[worker] = message
                else:
                    self._handle(worker, message)
            missing = [name for name in names if name not in answers]
            if ended := self._workers.ended():
                self._drain()
                raise WorkerError(*next(iter(ended.items())))
            if lost := self._control.liveness.lost():
                raise silence(lost)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"no {kind.__name__} from {', '.join(missing)} within {timeout_s:.0f} s; "
                    f"is the machine overloaded or out of memory? LAMINA_LOG_LEVEL=INFO shows what the workers do"
                )
        return answers

    def _drain(self) -> None:
        """Raise the error that a worker may have sent just before it exited."""
        for worker, message in self._control.receive(POLL_S):
            self._handle(worker, message)

    def _handle(self, worker: str, message: ToEngine) -> None:
        if isinstance(message, Failed):
            raise failure(worker, message)
        if isinstance(message, LoadProgress):
            self._on_progress(worker, message)


def silence(silent: Mapping[str, float]) -> TransportError:
    """Return the error for workers that have not answered pings. ``silent``: seconds by worker."""
    named = ", ".join(f"worker {worker} has not answered for {seconds:.0f} s" for worker, seconds in silent.items())
    return TransportError(
        f"{named}: its process is stopped (SIGSTOP, a debugger), or its machine or the network to it hangs"
    )


def failure(worker: str, message: Failed) -> LaminaError:
    """Return the exception for a worker's last message: its own UserError, else a WorkerError."""
    elsewhere = message.machine and message.machine != platform.node()
    said = f"{worker} on {message.machine}: {message.message}" if elsewhere else message.message
    if message.user and (error := user_error(message.kind, said)) is not None:
        return error
    return WorkerError(worker, f"{message.kind}: {message.message}\n{message.traceback}")
