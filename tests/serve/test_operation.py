"""Endpoints and logs for operators: health, models, metrics, the OpenAPI document, `lamina status`."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lamina.cli.client import status, status_lines
from lamina.config.server_config import ServerConfig
from lamina.core.errors import ConfigError, DeadlineError, EngineDeadError, TransportError
from lamina.output import JsonFormatter
from lamina.serve import server as serving
from lamina.serve.request_log import OncePer, RequestLog
from tests.support.scripted_engine import CHAT, COMPLETION, TIMEOUT_S, FakeEngine, Running, refusal
from tests.support.waiting import wait_until


def test_a_dead_engine_answers_503_everywhere(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok", "running": 1, "waiting": 2}
    server.engine.dead = "memory0 was killed\nTraceback: its own business"
    for response in (server.http.get("/health"), server.post(COMPLETION, prompt="a")):
        message = refusal(response, 503)["message"]
        assert "memory0 was killed" in message and "its own business" not in message


def test_an_engine_that_does_not_answer_in_time_is_a_503(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        raise DeadlineError("the engine has not answered within 5 s")

    monkeypatch.setattr(server.engine, "stats", wait)
    assert refusal(server.http.get("/health"), 503)["code"] == "engine_silent"


def test_health_and_status_name_workers_that_do_not_answer(server: Running) -> None:
    server.engine.silent = {"memory0": 5.04}
    response = server.http.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "degraded", "running": 1, "waiting": 2, "silent_s": {"memory0": 5.0}}
    with pytest.raises(EngineDeadError, match=r"worker memory0 has not answered for 5\.0 s"):
        status(server.url)


def test_status_and_metrics_say_that_the_engine_has_stopped(server: Running) -> None:
    server.engine.dead = "worker memory0 is gone"
    assert "lamina_up 0.0" in server.http.get("/metrics").text
    with pytest.raises(EngineDeadError, match="the engine has stopped: worker memory0 is gone"):
        status(server.url)


def test_a_server_ends_with_its_engine_and_says_why() -> None:
    engine, listener = FakeEngine(), socket.create_server(("127.0.0.1", 0))

    def die() -> None:
        engine.dead = "worker memory0 is gone\nTraceback: in the log"

    with pytest.raises(EngineDeadError, match=r"^the engine has stopped: worker memory0 is gone\. Start [^\n]*$"):
        serving.serve(engine, listener, die)  # type: ignore[arg-type]


def test_the_interface_describes_itself(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    assert {COMPLETION, CHAT, "/v1/models", "/health"} <= set(schema["paths"])
    schemas = schema["components"]["schemas"]
    assert "min_p" in schemas["CompletionBody"]["properties"]
    assert schemas.keys() >= {"CompletionBody", "ChatBody", "StreamOptions", "Error"}
    statuses = {
        path: {*operation["responses"]} for path in schema["paths"] for operation in schema["paths"][path].values()
    }
    assert statuses[COMPLETION] == statuses[CHAT] == {"200", "400", "404", "408", "413", "415", "429", "503"}
    assert statuses["/health"] == {"200", "503"} and statuses["/v1/models/{name}"] == {"200", "404"}
    assert "/openapi.json" in refusal(server.http.get("/docs"), 404)["message"]  # a page of scripts from elsewhere


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/fake"])
def test_what_can_be_read_can_be_asked_for_its_head(server: Running, path: str) -> None:
    response = server.http.head(path)
    assert response.status_code == 200 and response.content == b""
    assert response.headers["content-type"] == server.http.get(path).headers["content-type"]


def test_a_line_per_request(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    def lines(own: str) -> list[str]:
        said = [record.getMessage() for record in caplog.records if record.name == "lamina.serve.request_log"]
        return [line.removesuffix(f" [{own}]") for line in said if line.endswith(f" [{own}]")]

    def lines_of(path: str, **body: Any) -> list[str]:
        """The lines of this request alone. They are written after the client has its answer."""
        own = uuid.uuid4().hex
        server.http.post(path, json=body, headers={"X-Request-Id": own})
        wait_until(lambda: lines(own), "the request is not logged")
        return lines(own)

    with caplog.at_level(logging.INFO, "lamina.serve.request_log"):
        (line,) = lines_of(COMPLETION, prompt=["abc", "d"], n=2, stream=True)
        assert re.fullmatch(
            r"127\.0\.0\.1:\d+ POST /v1/completions 200 in \d+\.\d{3} s: 4 prompt tokens, 12 generated, 4 length", line
        )
        (line,) = lines_of(COMPLETION, prompt="too long")
        assert re.search(r"POST /v1/completions 400 in \d+\.\d{3} s$", line)
        (line,) = lines_of("/%0Anew?a=%0A")
        assert "POST /%0Anew" in line and " 404 in " in line


def test_log_lines_may_be_json_objects() -> None:
    try:
        raise ValueError("a fault")
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, "", 0, "no %s", ("files",), sys.exc_info())
    record.fields = {"request_id": "r1"}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    values = json.loads(line)
    assert datetime.fromisoformat(values.pop("time")).timestamp() == pytest.approx(record.created, abs=0.001)
    assert "ValueError: a fault" in values.pop("exception")
    assert values == {"level": "ERROR", "logger": "a.b", "message": "no files", "request_id": "r1"}


@pytest.mark.parametrize(("level", "lines"), [(logging.INFO, 1), (logging.WARNING, 0)])
def test_requests_are_logged_at_level_info(level: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(*_: object) -> None: ...

    scope = {"type": "http", "headers": [], "method": "GET", "raw_path": b"/health"}
    with caplog.at_level(level, "lamina.serve.request_log"):
        asyncio.run(RequestLog(answer)(scope, answer, answer))  # type: ignore[arg-type]
    assert len(caplog.records) == lines


def test_lines_that_clients_can_cause_are_not_written_each_time() -> None:
    now = 0.0
    once = OncePer(10, clock=lambda: now)

    def line(text: str, *args: object) -> logging.LogRecord:
        return logging.LogRecord("a", logging.WARNING, "", 0, text, args, None)

    assert once.filter(line("no %s", "files")) and once.filter(line("other"))
    assert not any(once.filter(line("no %s", number)) for number in range(1000))
    now = 11.0
    last = line("no %s", "files")
    assert once.filter(last) and last.getMessage() == "no files (1000 more such lines suppressed)"


def test_metrics_say_what_runs_and_how_workers_are_linked(server: Running) -> None:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if family.name not in TRAFFIC and not family.name.startswith("vllm:")
    }
    assert values == {
        ("lamina_up",): 1,
        ("lamina_requests_running",): 1,
        ("lamina_requests_waiting",): 2,
        ("lamina_steps_total",): 3,
        ("lamina_preemptions_total",): 5,
        ("lamina_recoveries_total",): 6,
        ("lamina_tokens_recomputed_total",): 7,
        ("lamina_kv_tokens_spilled_total",): 0,
        ("lamina_kv_tokens_fetched_total",): 0,
        ("lamina_prefix_cache_queries_total",): 8,
        ("lamina_prefix_cache_hits_total",): 2,
        ("lamina_kv_imbalance",): 1,
        ("lamina_kv_usage",): pytest.approx(5 / 9),
        ("lamina_kv_moved_bytes_total", "memory0"): 4096,
        ("lamina_kv_slots_used", "memory0"): 5,
        ("lamina_kv_slots_cached", "memory0"): 3,
        ("lamina_kv_slots", "memory0"): 9,
        ("lamina_workers", "memory0", "serving"): 1,
        ("lamina_workers", "compute0", "serving"): 1,
        ("lamina_workers", "compute1", "serving"): 1,
        ("lamina_worker_roles", "", "", "0", "compute0", "prefill"): 1,
        ("lamina_worker_roles", "0", "1", "1", "compute1", "decode"): 1,
        ("lamina_handovers_total",): 4,
        ("lamina_scratch_tokens",): 96,
        ("lamina_parked_total", "memory0"): 2,
        ("lamina_parked_bytes_total", "memory0"): 4096,
        ("lamina_autoscale_load", "memory"): 1.75,
        ("lamina_autoscale_bound", "least", "memory"): 1,
        ("lamina_autoscale_bound", "memory", "most"): 4,
        ("lamina_autoscale_workers_total", "added", "memory"): 2,
        ("lamina_autoscale_workers_total", "memory", "removed"): 1,
        ("lamina_autoscale_latest_seconds", "+2, requests waited", "memory"): 1e9,
        ("lamina_links", "same host", "shm"): 1,
        ("lamina_links", 'different hosts; no rdma: "none"', "tcp"): 2,
    }


def test_placement_says_who_has_what_and_what_moves(server: Running) -> None:
    answer = server.http.get("/placement").json()
    assert answer["workers"]["memory0"]["largest_requests"] == {"chat-1": 5}
    assert answer["moves"]["in_progress"] == [{"source": "memory0", "target": "memory1", "tokens": 64}]
    assert answer["prefix_cache"] == {"queried": 8, "hit": 2}


TRAFFIC = {
    "lamina_prompt_tokens",
    "lamina_generated_tokens",
    "lamina_completions",
    "lamina_time_to_first_token_seconds",
    "lamina_time_between_tokens_seconds",
    "lamina_request_duration_seconds",
}


def traffic(server: Running) -> Counter[str]:
    """Sums, counts and totals of ``TRAFFIC``, without buckets."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return Counter(
        {
            "/".join([sample.name, *sample.labels.values()]): sample.value
            for family in families
            if family.name in TRAFFIC
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }
    )


