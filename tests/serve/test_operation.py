"""What an operator asks a server: health, models, metrics, its interface."""

import os
import signal
import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lamina.cli import status
from lamina.errors import ConfigError, EngineDeadError, TransportError
from lamina.serve import server as serving
from tests.serve.scripted import CHAT, COMPLETION, TIMEOUT_S, FakeEngine, Running, refusal


def test_a_dead_engine_answers_503_everywhere(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok", "running": 1, "waiting": 2}
    server.engine.dead = "memory0 was killed\nTraceback: its own business"
    for response in (server.http.get("/health"), server.post(COMPLETION, prompt="a")):
        message = refusal(response, 503)["message"]
        assert "memory0 was killed" in message and "its own business" not in message


def test_health_and_status_name_workers_that_do_not_answer(server: Running) -> None:
    server.engine.silent = {"memory0": 5.04}
    response = server.http.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "degraded", "running": 1, "waiting": 2, "silent_s": {"memory0": 5.0}}
    with pytest.raises(EngineDeadError, match=r"worker memory0 has not answered for 5\.0 s"):
        status.status(server.url)


def test_status_and_metrics_say_that_the_engine_has_stopped(server: Running) -> None:
    server.engine.dead = "worker memory0 is gone"
    assert "lamina_up 0.0" in server.http.get("/metrics").text
    with pytest.raises(EngineDeadError, match="the engine has stopped: worker memory0 is gone"):
        status.status(server.url)


def test_a_server_ends_with_its_engine_and_says_why() -> None:
    engine, listener = FakeEngine(), socket.create_server(("127.0.0.1", 0))

    def die() -> None:
        engine.dead = "worker memory0 is gone\nTraceback: in the log"

    with pytest.raises(EngineDeadError, match=r"^the engine has stopped: worker memory0 is gone\. Start [^\n]*$"):
        serving.serve(engine, listener, die)  # type: ignore[arg-type]


def test_the_interface_describes_itself(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    assert {COMPLETION, CHAT, "/v1/models", "/health"} <= set(schema["paths"])
    assert "min_p" in schema["components"]["schemas"]["CompletionRequest"]["properties"]


def test_metrics_say_what_runs_and_how_workers_are_linked(server: Running) -> None:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert values == {
        ("lamina_up",): 1,
        ("lamina_requests_running",): 1,
        ("lamina_requests_waiting",): 2,
        ("lamina_steps_total",): 3,
        ("lamina_sequences_moved_total",): 4,
        ("lamina_kv_slots_used", "memory0"): 5,
        ("lamina_kv_slots", "memory0"): 9,
        ("lamina_links", "same host", "shm"): 1,
        ("lamina_links", 'different hosts; no rdma: "none"', "tcp"): 2,
    }


def test_status_shows_what_a_server_s_metrics_say(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.lines(server.http.get("/metrics").text) == [
        "requests  1 running, 2 waiting, 3 steps so far",
        "memory0   5 of 9 token slots in use",
        "network   shm between 1 pair of workers (same host)",
        'network   tcp between 2 pairs of workers (different hosts; no rdma: "none")',
    ]
    status.status(server.url)
    assert "1 running" in capsys.readouterr().out
    with pytest.raises(TransportError, match="no server answers at"):
        status.status("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="is this a server of Lamina"):
        status.lines("python_info 1\n")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_answers_that_outlast_the_server_end_in_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE_S", 0.2)
    engine, listener = FakeEngine(), socket.create_server(("127.0.0.1", 0))
    answers: dict[bool, httpx.Response] = {}

    def ask(stream: bool) -> None:
        body: dict[str, Any] = {"prompt": "hang", "stream": stream}
        answers[stream] = httpx.post(serving.url(listener) + COMPLETION, json=body, timeout=TIMEOUT_S)

    clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]

    def stop() -> None:
        engine.wait_until(lambda: len(engine.hanging) == len(clients))
        os.kill(os.getpid(), signal.SIGINT)

    others = [*clients, threading.Thread(target=stop)]
    with pytest.raises(KeyboardInterrupt):
        serving.serve(engine, listener, lambda: [thread.start() for thread in others] and None)  # type: ignore[arg-type]
    for thread in others:
        thread.join(TIMEOUT_S)
    assert "the engine was closed" in refusal(answers[False], 503)["message"]
    assert "the engine was closed" in answers[True].text and answers[True].text.endswith("data: [DONE]\n\n")
