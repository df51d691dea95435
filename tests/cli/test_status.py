"""`lamina status` with addresses where something other than Lamina answers."""

import json
import socketserver
import threading
from collections.abc import Iterator, Sequence

import pytest

from lamina.cli import client
from lamina.core.errors import ConfigError
from lamina.serve.monitoring import placement_of
from tests.support.scripted_engine import FakeEngine

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


class Stranger(socketserver.TCPServer):
    """A server that answers every request with ``answer``, and keeps the lines of the last one's header."""

    answer = b""
    asked: Sequence[bytes] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Stranger)
        self.server.asked = list(iter(lambda: self.rfile.readline().strip(), b""))
        self.wfile.write(self.server.answer)


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with Stranger(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OK + b"\r\n<html><body>It works!</body></html>\n", "not Prometheus metrics"),
        (OK + b'\r\n{"status": "ok"}\n', "not Prometheus metrics"),
        (OK + b'\r\nlamina_kv_slots{worker="memory0\n', "not Prometheus metrics"),
        (OK + b"\r\n\xff\xfe\n", "can't decode"),
        (OK + b"Content-Length: 100\r\n\r\nlamina_steps_total 3\n", "IncompleteRead"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (b"", "without response"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "404"),
        (OK + b"\r\npython_info 1\n", "is this a Lamina server"),
        (
            OK + b"\r\nlamina_requests_running 0\nlamina_requests_waiting 0\nlamina_steps_total 0\nlamina_links 1\n",
            "is this a Lamina server",
        ),
    ],
)
def test_what_is_no_server_of_lamina_is_refused(stranger: Stranger, answer: bytes, said: str) -> None:
    stranger.answer = answer
    with pytest.raises(ConfigError, match=said):
        client.status(stranger.url)


LOCKED = b"HTTP/1.1 401 Unauthorized\r\n\r\n"


def test_a_server_that_wants_a_key_gets_it_or_is_named(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger.answer = LOCKED
    monkeypatch.delenv("LAMINA_METRICS_KEY", raising=False)
    with pytest.raises(ConfigError, match="wants a key; set LAMINA_METRICS_KEY"):
        client.status(stranger.url)
    assert not any(b"Authorization" in line for line in stranger.asked)
    with pytest.raises(ConfigError, match="wants a key; give it as --api-key"):
        client.RemoteModel(stranger.url, {})
    for name in ("LAMINA_METRICS_KEY", "LAMINA_ADMIN_KEY"):
        monkeypatch.setenv(name, "mine")
    for ask in (
        lambda: client.status(stranger.url),
        lambda: client.administer(stranger.url, "/admin/stop", {}),
        lambda: client.RemoteModel(stranger.url, {}, "mine"),
    ):
        with pytest.raises(ConfigError, match=r"wants a key|another LAMINA_ADMIN_KEY"):
            ask()
        assert b"Authorization: Bearer mine" in stranger.asked


def test_placement_is_a_bar_for_each_worker_with_its_largest_requests_and_moves() -> None:
    answer = json.dumps(placement_of(FakeEngine().stats()))
    assert client.placement_lines(answer) == [
        "memory0   [" + "#" * 12 + "+" * 7 + ".] 5 used, 3 cached of 9 slots",
        "          chat-1 5",
        "imbalance 1.00 (fullest worker over mean)",
        "moves     3 completed, 2 refused, 1 cancelled; now 64 tokens memory0 -> memory1",
        "prefixes  2 of 8 tokens found (25%)",
    ]
    for other in ("no JSON", "[]", '{"workers": {"memory0": 3}}'):
        with pytest.raises(ConfigError, match="not a placement"):
            client.placement_lines(other)
