"""The simulated control plane and the processes of workers, with which the real engine and the real workers talk."""

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import torch
from typing_extensions import override

from lamina.cluster.conversations import Launcher, Wish
from lamina.compute import worker as compute
from lamina.control.agent_messages import Start
from lamina.control.liveness import Liveness
from lamina.control.messages import Failed, Inspect, Resources, ToEngine, ToWorker
from lamina.control.sockets import Bootstrap, ControlClient, ControlServer, decode
from lamina.core.errors import DeadlineError, UnreachableError
from lamina.core.topology import Pool, Role, Topology
from lamina.dataplane.transport_choice import Transport
from lamina.memory import worker as memory
from lamina.worker.links import Member
from lamina.worker.loop import Fence, WorkerLoop
from lamina.worker.process import serve
from tests.simulation.layouts import Pace
from tests.simulation.model import POISON, load
from tests.simulation.network import Network, SimulatedEndpoint
from tests.simulation.world import Task

ENGINE = "engine"
Unread = tuple[str, int, int]  # sender, slot, number of the message
EXPECTED = frozenset({"MemoryError", "PeerLostError", "TransportError", "DeadlineError"})
"""Errors with which workers may end: what faults cause. Others are faults of the product, also if it recovers."""
_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)


class Process:
    """A worker's process.

    Attributes:
        client: its end of the control plane.
        reason: why it has exited; empty: it runs.
        lacks_memory: it cannot allocate memory for its next message, nor for an arena.
        overlooked: messages that it left unread between two slices, although it may lend its local memory.
    """

    def __init__(self, processes: "Processes", name: str, role: Role) -> None:
        self.name, self.role = name, role
        self.reason = ""
        self.lacks_memory = False
        self.overlooked = set[Unread]()
        self._unread = set[Unread]()  # when its latest slice began
        self.endpoints: list[SimulatedEndpoint] = []
        self._processes, self._network = processes, processes.network
        self._world = processes.network.world
        self.client = SimulatedClient(self, processes)
        self.worker: compute.ComputeWorker | memory.MemoryWorker | None = None
        self.task = Task(self._world, name, self._run, self.exit)

    def _run(self) -> None:
        self._world.block(self._processes.pace.start_s * (1 + self._world.random.random()))
        self._processes.server.on_connected(self.name)
        serve(self.client, self._build)

    def _build(self, control: ControlClient, resources: contextlib.ExitStack) -> WorkerLoop:
        if self.role == "compute":
            model = partial(load, on_slice=self._run_slice)
            self.worker = compute.build(control, resources, model, self._open)
        else:
            self.worker = memory.build(control, resources, self._open)
        return self.worker

    def _open(self, member: Member, transport: Transport, tls: bool) -> SimulatedEndpoint:
        self._allocate()
        endpoint = SimulatedEndpoint(member.name, self._network, self.task, self._fence, self._allocate)
        self.endpoints.append(endpoint)
        return endpoint

    def _fence(self) -> Fence | None:
        return None if self.worker is None else self.worker._fence

    def _allocate(self) -> None:
        if self.lacks_memory:
            raise MemoryError(f"{self.name} cannot allocate memory")

    def _run_slice(self, tokens: torch.Tensor) -> None:
        unread = self._find_unread()
        self.overlooked |= self._unread & unread
        self._unread = unread
        self._world.block(self._processes.pace.slice_s * (1 + len(tokens) / 100))
        if POISON in tokens:
            self.exit("killed by signal 11")
            self._world.block(0.0)

    def _find_unread(self) -> set[Unread]:
        """Return the messages of other replicas and of the engine that a worker with memory to lend has not read."""
        lender = self.worker._lender if isinstance(self.worker, compute.ComputeWorker) else None
        if lender is None or not lender._mail.lenders:
            return set()
        mail = lender._mail
        sequence = self.endpoints[0].native.sequence
        found = {
            (peer, slot, number)
            for peer in mail.lenders
            for slot, (bell, number) in mail.channels[peer].awaited.items()
            if sequence(bell) >= number
        }
        return found | {(ENGINE, 0, number) for number in self.client.unread}

    def exit(self, reason: str) -> None:
        """The process has ended, or is killed."""
        if self.reason:
            return
        self.reason = reason
        self._world.tell(f"{self.name} ends: {reason}")
        self.task.kill()
        for endpoint in self.endpoints:
            endpoint.close()
        self._processes.server.on_disconnected(self.name)


