"""What is particular to TCP: streams that resume, frames that cannot be, peers that are no peers."""

import contextlib
import itertools
import logging
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from conftest import FarProcess
from far import SECRET, stamped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina._native import TcpEndpoint as NativeEndpoint
from lamina.errors import DeadlineError, PeerLostError, RefusedError, TransportError
from lamina.transport import arena, listener
from lamina.transport.handshake import PROTOCOL
from lamina.transport.listener import Descriptor
from lamina.transport.tcp import TcpEndpoint

NBYTES = 1 << 16
DOORBELLS = 4
TIMEOUT_S = 30.0
FRAME = struct.Struct("<QQQII")
MAGIC = 0x314D414C
NO_DOORBELL = 0xFFFFFFFF


def frame(offset: int, nbytes: int, doorbell: int = NO_DOORBELL, sequence: int = 0, magic: int = MAGIC) -> bytes:
    return FRAME.pack(offset, nbytes, sequence, doorbell, magic)


@pytest.fixture
def make() -> Iterator[Callable[..., TcpEndpoint]]:
    opened: list[TcpEndpoint] = []

    def make_endpoint(name: str, nbytes: int = NBYTES, **options: float) -> TcpEndpoint:
        endpoint = TcpEndpoint(name, secret=SECRET, **options)
        opened.append(endpoint)
        endpoint.register(nbytes, DOORBELLS)
        return endpoint

    yield make_endpoint
    for endpoint in opened:
        endpoint.close()


def described(endpoint: TcpEndpoint, **changes: object) -> bytes:
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=Descriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(where, **changes))


def port_of(endpoint: TcpEndpoint) -> int:
    return msgspec.msgpack.decode(endpoint.descriptor(), type=Descriptor).port


def raw_stream(endpoint: TcpEndpoint, stream: int = 1, *, is_new: bool = True) -> tuple[socket.socket, int]:
    """A connection that has proved itself, to send any bytes over, and the byte of its stream wanted next."""
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=Descriptor)
    request = struct.pack("<QQ?", stream, 77, is_new)
    connection, answer = listener.attempt(where, SECRET, request, TIMEOUT_S, TIMEOUT_S)
    return connection, struct.unpack("<Q", answer)[0]


