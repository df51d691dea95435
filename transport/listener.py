"""Authenticated TCP connections between endpoints: the handshake, ``Listener`` and ``connect``.

Used by tcp, and by rdma to exchange queue pairs. In the handshake, both sides prove that they know the cluster secret.
"""

import contextlib
import enum
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

from lamina.core.errors import PeerLostError, RefusedError, TransportError
from lamina.core.threads import join_thread

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RETRY_S = 0.01
HANDSHAKE_S = 5.0  # time for a peer to authenticate
MAX_WAITING = 256  # most unauthenticated connections
PROTOCOL = 1
MAGIC = b"lamina"
MAX_NBYTES = 4096  # most bytes of a request or an answer
MIN_SECRET_NBYTES = 16

_PROOF_NBYTES = 32
_NONCE_NBYTES = 32
_VERSION = struct.Struct("<6sH")
_HELLO = struct.Struct(f"<Q{_NONCE_NBYTES}sH")
_CHALLENGE = struct.Struct(f"<B{_NONCE_NBYTES}s")
_ANSWER = struct.Struct("<BH")

# Returns the answer to a request, and the function that then takes over the connection; or raises TransportError.
Admit = Callable[[bytes], tuple[bytes, Callable[[socket.socket], None]]]
Step = tuple[bytes, int]  # bytes to send, and the number of bytes to receive next


class Verdict(enum.IntEnum):
    """The listening side's reply to a connection."""

    ACCEPTED = 0
    GARBAGE = 1
    PROTOCOL = 2
    ENDPOINT = 3
    SECRET = 4
    REQUEST = 5


_REASONS = {
    Verdict.GARBAGE: "it does not speak this protocol",
    Verdict.PROTOCOL: f"it speaks another version of the protocol, this process {PROTOCOL}; "
    "run the same release of lamina in all workers",
    Verdict.ENDPOINT: "another endpoint now listens on its port",
    Verdict.SECRET: "it has another cluster secret; give all workers of a cluster the same",
    Verdict.REQUEST: "it cannot grant the request",
}


class Refusals:
    """Counts rejected connections of a listener. Only one thread may add to a kind; any may read ``by_kind``."""

    def __init__(self, name: str) -> None:
        self.by_kind: Counter[str] = Counter()
        self._name = name

    def record(self, kind: str, reason: str) -> None:
        """Count a rejected connection."""
        self.by_kind[kind] += 1
        if self.by_kind[kind] == 1:
            logger.warning("%s rejected a connection: %s (more of this kind are only counted)", self._name, reason)


class ArenaDescriptor(msgspec.Struct, array_like=True, frozen=True):
    """How peers reach an arena. The random ``identity`` distinguishes it from a later arena at the same address."""

    transport: str
    protocol: int
    name: str
    identity: int


class SocketDescriptor(ArenaDescriptor, array_like=True, frozen=True):
    """Where to connect to an arena."""

    host: str
    port: int
    nbytes: int
    doorbells: int


DescriptorT = TypeVar("DescriptorT", bound=ArenaDescriptor)


def decode(descriptor: bytes, transport: str, kind: type[DescriptorT]) -> DescriptorT:
    """Decode a descriptor of ``transport``. Raises TransportError for any other bytes."""
    try:
        where = msgspec.msgpack.decode(descriptor, type=kind)
    except msgspec.DecodeError as error:
        raise TransportError(f"not the descriptor of a {transport} endpoint: {error}") from error
    if where.transport != transport:
        raise TransportError(f"descriptor of a {where.transport} endpoint, not of a {transport} one")
    if where.protocol != PROTOCOL:
        raise TransportError(
            f"{where.name} speaks version {where.protocol} of the protocol, this process {PROTOCOL}; "
            "run the same release of lamina in all workers"
        )
    return where


def check_secret(secret: bytes) -> None:
    """Raise ValueError for a secret short enough to be guessed."""
    if len(secret) < MIN_SECRET_NBYTES:
        raise ValueError(f"a cluster secret has at least {MIN_SECRET_NBYTES} bytes; this one has {len(secret)}")


