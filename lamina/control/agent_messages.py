"""What an engine and the agents that run its workers say to each other.

An agent starts, watches and ends worker processes on its machine. There are two kinds:

* The supervisor of a server owns the processes of its engine, workers and frontends, and speaks with the engine over a
  pipe. Its workers outlive the engine: another engine takes them over, from what the one before it had saved.
* ``lamina worker`` and Ray's actors run one worker on another machine. Such an agent connects with a CURVE key of the
  cluster, or with its own key that the engine has been told to trust, and applies. ZeroMQ delivers in order and
  reconnects by itself. Each side gives up its part once the other has been silent for too long.
"""

from multiprocessing.connection import Connection
from typing import Any

import msgspec

from lamina.control.frontend_messages import FrontendBootstrap
from lamina.control.sockets import Bootstrap
from lamina.core.topology import Role

AGENT = "supervisor"  # the name under which agents' common key is derived from the cluster's secret
BEAT_S = 1.0
ORPHAN_S = 30.0  # after which an agent ends its worker: later than the engine has given it up (``liveness.LOST_S``)
CUT_S = 5.0  # the same if its connection was closed: the engine's process has ended, or will be back in a moment


class Start(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent: start this worker.

    Attributes:
        bootstrap: addresses in it are the engine's view of itself.
        cores: CPU cores to run on, with the device in ``bootstrap``. Empty: the agent chooses both: the cores of all
            workers of that role so far, and a device of ``kind``, such as that of a worker that was killed.
        shared_cores: workers of the other pool run on these cores too.
    """

    role: Role
    kind: str
    bootstrap: Bootstrap
    cores: frozenset[int] = frozenset()
    shared_cores: bool = False

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self.bootstrap.name


class End(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent: kill these workers, after ``grace_s`` in which they may exit by themselves.

    Attributes:
        reason: for those who have started the agent.
    """

    workers: list[str]
    grace_s: float = 0.0
    reason: str = ""


class Exited(msgspec.Struct, tag=True, frozen=True):
    """Agent to engine: the process of this worker has exited, and was reaped."""

    worker: str
    how: str


class Apply(msgspec.Struct, tag=True, frozen=True):
    """Agent of another machine to engine: a worker can run here.

    Attributes:
        version: of lamina.
        host: see ``transport.shm``.
        machine: its name for people.
        name: of the worker that it was started for; empty: any.
    """

    version: str
    role: Role
    kind: str
    host: str
    machine: str
    name: str = ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent of another machine: no worker of yours is wanted."""

    reason: str


class Started(msgspec.Struct, tag=True, frozen=True):
    """Agent of another machine to engine: the worker's process runs."""

    pid: int


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """Agent of another machine to engine: somebody wants the worker to leave, as SIGTERM says."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent of another machine: answer with Pong."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Agent of another machine to engine: it is there."""


class EngineBootstrap(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine, its first message.

    Attributes:
        settings: of ``EngineConfig``.
        secret: of the cluster.
        listener: descriptor of the control plane's socket.
        folder: for sockets that frontends connect to.
        supervisor_pid: the process that workers and frontends end with.
        incarnation: of the engine.
        saved: by the latest engine; None: there are no workers.
        frontends: names of those that run.
        workers: names of those that run.
        exited: workers that have, with the reasons.
    """

    settings: dict[str, Any]
    secret: bytes
    listener: int
    folder: str
    supervisor_pid: int
    incarnation: int
    saved: bytes | None
    frontends: list[str]
    workers: list[str]
    exited: dict[str, str]


class Done(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: Start or End has been carried out, or failed with this error."""

    error: str = ""


class FrontendExited(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: the process of this frontend has ended."""

    frontend: str


class CloseEngine(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: end all requests and workers, and exit."""


class Save(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: what the next engine needs to take over the workers."""

    state: bytes


class Serving(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: frontends may submit requests.

    Attributes:
        frontend: the bootstrap of each, but for its name.
        summary: of the cluster, for people.
    """

    frontend: FrontendBootstrap
    summary: str


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor, every ``BEAT_S``: its process runs."""


class FrontendLost(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: this frontend cannot be answered any more."""

    frontend: str
    why: str


class EngineStopped(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: it could not start, or has stopped by itself, and is not to be started again.

    Attributes:
        kind: of the error.
    """

    kind: str
    reason: str


ToEngine = Apply | Started | Pong | Leaving | Exited
"""What an agent of another machine sends."""
ToAgent = Start | Refused | End | Ping
"""What an agent of another machine receives."""
SupervisorToEngine = EngineBootstrap | Exited | Done | FrontendExited | CloseEngine
EngineToSupervisor = Start | End | Save | Serving | Beat | FrontendLost | EngineStopped

_TO_ENGINE = msgspec.msgpack.Decoder(SupervisorToEngine)
_FROM_ENGINE = msgspec.msgpack.Decoder(EngineToSupervisor)


def send(line: Connection, message: SupervisorToEngine | EngineToSupervisor) -> None:
    """Send a message between engine and supervisor. Raises OSError if the other side has exited."""
    line.send_bytes(msgspec.msgpack.encode(message))


def receive_from_engine(line: Connection) -> EngineToSupervisor:
    """Return the next message of the engine. Raises EOFError or OSError if it has exited."""
    message: EngineToSupervisor = _FROM_ENGINE.decode(line.recv_bytes())
    return message


def receive_from_supervisor(line: Connection) -> SupervisorToEngine:
    """Return the next message of the supervisor. Raises EOFError or OSError if it has exited."""
    message: SupervisorToEngine = _TO_ENGINE.decode(line.recv_bytes())
    return message
