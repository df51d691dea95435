"""TCP sends into full windows, and slow peers: nothing deadlocks, nothing holds the GIL."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from lamina.core.errors import DeadlineError, PeerLostError
from lamina.transport.tcp import TcpEndpoint
from tests.transport.conftest import FarProcess
from tests.transport.tcp_tools import (
    TIMEOUT_S,
    MakeTcp,
)


def test_two_that_send_much_at_once_do_not_wait_for_each_other(make_tcp: MakeTcp) -> None:
    nbytes = 64 << 20  # more than both kernels and both windows hold
    near, far = make_tcp("near", nbytes), make_tcp("far", nbytes)
    data = os.urandom(nbytes)

    def exchange(own: TcpEndpoint, other: TcpEndpoint) -> None:
        peer = own.connect(other.descriptor(), TIMEOUT_S)
        own.post(peer, 0, nbytes, [data], 0, 1)
        own.wait([(0, 1)], TIMEOUT_S)
        assert memoryview(own._own.arena.native) == data  # type: ignore[union-attr]

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(exchange, near, far), pool.submit(exchange, far, near)]:
            done.result(60)


def test_a_post_that_blocks_lets_other_python_threads_run(make_tcp: MakeTcp) -> None:
    """If the GIL were held, the receiver could not run, and the post would stall."""
    nbytes = 64 << 20
    near, far = make_tcp("near", stall_s=TIMEOUT_S), make_tcp("far", nbytes)
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(near.post, peer, 0, nbytes, [bytes(nbytes)], 0, 1)
        with pytest.raises(TimeoutError):
            posted.result(0.3)
        far.wait([(0, 1)], TIMEOUT_S)
        posted.result(TIMEOUT_S)


@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_that_waits_for_its_device_receives_all_the_same(make_tcp: MakeTcp, tls: bool) -> None:
    """Nobody calls its endpoint while much more is sent to it than its kernel and the sender's window hold."""
    near, far = make_tcp("near", tls=tls), make_tcp("far", 64 << 20, tls=tls)
    far.receive_always()
    data = os.urandom(64 << 20)
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    near.post(peer, 0, len(data), [data], 0, 1)
    far.wait([(0, 1)], TIMEOUT_S)  # else closing the connection may lose bytes in flight
    assert memoryview(far._own.arena.native) == data  # type: ignore[union-attr]
    near.disconnect(peer)
    again = near.connect(far.descriptor(), TIMEOUT_S)
    near.post(again, 0, len(data), [data[::-1]], 1, 1)
    far.wait([(1, 1)], TIMEOUT_S)
    assert memoryview(far._own.arena.native) == data[::-1]  # type: ignore[union-attr]


def test_a_peer_that_takes_nothing_in_is_given_up(make_tcp: MakeTcp) -> None:
    near, far = make_tcp("near", stall_s=0.3), make_tcp("far", 64 << 20)
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    for _ in range(2):  # half a message has been sent: nothing can follow
        with pytest.raises(PeerLostError, match=r"lost peer far: it has accepted no bytes for 0\.3 s"):
            near.post(peer, 0, 64 << 20, [bytes(64 << 20)], 0, 1)


@pytest.mark.timeout(60)
def test_a_peer_that_takes_nothing_in_is_given_up_though_connections_to_it_can_be_made(make_tcp: MakeTcp) -> None:
    """The kernel closes a connection whose window stays shut for ``silence_s``; reconnecting makes no progress."""
    near, far = make_tcp("near", silence_s=1.5, stall_s=6.0), make_tcp("far", 64 << 20)
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    with pytest.raises(PeerLostError, match="it has accepted no bytes for 6 s"):
        near.post(peer, 0, 64 << 20, [bytes(64 << 20)], 0, 1)


def test_a_signal_handler_that_raises_ends_a_wait_and_a_post(make_tcp: MakeTcp) -> None:
    class InterruptError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptError

    near, far = make_tcp("near"), make_tcp("far", 64 << 20)
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptError):
            near.wait([(0, 1)], 60.0)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(InterruptError):
            near.post(peer, 0, 64 << 20, [bytes(64 << 20)], 0, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(PeerLostError, match="cut short"):
        near.ring(peer, 0, 1)


def test_a_stopped_peer_is_late_not_lost(make_tcp: MakeTcp) -> None:
    near, far = make_tcp("near"), FarProcess.start()
    near.connect(far.call("open", "tcp", 4096, 1), TIMEOUT_S)
    far.call("connect", near.descriptor())
    far.process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError):
        near.wait([(0, 1)], 0.1)
    far.process.send_signal(signal.SIGCONT)
    far.call("ring", 0, 1)
    assert near.wait([(0, 1)], TIMEOUT_S) == 0
    far.close()
