"""TCP streams that resume over new connections, until none can be made."""

import contextlib
import itertools
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from lamina.core.errors import DeadlineError, PeerLostError
from lamina.transport.base import Fetch
from lamina.transport.tcp import TcpEndpoint
from tests.transport.far import stamped
from tests.transport.tcp_tools import (
    TIMEOUT_S,
    MakeProxy,
    MakeTcp,
    described,
    port_of,
)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(("nbytes", "messages", "most"), [(200, 200, 4000), (60_000, 150, 400_000)])
def test_streams_go_on_over_new_connections(
    make_tcp: MakeTcp, proxies: MakeProxy, nbytes: int, messages: int, most: int, tls: bool
) -> None:
    """Every connection is cut after a random number of bytes: in frames, in headers, in handshakes."""
    budgets = random.Random(1)
    near, far = make_tcp("near", 2 * nbytes, tls=tls), make_tcp("far", 2 * nbytes, tls=tls)
    arenas = {"near": memoryview(near._own.arena.native), "far": memoryview(far._own.arena.native)}  # type: ignore[union-attr]
    through = {
        side: proxies(port_of(endpoint), (budgets.randrange(most) for _ in itertools.count()))
        for side, endpoint in (("near", near), ("far", far))
    }

    arrived = {"near": threading.Event(), "far": threading.Event()}

    def exchange(own: TcpEndpoint, other: TcpEndpoint) -> None:
        peer = own.connect(described(other, port=through[other.name].port), TIMEOUT_S)
        for n in range(1, messages + 1):
            data = stamped(n + (own is near) * messages, nbytes)
            own.post(peer, n % 2 * nbytes, nbytes, [data], 0, n)
            own.wait([(0, n)], TIMEOUT_S)
            expected = stamped(n + (own is far) * messages, nbytes)
            assert arenas[own.name][n % 2 * nbytes : n % 2 * nbytes + nbytes] == expected
        arrived[own.name].set()
        deadline = time.monotonic() + TIMEOUT_S
        while not arrived[other.name].is_set() and time.monotonic() < deadline:
            with contextlib.suppress(DeadlineError):  # bytes lost with the last connection are sent again
                own.wait([(1, 1)], 0.01)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(exchange, near, far), pool.submit(exchange, far, near)]:
            done.result(120)
    assert sum(proxy.cuts for proxy in through.values()) > 10


def test_a_peer_that_cannot_be_reached_again_is_lost(make_tcp: MakeTcp, proxies: MakeProxy) -> None:
    near, far = make_tcp("near", silence_s=0.5), make_tcp("far")
    proxy = proxies(port_of(far), itertools.chain([2000], itertools.repeat(0)))
    peer = near.connect(described(far, port=proxy.port), TIMEOUT_S)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"no connection for 0\.5 s"):
        while time.monotonic() < start + TIMEOUT_S:
            near.post(peer, 0, 1000, [bytes(1000)], 0, 1)
            with contextlib.suppress(DeadlineError):
                near.wait([(0, 1)], 0.01)


def test_a_wait_ends_at_its_deadline_while_a_peer_cannot_be_reached(make_tcp: MakeTcp, proxies: MakeProxy) -> None:
    """Connections can be made but carry no bytes: each attempt takes its full time."""
    near, far = make_tcp("near"), make_tcp("far")
    proxy = proxies(port_of(far), itertools.chain([2000], itertools.repeat(None)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = near.connect(described(far, port=proxy.port), TIMEOUT_S)
        while not proxy.cuts:
            near.post(peer, 0, 1000, [bytes(1000)], 0, 1)
        port, peer.where = peer.where.port, replace(peer.where, port=silent.getsockname()[1])
        for timeout_s in (0.0, 0.5):
            with pytest.raises(DeadlineError):  # not PeerLostError: the peer still has time to come back
                near.wait([(0, 1)], timeout_s)
        peer.where = replace(peer.where, port=port)
    near.ring(peer, 1, 1)
    assert far.wait([(1, 1)], TIMEOUT_S) == 0


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_fetches_go_on_over_new_connections(make_tcp: MakeTcp, proxies: MakeProxy, tls: bool) -> None:
    nbytes, budgets = 40_000, random.Random(2)
    near, far = make_tcp("near", nbytes, tls=tls), make_tcp("far", nbytes, tls=tls)
    here, there = (memoryview(endpoint._own.arena.native) for endpoint in (near, far))  # type: ignore[union-attr]
    proxy = proxies(port_of(far), (budgets.randrange(100_000) for _ in itertools.count()))
    peer = near.connect(described(far, port=proxy.port), TIMEOUT_S)
    for n in range(1, 51):
        there[:] = stamped(n, nbytes)
        for piece in range(4):
            at = piece * nbytes // 4
            sequence = 2 * n + piece // 2
            near.fetch(peer, Fetch(offset=at, nbytes=nbytes // 4, to=at, doorbell=piece % 2, sequence=sequence))
        near.wait([(1, 2 * n + 1)], TIMEOUT_S)
        assert here == there
    assert proxy.cuts > 10