class Processes(Launcher):
    """Starts and ends workers. Implements ``cluster.conversations.Launcher``.

    Attributes:
        server: the engine's end of the control plane.
        all: every process that was ever started, by name.
        refuses: processes cannot be started.
        broken: how workers have failed that no fault has made fail.
    """

    def __init__(self, network: Network, pace: Pace) -> None:
        self.network, self.pace = network, pace
        self.server: SimulatedServer
        self.all: dict[str, Process] = {}
        self.refuses = False
        self.broken: list[str] = []
        self._left_out = set[str]()

    def default_kind(self, pool: Pool) -> str:
        return "cpu"

    def offers(self) -> Sequence[Pool]:
        return ()

    def refuse_offers(self, pool: Pool, reason: str) -> None:
        """No agent offers a worker."""

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        """Any pool will do."""

    def start(self, worker: Start) -> None:
        name = worker.bootstrap.name
        if self.refuses:
            raise OSError("cannot allocate memory")
        self.network.world.tell(f"{name} starts")
        self.all[name] = Process(self, name, worker.role)
        self._left_out.discard(name)

    def ended(self) -> Mapping[str, str]:
        return {name: one.reason for name, one in self.all.items() if one.reason and name not in self._left_out}

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        self.all[worker].exit(reason or "ended by the engine")
        self._left_out.add(worker)

    def end_others(self, workers: Sequence[str]) -> None:
        for name in self.all.keys() - self._left_out - set(workers):
            self.kill_worker(name)

    def start_again(self) -> None:
        """Kill all workers and forget them."""
        self.kill()
        self.all.clear()
        self._left_out.clear()

    @property
    def processes(self) -> set[str]:
        """The workers that run, or have exited by themselves, as ``SupervisedWorkers.processes``."""
        return self.all.keys() - self._left_out

    def kill_workers(self, names: Collection[str]) -> None:
        """Kill several workers, as ``SupervisedWorkers.kill_workers``."""
        for name in sorted(names):
            self.kill_worker(name)

    def wishes(self) -> Sequence[Wish]:
        return ()

    def close(self) -> None:
        self.kill()

    def kill(self, reason: str = "") -> None:
        for name in self.all:
            self.kill_worker(name)

    @property
    def living(self) -> dict[str, Process]:
        """The processes that run, by name."""
        return {name: one for name, one in self.all.items() if not one.reason}


