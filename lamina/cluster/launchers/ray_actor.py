"""The Ray actor that supervises one worker on its node. Does not import Ray, which makes an actor of the class."""

import platform

import zmq

from lamina.cluster.launchers.agent import Keys, Place, Supervisor
from lamina.config.environment import environment
from lamina.control.agent_messages import Apply
from lamina.core.errors import LaminaError, WorkerError
from lamina.core.topology import Role
from lamina.core.version import __version__
from lamina.transport.shm import host


class SupervisorActor:
    """Supervises one worker, whose process ends with the actor's.

    No secret goes through Ray: the actor generates its key pair and returns the public key. Everything else reaches the
    worker over its connection to the engine, encrypted with that pair.
    """

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()

    def key(self) -> bytes:
        """Return the public key, for the engine to trust."""
        return bytes(self._public)

    def run(self, engine: tuple[str, int], engine_key: bytes, name: str, role: Role, kind: str, device: str) -> str:
        """Supervise worker ``name`` until it has ended. Returns why it could not; empty if it could."""
        environment()  # report invalid variables of this node here, not from the worker
        about = Apply(__version__, role, kind, host(), platform.node(), name)
        keys = Keys(engine_key, self._public, self._secret)
        try:
            Supervisor(engine, keys, about, Place(device)).run()
        except WorkerError:
            return ""  # the supervisor has told the engine
        except LaminaError as error:
            return str(error)
        return ""
