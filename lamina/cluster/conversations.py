"""Collects the workers' answers while a cluster is brought up, and turns their failures into exceptions."""

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
from lamina.core.topology import Role

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
    """One answer of this kind is expected from each of these workers within ``timeout_s``."""

    kind: type[ToEngine]
    names: Sequence[str]
    timeout_s: float


Conversation = Generator[Ask, dict[str, Any], ResultT]
"""Talks with workers: sends something, yields whose answers it needs, and is sent them by the worker's name.

``converse`` waits for them. An engine that serves goes on serving meanwhile: see ``engine.changes``.
"""


def converse(gather: "Gather", conversation: Conversation[ResultT]) -> ResultT:
    """Run a conversation to its end and return its result. Raises what it raises, and what ``Gather.all`` does."""
    answers: dict[str, Any] | None = None
    while True:
        try:
            asked = next(conversation) if answers is None else conversation.send(answers)
        except StopIteration as done:
            result: ResultT = done.value
            return result
        answers = gather.all(asked.kind, asked.names, asked.timeout_s)


class Wish(NamedTuple):
    """What somebody on another machine wants of the engine: that a worker joins, or that ``leaver`` leaves.

    ``moves``: its machine is to end, and another worker of its kind takes its place elsewhere. Wished again and again.
    """

    role: Role
    kind: str
    leaver: str = ""
    moves: bool = False


class Workers(Protocol):
    """Handle on the worker processes, wherever they run."""

    def ended(self) -> Mapping[str, str]:
        """Workers that have exited, with the known reason."""
        ...

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        """End this worker at once. When this returns it can do nothing any more, and ``ended`` leaves it out.

        Args:
            cut: its peers close their connections to it. Then it may be out of reach and go on for a while, as long as
                it shares memory with nobody who stays: ``ended`` names those who have to go with it.
            reason: for those who have started it.

        Raises TransportError if it cannot be ended.
        """
        ...

    def wishes(self) -> Sequence[Wish]:
        """Return what has been wished for since the last call."""
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...


class Launcher(Workers, Protocol):
    """Can also start workers."""

    def default_kind(self, role: Role) -> str:
        """Return the kind of workers that are added without one being named."""
        ...

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        """Raises ConfigError for an unknown kind, or if a pool of ``count`` such workers is more than there can be."""
        ...

    def start(self, worker: Start) -> None:
        """Start a worker. Raises OSError."""
        ...

    def kill(self, reason: str = "") -> None:
        """End all workers at once. ``reason``: for those who have started them elsewhere."""
        ...


class Gather:
    """Collects one answer from each of several workers while watching for failed and exited ones."""

    def __init__(self, control: ControlServer, workers: Workers, on_progress: OnProgress) -> None:
        self._control = control
        self._workers = workers
        self._on_progress = on_progress

    def all(self, kind: type[MessageT], names: Sequence[str], timeout_s: float) -> dict[str, MessageT]:
        """One message of this kind from each worker, by its name. Raises DeadlineError, WorkerError and UserErrors."""
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
    """Return the error for workers that have not answered a ping for so many seconds."""
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
