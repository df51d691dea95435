"""Starts frontend processes, replaces those that end or hang, and ends them with the server."""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from lamina.cluster.local_workers import describe_exit, wait_for_killed
from lamina.config.server_config import ServerConfig
from lamina.config.settings import plain_values
from lamina.control.agent_messages import Serving
from lamina.control.frontend_messages import ENGINE_STOPPED, READY
from lamina.control.liveness import Liveness
from lamina.core.errors import EngineDeadError, TransportError, WorkerError
from lamina.serve.http_errors import first_line
from lamina.serve.server import TELL_S


@contextlib.contextmanager
def collected() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of raising exceptions. Main thread only.

    An exception raised in the middle of a lock's operation would leave the lock locked for ever; an exception raised in
    a finalizer would be lost.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            signal.signal(number, lambda caught, _: received.append(caught))
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


log = logging.getLogger(__name__)

ENGINE = "engine"
POLL_S = 0.1
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 2 * TELL_S + 5.0  # time in which a frontend ends after the shutdown timeout
MOST_ENDS, ENDS_S = 5, 60.0  # the server gives up after so many unexpected ends of frontends within so many seconds


class Owner(Protocol):
    """Owns an engine and starts it again, as ``supervisor.Supervisor`` does.

    Attributes:
        serving: How frontends reach the running engine; None before the first engine runs.
        gave_up: Whether no engine will run again, which frontends have not been told.
        lost_frontends: Frontends that the engine cannot reach, with the reasons; their reader removes them.
        dead: Why no engine runs any more; None while one runs.
        beats: Counter that increases while the engine's process runs.
    """

    serving: Serving | None
    gave_up: bool
    lost_frontends: dict[str, str]

    @property
    def dead(self) -> str | None: ...

    @property
    def beats(self) -> int: ...

    def on_frontend_exit(self, frontend: str) -> None: ...

    def kill_engine(self) -> None: ...


@dataclass(eq=False)
class _Process:
    popen: subprocess.Popen[bytes]
    exited: int  # a descriptor that is readable once the process has exited
    name: str = ""  # given when the engine runs
    ready: bool = False  # the process accepts connections, as ``read_output`` has found
    killed: str = ""  # why it was killed, if it was

    def read_output(self) -> bytes:
        """Return what the process has written since the last call: see ``lamina.serve``."""
        with contextlib.suppress(BlockingIOError):
            words = os.read(self.popen.stdout.fileno(), 1024)  # type: ignore[union-attr]
            self.ready = self.ready or READY in words
            return words
        return b""