def reset(connection: socket.socket) -> None:
    """Close as a dead process's kernel may: without a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


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
    make: Callable[..., TcpEndpoint], proxies: Callable[..., Proxy], nbytes: int, messages: int, most: int
) -> None:
    """Every connection is cut after some random number of bytes: in frames, in headers, in handshakes."""
    budgets = random.Random(1)
    near, far = make("near", 2 * nbytes), make("far", 2 * nbytes)
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


def test_a_peer_that_cannot_be_reached_again_is_lost(
    make: Callable[..., TcpEndpoint], proxies: Callable[..., Proxy]
) -> None:
    near, far = make("near", silence_s=0.5), make("far")
    proxy = proxies(port_of(far), itertools.chain([2000], itertools.repeat(0)))
    peer = near.connect(described(far, port=proxy.port), TIMEOUT_S)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"no connection for 0\.5 s"):
        while True:
            near.post(peer, 0, 1000, [bytes(1000)], 0, 1)
            near.wait([(0, 1)], 0.01) if time.monotonic() - start > 10 else time.sleep(0.01)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("linger", [False, True], ids=["closed", "reset"])
def test_a_message_cut_short_anywhere_is_never_announced(make: Callable[..., TcpEndpoint], linger: bool) -> None:
    near = make("near")
    body = os.urandom(24)
    whole = frame(8, len(body), 2, 1) + body
    for cut in range(len(whole) + 1):
        near.close()
        near.register(NBYTES, DOORBELLS)
        view = memoryview(near._own.arena.native)  # type: ignore[union-attr]
        connection, position = raw_stream(near)
        assert position == 0
        connection.sendall(whole[:cut])
        reset(connection) if linger else connection.close()
        if cut < len(whole):
            with pytest.raises(DeadlineError, match="2 is at 0 of 1"):
                near.wait([(2, 1)], 0.002)
        else:
            assert near.wait([(2, 1)], TIMEOUT_S) == 0
            assert view[8 : 8 + len(body)] == body


def test_a_stream_resumes_in_the_middle_of_a_message(make: Callable[..., TcpEndpoint]) -> None:
    near = make("near")
    view = memoryview(near._own.arena.native)  # type: ignore[union-attr]
    body = os.urandom(5000)
    whole = frame(0, len(body), 0, 1) + body + frame(6000, 4) + b"next" + frame(0, 0, 1, 9)
    sent = 0
    for step in (3, 40, 4000, 5040, len(whole)):
        connection, position = raw_stream(near, is_new=sent == 0)
        assert position <= sent
        connection.sendall(whole[position:step])
        sent = step
        with pytest.raises(DeadlineError):
            near.wait([(0, 99)], 0.05)
        connection.close()
    assert near.wait([(1, 9)], TIMEOUT_S) == 0
    assert near.wait([(0, 1)], 0) == 0
    assert view[:5000] == body
    assert view[6000:6004] == b"next"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (frame(NBYTES - 3, 4), f"4 bytes at offset {NBYTES - 3} lies outside the arena of {NBYTES} bytes"),
        (frame(NBYTES + 1, 0), "lies outside"),
        (frame(2**64 - 8, 16), "lies outside"),
        (frame(0, 2**64 - 1), "lies outside"),
        (frame(0, 0, DOORBELLS), f"rings doorbell {DOORBELLS} of {DOORBELLS}"),
        (frame(0, 4, magic=1), "is no frame"),
        (b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", "is no frame"),
    ],
)
def test_a_bad_frame_closes_its_stream_alone(
    make: Callable[..., TcpEndpoint], caplog: pytest.LogCaptureFixture, bad: bytes, reason: str
) -> None:
    near = make("near")
    view = memoryview(near._own.arena.native)  # type: ignore[union-attr]
    good, _ = raw_stream(near, 1)
    with caplog.at_level(logging.WARNING):
        for stream in (2, 3):
            connection, _ = raw_stream(near, stream)
            connection.sendall(frame(0, 4) + b"fine" + bad + b"never" + frame(0, 5) + b"never")
            with pytest.raises(DeadlineError):
                near.wait([(0, 1)], 0.05)
            connection.settimeout(TIMEOUT_S)
            with pytest.raises(ConnectionResetError):  # bytes behind the bad frame were not read
                assert connection.recv(1) == b""
                raise ConnectionResetError
            connection.close()
            with pytest.raises(RefusedError):
                raw_stream(near, stream, is_new=False)
    assert near.refused["FRAME"] == 2
    assert sum(reason in record.message for record in caplog.records) == 1
    assert bytes(view) == b"fine".ljust(NBYTES, b"\0")
    good.sendall(frame(0, 0, 0, 1))
    assert near.wait([(0, 1)], TIMEOUT_S) == 0
    good.close()


def decoded(stream: bytes, nbytes: int, doorbells: int) -> tuple[bytes, list[int], bool]:
    """What a receiver makes of a stream: arena, doorbells, whether it was refused. Written for clarity."""
    memory, rung, at = bytearray(nbytes), [0] * doorbells, 0
    while at + FRAME.size <= len(stream):
        offset, length, sequence, doorbell, magic = FRAME.unpack_from(stream, at)
        at += FRAME.size
        if magic != MAGIC or offset + length > nbytes or (doorbell != NO_DOORBELL and doorbell >= doorbells):
            return bytes(memory), rung, True
        body = stream[at : at + length]
        memory[offset : offset + len(body)] = body
        at += len(body)
        if len(body) == length and doorbell != NO_DOORBELL:
            rung[doorbell] = sequence
    return bytes(memory), rung, False


frames = st.builds(
    lambda offset, body, doorbell, sequence: frame(offset, len(body), doorbell, sequence) + body,
    st.integers(0, 300),
    st.binary(max_size=100),
    st.sampled_from([NO_DOORBELL, 0, 1, 2, 3, 4]),
    st.integers(0, 2**64 - 2),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(st.one_of(frames, frames, frames, st.binary(max_size=80)), max_size=12),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=10),
)
def test_any_bytes_are_decoded_as_the_model_does(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    own = arena.allocate("fuzz", 300, 4)
    native = own.native
    endpoint = NativeEndpoint(native)
    sender, receiver = socket.socketpair()
    expected = endpoint.expect(1, 1, True)
    assert expected == (0, 1)
    endpoint.accept(1, 1, receiver.detach())
    refusals: list[str] = []
    at = 0
    for step in itertools.cycle(cuts):
        if at >= len(stream):
            break
        try:
            sender.sendall(stream[at : at + step])
        except BrokenPipeError:
            break
        at += step
        with pytest.raises(TimeoutError):
            endpoint.wait([(0, 2**64 - 1)], 0.0, 0.0, pytest.fail, refusals.append)
    memory, rung, refused = decoded(stream, 300, 4)
    assert bytes(memoryview(native)) == memory
    assert [native.sequence(doorbell) for doorbell in range(4)] == rung
    assert bool(refusals) == refused
    sender.close()
    endpoint.close()
    own.close()


def test_two_that_send_much_at_once_do_not_wait_for_each_other(make: Callable[..., TcpEndpoint]) -> None:
    nbytes = 64 << 20  # more than both kernels and both windows hold
    near, far = make("near", nbytes), make("far", nbytes)
    data = os.urandom(nbytes)

    def exchange(own: TcpEndpoint, other: TcpEndpoint) -> None:
        peer = own.connect(other.descriptor(), TIMEOUT_S)
        own.post(peer, 0, nbytes, [data], 0, 1)
        own.wait([(0, 1)], TIMEOUT_S)
        assert memoryview(own._own.arena.native) == data  # type: ignore[union-attr]

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(exchange, near, far), pool.submit(exchange, far, near)]:
            done.result(60)


def test_a_post_that_blocks_lets_other_python_threads_run(make: Callable[..., TcpEndpoint]) -> None:
    """Were the GIL held, nobody could take the message in, and the post would stall."""
    nbytes = 64 << 20
    near, far = make("near", stall_s=TIMEOUT_S), make("far", nbytes)
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(near.post, peer, 0, nbytes, [bytes(nbytes)], 0, 1)
        with pytest.raises(TimeoutError):
            posted.result(0.3)
        far.wait([(0, 1)], TIMEOUT_S)
        posted.result(TIMEOUT_S)


def test_a_peer_that_takes_nothing_in_is_given_up(make: Callable[..., TcpEndpoint]) -> None:
    near, far = make("near", stall_s=0.3), make("far", 64 << 20)
    peer = near.connect(far.descriptor(), TIMEOUT_S)
    for _ in range(2):  # half a message is on its way: nothing can follow
        with pytest.raises(PeerLostError, match=r"far is gone: it has taken in nothing of a message for 0\.3 s"):
            near.post(peer, 0, 64 << 20, [bytes(64 << 20)], 0, 1)


def test_a_signal_handler_that_raises_ends_a_wait_and_a_post(make: Callable[..., TcpEndpoint]) -> None:
    class InterruptError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptError

    near, far = make("near"), make("far", 64 << 20)
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


def test_strangers_are_turned_away_counted_and_logged_once(
    make: Callable[..., TcpEndpoint], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.3)
    near = make("near")
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
    assert len([record for record in caplog.records if "near turned somebody away" in record.message]) == 3


def test_a_flood_of_silent_connections_is_bounded(
    make: Callable[..., TcpEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_WAITING", 3)
    near = make("near")
    crowd = [socket.create_connection(("127.0.0.1", port_of(near))) for _ in range(5)]
    for late in crowd[3:]:
        late.settimeout(TIMEOUT_S)
        assert late.recv(1) == b""
    assert near.refused["BUSY"] == 2
    for connection in crowd:
        connection.close()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"protocol": PROTOCOL + 1}, TransportError, "far speaks version 2 .* this process 1; run the same release"),
        ({"transport": "rdma"}, TransportError, "but of a rdma one"),
        ({"identity": 5}, PeerLostError, "another endpoint has its port"),
        ({"port": 1}, PeerLostError, "nobody listens on 127.0.0.1 port 1"),
        ({"host": "no.such.host.invalid"}, TransportError, "no way to far at no.such.host.invalid .* within 0.2 s"),
    ],
    ids=["protocol", "transport", "identity", "port", "host"],
)
def test_a_descriptor_that_leads_nowhere(
    make: Callable[..., TcpEndpoint], changes: dict[str, object], error: type[Exception], message: str
) -> None:
    near, far = make("near"), make("far")
    with pytest.raises(error, match=message):
        near.connect(described(far, **changes), 0.2)


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    endpoint = TcpEndpoint("near", secret=SECRET, host="192.0.2.1")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=r"near cannot listen on 192\.0\.2\.1"):
        endpoint.register(64, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stopped_peer_is_late_not_lost(make: Callable[..., TcpEndpoint]) -> None:
    near, far = make("near"), FarProcess.start()
    near.connect(far.call("open", "tcp", 4096, 1), TIMEOUT_S)
    far.call("connect", near.descriptor())
    far.process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError):
        near.wait([(0, 1)], 0.1)
    far.process.send_signal(signal.SIGCONT)
    far.call("ring", 0, 1)
    assert near.wait([(0, 1)], TIMEOUT_S) == 0
    far.close()
