"""Processes of frontends around a scripted engine: what happens to them once it has stopped for good."""

import os
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from lamina.config.server_config import ServerConfig
from lamina.control.agent_messages import Serving
from lamina.core.errors import EngineDeadError
from lamina.engine.frontends import Frontends
from lamina.models.directory import find
from lamina.serve.frontend_processes import FrontendProcesses, _Process
from lamina.serve.server import bind, url
from tests.support.recording_engine import RecordingEngine
from tests.support.waiting import wait_until

LATE_S = 3.0  # a frontend that has heard of the end of its engine has exited, and another would be starting


class LateOwner:
    """Hears of the end of its engine ``LATE_S`` after the frontends."""

    gave_up, beats = False, 0

    def __init__(self, engine: RecordingEngine, frontends: Frontends) -> None:
        self.serving: Serving | None = Serving(frontends.bootstrap, "")
        self.dead: str | None = None
        self.lost_frontends: dict[str, str] = {}
        self.left: list[str] = []
        self._engine = engine

    def on_frontend_exit(self, frontend: str) -> None:
        self.left.append(frontend)

    def kill_engine(self) -> None:
        raise AssertionError("it answers")

    def end(self) -> None:
        self._engine.dead = "a worker hangs"
        self._engine.end_turn()
        time.sleep(LATE_S)
        self.dead = self._engine.dead


class Stuck:
    """A process that does not end although it was killed."""

    pid = 7

    def kill(self) -> None:
        pass

    def wait(self, timeout: float) -> None:
        raise subprocess.TimeoutExpired("frontend", timeout)


def test_a_killed_frontend_that_does_not_end_is_logged_and_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FrontendProcesses, "_start", lambda self: None)
    with (
        bind("127.0.0.1", 0) as listener,
        FrontendProcesses(ServerConfig(), find(None, weights=False).path, listener) as processes,
    ):
        processes._running += [_Process(Stuck(), -1), _Process(Stuck(), -1)]  # type: ignore[arg-type]
        folder = processes.folder
    assert not folder.exists()
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "a frontend (process 7) was killed, but has not ended within 10 s"
    ] * 2


@pytest.mark.slow
def test_frontends_are_not_replaced_once_the_engine_has_stopped_for_good(tmp_path: Path) -> None:
    engine = RecordingEngine()
    frontends = Frontends(engine, tmp_path, os.getpid())  # type: ignore[arg-type]
    owner = LateOwner(engine, frontends)
    ending = threading.Thread(target=owner.end)
    served: list[int] = []

    def on_ready() -> None:
        served.append(httpx.get(f"{url(listener)}/v1/models").status_code)
        ending.start()

    with (
        bind("127.0.0.1", 0) as listener,
        FrontendProcesses(ServerConfig(), find(None, weights=False).path, listener) as processes,
    ):
        with pytest.raises(EngineDeadError, match="the engine has stopped: a worker hangs"):
            processes.serve(owner, on_ready)
        assert processes.names() == [] and served == [200]
    ending.join()
    assert owner.left == [], "a frontend counts as lost"
    frontends.close()


@pytest.mark.slow
def test_the_log_says_once_why_a_frontend_was_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = RecordingEngine()
    frontends = Frontends(engine, tmp_path, os.getpid())  # type: ignore[arg-type]
    owner = LateOwner(engine, frontends)

    def end() -> None:
        wait_until(lambda: owner.left == ["frontend0"], "the frontend was not ended")
        owner.dead = "that is all"

    with (
        bind("127.0.0.1", 0) as listener,
        FrontendProcesses(ServerConfig(), find(None, weights=False).path, listener) as processes,
    ):
        ending = threading.Thread(target=end)
        ending.start()
        with pytest.raises(EngineDeadError, match="that is all"):
            processes.serve(owner, lambda: owner.lost_frontends.update(frontend0="it reads nothing"))
        ending.join()
    lines = [message for message in caplog.messages if "frontend0" in message]
    assert lines == [
        "frontend0: it was ended: it reads nothing; its requests are cancelled, and another takes its place"
    ]
    frontends.close()
