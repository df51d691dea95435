"""Owns the processes of a server's engine and workers, the cluster's secret and the socket that workers connect to.

If the engine's process ends, a new engine takes over the workers, which keep their weights, and frontends send it their
unfinished requests. An engine that reports that it has stopped by itself is not restarted.
"""

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from lamina.cluster.local_workers import LocalWorkers, describe_exit
from lamina.config.engine_config import EngineConfig
from lamina.config.settings import plain_values
from lamina.control.agent_messages import (
    Beat,
    CloseEngine,
    Done,
    End,
    EngineBootstrap,
    EngineStopped,
    EngineToSupervisor,
    Exited,
    FrontendExited,
    FrontendLost,
    Save,
    Serving,
    Start,
    SupervisorToEngine,
    receive_from_engine,
    send,
)
from lamina.control.liveness import Restarts
from lamina.control.secret import Secret, configured, new
from lamina.core.errors import EngineDeadError, LaminaError, user_error
from lamina.core.threads import join_thread
from lamina.serve.frontend_processes import collected
from lamina.transport.listener import LOOPBACK

log = logging.getLogger(__name__)

POLL_S = 0.1
CLOSE_S = 75.0  # time in which an engine ends its requests and workers
KILL_S = 5.0


class Supervisor:
    """Runs the engine of a server, and starts it again when its process ends; in a thread of its own.

    ``frontend_processes.Owner`` describes the attributes.
    """

    def __init__(self, config: EngineConfig, folder: Path, frontends: Callable[[], Collection[str]]) -> None:
        """Raises ConfigError if the secret cannot be read.

        Args:
            config: The settings of the engine.
            folder: Holds the sockets that frontends connect to.
            frontends: Returns the names of the frontends that run.
        """
        self.serving: Serving | None = None
        self.dead: str | None = None
        self.gave_up = False
        self.beats = 0
        self.lost_frontends: dict[str, str] = {}
        self._settings = plain_values(config)
        self._folder = folder
        self._frontends = frontends
        self._secret: Secret = configured(config.secret_file) or new()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        # Workers of other machines end with the engine that they have joined.
        self._elsewhere = config.listen is not None or config.ray is not None
        self._restarts = Restarts(0 if self._elsewhere else config.max_restarts)
        self._workers = LocalWorkers()
        self._told: set[str] = set()  # exits that the engine knows of
        self._saved: bytes | None = None
        self._incarnations = itertools.count(1)
        self._engine: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._refusal: EngineStopped | None = None
        self._begun = threading.Event()
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lamina-supervisor", daemon=True)

    def __enter__(self) -> Self:
        """Start the engine and its workers. A signal during the wait is raised again after it.

        Raises the engine's error if they cannot be started.
        """
        try:
            with collected() as signals:
                self._thread.start()
                while not signals and not self._begun.wait(POLL_S):
                    pass
            if signals:
                signal.raise_signal(signals[0])
            if self._refusal is not None:
                raise user_error(self._refusal.kind, self._refusal.reason) or LaminaError(self._refusal.reason)
            if self.dead is not None:
                raise LaminaError(f"the engine could not start: {self.dead}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        join_thread(self._thread, CLOSE_S + 2 * KILL_S)
        self._listener.close()

    @property
    def summary(self) -> str:
        """Description of the engine, in words."""
        return "" if self.serving is None else self.serving.summary

    def on_frontend_exit(self, frontend: str) -> None:
        """Tell the engine that the process of a frontend has ended."""
        self._tell(FrontendExited(frontend))

    def kill_engine(self) -> None:
        """End an engine that does not answer."""
        if (engine := self._engine) is not None:
            engine.kill()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set() and self.dead is None:
                before = self.serving
                how = self._run_engine()
                if not self._closing.is_set() and self.dead is None:
                    self._prepare_another(how, served=self.serving is not before)
        except BaseException as error:
            log.exception("the supervisor failed")
            self._give_up(f"the supervisor failed: {error}")
        finally:
            self._begun.set()
            self._workers.kill()

    def _run_engine(self) -> str:
        """Run an engine until its process has ended; return how it has ended."""
        before = self.serving
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            engine = subprocess.Popen(
                [sys.executable, "-P", "-m", "lamina.serve.engine_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self._listener.fileno()],
                process_group=0,  # so that Ctrl-C in a terminal reaches the supervisor alone
            )
        self._engine = engine
        with ours, selectors.DefaultSelector() as ready:
            with self._sending:  # frontends that end now are told of after the bootstrap
                with contextlib.suppress(OSError):
                    send(ours, self._bootstrap())
                self._line = ours
            ready.register(ours, selectors.EVENT_READ)
            ready.register(self._workers.exits, selectors.EVENT_READ)
            told_to_close, end_at = False, math.inf
            while engine.poll() is None:
                for key, _ in ready.select(POLL_S):
                    if key.fileobj is not ours:
                        self._tell_exits()
                    elif (message := self._read(ours)) is None:  # it ends
                        ready.unregister(ours)
                        end_at = time.monotonic() + CLOSE_S
                    else:
                        self._on_message(message)
                if self._closing.is_set() and not told_to_close:
                    told_to_close, end_at = True, time.monotonic() + CLOSE_S
                    if self.serving is before and not self._elsewhere:
                        engine.kill()  # it still loads, and its workers belong to this process
                    else:
                        self._tell(CloseEngine())
                elif time.monotonic() > end_at:
                    log.warning("the engine (process %d) was to end within %g s; it is killed", engine.pid, CLOSE_S)
                    engine.kill()
                    end_at = math.inf
            while ours.poll() and (message := self._read(ours)) is not None:
                self._on_message(message)
            self._line = None
        return describe_exit(engine)

    def _bootstrap(self) -> EngineBootstrap:
        exited = dict(self._workers.ended())
        self._told = set(exited)
        return EngineBootstrap(
            self._settings,
            self._secret.data,
            self._listener.fileno(),
            str(self._folder),
            os.getpid(),
            next(self._incarnations),
            self._saved,
            sorted(self._frontends()),
            sorted(self._workers.processes),
            exited,
        )

    def _prepare_another(self, how: str, served: bool) -> None:
        """Prepare the start of another engine that takes over, unless too many engines have ended."""
        at = self._restarts.next(time.monotonic())
        if at is None or self.serving is None:
            before = f", and {self._restarts.most} others before it" if at is None else ""
            self._give_up(f"{how}{before}")
            return
        if not served:  # its workers may have been the cause
            self._saved = None
        if self._saved is None:
            self._workers.kill()
            self._workers = LocalWorkers()
        log.warning("engine: %s; another one takes over the workers", how)
        self._closing.wait(max(0.0, at - time.monotonic()))

    def _give_up(self, why: str) -> None:
        self.dead, self.gave_up = why, True

    def _read(self, line: Connection) -> EngineToSupervisor | None:
        """Return the engine's next message; None if it has exited."""
        try:
            return receive_from_engine(line)
        except (EOFError, OSError):
            return None

    def _on_message(self, message: EngineToSupervisor) -> None:
        self.beats += 1
        if isinstance(message, Save):
            self._saved = message.state
        elif isinstance(message, Serving):
            self.serving = message
            self._begun.set()
        elif isinstance(message, FrontendLost):
            self.lost_frontends[message.frontend] = message.why
        elif isinstance(message, EngineStopped):
            if self.serving is None:
                self._refusal = message
            elif message.kind == EngineDeadError.__name__:
                self.dead = message.reason
            else:  # it could not take over
                log.warning("the engine could not take over the workers: %s", message.reason)
                self._tell(CloseEngine())
                return
            self.dead = message.reason
            self._begun.set()
        elif not isinstance(message, Beat):
            self._tell(Done(self._carry_out(message)))

    def _carry_out(self, message: Start | End) -> str:
        """Start or end workers; return the error, or ""."""
        workers = self._workers
        try:
            if isinstance(message, Start):
                workers.start(message)
            elif message.grace_s:
                workers.close()
            else:
                workers.kill_workers([name for name in message.workers if name in workers.processes])
        except (OSError, LaminaError) as error:
            return str(error)
        return ""

    def _tell_exits(self) -> None:
        for name, how in dict(self._workers.ended()).items():
            if name not in self._told:
                self._told.add(name)
                self._tell(Exited(name, how))

    def _tell(self, message: SupervisorToEngine) -> None:
        """Send ``message`` to the engine, if one runs. Any thread."""
        with self._sending, contextlib.suppress(OSError):
            if self._line is not None:
                send(self._line, message)
