"""What the supervisor of a server and its engine say to each other.

The supervisor owns the processes of workers and frontends, the cluster's secret and the socket that workers connect
to. The engine asks it to start and end workers; every such request is answered by ``Done``. An engine that is started
again takes over the workers that are left, from what the one before it had saved.
"""

from multiprocessing.connection import Connection
from typing import Any

import msgspec

from lamina.control.frontend_messages import FrontendBootstrap
from lamina.control.sockets import Bootstrap
from lamina.core.topology import Role

BEAT_S = 1.0


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
    exited: dict[str, str]


class Exited(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: the process of this worker has exited."""

    worker: str
    how: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: the request has been carried out, or failed with this error."""

    error: str = ""


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: the process of this frontend has ended."""

    frontend: str


class Close(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: end all requests and workers, and exit."""


ToEngine = EngineBootstrap | Exited | Done | Leave | Close


class Spawn(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: start a worker, see ``LocalWorkers.spawn``."""

    name: str
    module: str
    bootstrap: Bootstrap
    cores: list[int]
    shared_cores: bool


class Start(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: start another worker, see ``LocalWorkers.start``."""

    name: str
    role: Role
    kind: str
    bootstrap: Bootstrap


class End(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: kill these workers, and answer once they have exited. ``others``: kill all but these."""

    workers: list[str]
    others: bool = False


class CloseWorkers(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: wait until all workers have exited, or kill them at once."""

    kill: bool


class Save(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: what the next engine needs to take over the workers. Not answered."""

    state: bytes


class Serving(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: frontends may submit requests. ``frontend``: the bootstrap of each, but for its name.
    ``summary``: of the cluster, for people."""

    frontend: FrontendBootstrap
    summary: str


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor, every ``BEAT_S``: its process runs."""


class FrontendLost(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: this frontend cannot be answered any more."""

    frontend: str
    why: str


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: it could not start, or has stopped by itself, and is not to be started again. ``kind``: of
    the error."""

    kind: str
    reason: str


FromEngine = Spawn | Start | End | CloseWorkers | Save | Serving | Beat | FrontendLost | Stopped

_TO_ENGINE, _FROM_ENGINE = msgspec.msgpack.Decoder(ToEngine), msgspec.msgpack.Decoder(FromEngine)


def send(line: Connection, message: ToEngine | FromEngine) -> None:
    """Raises OSError if the other side has exited."""
    line.send_bytes(msgspec.msgpack.encode(message))


def receive_from_engine(line: Connection) -> FromEngine:
    """Return the next message of the engine. Raises EOFError or OSError if it has exited."""
    message: FromEngine = _FROM_ENGINE.decode(line.recv_bytes())
    return message


def receive_from_supervisor(line: Connection) -> ToEngine:
    """Return the next message of the supervisor. Raises EOFError or OSError if it has exited."""
    message: ToEngine = _TO_ENGINE.decode(line.recv_bytes())
    return message
