"""Spans of requests, as an exporter of OpenTelemetry gets them."""

import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lamina.config.server_config import ServerConfig
from lamina.core.errors import ConfigError
from lamina.serve import tracing
from tests.support.http_server import serve
from tests.support.scripted_engine import CHAT, COMPLETION, Running
from tests.support.waiting import wait_until

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is not installed: pip install lamina[otel]")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

USER = [{"role": "user", "content": "a"}]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Traced:
    """A server whose spans are kept in memory."""

    def __init__(self, running: Running, exporter: InMemorySpanExporter) -> None:
        self.post, self.http, self.engine, self._exporter = running.post, running.http, running.engine, exporter

    def span(self) -> ReadableSpan:
        """Return the only span since the last call."""
        wait_until(lambda: bool(self._exporter.get_finished_spans()), "no span has ended")
        (span,) = self._exporter.get_finished_spans()
        self._exporter.clear()
        return span


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("lamina.serve.server.provider_from_environment", lambda: provider)
    with serve(config=ServerConfig(root_path="/llm")) as running:
        yield Traced(running, exporter)


def test_a_span_has_the_parameters_and_the_tokens_of_its_request(traced: Traced) -> None:
    body = {"temperature": 0.5, "n": 2, "seed": 3, "stop": "z", "max_tokens": 3, "stream": True}
    traced.post(COMPLETION, prompt="hello", **body)
    span = traced.span()
    assert (span.name, span.kind) == ("text_completion fake", SpanKind.SERVER)
    found: dict[str, Any] = dict(span.attributes or {})
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "lamina",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.model": "fake",
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("z",),
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.response.model": "fake",
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 6,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": COMPLETION,
        "url.path": COMPLETION,
        "url.scheme": "http",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None and span.end_time is not None and span.end_time > span.start_time


def test_traceparent_makes_the_span_a_child(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    traced.http.post(f"/llm{CHAT}", json={"messages": USER}, headers=headers)
    span = traced.span()
    assert span.name == "chat fake" and f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    traced.http.post(CHAT, json={"messages": USER}, headers={"traceparent": "00-0-0-zz"})
    assert traced.span().parent is None


@pytest.mark.parametrize(
    ("body", "status", "error", "code"),
    [
        ({"prompt": "a", "n": 0}, 400, "400", StatusCode.UNSET),
        ({"prompt": "crowd"}, 429, "429", StatusCode.UNSET),
        ({"prompt": "break"}, 503, "503", StatusCode.ERROR),
        ({"prompt": "break", "stream": True}, 200, "503", StatusCode.ERROR),
    ],
    ids=["refused", "overloaded", "failed", "failed in the stream"],
)
def test_a_span_says_how_its_request_failed(
    traced: Traced, body: dict[str, object], status: int, error: str, code: StatusCode
) -> None:
    traced.post(COMPLETION, **body)
    span = traced.span()
    found = dict(span.attributes or {})
    assert (found["http.response.status_code"], found["error.type"]) == (status, error)
    assert span.status.status_code is code


def test_a_client_that_leaves_ends_its_span(traced: Traced) -> None:
    with traced.http.stream("POST", COMPLETION, json={"prompt": "hang", "stream": True}) as response:
        next(response.iter_bytes())
    found = dict(traced.span().attributes or {})
    assert found["gen_ai.usage.output_tokens"] == 1 and "gen_ai.response.finish_reasons" not in found


def test_only_requests_that_generate_have_spans(traced: Traced) -> None:
    traced.http.get("/health")
    traced.post("/tokenize", prompt="a")
    traced.post(COMPLETION, prompt="a")
    assert traced.span().name == "text_completion fake"


# -- the OTEL_* variables ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*tracing.ENABLING, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_without_variables_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.provider_from_environment() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing.provider_from_environment() is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "false")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert tracing.provider_from_environment() is None


def test_an_unknown_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console,pigeon")
    with pytest.raises(ConfigError, match=r"exporter 'pigeon' is not installed; installed are .*console"):
        tracing.provider_from_environment()


def test_without_the_packages_a_warning_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert tracing.provider_from_environment() is None
    assert "pip install 'lamina[otel]'" in caplog.text


def test_spans_reach_the_collector_named_by_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that stopping the server sends the spans that have not been sent."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install lamina[otel]")
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def collect() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            text = b""
            while b"gen_ai.usage.output_tokens" not in text:
                text += connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        received.append(text)

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "night-shift")
    with serve() as running:
        assert httpx.post(running.url + COMPLETION, json={"prompt": "a"}).status_code == 200
    collecting.join(30)
    listener.close()
    (text,) = received
    assert text.startswith(b"POST /v1/traces ") and b"night-shift" in text and b"text_completion fake" in text
