"""The frontends of a simulated run: the real ``RemoteEngine`` of each and the engine's real ``Frontends``.

Simulated are their processes, event loops and threads, and the ZeroMQ sockets between them and the engine. As with
ZeroMQ, what a frontend sends while no engine listens arrives at the next one, and what an engine sends to a frontend
that is not connected is an error.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import zmq

from lamina.control.frontend_messages import FrontendHello
from lamina.core.errors import LaminaError
from lamina.core.types import Client
from lamina.engine import frontends
from lamina.engine.engine import Engine
from lamina.engine.remote_engine import HELLO_S, RemoteEngine
from lamina.engine.streams import Submission
from tests.simulation.control import ENGINE
from tests.simulation.network import Network
from tests.simulation.world import Task, World

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation

START_S = 0.3  # of a frontend's process
FOLDER = Path("frontends")
_RESULT = concurrent.futures.Future.result


class Loop:
    """The event loop of a frontend.

    Attributes:
        readers: By descriptor, what is called when it becomes readable.
        stopped_until: Nothing is called before, as after SIGSTOP.
        dead: Nothing is called any more.
    """

    def __init__(self, world: World) -> None:
        self.readers: dict[int, Callable[[], object]] = {}
        self.stopped_until = 0.0
        self.dead = False
        self._world = world
        self._held: list[Callable[[], object]] = []  # calls that were due while the loop was stopped

    def add_reader(self, descriptor: int, callback: Callable[..., object], *given: object) -> None:
        self.readers[descriptor] = partial(callback, *given)

    def remove_reader(self, descriptor: int) -> None:
        self.readers.pop(descriptor, None)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call back once the loop is free."""

        def call() -> None:
            if self._world.now < self.stopped_until:
                self._held.append(call)
            elif not self.dead:
                callback()

        self._world.call_later(0.0, call)

    call_soon_threadsafe = call_soon

    def stop(self, until: float) -> None:
        """Call nothing back before this time. A shorter stop does not end a longer one."""
        self.stopped_until = max(self.stopped_until, until)
        self._world.call_at(self.stopped_until, self._call_held)

    def end_stop(self) -> None:
        """Call back now what a stop has held."""
        self.stopped_until = min(self.stopped_until, self._world.now)
        self._call_held()

    def _call_held(self) -> None:
        held, self._held = self._held, []
        for call in held:
            call()

    def on_readable(self, descriptor: int) -> None:
        """Call back what waits for this descriptor."""
        if (callback := self.readers.get(descriptor)) is not None:
            self.call_soon(callback)


class Socket:
    """A socket of the engine (ROUTER) or of a frontend (DEALER).

    Attributes:
        loop: That of the frontend; None at the engine.
        connected: At the engine: the sockets of frontends that it can reach, by name.
    """

    def __init__(self, wires: "Wires", number: int, loop: Loop | None) -> None:
        self.identity, self.loop = b"", loop
        self.connected: dict[str, Socket] = {}
        self.inbox: collections.deque[tuple[bytes, bytes]] = collections.deque()
        self._wires, self._number = wires, number
        self._waiting: Task | None = None
        self._target: Socket | None = None

    def bind(self, address: str) -> None:
        self._wires.bind(address, self)

    def connect(self, address: str) -> None:
        self._wires.connect(address, self)

    def fileno(self) -> int:
        return self._number

    def send(self, part: bytes, flags: int = 0) -> None:
        """Send a message; the engine first sends the frontend's name."""
        if self.loop is not None:
            self._wires.send_to_engine(self, part)
        elif flags & zmq.SNDMORE:
            self._target = self.connected.get(part.decode())
            if self._target is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
        else:
            assert self._target is not None
            self._wires.send_to_frontend(self._target, part)

    def arrive(self, sender: bytes, payload: bytes) -> None:
        """A message has arrived. A descriptor signals only the first of several."""
        self.inbox.append((sender, payload))
        if self._waiting is not None:
            self._waiting.wake()
        if self.loop is not None and len(self.inbox) == 1:
            self.loop.on_readable(self._number)

    def poll(self, timeout_ms: float) -> bool:
        """Wait for a message."""
        world = self._wires.world
        deadline = world.now + timeout_ms / 1e3
        world.pass_time()
        while not self.inbox and world.now < deadline:
            self._waiting = world.current
            world.block(deadline - world.now)
            self._waiting = None
        return bool(self.inbox)

    def recv_multipart(self) -> tuple[bytes, bytes]:
        return self.inbox.popleft()

    def recv(self, flags: int) -> bytes:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()[1]


class Context:
    """The sockets of a process."""

    def __init__(self, wires: "Wires") -> None:
        self.closed = False
        self._wires = wires

    def socket(self, kind: int) -> Socket:
        return self._wires.open()

    def destroy(self, linger: int) -> None:
        self.closed = True