def connecting(secret: bytes, identity: int, request: bytes) -> Generator[Step, bytes, bytes]:
    """Run the connecting side of a handshake, and return the answer.

    Raises RefusedError if either side rejects, and ValueError for a request that is too long.
    """
    if len(request) > MAX_NBYTES:
        raise ValueError(f"a request has at most {MAX_NBYTES} bytes; this one has {len(request)}")
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    hello = _VERSION.pack(MAGIC, PROTOCOL) + _HELLO.pack(identity, nonce, len(request)) + request
    challenge = yield hello, _CHALLENGE.size
    _check_verdict(challenge[0])
    transcript = hello + challenge
    answer_head = yield _proof(secret, b"connect", transcript), _ANSWER.size
    verdict, nbytes = _ANSWER.unpack(answer_head)
    _check_verdict(verdict)
    if nbytes > MAX_NBYTES:
        raise RefusedError(Verdict.GARBAGE.name, _REASONS[Verdict.GARBAGE])
    answer = yield b"", nbytes
    proof = yield b"", _PROOF_NBYTES
    if not hmac.compare_digest(proof, _proof(secret, b"answer", transcript + answer_head + answer)):
        raise RefusedError(Verdict.SECRET.name, "it does not know the cluster's secret")
    return answer


def listening(secret: bytes, identity: int, grant: Callable[[bytes], bytes]) -> Generator[Step, bytes, None]:
    """Run the listening side of a handshake. ``grant`` makes the answer to the request of an authenticated peer.

    Raises RefusedError for an invalid request, after yielding the verdict to send. ``grant`` raises TransportError for
    a request that it rejects.
    """
    version = yield b"", _VERSION.size
    magic, protocol = _VERSION.unpack(version)
    if magic != MAGIC:
        raise RefusedError(Verdict.GARBAGE.name, "it sent something other than a handshake")
    if protocol != PROTOCOL:
        yield from _refuse(Verdict.PROTOCOL, f"it speaks version {protocol} of the protocol, this process {PROTOCOL}")
    hello = yield b"", _HELLO.size
    wanted, _, nbytes = _HELLO.unpack(hello)
    if nbytes > MAX_NBYTES:
        yield from _refuse(Verdict.REQUEST, f"its request of {nbytes} bytes is larger than {MAX_NBYTES}")
    request = yield b"", nbytes
    if wanted != identity:
        yield from _refuse(Verdict.ENDPOINT, "it wants another endpoint")
    challenge = _CHALLENGE.pack(Verdict.ACCEPTED, secrets.token_bytes(_NONCE_NBYTES))
    transcript = version + hello + request + challenge
    proof = yield challenge, _PROOF_NBYTES
    if not hmac.compare_digest(proof, _proof(secret, b"connect", transcript)):
        yield from _refuse(Verdict.SECRET, "it does not know the cluster's secret", _ANSWER.size)
    try:
        answer = grant(request)
    except TransportError as error:
        yield from _refuse(Verdict.REQUEST, str(error), _ANSWER.size)
    head = _ANSWER.pack(Verdict.ACCEPTED, len(answer))
    yield head + answer + _proof(secret, b"answer", transcript + head + answer), 0


def _proof(secret: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, side + transcript, hashlib.sha256)


def _check_verdict(number: int) -> None:
    if number == Verdict.ACCEPTED:
        return
    known = number in _REASONS
    verdict = Verdict(number) if known else Verdict.GARBAGE
    raise RefusedError(verdict.name, _REASONS[verdict])


def _refuse(verdict: Verdict, reason: str, nbytes: int = _CHALLENGE.size) -> Generator[Step, bytes, None]:
    yield bytes([verdict]).ljust(nbytes, b"\0"), 0
    raise RefusedError(verdict.name, reason)


def _tune(connection: socket.socket, silence_s: float) -> None:
    """Send without delay, and close the connection if the peer's machine has not answered for about ``silence_s``."""
    quarter_s = max(1, round(silence_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quarter_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))


def connect(
    name: str, where: SocketDescriptor, secret: bytes, request: bytes, timeout_s: float, silence_s: float
) -> tuple[socket.socket, bytes]:
    """Connect endpoint ``name`` to the endpoint at ``where``, retrying until the deadline.

    Returns the connection and the answer to the request. Raises PeerLostError if that endpoint no longer exists,
    RefusedError if it rejects the request, otherwise TransportError.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt(where, secret, request, deadline - time.monotonic(), silence_s)
        except ConnectionRefusedError as error:
            raise PeerLostError(where.name, f"nothing listens on {where.host} port {where.port}") from error
        except RefusedError as error:
            if error.verdict == Verdict.ENDPOINT.name:
                raise PeerLostError(where.name, str(error)) from error
            raise RefusedError(error.verdict, f"{where.name} and {name} cannot connect: {error}") from error
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"{name} could not connect to {where.name} at {where.host} port {where.port} within "
                    f"{timeout_s:g} s: {error}; let workers reach each other on all ports"
                ) from error
        time.sleep(RETRY_S)


def attempt(
    where: SocketDescriptor, secret: bytes, request: bytes, timeout_s: float, silence_s: float
) -> tuple[socket.socket, bytes]:
    """Try once to connect. Returns the connection and the answer to the request.

    Raises RefusedError if the endpoint rejects the request; ConnectionRefusedError if nothing listens on its port;
    another OSError if the connection takes too long.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((where.host, where.port), timeout=max(timeout_s, 1e-3))
    try:
        _tune(connection, silence_s)
        handshake = connecting(secret, where.identity, request)
        output, wanted = next(handshake)
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            connection.sendall(output)
            output, wanted = handshake.send(_receive(connection, wanted, deadline))
    except StopIteration as finished:
        answer: bytes = finished.value
        return connection, answer
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        some = connection.recv(nbytes - len(received))
        if not some:
            raise ConnectionAbortedError("the peer closed the connection during the handshake")
        received += some
    return received