class SimulatedServer(ControlServer):
    """The engine's end, as ``control.sockets.ControlServer``."""

    def __init__(self, network: Network, processes: Processes, members: Sequence[str]) -> None:
        self._network, self._world, self._processes = network, network.world, processes
        self.bootstraps: Mapping[str, Bootstrap] = {name: _bootstrap(name) for name in members}
        self.liveness = Liveness(self._world.now)
        self.most_waiting = 0
        self._members, self._joining = set(members), set[str]()
        self._inbox: collections.deque[tuple[str, bytes]] = collections.deque()
        self._connected = set[str]()
        self._woken = False
        self._waiting: Task | None = None
        self._closed = False

    def on_connected(self, name: str) -> None:
        """A worker has connected."""
        self._connected.add(name)

    def on_disconnected(self, name: str) -> None:
        """A worker's process has ended."""
        self._connected.discard(name)

    @override
    def admit(self, name: str) -> Bootstrap:
        self._joining.add(name)
        return _bootstrap(name)

    @override
    def dismiss(self, name: str) -> None:
        self.liveness.unwatch(name)
        self._joining.discard(name)
        self._members.discard(name)

    @override
    def apply_topology(self, topology: Topology) -> None:
        for worker in self._members - topology.names:
            self.liveness.unwatch(worker)
        self._members = set(topology.names)
        self._joining -= self._members

    @override
    def send(self, workers: Sequence[str], message: ToWorker) -> None:
        payload = _ENCODER.encode(message)
        unreachable = {worker: "Host unreachable" for worker in workers if worker not in self._connected}
        for worker in workers:
            if worker not in unreachable:
                client = self._processes.all[worker].client
                self._network.send("control", ENGINE, worker, partial(client.deliver, payload))
        if unreachable:
            raise UnreachableError(unreachable)

    @override
    def wake(self) -> None:
        self._woken = True
        if self._waiting is not None:
            self._waiting.wake()

    def deliver(self, worker: str, payload: bytes | None) -> None:
        """A message has arrived; None: the answer to a ping."""
        if self._closed:
            return
        if worker not in self._members and worker not in self._joining:
            return
        if payload is not None:
            self._inbox.append((worker, payload))
            self.most_waiting = max(self.most_waiting, len(self._inbox))
            self.wake()
            self._woken = False
        else:
            self.liveness.on_message(worker)

    @override
    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToEngine]]:
        deadline = self._world.now + timeout_s
        if self.liveness.turn(self._world.now):
            self._ping()
        while not self._inbox and not self._woken and self._world.now < deadline:
            self._waiting = self._world.current
            self._world.block(deadline - self._world.now)
        self._waiting, self._woken = None, False
        while self._inbox:
            worker, payload = self._inbox.popleft()
            if worker in self._members or worker in self._joining:
                self.liveness.on_message(worker)
                yield worker, decode(worker, payload)

    @override
    def _ping(self) -> None:
        for worker in sorted(filter(self.liveness.is_quiet, (*self._members, *self._joining))):
            if worker in self._connected:
                self._network.send("heartbeat", ENGINE, worker, partial(self._echo, worker))

    def _echo(self, worker: str) -> None:
        if (process := self._processes.living.get(worker)) is None:
            return
        task = process.task
        if task.stopped_until > self._world.now:
            self._world.call_at(task.stopped_until, partial(self._echo, worker))
            return
        self._network.send("heartbeat", worker, ENGINE, partial(self._processes.server.deliver, worker, None))

    @override
    def close(self) -> None:
        self._closed = True


class SimulatedClient(ControlClient):
    """A worker's end, as ``control.sockets.ControlClient``."""

    device, shares_gpu, data_secret, local_address, bind_address = "cpu", False, b"", "host", "host"

    def __init__(self, process: Process, processes: Processes) -> None:
        self.name = process.name
        self._process, self._processes = process, processes
        self._network, self._world = processes.network, processes.network.world
        self._inbox: collections.deque[bytes] = collections.deque()
        self._delivered = 0  # messages so far
        self._waits = False

    @property
    def unread(self) -> range:
        """Numbers of the messages that have arrived and were not received."""
        return range(self._delivered - len(self._inbox), self._delivered)

    def deliver(self, payload: bytes) -> None:
        """A message of the engine has arrived."""
        self._inbox.append(payload)
        self._delivered += 1
        if self._waits:
            self._process.task.wake()

    @override
    def send(self, message: ToEngine) -> None:
        if isinstance(message, Failed):
            self._world.tell(f"{self.name} fails: {message.kind}: {message.message}\n{message.traceback}")
            if message.kind not in EXPECTED:
                self._processes.broken.append(f"{self.name} fails: {message.kind}: {message.message}")
        if not self._process.reason:
            payload = _ENCODER.encode(message)
            arrive: Callable[[], None] = lambda: self._processes.server.deliver(self.name, payload)  # noqa: E731
            self._network.send("control", self.name, ENGINE, arrive)

    @override
    def receive(self, timeout_s: float) -> ToWorker:
        deadline = self._world.now + timeout_s
        while True:
            if (message := self.poll(max(deadline - self._world.now, 0.0))) is not None:
                return message
            if self._world.now >= deadline:
                raise DeadlineError(f"{self.name}: no message from the engine within {timeout_s} s")

    @override
    def poll(self, timeout_s: float = 0.0) -> ToWorker | None:
        self._world.pass_time()
        deadline = self._world.now + timeout_s
        while not self._inbox and self._world.now < deadline:
            self._waits = True
            self._world.block(deadline - self._world.now)
            self._waits = False
        if not self._inbox:
            return None
        message: ToWorker = _TO_WORKER.decode(self._inbox.popleft())
        if not isinstance(message, Inspect):
            return message
        self.send(Resources(message.sent_ns, int(self._world.now * 1e9), 1 << 33, 1 << 33))
        return None


def _bootstrap(name: str) -> Bootstrap:
    return Bootstrap(name, "", b"", b"", b"", b"", 0)
