"""Requests whose end a proxy may see elsewhere than this server: what follows must not be served as another request."""

import socket

import httpx
import pytest

from lamina.serve.request_log import REQUEST_ID
from tests.support.raw_http import raw
from tests.support.scripted_engine import COMPLETION, TIMEOUT_S, Running

HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
BODY = b'{"prompt":"a"}'
CHUNKED = b"e\r\n" + BODY + b"\r\n0\r\n\r\n"


def post(*fields: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST " + COMPLETION.encode() + b" HTTP/" + version, b"Host: a", b"Content-Type: application/json"]
    return b"\r\n".join([*lines, *fields, b"", b""])


def everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


LENGTH, TE = b"Content-Length: 14", b"Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(post(LENGTH, TE) + CHUNKED, 400, id="length-and-chunked"),
        pytest.param(post(TE, b"Content-Length: 0") + CHUNKED, 400, id="chunked-and-length"),
        pytest.param(post(LENGTH, LENGTH) + BODY, 400, id="length-twice"),
        pytest.param(post(b"Content-Length: 14, 14") + BODY, 400, id="length-list"),
        pytest.param(post(LENGTH, b"Content-Length: 3") + BODY, 400, id="lengths-differ"),
        pytest.param(post(b"Content-Length: +14") + BODY, 400, id="length-with-sign"),
        pytest.param(post(b"Content-Length: 0xe") + BODY, 400, id="length-in-hex"),
        pytest.param(post(b"Content-Length: -1") + BODY, 400, id="length-negative"),
        pytest.param(post(b"Content-Length:") + BODY, 400, id="length-empty"),
        pytest.param(post(b"Content-Length : 14") + BODY, 400, id="space-before-colon"),
        pytest.param(post(b"Transfer-Encoding : chunked") + CHUNKED, 400, id="space-before-colon-chunked"),
        pytest.param(post(b"Transfer-Encoding: chunked, identity") + CHUNKED, 501, id="chunked-identity"),
        pytest.param(post(b"Transfer-Encoding: identity, chunked") + CHUNKED, 501, id="identity-chunked"),
        pytest.param(post(b"Transfer-Encoding: xchunked") + CHUNKED, 501, id="unknown-coding"),
        pytest.param(post(b"Transfer-Encoding: \x0bchunked") + CHUNKED, 400, id="control-before-chunked"),
        pytest.param(post(TE, TE) + CHUNKED, 501, id="chunked-twice"),
        pytest.param(post(b"Transfer-Encoding:\r\n chunked") + CHUNKED, 400, id="folded-chunked"),
        pytest.param(post(LENGTH, b"X: a\r\n\tb") + BODY, 400, id="folded"),
        pytest.param(post(b"X: a\nContent-Length: 14") + BODY, 400, id="bare-lf"),
        pytest.param(post(LENGTH, b"X: a\rb") + BODY, 400, id="bare-cr"),
        pytest.param(post(LENGTH, b"X: a\x00b") + BODY, 400, id="nul"),
        pytest.param(post(TE, version=b"1.0") + CHUNKED, 400, id="http-1.0-chunked"),
        pytest.param(post(LENGTH, version=b"2.0") + BODY, 505, id="http-2.0"),
        pytest.param(post(LENGTH, b"Host: b") + BODY, 400, id="two-hosts"),
        *(
            pytest.param(post(TE) + size + b"\r\n" + BODY + b"\r\n0\r\n\r\n", 400, id=f"chunk-size-{size.decode()!r}")
            for size in (b"", b"0xe", b"+e", b"-1", b" e", b"g", b"e\n", b"0" * 21 + b"e", b"e;a\nb")
        ),
        pytest.param(post(TE) + b"3\r\n" + BODY + b"\r\n0\r\n\r\n", 400, id="chunk-too-long"),
        pytest.param(post(TE) + b"e\n" + BODY + b"\n0\n\n", 400, id="chunks-with-bare-lf"),
        pytest.param(post(TE) + b"e\r\n" + BODY + b"\r\n0\r\n\n", 400, id="trailer-ends-in-bare-lf"),
        pytest.param(post(TE) + b"e\r\n" + BODY + b"\r\n0\r\nX: a\n\n", 400, id="trailer-with-bare-lf"),
    ],
)
def test_an_ambiguous_request_ends_its_connection(server: Running, sent: bytes, status: int) -> None:
    with raw(server, sent + HIDDEN) as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer.lower()
    assert REQUEST_ID in answer.lower()
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    "sent", [post(LENGTH) + BODY, post(TE) + CHUNKED, post(b"transfer-encoding: Chunked") + CHUNKED]
)
def test_a_clear_request_is_followed_by_another(server: Running, sent: bytes) -> None:
    close = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with raw(server, sent + HIDDEN + close) as connection:
        assert everything(connection).count(b"HTTP/1.1 200") == 3


def test_a_client_that_waits_to_send_a_refused_body_is_disconnected(server: Running) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n"
    with raw(server, head) as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 404") and b"connection: close" in answer.lower()


def test_what_follows_the_last_request_does_not_spoil_its_answer(server: Running) -> None:
    with raw(server, post(LENGTH, b"Connection: close") + BODY) as connection:
        connection.sendall(b"\r\n" + HIDDEN)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_ends_its_side_gets_its_answer(server: Running, version: bytes) -> None:
    body = b'{"prompt":"hang"}'
    with raw(server, post(b"Content-Length: %d" % len(body), version=version) + body) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert server.engine.wait_until(lambda: bool(server.engine.hanging))
        server.engine.close()
        answer = everything(connection)
    assert b"the engine was closed" in answer


def test_a_client_that_leaves_while_it_waits_cancels_its_request(server: Running) -> None:
    body = b'{"prompt":"hang"}'
    with raw(server, post(b"Content-Length: %d" % len(body)) + body):
        assert server.engine.wait_until(lambda: bool(server.engine.hanging))
    assert server.engine.wait_until(
        lambda: bool(server.engine.running) and server.engine.running <= server.engine.aborted
    )


def test_a_request_s_id_comes_back(server: Running) -> None:
    def got(path: str, *given: str) -> str:
        headers = {"X-Request-Id": given[0]} if given else {}
        return httpx.get(server.url + path, headers=headers, timeout=TIMEOUT_S).headers["x-request-id"]

    assert got("/health", "my-id.1") == got("/nowhere", "my-id.1") == "my-id.1"
    assert len({got("/health"), got("/health"), got("/health", "x" * 129), got("/health", "a b")}) == 4


def test_an_unexpected_error_has_the_request_s_id(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.engine, "stats", lambda: 1 / 0)
    response = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "one"}, timeout=TIMEOUT_S)
    assert response.status_code == 500 and response.headers["x-request-id"] == "one"
    assert "request one failed" in caplog.text


def test_proxies_do_not_keep_streams(server: Running) -> None:
    headers = server.post(COMPLETION, prompt="a", stream=True).headers
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
