"""TCP streams that go on over new connections, until there are none to be had."""

import contextlib
import itertools
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from far import stamped
from tcp_tools import (
    TIMEOUT_S,
    MakeTcp,
    described,
    port_of,
    reset,
)

from lamina.errors import DeadlineError, PeerLostError
from lamina.transport.tcp import TcpEndpoint


class Proxy:
    """Passes connections on to a port, and cuts each after the next of ``budgets`` bytes (None: never)."""

    def __init__(self, port: int, budgets: Iterator[int | None]) -> None:
        self.cuts = 0
        self._target = port
        self._budgets = budgets
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._pool = ThreadPoolExecutor(16)
        self._ended = threading.Event()
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        self._pool.shutdown()

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            self._pool.submit(self._pass_on, near, next(self._budgets))

    def _pass_on(self, near: socket.socket, budget: int | None) -> None:
        far = socket.create_connection(("127.0.0.1", self._target))
        left = float("inf") if budget is None else budget
        while not self._ended.is_set() and left > 0:
            for source in select.select([near, far], [], [], 0.05)[0]:
                try:
                    data = source.recv(min(65536, int(min(left, 65536))))
                    (far if source is near else near).sendall(data)
                except OSError:
                    data = b""
                left = left - len(data) if data else 0
        self.cuts += 1
        reset(near)
        reset(far)


@pytest.fixture
def proxies() -> Iterator[Callable[..., Proxy]]:
    opened: list[Proxy] = []

    def open_proxy(port: int, budgets: Iterator[int | None]) -> Proxy:
        opened.append(Proxy(port, budgets))
        return opened[-1]

    yield open_proxy
    for proxy in opened:
        proxy.close()


@pytest.mark.parametrize(("nbytes", "messages", "most"), [(200, 400, 4000), (60_000, 150, 400_000)])
def test_streams_go_on_over_new_connections(
    make_tcp: MakeTcp, proxies: Callable[..., Proxy], nbytes: int, messages: int, most: int
) -> None:
    """Every connection is cut after some random number of bytes: in frames, in headers, in handshakes."""
    budgets = random.Random(1)
    near, far = make_tcp("near", 2 * nbytes), make_tcp("far", 2 * nbytes)
    arenas = {"near": memoryview(near._own.arena.native), "far": memoryview(far._own.arena.native)}  # type: ignore[union-attr]
    through = {
        side: proxies(port_of(endpoint), (budgets.randrange(most) for _ in itertools.count()))
        for side, endpoint in (("near", near), ("far", far))
    }

    def exchange(own: TcpEndpoint, other: TcpEndpoint) -> None:
        peer = own.connect(described(other, port=through[other.name].port), TIMEOUT_S)
        for n in range(1, messages + 1):
            data = stamped(n + (own is near) * messages, nbytes)
            own.post(peer, n % 2 * nbytes, nbytes, [data], 0, n)
            own.wait([(0, n)], TIMEOUT_S)
            expected = stamped(n + (own is far) * messages, nbytes)
            assert arenas[own.name][n % 2 * nbytes : n % 2 * nbytes + nbytes] == expected
        own.wait([(1, 1)], TIMEOUT_S) if own is far else own.ring(peer, 1, 1)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(exchange, near, far), pool.submit(exchange, far, near)]:
            done.result(120)
    assert sum(proxy.cuts for proxy in through.values()) > 10


def test_a_peer_that_cannot_be_reached_again_is_lost(make_tcp: MakeTcp, proxies: Callable[..., Proxy]) -> None:
    near, far = make_tcp("near", silence_s=0.5), make_tcp("far")
    proxy = proxies(port_of(far), itertools.chain([2000], itertools.repeat(0)))
    peer = near.connect(described(far, port=proxy.port), TIMEOUT_S)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"no connection for 0\.5 s"):
        while time.monotonic() < start + TIMEOUT_S:
            near.post(peer, 0, 1000, [bytes(1000)], 0, 1)
            with contextlib.suppress(DeadlineError):
                near.wait([(0, 1)], 0.01)
