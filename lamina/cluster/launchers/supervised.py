"""Workers whose processes belong to the supervisor of a server, so that they outlive the engine."""

import queue
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection

from lamina.cluster.conversations import Wish
from lamina.cluster.pool import CPU, RUNNABLE, PoolEntry, assign, find_devices, require_kind
from lamina.control import supervisor_messages
from lamina.control.sockets import Bootstrap
from lamina.control.supervisor_messages import CloseWorkers, Done, End, Exited, FromEngine, Spawn, Start
from lamina.core.errors import TransportError
from lamina.core.topology import Role

ANSWER_S = 60.0


class SupervisedWorkers:
    """Starts and ends workers through the supervisor, which owns their processes. One thread at a time may use it.

    Attributes:
        processes: names of the workers that this engine has started or taken over and has not killed.

    Whoever reads the supervisor's messages passes those about workers to ``on_supervisor_message``, from any thread.
    """

    def __init__(self, line: Connection, exited: Mapping[str, str]) -> None:
        """``exited``: workers that have, with the reasons."""
        self.processes: set[str] = set()
        self._line = line
        self._ended = dict(exited)
        self._answers: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def on_supervisor_message(self, message: Exited | Done) -> None:
        """What the supervisor says of workers."""
        if isinstance(message, Exited):
            self._ended = {**self._ended, message.worker: message.how}  # others may be looking at the old one
        else:
            self._answers.put(message)

    def spawn(self, name: str, module: str, bootstrap: Bootstrap, cores: frozenset[int], shared_cores: bool) -> None:
        """Start one worker on ``cores``. ``shared_cores``: the other pool uses them too."""
        self._ask(Spawn(name, module, bootstrap, sorted(cores), shared_cores))
        self.processes.add(name)

    def start(self, name: str, role: Role, kind: str, bootstrap: Bootstrap) -> None:
        """Start another worker, on all cores of those of its role that were started before. Raises OSError."""
        try:
            self._ask(Start(name, role, kind, bootstrap))
        except TransportError as error:
            raise OSError(str(error)) from error
        self.processes.add(name)

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        """Raise ConfigError unless this machine, which the supervisor runs on, has room for ``count`` such workers."""
        require_kind(kind, RUNNABLE)
        assign(role, (PoolEntry(kind, count),), find_devices())

    def default_kind(self, role: Role) -> str:
        return CPU

    def wishes(self) -> list[Wish]:
        """None: the engine alone decides."""
        return []

    def ended(self) -> Mapping[str, str]:
        """Workers that have exited, with their exit status."""
        return self._ended

    def kill_worker(self, name: str, *, cut: bool = False, reason: str = "") -> None:
        """Kill one worker and wait until it has exited. Raises TransportError if the kernel does not end it."""
        self._ask(End([name]))
        self.processes.discard(name)
        self._ended = {worker: how for worker, how in self._ended.items() if worker != name}

    def end_others(self, names: list[str]) -> None:
        """Kill all workers but these. Raises TransportError."""
        self._ask(End(names, others=True))
        self.processes = set(names)
        self._ended = {worker: how for worker, how in self._ended.items() if worker in names}

    def kill(self, reason: str = "") -> None:
        """Kill all workers at once."""
        self._ask(CloseWorkers(kill=True))

    def close(self) -> None:
        """Give workers some time to exit by themselves, then kill them."""
        self._ask(CloseWorkers(kill=False))

    def tell(self, message: FromEngine) -> None:
        """Send something that is not answered. Any thread. Raises OSError if the supervisor has exited."""
        with self._sending:
            supervisor_messages.send(self._line, message)

    def _ask(self, message: FromEngine) -> None:
        self.tell(message)
        try:
            answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise TransportError(f"the supervisor has not answered within {ANSWER_S:.0f} s") from None
        if answer.error:
            raise TransportError(answer.error)
