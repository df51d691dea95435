"""The process of a server's engine, without workers: what its supervisor tells it."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from lamina.control.agent_messages import (
    CloseEngine,
    EngineBootstrap,
    Exited,
    FrontendExited,
    Serving,
    receive_from_engine,
    send,
)
from lamina.serve import engine_process
from lamina.serve.engine_process import EngineProcess
from tests.support.recording_engine import RecordingEngine
from tests.support.waiting import END_S


def test_a_frontend_that_ends_while_the_engine_loads_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor had named the frontend when it started this engine. Without an end, greetings would never end."""
    ours, theirs = multiprocessing.Pipe()
    frontends = ["frontend0", "frontend1"]
    given = EngineBootstrap({}, b"", 0, str(tmp_path), os.getpid(), 1, None, frontends, ["memory0"], {})
    process, engine, closed = EngineProcess(theirs, given), RecordingEngine(), threading.Event()
    monkeypatch.setattr(engine, "close", closed.set, raising=False)
    monkeypatch.setattr(engine_process, "describe", lambda engine: "")

    def load() -> RecordingEngine:
        send(ours, FrontendExited("frontend0"))
        send(ours, Exited("memory0", "killed"))
        deadline = time.monotonic() + END_S
        while "memory0" not in process._workers.ended():  # the messages have been read
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return engine

    monkeypatch.setattr(process, "_start", load)
    running = threading.Thread(target=process.serve_until_closed, daemon=True)
    running.start()
    while not isinstance(receive_from_engine(ours), Serving):
        pass
    room = process._frontends
    assert room is not None and room._members.keys() == {"frontend1"}
    send(ours, CloseEngine())
    running.join(END_S)
    assert closed.is_set() and not running.is_alive()
    ours.close()