class _Waiting:
    """A connection whose peer has not authenticated yet."""

    def __init__(self, connection: socket.socket, secret: bytes, identity: int, admit: Admit) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.handshake = listening(secret, identity, self._grant)
        _, self.wanted = next(self.handshake)
        self.received = b""
        self._admit = admit

    def _grant(self, request: bytes) -> bytes:
        answer, self.take = self._admit(request)
        return answer


class Listener:
    """Listens on a port in a separate thread, and accepts peers that know the secret.

    Args:
        host: address of this machine to listen on.
        silence_s: time without an answer of the peer's machine after which a connection is closed.
        admit: handles the request of an authenticated peer. ``admit`` and the function that it returns are called in
            the listener's thread. The function owns the connection, and may raise TransportError.

    Attributes:
        host: address on which it listens.
        port: port on which it listens.
        refusals: rejected connections, by verdict. FRAME: closed later for an invalid frame. SYSTEM: the system lacked
            resources.
    """

    def __init__(self, name: str, host: str, secret: bytes, identity: int, silence_s: float, admit: Admit) -> None:
        self.refusals = Refusals(name)
        self.host, self._secret, self._identity = host, secret, identity
        self._silence_s, self._admit = silence_s, admit
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._socket = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        self._selector = selectors.DefaultSelector()
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._end, self._ended = socket.socketpair()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"listener-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close every connection that has not been accepted."""
        self._end.close()
        join_thread(self._thread)

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            for closing in (self._selector, self._socket, self._ended):
                stack.callback(closing.close)
            while True:
                for key, _ in self._selector.select(1.0 if self._waiting else None):
                    if key.fileobj is self._ended:
                        for waiting in self._waiting.values():
                            waiting.connection.close()
                        return
                    if key.fileobj is self._socket:
                        self._accept()
                    else:
                        self._advance(self._waiting[key.data])
                self._drop_late()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # closed by the peer
            return
        except OSError as error:
            self.refusals.record("SYSTEM", f"cannot accept it: {error}; check the limit of open files (ulimit -n)")
            time.sleep(RETRY_S)  # the connection stays in the kernel's queue
            return
        with contextlib.suppress(OSError):  # closed by the peer
            connection.setblocking(False)
            _tune(connection, self._silence_s)
            if len(self._waiting) >= MAX_WAITING:
                self.refusals.record("BUSY", f"{MAX_WAITING} connections have not authenticated yet")
                connection.close()
                return
            self._waiting[connection] = _Waiting(connection, self._secret, self._identity, self._admit)
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def _advance(self, waiting: _Waiting) -> None:
        """Continue the handshake with the bytes that have arrived."""
        connection = waiting.connection
        try:
            some = connection.recv(waiting.wanted - len(waiting.received))
            if not some:
                raise RefusedError("GARBAGE", "it closed the connection during the handshake")
            waiting.received += some
            while len(waiting.received) == waiting.wanted:
                received, waiting.received = waiting.received, b""
                output, waiting.wanted = waiting.handshake.send(received)
                connection.sendall(output)  # fits a new connection's buffer
        except StopIteration:
            self._forget(waiting)
            try:
                waiting.take(connection)
            except TransportError as error:
                self.refusals.record("TLS", str(error))
            except RuntimeError as error:  # from native code: no file or no thread available
                self.refusals.record("SYSTEM", f"cannot serve it: {error}; check the limit of open files (ulimit -n)")
        except BlockingIOError:
            return
        except (RefusedError, OSError) as error:
            self._forget(waiting)
            self.refusals.record(error.verdict if isinstance(error, RefusedError) else "LOST", str(error))
            connection.close()

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.connection]
        self._selector.unregister(waiting.connection)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for waiting in [waiting for waiting in self._waiting.values() if waiting.deadline < now]:
            self._forget(waiting)
            self.refusals.record("LATE", f"it did not authenticate within {HANDSHAKE_S:g} s")
            waiting.connection.close()
