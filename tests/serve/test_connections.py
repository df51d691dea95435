"""Connections that send nothing, too little, too much, or too many at once."""

import asyncio
import contextlib
import errno
import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lamina.serve import connections
from lamina.serve.connections import Connections, accept
from tests.support.http_server import serve
from tests.support.raw_http import answer, head, raw
from tests.support.scripted_engine import COMPLETION, TIMEOUT_S, WORDS, Running, refusal

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def connect(server: Running) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), TIMEOUT_S)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_S", 0.3)
    monkeypatch.setattr(connections, "DRAIN_S", 0.3)


@pytest.mark.usefixtures("soon")
def test_a_silent_connection_is_closed(server: Running) -> None:
    with connect(server) as connection, _closing():
        assert connection.recv(100) == b""


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
def test_half_a_header_is_answered_and_closed(server: Running, before: bytes) -> None:
    with connect(server) as connection:
        if before:
            connection.sendall(before)
            assert answer(connection)[0] == 200
        connection.sendall(b"POST /v1/comp")
        status, body = answer(connection)
        assert status == 408 and "no complete header within" in body["error"]["message"]
        assert connection.recv(1) == b""


@pytest.mark.usefixtures("soon")
def test_a_header_in_drops_is_not_in_time(server: Running) -> None:
    with connect(server) as connection:
        begun = time.monotonic()
        with _closing():
            while time.monotonic() - begun < TIMEOUT_S:
                connection.sendall(b"X")
                time.sleep(0.05)
        assert time.monotonic() - begun < TIMEOUT_S / 2


@pytest.mark.usefixtures("soon")
def test_a_body_that_nobody_reads_is_thrown_away_for_a_while_only(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(head(10**9, "/nowhere"))
        assert answer(connection)[0] == 404
        begun = time.monotonic()
        with _closing():
            while time.monotonic() - begun < TIMEOUT_S:
                connection.sendall(b"X")
                time.sleep(0.05)
        assert time.monotonic() - begun < TIMEOUT_S / 2


@pytest.mark.usefixtures("soon")
def test_time_passes_only_while_a_header_is_owed(server: Running) -> None:
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(GET)
            assert answer(connection)[0] == 200
            time.sleep(0.6)  # idle, which a connection may be for longer
        body = b'{"prompt":"hang"}'
        connection.sendall(head(len(body)) + body)
        assert server.engine.wait_until(lambda: bool(server.engine.hanging))
        time.sleep(0.6)
        server.engine.close()
        assert answer(connection)[0] == 503


def test_requests_that_are_sent_ahead_are_answered_in_turn(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(GET * 100)
        received = b""
        while received.count(b"HTTP/1.1 200") < 100:
            received += connection.recv(65536)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_is_in_chunks_if_the_client_knows_them(server: Running, version: bytes) -> None:
    body = b'{"prompt":"four","stream":true}'
    request = head(len(body), extra="Connection: close\r\n").replace(b"1.1", version, 1) + body
    with raw(server, request) as connection, http.client.HTTPResponse(connection) as response:
        response.begin()
        assert response.chunked == (version == b"1.1")
        *events, done, rest = response.read().split(b"\n\n")
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert ("".join(texts), done, rest) == ("".join(WORDS), b"data: [DONE]", b"")


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, 431, "the header is too large"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "not an HTTP request"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "not an HTTP request: Missing mandatory Host: header"),
    ],
)
def test_what_is_not_http(server: Running, sent: bytes, status: int, said: str) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        got, body = answer(connection)
        assert got == status and said in body["error"]["message"]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server limited to four connections."""
    monkeypatch.setattr("lamina.serve.server.connection_limit", lambda: 4)
    with serve(backlog=128) as running:
        yield running


def test_silent_connections_make_room_for_others(crowded: Running) -> None:
    kept = crowded.http.get("/health")
    silent = [connect(crowded) for _ in range(50)]
    for _ in range(2):
        assert httpx.get(f"{crowded.url}/health", timeout=TIMEOUT_S).status_code == 200
    again = crowded.http.get("/health")  # who has been answered before is closed after those that never asked
    addresses = [each.extensions["network_stream"].get_extra_info("client_addr") for each in (kept, again)]
    assert addresses[0] == addresses[1]
    for connection in silent:
        connection.close()


def test_connections_at_work_are_not_closed_for_others(crowded: Running, caplog: pytest.LogCaptureFixture) -> None:
    def hang() -> None:
        refusal(httpx.post(crowded.url + COMPLETION, json={"prompt": "hang"}, timeout=TIMEOUT_S), 503)

    at_work = [threading.Thread(target=hang) for _ in range(4)]
    for thread in at_work:
        thread.start()
    assert crowded.engine.wait_until(lambda: len(crowded.engine.hanging) == 4)
    waiting = connect(crowded)
    waiting.sendall(GET)
    waiting.settimeout(0.5)
    with pytest.raises(TimeoutError):
        waiting.recv(1)
    assert "all 4 connections are busy" in caplog.text
    crowded.engine.close()
    for thread in at_work:
        thread.join(TIMEOUT_S)
    waiting.settimeout(TIMEOUT_S)
    assert answer(waiting)[0] == 200
    waiting.close()


async def test_without_files_accepting_goes_on_without_haste(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    async def no_files(_: Any) -> Any:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", no_files)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await accept(listener, None, Connections(), 4)  # type: ignore[arg-type]
    assert 1 < tries <= 1.0 / connections.WAIT_S + 1
    assert "cannot accept a connection: Too many open files" in caplog.text


def test_files_are_kept_back() -> None:
    code = """
import resource
from lamina.core.errors import ConfigError
from lamina.serve.connections import connection_limit, raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, min(hard, 1024)))
try:
    print(connection_limit())
except ConfigError as error:
    print(error)
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], connection_limit())
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
try:
    print(connection_limit())
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    low, raised, refused = done.stdout.splitlines()
    assert 16 <= int(low) < 100 - connections.RESERVED_FILES
    limit, most = map(int, raised.split())
    assert limit == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1024) and 900 < most < limit
    assert "Raise the limit: ulimit -n" in refused


def _closing() -> Any:
    """A connection closed by the server may end by EOF or by reset."""
    return contextlib.suppress(ConnectionResetError, BrokenPipeError)