class Wires:
    """All sockets between the engine and its frontends.

    Attributes:
        loop: Of the frontend that opens sockets now; None: the engine does.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.world = network, network.world
        self.loop: Loop | None = None
        self._bound: dict[str, Socket] = {}  # of the engine, by address
        self._opened: list[Socket] = []
        self._connections: dict[Socket, str] = {}  # the address of each socket of a frontend
        self._unsent: dict[Socket, list[bytes]] = collections.defaultdict(list)  # while no engine listens
        self._on_way = collections.Counter[Socket]()  # messages to the engine

    def open(self) -> Socket:
        socket = Socket(self, len(self._opened), self.loop)
        self._opened.append(socket)
        return socket

    def bind(self, address: str, socket: Socket) -> None:
        """The engine listens: frontends connect again after a while."""
        self._bound[address] = socket
        for one, wanted in self._connections.items():
            if wanted == address:
                self._reach_later(one, socket)

    def connect(self, address: str, socket: Socket) -> None:
        """A frontend connects, once the engine listens."""
        self._connections[socket] = address
        if (bound := self._bound.get(address)) is not None:
            self._reach_later(socket, bound)

    def _reach_later(self, socket: Socket, bound: Socket) -> None:
        self.world.call_later(0.02 * self.world.random.random(), partial(self._reach, socket, bound))

    def _reach(self, socket: Socket, bound: Socket) -> None:
        assert socket.loop is not None
        if socket.loop.dead or self._bound.get(self._connections[socket]) is not bound:
            return
        bound.connected[socket.identity.decode()] = socket
        unsent = self._unsent.pop(socket, [])
        for payload in unsent:
            self.send_to_engine(socket, payload)

    def _listener(self, socket: Socket) -> Socket | None:
        bound = self._bound.get(self._connections[socket])
        return bound if bound is not None and socket.identity.decode() in bound.connected else None

    def send_to_engine(self, socket: Socket, payload: bytes) -> None:
        """Deliver what a frontend sends, to the next engine if none listens or if the one that does is killed first."""
        assert socket.loop is not None
        if socket.loop.dead:
            return
        bound = self._listener(socket)
        if bound is None:
            self._unsent[socket].append(payload)
            return

        def arrive() -> None:
            self._on_way[socket] -= 1
            if bound in self._bound.values():
                bound.arrive(socket.identity, payload)

        self._on_way[socket] += 1
        self.network.send("frontend", socket.identity.decode(), ENGINE, arrive)

    def is_waiting(self, socket: Any) -> bool:
        """True while something that a frontend has sent has not arrived."""
        return bool(self._on_way[socket] or self._unsent.get(socket))

    def send_to_frontend(self, socket: Socket, payload: bytes) -> None:
        """Deliver what the engine sends to a frontend."""
        self.network.send("frontend", ENGINE, socket.identity.decode(), partial(socket.arrive, b"", payload))

    def drop_engine(self) -> None:
        """The engine was killed."""
        self._bound.clear()

    def drop(self, loop: Loop) -> None:
        """A frontend was killed."""
        for socket in [one for one in self._connections if one.loop is loop]:
            if (bound := self._bound.get(self._connections.pop(socket))) is not None:
                bound.connected.pop(socket.identity.decode(), None)
            self._unsent.pop(socket, None)


class Frontend:
    """A process with HTTP clients, which are simulated, and the real client of the engine.

    Attributes:
        name: Of the process.
        remote: The engine as it sees it; None until it has started.
        ready: It is connected to the engine.
    """

    def __init__(self, rooms: "Frontends", number: int) -> None:
        self.name = f"frontend{number}"
        self.loop = Loop(rooms.world)
        self.remote: RemoteEngine | None = None
        self._rooms, self._world = rooms, rooms.world
        self._tasks: list[Task] = []
        self._world.call_later(START_S * (1 + self._world.random.random()), self._start)

    @property
    def ready(self) -> bool:
        return self.remote is not None and self.remote._welcome.is_set() and not self.loop.dead

    def _start(self) -> None:
        """Do what ``RemoteEngine.connect`` does, in the simulated event loop."""
        if self.loop.dead:
            return
        if (bootstrap := self._rooms.bootstrap) is None:  # the engine is down: the supervisor starts it later
            self._world.call_later(START_S, self._start)
            return
        self._rooms.wires.loop = self.loop
        with mock.patch.object(asyncio, "get_running_loop", lambda: self.loop):
            self.remote = RemoteEngine(msgspec.structs.replace(bootstrap, name=self.name), self._rooms.tokenizer)
        self._rooms.wires.loop = None
        self.loop.add_reader(self.remote._answers.fileno(), self.remote._receive)
        self._greet()

    def _greet(self) -> None:
        assert self.remote is not None
        if not self.loop.dead and not self.remote._welcome.is_set():
            self.remote._send(FrontendHello())
            self._world.call_later(HELLO_S, self._greet)

    def submit(
        self,
        submission: Submission,
        client: Client,
        on_submitted: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """Send a request in a thread of its own, as the server does. ``on_refused`` gets the reason if it fails."""
        remote = self.remote
        assert remote is not None

        def body() -> None:
            try:
                remote.submit_all([submission], client)
            except LaminaError as error:
                on_refused(str(error))
            else:
                on_submitted()

        task = Task(self._world, f"{self.name} submits", body, lambda reason: self._tasks.remove(task))
        self._tasks.append(task)

    def kill(self) -> None:
        """End the process."""
        self.loop.dead = True
        self._rooms.wires.drop(self.loop)
        for task in self._tasks:
            task.kill()


class Frontends:
    """All frontends of a run, and the supervisor that starts them.

    Attributes:
        living: By name.
        bootstrap: What the engine gives a new frontend; None while it is down.
        task: The engine's thread for frontends.
    """

    def __init__(self, run: "Simulation", count: int, tokenizer: Any) -> None:
        self.world, self.tokenizer = run.world, tokenizer
        self.wires = Wires(run.network)
        self.living: dict[str, Frontend] = {}
        self.bootstrap: Any = None
        self.task: Task | None = None
        self._run, self._count = run, count
        self._started = self._incarnations = 0
        self._room: frontends.Frontends | None = None

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Let the product open simulated sockets and threads meanwhile."""
        threads = SimpleNamespace(Thread=self._thread, Event=threading.Event, Lock=threading.Lock)
        with (
            mock.patch.object(zmq, "Context", lambda: Context(self.wires)),
            mock.patch.object(frontends, "threading", threads),
            mock.patch.object(os, "pidfd_open", lambda pid: -1),
            mock.patch.object(
                concurrent.futures.Future, "result", lambda future, timeout=None: self._result(future, timeout)
            ),
        ):
            yield

    def _thread(self, target: Callable[[], None], name: str, daemon: bool) -> Any:
        def start() -> None:
            self.task = Task(self.world, name, target, lambda reason: None)

        return SimpleNamespace(start=start, join=lambda timeout: None)

    def _result(self, future: "concurrent.futures.Future[Any]", timeout: float | None = None) -> Any:
        """Wait for a future in simulated time."""
        task = self.world.current
        if task is not None and not future.done() and timeout is not None:
            deadline = self.world.now + timeout
            future.add_done_callback(lambda done: task.wake())
            while not future.done() and self.world.now < deadline:
                self.world.block(deadline - self.world.now)
        return _RESULT(future, 0)

    def serve(self, engine: Engine) -> None:
        """Let an engine serve the frontends."""
        if not self._count:
            return
        names = [name for name, one in self.living.items() if one.remote is not None]
        self._room = frontends.Frontends(engine, FOLDER, 0, self._incarnations, names, on_lost=self.kill)
        self._incarnations += 1
        self.bootstrap = self._room.bootstrap
        while len(self.living) < self._count:
            self._start()

    def _start(self) -> None:
        one = Frontend(self, self._started)
        self.living[one.name] = one
        self._started += 1

    def drop_engine(self) -> None:
        """The engine was killed."""
        if self.task is not None:
            self.task.abandon()
        self.wires.drop_engine()
        self._room = self.bootstrap = None

    def choose(self, choice: float) -> Frontend | None:
        """Return one of the connected frontends; None without any."""
        ready = [one for one in self.living.values() if one.ready]
        return ready[int(choice * len(ready))] if ready else None

    def kill(self, name: str, why: str) -> None:
        """Kill a frontend. The supervisor tells the engine, and starts another one."""
        one = self.living.pop(name, None)
        if one is None:
            return
        self.world.tell(f"{name} ends: {why}")
        one.kill()
        self._run.clients.on_frontend_exit(name)
        self.world.call_later(0.01 * self.world.random.random(), partial(self._tell_exit, self._room, name))
        self._start()

    def _tell_exit(self, room: frontends.Frontends | None, name: str) -> None:
        if room is not None and room is self._room:
            room.on_frontend_exit(name)

    def aborted(self) -> set[str]:
        """Return requests that the engine runs although their frontends have told it to abort them, and everything that
        these have sent has been read."""
        room = self._room
        if room is None or room._requests.inbox or room._submissions:
            return set()
        return {
            member.request_id(number)
            for name, member in room._members.items()
            if (one := self.living.get(name)) is not None
            if (remote := one.remote) is not None and not self.wires.is_waiting(remote._requests)
            for number in member.running
            if (asked := remote._asked.get(number)) is not None and asked.aborted
        }

    def left_over(self) -> list[str]:
        """Return what frontends and the engine still know of requests, all of which have ended."""
        found = []
        for name, one in self.living.items():
            if one.remote is not None and (one.remote._asked or one.remote._named or one.remote._replies):
                found.append(f"{name} knows of {len(one.remote._asked)} requests")
        if self._room is not None:
            running = {name: sorted(one.running) for name, one in self._room._members.items() if one.running}
            if running or self._room._submissions:
                found.append(f"the engine's side of frontends runs {running}")
            if gone := self._room._members.keys() - self.living.keys():
                found.append(f"the engine knows frontends that have ended: {', '.join(sorted(gone))}")
        return found

    def close(self) -> None:
        """End everything."""
        for one in self.living.values():
            one.kill()
        if self.task is not None:
            self.task.kill()
