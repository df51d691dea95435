"""Runs the process of a server's engine: ``python -m lamina.serve.engine_process DESCRIPTOR``.

DESCRIPTOR is the file descriptor of the inherited connection to the supervisor.
"""

import _thread
import contextlib
import logging
import signal
import sys
import threading
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lamina.cluster.local_workers import SupervisedWorkers
from lamina.cluster.pool import LOCAL
from lamina.config.engine_config import EngineConfig
from lamina.control.agent_messages import (
    BEAT_S,
    Beat,
    CloseEngine,
    Done,
    EngineBootstrap,
    EngineStopped,
    Exited,
    FrontendExited,
    FrontendLost,
    Save,
    Serving,
    receive_from_supervisor,
)
from lamina.core.errors import LaminaError
from lamina.core.topology import Topology
from lamina.dataplane.transport_choice import summary
from lamina.engine.engine import Engine
from lamina.engine.frontends import Frontends
from lamina.launch import Home, launch
from lamina.models.directory import describe_defaults
from lamina.observe.progress import loading_progress
from lamina.output import start_logging
from lamina.worker.process import exit_with, no_old_garbage

log = logging.getLogger(__name__)

CLOSE_S = 60.0  # longest wait, once the engine has stopped, for the supervisor to close this process


class EngineProcess:
    """An engine whose workers and frontends belong to the supervisor at the other end of ``line``."""

    def __init__(self, line: Connection, bootstrap: EngineBootstrap) -> None:
        self._line = line
        self._bootstrap = bootstrap
        self._workers = SupervisedWorkers(line, bootstrap.workers, bootstrap.exited)
        self._frontends: Frontends | None = None
        self._ended_frontends: list[str] = []  # frontends that have exited since this process was started
        self._closing = threading.Event()
        self._loading = True
        threading.Thread(target=self._read, name="supervisor", daemon=True).start()
        # From the start: loading may take longer than the supervisor waits for a sign of life.
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def serve_until_closed(self) -> None:
        """Serve until told to close, or until the engine has stopped by itself.

        Raises KeyboardInterrupt if told to close while it loads; the supervisor then ends the workers.
        """
        try:
            engine = self._start()
            self._loading = False
        except Exception as error:
            self._loading = False
            if not isinstance(error, LaminaError):
                log.exception("the engine cannot start")
            self._workers.tell_supervisor(EngineStopped(type(error).__name__, str(error)))
            self._closing.wait(CLOSE_S)
            return
        given = self._bootstrap
        self._frontends = Frontends(
            engine,
            Path(given.folder),
            given.supervisor_pid,
            given.incarnation,
            given.frontends,
            self._report_lost_frontend,
            self._report_death,
        )
        for frontend in self._ended_frontends:  # while the engine was loading
            self._frontends.on_frontend_exit(frontend)
        try:
            self._workers.tell_supervisor(Serving(self._frontends.bootstrap, describe(engine)))
            with no_old_garbage():
                self._wait_for_end(engine)
        finally:
            engine.close()
            self._frontends.close()

    def _wait_for_end(self, engine: Engine) -> None:
        while not self._closing.wait(BEAT_S):
            if engine.dead is not None:
                self._report_death(engine.dead)  # if it died before Frontends was made, nothing else reports it
                self._closing.wait(CLOSE_S)
                return

    def _start(self) -> Engine:
        given = self._bootstrap
        home = Home(
            given.supervisor_pid,
            given.secret,
            given.listener,
            self._workers,
            given.saved,
            lambda state: self._workers.tell_supervisor(Save(state)),
        )
        with loading_progress() as on_progress:
            return launch(EngineConfig(**given.settings), on_progress, home=home)

    def _report_lost_frontend(self, frontend: str, why: str) -> None:
        self._workers.tell_supervisor(FrontendLost(frontend, why))

    def _report_death(self, why: str) -> None:
        self._workers.tell_supervisor(EngineStopped("EngineDeadError", why))

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the supervisor has exited, and this process ends too
            while not self._closing.wait(BEAT_S):
                self._workers.tell_supervisor(Beat())

    def _read(self) -> None:
        """Handle the supervisor's messages until it exits, which ends this process too."""
        while True:
            try:
                message = receive_from_supervisor(self._line)
            except (EOFError, OSError):
                return
            if isinstance(message, Exited | Done):
                self._workers.on_supervisor_message(message)
            elif isinstance(message, FrontendExited):
                self._ended_frontends.append(message.frontend)
                if self._frontends is not None:
                    self._frontends.on_frontend_exit(message.frontend)
            elif isinstance(message, CloseEngine):
                self._closing.set()
                if self._loading:  # may take half an hour while workers of other machines are awaited
                    _thread.interrupt_main()


def describe(engine: Engine) -> str:
    """Return the summary of an engine that a server prints when it starts."""
    held = engine.cluster.loaded.weights and f" ({engine.cluster.loaded.weights})"
    slots = engine.stats().slots[1]
    defaults = describe_defaults(engine.sampling_defaults)
    sampling = defaults and f"  sampling {defaults} unless a request says otherwise (generation_config.json)\n"
    return (
        f"  model    {engine.model_name}, {engine.cluster.loaded.parameters / 1e6:.1f}M parameters, "
        f"{engine.cluster.loaded.dtype.value}{held}, up to {engine.max_model_len} tokens per request\n"
        + ("" if engine.config.prefill is None else f"  prefill  {engine.config.prefill}\n")
        + f"  compute  {engine.config.compute}\n"
        f"  memory   {_memory_pool(engine.cluster.topology)}, room for {slots} tokens of KV\n"
        f"{sampling}"
        f"  network  {', '.join(summary(engine.cluster.links)) or 'not used: one worker'}\n"
    )


def _memory_pool(topology: Topology) -> str:
    """Return the workers that hold KV as the setting ``memory`` names them."""
    kinds = Counter(member.kind for member in topology.members if member.role == "memory")
    local = [LOCAL] if topology.local else []
    return ",".join([*local, *(f"{kind}:{count}" for kind, count in kinds.items())])


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt("the server is stopped")


def main() -> None:
    """Body of the process."""
    start_logging()
    line = Connection(int(sys.argv[1]))
    bootstrap = receive_from_supervisor(line)
    if not isinstance(bootstrap, EngineBootstrap):
        raise SystemExit(f"expected EngineBootstrap from the supervisor, got {type(bootstrap).__name__}")
    exit_with(bootstrap.supervisor_pid)
    signal.signal(signal.SIGINT, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        EngineProcess(line, bootstrap).serve_until_closed()


if __name__ == "__main__":
    main()
