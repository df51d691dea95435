"""Messages between an engine and the agents that run its workers.

An agent starts, watches and ends worker processes on its machine. There are two kinds:

* The supervisor of a server owns the processes of its engine, workers and frontends, and is connected to the engine by
  a pipe. Workers outlive the engine: the next engine takes them over with the state that the last engine saved.
* ``lamina worker`` and Ray's actors run one worker on another machine. Such an agent connects with a CURVE key of the
  cluster, or with a key of its own that the engine trusts, and sends ``Apply``. ZeroMQ delivers in order and reconnects
  by itself. Each side gives up once the other has been silent for too long.
"""

from multiprocessing.connection import Connection
from typing import Any

import msgspec

from lamina.control.frontend_messages import FrontendBootstrap
from lamina.control.sockets import Bootstrap
from lamina.core.topology import Pool, Role, role_of

AGENT = "supervisor"  # the name under which agents' common key is derived from the cluster's secret
BEAT_S = 1.0
ORPHAN_S = 30.0  # silence of the engine after which an agent ends its worker; longer than ``liveness.LOST_S``
CUT_S = 5.0  # time without a connection after which an agent ends its worker


class Start(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent: start this worker.

    Attributes:
        pool: the pool that it joins.
        bootstrap: the worker's bootstrap, with the addresses by which the engine knows itself.
        cores: CPU cores to run on, beside the device in ``bootstrap``. Empty: the agent chooses the cores of the
            workers of this role, and a free device of ``kind``.
        shared_cores: True if workers of the other pool run on these cores too.
    """

    pool: Pool
    kind: str
    bootstrap: Bootstrap
    cores: frozenset[int] = frozenset()
    shared_cores: bool = False

    @property
    def role(self) -> Role:
        """The role of the pool's workers."""
        return role_of(self.pool)

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self.bootstrap.name


class End(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent: kill these workers, after ``grace_s`` in which they may exit by themselves.

    Attributes:
        reason: what the agent tells the person who started it.
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
        version: version of lamina.
        pool: the pool that the worker is for.
        host: identifies the machine, as ``transport.shm.host`` does.
        machine: name of the machine, for people.
        name: the worker that the agent was started for; empty: any.
    """

    version: str
    pool: Pool
    kind: str
    host: str
    machine: str
    name: str = ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent of another machine: no worker is wanted from it."""

    reason: str


class Started(msgspec.Struct, tag=True, frozen=True):
    """Agent of another machine to engine: the worker's process runs."""

    pid: int


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """Agent of another machine to engine: the agent got SIGTERM, and its worker shall leave."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Engine to agent of another machine: answer with Pong."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Agent of another machine to engine: the answer to ``Ping``."""


class EngineBootstrap(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine, its first message.

    Attributes:
        settings: settings of ``EngineConfig``, as plain values.
        secret: the cluster's secret.
        listener: descriptor of the control plane's socket.
        folder: folder for the sockets that frontends connect to.
        supervisor_pid: the process that workers and frontends end with.
        incarnation: number of this engine, counted over restarts.
        saved: state saved by the last engine; None: there are no workers.
        frontends: names of the frontends that run.
        workers: names of the workers that run.
        exited: workers that have exited, with the reasons.
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
        frontend: the bootstrap of every frontend, without its name.
        summary: description of the cluster, for people.
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
    """Engine to supervisor: the engine could not start, or has stopped, and must not be restarted.

    Attributes:
        kind: class name of the error.
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
