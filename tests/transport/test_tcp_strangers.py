"""Connections that a TCP endpoint rejects, and descriptors that lead nowhere."""

import contextlib
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lamina.core.errors import DeadlineError, PeerLostError, RefusedError, TransportError
from lamina.transport import listener
from lamina.transport.base import Fetch
from lamina.transport.listener import PROTOCOL
from lamina.transport.tcp import TcpEndpoint
from tests.transport.conftest import files_left
from tests.transport.far import SECRET
from tests.transport.tcp_tools import (
    TIMEOUT_S,
    MakeTcp,
    described,
    port_of,
)


def test_strangers_are_turned_away_counted_and_logged_once(
    make_tcp: MakeTcp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.3)
    near = make_tcp("near")
    thief = TcpEndpoint("thief", secret=b"another secret than theirs")
    thief.register(64, 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port_of(near))) as garbage:
                garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
                garbage.settimeout(TIMEOUT_S)
                with contextlib.suppress(ConnectionResetError):
                    assert garbage.recv(1) == b""
            with pytest.raises(RefusedError, match="give all workers of a cluster the same"):
                thief.connect(near.descriptor(), TIMEOUT_S)
            with socket.create_connection(("127.0.0.1", port_of(near))) as silent:
                silent.settimeout(TIMEOUT_S)
                assert silent.recv(1) == b""  # dropped at its deadline
    thief.close()
    assert near.refused == {"GARBAGE": 3, "SECRET": 3, "LATE": 3}
    assert len([record for record in caplog.records if "near rejected a connection" in record.message]) == 3


def test_a_flood_of_silent_connections_is_bounded(make_tcp: MakeTcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 3)
    near = make_tcp("near")
    crowd = [socket.create_connection(("127.0.0.1", port_of(near))) for _ in range(5)]
    for late in crowd[3:]:
        late.settimeout(TIMEOUT_S)
        assert late.recv(1) == b""
    assert near.refused["BUSY"] == 2
    for connection in crowd:
        connection.close()


def test_who_comes_while_no_file_can_be_opened_is_let_in_later(make_tcp: MakeTcp) -> None:
    far, near = make_tcp("far"), make_tcp("near")
    with ThreadPoolExecutor(1) as pool:
        with files_left(1):
            peer = pool.submit(near.connect, far.descriptor(), TIMEOUT_S)
            wait_for_refusal(far)
        far.write(far.connect(near.descriptor(), TIMEOUT_S), 0, b"x")
        near.ring(peer.result(TIMEOUT_S), 0, 1)
    assert far.wait([(0, 1)], TIMEOUT_S) == 0


def test_who_cannot_be_served_for_want_of_files_is_served_later(make_tcp: MakeTcp) -> None:
    """Its connection can be accepted, but the event that wakes its serving thread cannot be opened."""
    far, near = make_tcp("far"), make_tcp("near")
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    memoryview(far._own.arena.native)[:4] = b"kept"  # type: ignore[union-attr]
    with files_left(2):
        near.fetch(peer, Fetch(offset=0, nbytes=4, to=0, doorbell=0, sequence=1))
        with pytest.raises(DeadlineError):
            near.wait([(0, 1)], 0.2)
        wait_for_refusal(far)
    assert near.wait([(0, 1)], TIMEOUT_S) == 0
    assert bytes(memoryview(near._own.arena.native)[:4]) == b"kept"  # type: ignore[union-attr]


def wait_for_refusal(endpoint: TcpEndpoint) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not endpoint.refused["SYSTEM"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert endpoint.refused["SYSTEM"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"protocol": PROTOCOL + 1}, TransportError, "far speaks version 2 .* this process 1; run the same release"),
        ({"transport": "rdma"}, TransportError, "descriptor of a rdma endpoint, not of a tcp one"),
        ({"identity": 5}, PeerLostError, "another endpoint now listens on its port"),
        ({"port": 1}, PeerLostError, "nothing listens on 127.0.0.1 port 1"),
        ({"host": "no.such.host.invalid"}, TransportError, "could not connect to far at no.such.host.invalid .* 0.2 s"),
    ],
    ids=["protocol", "transport", "identity", "port", "host"],
)
def test_a_descriptor_that_leads_nowhere(
    make_tcp: MakeTcp, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    near, far = make_tcp("near"), make_tcp("far")
    with pytest.raises(error, match=message):
        near.connect(described(far, **changes), 0.2 if "host" in changes else TIMEOUT_S)


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    endpoint = TcpEndpoint("near", secret=SECRET, host="192.0.2.1")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=r"near cannot listen on 192\.0\.2\.1"):
        endpoint.register(64, 1)
    assert len(os.listdir("/proc/self/fd")) == before