@pytest.mark.parametrize("stream", [False, True])
def test_metrics_count_tokens_and_measure_waits(server: Running, stream: bool) -> None:
    before = traffic(server)
    server.post(COMPLETION, prompt=["four", "seventh"], n=2, stream=stream)  # 3 words each, in as many updates
    new = traffic(server) - before
    assert all(new.pop(f"lamina_{name}_seconds_sum") > 0 for name in ("time_to_first_token", "request_duration"))
    new.pop("lamina_time_between_tokens_seconds_sum", 0)
    updates = new.pop("lamina_time_between_tokens_seconds_count", 0)  # those not read yet are read as one
    assert 0 <= updates <= 4
    assert new == {
        "lamina_prompt_tokens_total": len("four") + len("seventh"),
        "lamina_generated_tokens_total": 2 * 2 * 3,
        "lamina_completions_total/length": 2 * 2,
        "lamina_time_to_first_token_seconds_count": 2,
        "lamina_request_duration_seconds_count": 2,
    }


def test_metrics_count_the_tokens_of_a_client_that_leaves(server: Running) -> None:
    before = traffic(server)
    body = {"prompt": "hang", "stream": True}
    with server.http.stream("POST", COMPLETION, json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    assert server.engine.wait_until(lambda: bool(server.engine.aborted))
    assert (traffic(server) - before)["lamina_generated_tokens_total"] == 1


def test_status_shows_what_a_server_s_metrics_say(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_lines(server.http.get("/metrics").text) == [
        "requests  1 running, 2 waiting, 3 steps so far",
        "memory0   serving, 5 of 9 token slots in use",
        "compute0  serving, runs prompts",
        "compute1  serving, stage 0, rank 1 of replica 1, decodes",
        "prompts   4 handed over to decode, 96 tokens in scratch memory, 2 waits for earlier chunks (4.0 KiB)",
        f"autoscale memory 1 to 4 workers, load of 1.75; {time.strftime('%H:%M:%S', time.localtime(1e9))}: "
        "+2, requests waited",
        "network   shm between 1 pair of workers (same host)",
        'network   tcp between 2 pairs of workers (different hosts; no rdma: "none")',
    ]
    status(server.url)
    assert "1 running" in capsys.readouterr().out
    with pytest.raises(TransportError, match="no server answers at"):
        status("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="is this a Lamina server"):
        status_lines("python_info 1\n")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    for name in ("fake", "alias"):
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt="a").model == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_answers_that_outlast_the_server_end_in_an_error_that_says_why() -> None:
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

    def start() -> None:
        for thread in others:
            thread.start()

    with pytest.raises(KeyboardInterrupt):
        serving.serve(engine, listener, start, ServerConfig(shutdown_timeout=0))  # type: ignore[arg-type]
    for thread in others:
        thread.join(TIMEOUT_S)
    assert "the engine was closed" in refusal(answers[False], 503)["message"]
    assert "the engine was closed" in answers[True].text and answers[True].text.endswith("data: [DONE]\n\n")