class FrontendProcesses:
    """Frontend processes. They load their tokenizers at once, and serve when the engine runs."""

    def __init__(self, config: ServerConfig, model: Path, listener: socket.socket) -> None:
        self._config = config
        self._model = model
        self._listener = listener
        self._folder = tempfile.TemporaryDirectory(prefix="lamina-")  # nobody else may enter it
        self._exits = selectors.DefaultSelector()
        self._running: list[_Process] = []
        self._started = 0
        self._ends = deque[float](maxlen=MOST_ENDS)
        self._signals: list[int] = []
        self._liveness = Liveness(time.monotonic())
        self._beats = 0
        for _ in range(config.frontends):
            self._start()

    def _start(self) -> _Process:
        metrics = Path(self._folder.name, "metrics")
        metrics.mkdir(exist_ok=True)
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "lamina.serve", str(self._model), str(self._listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(metrics)},
            pass_fds=[self._listener.fileno()],
            process_group=0,  # so that Ctrl-C in a terminal reaches the engine alone
        )
        os.set_blocking(popen.stdout.fileno(), False)  # type: ignore[union-attr]
        process = _Process(popen, os.pidfd_open(popen.pid))
        self._exits.register(process.exited, selectors.EVENT_READ, process)
        self._running.append(process)
        return process

    @property
    def folder(self) -> Path:
        """Folder for sockets, which no other user may enter."""
        return Path(self._folder.name)

    def names(self) -> list[str]:
        """Return the names of frontends that have been told of an engine. Any thread."""
        return [process.name for process in list(self._running) if process.name]

    def serve(self, supervisor: Owner, on_ready: Callable[[], None]) -> None:
        """Serve until SIGINT or SIGTERM, which is raised again once open answers have ended.

        Raises:
            EngineDeadError: The engine has stopped by itself; clients have received the error.
            WorkerError: A frontend cannot start, or frontends end repeatedly.
        """
        try:
            with collected() as self._signals:
                for process in self._running:
                    self._introduce(process, supervisor)
                self._await_ready(supervisor)
                if not self._signals and supervisor.dead is None:
                    on_ready()
                while not self._signals and supervisor.dead is None:
                    self._watch(supervisor)
                self._stop(hurry=supervisor.gave_up)
        finally:
            self._kill()
        if self._signals:
            signal.raise_signal(self._signals[0])
        elif supervisor.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {first_line(supervisor.dead)}. Start the server again")

    def _introduce(self, process: _Process, supervisor: Owner) -> None:
        if supervisor.serving is None:
            raise EngineDeadError("the engine has not started")
        process.name = f"frontend{self._started}"
        self._started += 1
        bootstrap = msgspec.structs.replace(
            supervisor.serving.frontend,
            name=process.name,
            seed=supervisor.serving.frontend.seed + self._started,
            server=plain_values(self._config),
        )
        with contextlib.suppress(BrokenPipeError), process.popen.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(msgspec.msgpack.encode(bootstrap))

    def _await_ready(self, supervisor: Owner) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._signals and supervisor.dead is None:
            for process in self._ended():
                if process.popen.returncode != ENGINE_STOPPED:
                    raise WorkerError(process.name, f"it could not start: {describe_exit(process.popen)}")
                self._running.remove(process)
            for process in self._running:
                process.read_output()
            if self._running and all(process.ready for process in self._running):
                return
            if time.monotonic() > deadline:
                raise WorkerError("frontend", f"it was not ready within {START_TIMEOUT_S:.0f} s")

    def _watch(self, supervisor: Owner) -> None:
        """Replace frontends that have ended or hang, and end an engine that hangs. Waits for ``POLL_S`` at most."""
        self._liveness.turn(time.monotonic())
        for process in self._running:
            if process.read_output():
                self._liveness.on_message(process.name)
        if supervisor.beats != self._beats:
            self._beats = supervisor.beats
            self._liveness.on_message(ENGINE)
        silent = {name: f"its event loop has not run for {s:.0f} s" for name, s in self._liveness.lost().items()}
        if ENGINE in silent:
            log.warning("the engine is ended: its process does not run")
            self._liveness.unwatch(ENGINE)
            supervisor.kill_engine()
        for process in self._running:
            why = supervisor.lost_frontends.pop(process.name, None) or silent.get(process.name)
            if why is not None and not process.killed and process.popen.poll() is None:
                process.killed = f"it was ended: {why}"
                process.popen.kill()
        for process in self._ended():
            self._running.remove(process)
            self._liveness.unwatch(process.name)
            if process.popen.returncode == ENGINE_STOPPED:  # the supervisor may learn of it later
                continue
            supervisor.on_frontend_exit(process.name)
            how, now = process.killed or describe_exit(process.popen), time.monotonic()
            log.warning("%s: %s; its requests are cancelled, and another takes its place", process.name, how)
            self._ends.append(now)
            if len(self._ends) == MOST_ENDS and now - self._ends[0] < ENDS_S:
                raise WorkerError(process.name, f"{how}, and {MOST_ENDS - 1} others before it in {ENDS_S:.0f} s")
            self._introduce(self._start(), supervisor)

    def _ended(self) -> Iterator[_Process]:
        """Yield the processes that have exited, after waiting for ``POLL_S`` at most."""
        for key, _ in self._exits.select(POLL_S):
            process: _Process = key.data
            self._exits.unregister(process.exited)
            os.close(process.exited)
            process.popen.wait()
            process.popen.stdout.close()  # type: ignore[union-attr]
            yield process

    def _stop(self, hurry: bool) -> None:
        """Let frontends end their answers within the shutdown timeout, or at once after a second signal.

        Starting frontends have no clients, and are killed. ``hurry``: end answers at once, since the engine has ended.
        """
        signals = [signal.SIGTERM, signal.SIGTERM] if hurry else self._signals
        told, deadline = 0, time.monotonic() + self._config.shutdown_timeout + STOP_TIMEOUT_S
        left = list(self._running)
        for process in left:
            process.read_output()
            if not process.ready:
                process.popen.kill()
        while left and time.monotonic() < deadline:
            if told < len(signals):
                told += 1
                for process in left:
                    process.popen.terminate()
            for process in self._ended():
                left.remove(process)

    def _kill(self) -> None:
        for process in self._running:
            process.popen.kill()
        for process in self._running:
            try:
                wait_for_killed("a frontend", process.popen)
            except TransportError as error:  # the server ends all the same
                log.warning("%s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for key in list((self._exits.get_map() or {}).values()):
            os.close(key.fd)
        self._exits.close()
        self._folder.cleanup()
