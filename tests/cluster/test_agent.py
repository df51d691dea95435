"""What `lamina worker` says while it waits for an engine."""

import logging
import socket
import threading

import pytest

from lamina.cluster import agent
from lamina.cluster.agent import Agent, WorkerPlace, keys_of
from lamina.cluster.remote_workers import RemoteWorkers
from lamina.control.agent_messages import Apply
from lamina.control.secret import new
from lamina.control.sockets import ENGINE
from lamina.core import __version__
from lamina.core.errors import ConfigError
from lamina.transport.listener import LOOPBACK

ABOUT = Apply(__version__, "memory", "cpu", "another host", "far")


def test_a_port_where_nobody_listens_is_told_long_before_the_wait_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent, "SILENT_S", 0.0)
    monkeypatch.setattr(agent, "REACH_S", 0.6)
    monkeypatch.setattr(agent, "RETRY_S", 0.1)
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConfigError, match="nothing has listened"):
        Agent((LOOPBACK, port), keys_of(new()), ABOUT, WorkerPlace()).host_worker()
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"nobody answers at {LOOPBACK}:{port}" in said and "--listen" in said and "--engine" in said


def test_a_worker_without_a_place_says_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent, "SILENT_S", 0.0)
    monkeypatch.setattr(agent, "TURN_S", 0.02)
    told = threading.Event()

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    handler = Telling(logging.WARNING)
    agent.log.addHandler(handler)
    secret = new()
    workers = RemoteWorkers(LOOPBACK, 0, secret, secret.curve_keys(ENGINE))
    waiting = Agent((LOOPBACK, workers.port), keys_of(secret), ABOUT, WorkerPlace())
    running = threading.Thread(target=waiting.host_worker)
    running.start()
    try:
        assert told.wait(30)
        waiting.request_leave()
        running.join(30)
        assert not running.is_alive()
    finally:
        agent.log.removeHandler(handler)
        workers.close()
    assert "has no place for this worker yet" in caplog.text
