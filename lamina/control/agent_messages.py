"""How workers of other machines come to an engine: what it and those who supervise them there say to each other.

A supervisor connects with a CURVE key of the cluster, or with one of its own that the engine has been told to trust,
and applies. It is given what a worker process starts with, and supervises that process from then on. ZeroMQ delivers
in order and reconnects by itself; each side ends what it has once the other has been silent for too long.
"""

import msgspec

from lamina.control.sockets import Bootstrap
from lamina.core.topology import Role

SUPERVISOR = "supervisor"  # the name under which supervisors' common key is derived from the cluster's secret
PING_S = 1.0
SILENCE_S = 13.0  # after which the engine takes a supervisor, and the workers of its host, for lost
ORPHAN_S = 30.0  # after which a supervisor ends its worker: later than the engine has given it up
CUT_S = 5.0  # the same if its connection was closed: the engine's process has ended, or will be back in a moment


class Apply(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: a worker can run here.

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


class Started(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: the worker's process runs."""

    pid: int


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: it is there."""


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine: somebody wants the worker to leave, as SIGTERM says."""


class Exited(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to engine, its last message: the process has ended, and was reaped."""

    how: str


class Appointed(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: start this worker. Addresses in ``bootstrap`` are the engine's view of itself."""

    bootstrap: Bootstrap
    role: Role


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: no worker of yours is wanted."""

    reason: str


class End(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: end the process, after ``grace_s`` in which it may end by itself; answered by Exited."""

    grace_s: float
    reason: str = ""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Engine to supervisor: answer with Pong."""


ToOffice = Apply | Started | Pong | Leaving | Exited
ToSupervisor = Appointed | Refused | End | Ping
