"""TCP with TLS: rejected peers, and what an eavesdropper sees. The conformance suite covers it too."""

import itertools
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lamina import _native
from lamina._native import Connection
from lamina.core.errors import RefusedError, TransportError
from lamina.transport.base import Fetch
from tests.transport.tcp_tools import TIMEOUT_S, MakeProxy, MakeTcp, described, port_of

KEY, OTHER_KEY = bytes(range(32)), bytes(32)


@pytest.mark.parametrize("listens_with_tls", [False, True])
def test_one_side_alone_is_refused(make_tcp: MakeTcp, listens_with_tls: bool) -> None:
    far, near = make_tcp("far", tls=listens_with_tls), make_tcp("near", tls=not listens_with_tls)
    with pytest.raises(RefusedError):
        near.connect(far.descriptor(), TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while not far.refused and time.monotonic() < deadline:
        time.sleep(0.01)  # it counts after it has answered
    assert far.refused == {"REQUEST": 1}


@pytest.mark.parametrize("tls", [False, True])
def test_bytes_are_seen_on_the_wire_unless_encrypted(make_tcp: MakeTcp, proxies: MakeProxy, tls: bool) -> None:
    """Messages and fetches; the case without TLS shows that the proxy would have seen them."""
    near, far = make_tcp("near", tls=tls), make_tcp("far", tls=tls)
    proxy = proxies(port_of(far), itertools.repeat(None))
    peer = near.connect(described(far, port=proxy.port), TIMEOUT_S)
    memoryview(far._own.arena.native)[100:120] = b"what far has for all"  # type: ignore[union-attr]
    near.post(peer, 0, 20, [b"what near sends away"], 0, 1)
    far.wait([(0, 1)], TIMEOUT_S)
    near.fetch(peer, Fetch(offset=100, nbytes=20, to=0, doorbell=0, sequence=1))
    near.wait([(0, 1)], TIMEOUT_S)
    assert bytes(memoryview(near._own.arena.native)[:20]) == b"what far has for all"  # type: ignore[union-attr]
    for secret in (b"what near sends away", b"what far has for all"):
        assert (secret in proxy.seen) == (not tls)


def shake_hands(near_key: bytes, far_key: bytes) -> tuple[BaseException | None, BaseException | None]:
    """The errors of the connecting and of the listening side of a TLS handshake; None for a side that succeeds."""
    near, far = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        listening = pool.submit(Connection.tls, far.detach(), far_key, True, TIMEOUT_S)
        connecting = pool.submit(Connection.tls, near.detach(), near_key, False, TIMEOUT_S)
        return connecting.exception(TIMEOUT_S), listening.exception(TIMEOUT_S)


def test_another_key_is_refused_by_both_sides() -> None:
    assert shake_hands(KEY, KEY) == (None, None)
    near, far = shake_hands(KEY, OTHER_KEY)
    assert "no TLS with the peer" in str(near)
    assert "no TLS with the peer" in str(far)


def test_a_peer_that_shows_a_certificate_instead_of_the_key_is_refused(tmp_path: Path) -> None:
    """Anyone can make a certificate: a peer with TLS but without the key must be rejected."""
    files = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=impostor"]
    try:
        subprocess.run([*make, "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
    except OSError:
        pytest.skip("no openssl command to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        impostor = pool.submit(context.wrap_socket, far, server_side=True)
        with pytest.raises(RuntimeError, match="certificate"):
            Connection.tls(near.detach(), KEY, False, TIMEOUT_S)
        assert isinstance(impostor.exception(TIMEOUT_S), ssl.SSLError)


def test_a_silent_peer_ends_the_handshake_at_its_deadline() -> None:
    near, far = socket.socketpair()
    with pytest.raises(RuntimeError, match="did not answer in time"):
        Connection.tls(near.detach(), KEY, False, 0.05)
    far.close()


def test_where_openssl_is_missing_tls_is_refused_with_the_remedy(
    make_tcp: MakeTcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _native.tls_obstacle() == ""
    monkeypatch.setattr("lamina.transport.tcp.tls_obstacle", lambda: "install it (Debian: apt-get install libssl3)")
    with pytest.raises(TransportError, match=r"TLS is not available for tcp here: .*libssl3"):
        make_tcp("near", tls=True)
