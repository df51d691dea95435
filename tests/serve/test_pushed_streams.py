"""Streams whose events are written past the middleware, over real sockets: TLS, slow readers, servers that stop."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.config.server_config import DEFAULTS, ServerConfig
from lamina.core.outputs import FinishReason
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client, Request
from lamina.engine.updates import CompletionUpdate, OnUpdate, RequestUpdate
from lamina.serve.connections import Connection
from lamina.serve.server import make_server
from tests.support.scripted_engine import COMPLETION, TIMEOUT_S, FakeEngine

TOKENS = 600
TEXTS = [f"{number:06d}" * 400 for number in range(TOKENS)]


class LoopEngine(FakeEngine):
    """Publishes updates in the event loop's thread, as the engine of a frontend does: else nothing is pushed.

    It goes on after the first update once a client has that one: from then on, somebody waits for the next.
    """

    loop: asyncio.AbstractEventLoop
    pause_at = TOKENS

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.paused, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def submit(self, request_id: str, prompt: Any, params: SamplingParams, on_update: OnUpdate, client: Client) -> None:
        def publish(update: RequestUpdate) -> None:
            published = threading.Event()

            def run() -> None:
                on_update(update)
                published.set()

            with contextlib.suppress(RuntimeError):  # the server has stopped
                self.loop.call_soon_threadsafe(run)
                published.wait(TIMEOUT_S)

        super().submit(request_id, prompt, params, publish, client)

    def _answer(self, request_id: str, prompt: Any, text: str, params: SamplingParams, on_update: OnUpdate) -> None:
        request = Request(request_id, None, self.tokenizer.encode(text), params)
        for number, piece in enumerate(TEXTS):
            if number == self.pause_at:
                self.paused.set()
                self.go_on.wait(TIMEOUT_S)
            last = number == TOKENS - 1
            one = CompletionUpdate(0, [1], [piece], finish_reason=FinishReason.LENGTH if last else None)
            on_update(RequestUpdate(request, [one], last))
            self.begun.wait(TIMEOUT_S)


@contextlib.contextmanager
def serving(engine: LoopEngine, config: ServerConfig) -> Iterator[tuple[Any, int]]:
    """A server, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # inherited by connections

    def on_ready() -> None:
        engine.loop = asyncio.get_running_loop()

    server = make_server(engine, on_ready, config=config)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield server, listener.getsockname()[1]
    server.should_exit = True
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def stream(engine: LoopEngine, port: int, certificate: Path | None) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request for a stream, but for its first character; its client has little room for the unread."""
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    lines = [f"POST {COMPLETION} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "", ""])
    with contextlib.closing(socket.socket()) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        plain.settimeout(TIMEOUT_S)
        plain.connect(("127.0.0.1", port))
        trust = None if certificate is None else ssl.create_default_context(cafile=str(certificate))
        client = plain if trust is None else trust.wrap_socket(plain, server_hostname="127.0.0.1")
        with client:
            client.sendall(head.encode() + body)
            with http.client.HTTPResponse(client) as answer:  # which holds the socket open
                answer.begin()
                assert (answer.status, answer.read1(1)) == (200, b"d")
                engine.begun.set()
                yield answer


def text_of(events: bytes) -> str:
    """The text of a whole stream, which must have ended well."""
    *parts, last = [part.removeprefix(b"data: ") for part in (b"d" + events).split(b"\n\n") if part]
    assert last == b"[DONE]"
    choices = [json.loads(part)["choices"][0] for part in parts]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    return "".join(choice["text"] for choice in choices)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the parts that were written past the middleware."""
    sizes: list[int] = []
    write: Callable[[Connection, bytes], None] = Connection.write_chunk

    def record(connection: Connection, data: bytes) -> None:
        sizes.append(len(data))
        write(connection, data)

    monkeypatch.setattr(Connection, "write_chunk", record)
    return sizes


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> tuple[ServerConfig, Path | None]:
    """Settings of a server, and the certificate that its clients trust."""
    if request.param == "http":
        return DEFAULTS, None
    return ServerConfig(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]), certificate[0]


def test_a_fast_reader_gets_all_of_a_stream_in_order(tls: tuple[ServerConfig, Path | None], pushed: list[int]) -> None:
    engine = LoopEngine()
    with serving(engine, tls[0]) as (_, port), stream(engine, port, tls[1]) as answer:
        assert text_of(answer.read()) == "".join(TEXTS)
    assert pushed


def test_a_slow_reader_gets_all_of_a_stream_in_order(tls: tuple[ServerConfig, Path | None], pushed: list[int]) -> None:
    """What it has not read fills the buffers: from then on the server waits for it."""
    engine = LoopEngine()
    engine.pause_at = TOKENS - 1
    with serving(engine, tls[0]) as (_, port), stream(engine, port, tls[1]) as answer:
        assert engine.paused.wait(TIMEOUT_S)
        before = len(pushed)
        assert 0 < sum(pushed) < len("".join(TEXTS)), "all was buffered"
        engine.go_on.set()
        events = b""
        while part := answer.read1(2048):
            events += part
            if len(events) < 1 << 17:
                time.sleep(0.001)
        assert text_of(events) == "".join(TEXTS) and len(pushed) == before


def test_a_stream_goes_on_while_its_server_stops(tls: tuple[ServerConfig, Path | None], pushed: list[int]) -> None:
    engine = LoopEngine()
    engine.pause_at = TOKENS // 2
    with serving(engine, tls[0]) as (server, port), stream(engine, port, tls[1]) as answer:
        begin = b""
        while TEXTS[engine.pause_at - 1].encode() not in begin:
            begin += answer.read1(1 << 16)
        server.should_exit = True
        with contextlib.suppress(OSError):  # the server accepts nobody any more
            for _ in range(int(TIMEOUT_S / 0.01)):
                socket.create_connection(("127.0.0.1", port), 0.1).close()
                time.sleep(0.01)
        before = len(pushed)
        engine.go_on.set()
        assert text_of(begin + answer.read()) == "".join(TEXTS)
        assert len(pushed) > before


def test_a_client_that_leaves_ends_its_request(tls: tuple[ServerConfig, Path | None]) -> None:
    engine = LoopEngine()
    engine.pause_at = TOKENS // 2
    with serving(engine, tls[0]) as (_, port):
        with stream(engine, port, tls[1]) as answer:
            answer.read(1 << 10)
        assert engine.wait_until(lambda: bool(engine.running) and engine.running <= engine.aborted)
        engine.go_on.set()
