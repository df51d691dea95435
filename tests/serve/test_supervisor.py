"""What a supervisor does while something else happens."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from lamina.cluster import local_workers
from lamina.cluster.pool import Devices
from lamina.config.engine_config import EngineConfig
from lamina.control.agent_messages import Done, EngineBootstrap, FrontendExited, Start, receive_from_supervisor
from lamina.control.sockets import Bootstrap
from lamina.serve import supervisor
from lamina.serve.supervisor import Supervisor
from tests.support.waiting import END_S


class Interrupted(threading.Condition):
    """Ctrl-C comes when a wait of the main thread has ended, and its lock is still held."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        super().__exit__(kind, error, trace)


def test_an_interrupt_while_a_lock_is_held_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CLOSE_S", 10.0)
    one = Supervisor(EngineConfig(), tmp_path, list)
    monkeypatch.setattr(one._begun, "_cond", Interrupted(threading.Lock()))
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt), one:
        pytest.fail("it has not started")
    assert not one._thread.is_alive(), "it waits for the lock"
    assert set(psutil.Process().children()) <= before


class ScriptedEngine:
    """The process of an engine that runs until ``kill``, with its end of the line to the supervisor."""

    started: "queue.SimpleQueue[ScriptedEngine]"
    pid = 0

    def __init__(self, command: list[str], *, pass_fds: list[int], **options: Any) -> None:
        self.returncode: int | None = None
        self.line = Connection(os.dup(pass_fds[0]))
        self.started.put(self)

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9


def test_the_first_message_to_an_engine_is_its_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a frontend ends while the bootstrap is made: the engine would refuse to start."""
    monkeypatch.setattr(ScriptedEngine, "started", queue.SimpleQueue(), raising=False)
    monkeypatch.setattr("subprocess.Popen", ScriptedEngine)
    one = Supervisor(EngineConfig(), tmp_path, list)
    made, ending = one._bootstrap, threading.Thread(target=one.on_frontend_exit, args=("frontend9",))

    def bootstrap() -> EngineBootstrap:
        ending.start()
        ending.join(0.3)  # long enough to send the message, if nothing holds it back
        return made()

    monkeypatch.setattr(one, "_bootstrap", bootstrap)
    running = threading.Thread(target=one._run_engine)
    running.start()
    engine = ScriptedEngine.started.get(timeout=END_S)
    first, second = receive_from_supervisor(engine.line), receive_from_supervisor(engine.line)
    assert isinstance(first, EngineBootstrap) and second == FrontendExited("frontend9")
    engine.kill()
    running.join(END_S)
    ending.join(END_S)
    engine.line.close()


def test_a_worker_whose_gpu_is_gone_does_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is told, and goes on without the worker."""
    monkeypatch.setattr(local_workers, "find_devices", lambda: Devices(2, 1 << 30))
    one = Supervisor(EngineConfig(), tmp_path, list)
    ours, engine = multiprocessing.Pipe()
    one._line = ours
    bootstrap = Bootstrap("memory0", "", b"", b"", b"", b"", os.getpid())
    one._on_message(Start("memory", "cuda", bootstrap))
    answer = receive_from_supervisor(engine)
    assert isinstance(answer, Done) and "GPU" in answer.error
    ours.close()
    engine.close()
    one._listener.close()


HANGS = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(600)"


def test_an_engine_that_hangs_after_it_has_closed_its_line_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor then starts another one; it must not fail itself."""
    start = subprocess.Popen

    def hang(command: list[str], *, pass_fds: list[int], **options: Any) -> "subprocess.Popen[bytes]":
        return start([sys.executable, "-c", HANGS, str(pass_fds[0])], pass_fds=pass_fds[:1], **options)

    monkeypatch.setattr(supervisor, "CLOSE_S", 0.2)
    monkeypatch.setattr("subprocess.Popen", hang)
    one = Supervisor(EngineConfig(), tmp_path, list)
    with ThreadPoolExecutor(1) as pool:
        how = pool.submit(one._run_engine).result(END_S)
    assert f"signal {signal.SIGKILL.value}" in how
    one._listener.close()
