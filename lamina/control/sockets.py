"""Control plane: msgspec messages over ZeroMQ, every peer authenticated by its CURVE key.

The engine owns a ROUTER socket, every worker a DEALER. Messages from one sender arrive in the order they were sent.
Every worker has a second DEALER, under its name with ``HEARTBEAT`` appended, that echoes the engine's pings.
"""

import contextlib
import ctypes
import math
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from lamina.control.file_transfer import FileServer, FileSource, ModelFile, OnFetched, fetch
from lamina.control.liveness import Liveness
from lamina.control.messages import (
    ComputeSetup,
    Connect,
    Inspect,
    MemorySetup,
    Register,
    Reserve,
    Resources,
    Step,
    Stop,
    ToEngine,
    ToWorker,
)
from lamina.control.secret import Secret
from lamina.control.secret import new as new_secret
from lamina.core.errors import DeadlineError, TransportError, UnreachableError, WorkerError
from lamina.core.topology import Topology
from lamina.transport.listener import LOOPBACK, Refusals

MessageT = TypeVar("MessageT", ComputeSetup, MemorySetup, Reserve, Register, Connect, Step, Stop)

Inspection = Callable[[int, int], Resources]
"""Answers ``Inspect``, given the times at which it was sent and received, in nanoseconds of each side's clock."""

ENGINE = "engine"
ANY = "0.0.0.0"
HEARTBEAT = b"/heartbeat"
MAX_MESSAGES = 1024  # read by one ``receive``: a worker that floods the engine must not starve its turns
MAX_MESSAGE_NBYTES = 1 << 30  # longest message from a worker; a longer one closes its connection
DESCRIPTORS_PER_WORKER = 3  # two connections and, of a local one, its process
OTHER_DESCRIPTORS = 1024  # descriptors of everything else in the engine's process: clients, files
SETUP_TIMEOUT_S = 1800.0  # longest time between two set-up messages: other workers may be loading a large model
EXACT_S = 0.1  # shorter waits of a router end on time; longer ones up to a millisecond late, as ZeroMQ's do
REFUSED_S = 2.0  # time without a connection after which a send concludes that the engine has rejected this worker


class Bootstrap(msgspec.Struct, frozen=True):
    """What a worker process reads from its standard input: keys must not be on a command line."""

    name: str
    address: str
    engine_key: bytes
    public_key: bytes
    secret_key: bytes
    data_secret: bytes
    parent_pid: int
    device: str = "cpu"
    """What the worker runs on: "cpu", "cuda:INDEX", or "emulated"."""
    shares_gpu: bool = False
    """A compute worker runs on the same GPU as this memory worker."""
    local_address: str = ""
    """Address at which peers reach the worker; empty: the address that packets to the engine leave from."""
    bind_address: str = ""
    """Address on which the worker listens for peers; empty: ``local_address``."""

    def __repr__(self) -> str:
        return f"Bootstrap(name={self.name!r}, address={self.address!r})"  # no keys in logs and tracebacks


class _Timer:
    """A timer whose descriptor, ``fd``, a poller can wait for: ZeroMQ's own waits are whole milliseconds."""

    _libc = ctypes.CDLL(None, use_errno=True)

    def __init__(self) -> None:
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "cannot create a timer")
        self._is_set = False

    def set(self, seconds: float) -> None:
        """Make ``fd`` readable in ``seconds`` instead of at the time set before; 0: never."""
        if seconds or self._is_set:
            whole, part_ns = divmod(math.ceil(1e9 * seconds), 1_000_000_000)
            spec = (ctypes.c_long * 4)(0, 0, whole, part_ns)  # struct itimerspec, without an interval
            self._libc.timerfd_settime(self.fd, 0, spec, None)
            self._is_set = seconds > 0


class KeyedRouter:
    """A ROUTER socket that only peers with known CURVE keys can connect to. One thread at a time may use ``socket``.

    Attributes:
        known: names of peers by their public keys, in Z85.
        port: where the socket listens.
        wakeup: an eventfd; writing to it ends a wait of ``poll``.
    """

    def __init__(
        self,
        title: str,
        keys: tuple[bytes, bytes],
        host: str,
        port: int,
        listener: int | None,
        options: Mapping[zmq.SocketOption, int],
    ) -> None:
        """Listen at ``host``.

        Args:
            title: name of the socket in logs about rejected connections.
            keys: CURVE keys, public and secret.
            port: port to listen on; 0: any free port.
            listener: descriptor of a socket on ``host`` that listens already; None: open a new one.
            options: ZeroMQ options of the socket.

        Raises OSError, zmq.ZMQError, or RuntimeError if the authenticator's thread has ended.
        """
        self.known: dict[bytes, str] = {}
        self.refusals = Refusals(title)
        self.context = zmq.Context()
        with contextlib.ExitStack() as undo:
            undo.callback(self.context.destroy, linger=0)
            from zmq.auth.thread import ThreadAuthenticator  # imports asyncio, which would delay workers

            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.start()
            undo.callback(self._authenticator.stop)
            self._authenticator.configure_curve_callback(credentials_provider=self)
            self.socket = self.context.socket(zmq.ROUTER)
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = keys
            self.socket.linger = 0
            for option, value in options.items():
                self.socket.setsockopt(option, value)
            self.port = _listen(self.socket, host, port, listener)
            self._timer = _Timer()
            undo.callback(os.close, self._timer.fd)
            self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.pop_all()
        self._poller = zmq.Poller()
        for awaited in (self.socket, self.wakeup, self._timer.fd):
            self._poller.register(awaited, zmq.POLLIN)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this key may connect. The authenticator calls it, as credentials provider."""
        if key in self.known:
            return True
        self.refusals.record("KEY", "its key does not belong to this cluster")
        return False

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message or for ``wakeup``, which is reset. Return whether ``wakeup`` was written."""
        self._timer.set(timeout_s if 0 < timeout_s < EXACT_S else 0.0)
        woken = self.wakeup in dict(self._poller.poll(_milliseconds(timeout_s)))
        if woken:
            os.eventfd_read(self.wakeup)
        return woken

    def receive_frames(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield identity, key and message of at most ``MAX_MESSAGES`` messages that have arrived."""
        for _ in range(MAX_MESSAGES):
            try:
                identity = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = last = self.socket.recv(zmq.NOBLOCK, copy=False)
            while last.more:
                last = self.socket.recv(zmq.NOBLOCK, copy=False)
            if last is not frame:
                self.refusals.record("FRAME", "a message arrived in another number of parts than two")
                continue
            yield identity, str(frame.get("User-Id")).encode(), frame.bytes

    def close(self) -> None:
        """Close the socket and end the authenticator's thread."""
        os.close(self.wakeup)
        os.close(self._timer.fd)
        self.socket.close()
        self._authenticator.stop()
        self.context.term()


class ControlServer:
    """The engine's end of the control plane. One thread at a time may use it.

    Attributes:
        liveness: how long each worker has been silent. ``receive`` sends pings: call it several times a second.

    Args:
        parent_pid: the process that workers end with; None: this one.
        secret: secret from which all keys are derived; None: a new one.
        host: address of this machine to listen on.
        advertised: address at which workers reach this machine; empty: ``host``.
        listener: descriptor of a socket on ``host`` that listens already; None: open a new one.

    Raises TransportError if it cannot listen there, or may not open as many files as it needs.
    """

    def __init__(
        self,
        workers: Sequence[str],
        parent_pid: int | None = None,
        *,
        secret: Secret | None = None,
        host: str = LOOPBACK,
        advertised: str = "",
        listener: int | None = None,
    ) -> None:
        _require_descriptors(len(workers))
        self._secret = secret or new_secret()
        options = {
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.ROUTER_MANDATORY: 1,
            zmq.BACKLOG: 2 * len(workers) + 100,  # all connect at once
            zmq.MAXMSGSIZE: MAX_MESSAGE_NBYTES,
        }
        try:
            self._router = KeyedRouter("the control plane", self.keys, host, 0, listener, options)
        except (zmq.ZMQError, OSError, RuntimeError) as error:
            raise TransportError(f"the control plane cannot listen on {host}: {error}") from error
        self._socket = self._router.socket
        self._address = f"tcp://{LOOPBACK if host == ANY else host}:{self._router.port}"
        self._parent_pid = parent_pid or os.getpid()
        self._local_address = advertised
        self._bind_address = host if advertised else ""
        self.bootstraps: Mapping[str, Bootstrap] = {name: self._issue(name) for name in workers}
        self._host = host
        self._files: FileServer | None = None
        self._members = set(workers)
        self._joining = set[str]()
        self._encoder = msgspec.msgpack.Encoder()
        self.liveness = Liveness(time.monotonic())
        self._closed = False
        self._wakeup_lock = threading.Lock()  # keeps ``wake`` from writing to a closed descriptor

    @property
    def secret(self) -> Secret:
        return self._secret

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The engine's CURVE keys, public and secret."""
        return self._secret.curve_keys(ENGINE)

    def _issue(self, name: str) -> Bootstrap:
        public, private = self._secret.curve_keys(name)
        self._router.known[public] = name
        data_secret = self._secret.data_plane
        return Bootstrap(
            name,
            self._address,
            self.keys[0],
            public,
            private,
            data_secret,
            self._parent_pid,
            local_address=self._local_address,
            bind_address=self._bind_address,
        )

    def offer_files(self, digest: str, paths: Sequence[Path]) -> FileSource:
        """Let workers fetch the files of a model until ``close``. Raises TransportError, OSError."""
        try:
            self._files = FileServer(self._router.context, self.keys, self._host, paths)
        except zmq.ZMQError as error:
            raise TransportError(f"model files cannot be served on {self._host}: {error}") from error
        files = [ModelFile(path.name, path.stat().st_size) for path in paths]
        return FileSource(self._files.port, digest, files)

    def admit(self, name: str) -> Bootstrap:
        """Let another worker connect, under a name that was never used. It is pinged until ``dismiss``, or until
        ``apply_topology`` drops it. Raises TransportError if this process may not open enough files."""
        _require_descriptors(len(self._members | self._joining) + 1)
        bootstrap = self._issue(name)
        self._joining.add(name)
        return bootstrap

    def dismiss(self, name: str) -> None:
        """Stop pinging a worker, and ignore its messages."""
        self.liveness.unwatch(name)
        self._joining.discard(name)
        self._members.discard(name)

    def apply_topology(self, topology: Topology) -> None:
        """Ping the members of ``topology`` and those that join from now on; ignore messages of all other workers."""
        for worker in self._members - topology.names:
            self.liveness.unwatch(worker)
        self._members = set(topology.names)
        self._joining -= self._members

    def send(self, workers: Sequence[str], message: ToWorker) -> None:
        """Send one message to several workers; encoded once.

        Raises UnreachableError for those that cannot be reached, after it has been sent to all others.
        """
        payload = self._encoder.encode(message)
        unreachable: dict[str, str] = {}
        for worker in workers:
            try:
                self._socket.send(worker.encode(), zmq.SNDMORE)  # ``send_multipart`` takes as long again to check both
                self._socket.send(payload)
            except zmq.ZMQError as error:
                unreachable[worker] = str(error)
        if unreachable:
            raise UnreachableError(unreachable)

    def wake(self) -> None:
        """End the current or next ``receive`` early. Any thread."""
        with self._wakeup_lock:
            if not self._closed:
                os.eventfd_write(self._router.wakeup, 1)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToEngine]]:
        """Yield at most ``MAX_MESSAGES`` messages; wait up to ``timeout_s`` for the first or for ``wake``."""
        now = time.monotonic()
        deadline = now + timeout_s
        if self.liveness.turn(now):
            self._ping()
        while True:
            woken = self._router.poll(deadline - time.monotonic())
            came = yield from self._messages()
            if came or woken or time.monotonic() >= deadline:  # otherwise it was an echo of a ping
                return

    def _messages(self) -> Generator[tuple[str, ToEngine], None, bool]:
        """Yield the messages that have arrived. Return whether there were any."""
        came = False
        for identity, key, payload in self._router.receive_frames():
            worker = self._router.known.get(key)
            if worker is None or identity.removesuffix(HEARTBEAT) != worker.encode():
                self._router.refusals.record("NAME", "a message arrived under a name that does not match its key")
                continue
            if worker not in self._members and worker not in self._joining:
                continue  # a lost worker
            self.liveness.on_message(worker)
            if not identity.endswith(HEARTBEAT):
                came = True
                yield worker, decode(worker, payload)
        return came

    def _ping(self) -> None:
        for worker in filter(self.liveness.is_quiet, (*self._members, *self._joining)):
            with contextlib.suppress(zmq.ZMQError):  # not connected, yet or any more: liveness notices its silence
                self._socket.send_multipart([worker.encode() + HEARTBEAT, b""])

    @property
    def refused(self) -> Counter[str]:
        """Connections and messages rejected so far, by kind."""
        return Counter(self._router.refusals.by_kind)

    def close(self) -> None:
        """Close sockets and the authenticator's thread. Idempotent."""
        with self._wakeup_lock:
            if self._closed:
                return
            self._closed = True
        if self._files is not None:
            self._files.close()
        self._router.close()


def _listen(router: "zmq.Socket[bytes]", host: str, port: int, listener: int | None) -> int:
    if listener is None:
        router.bind(f"tcp://{host}:{port or '*'}")
        return int(bytes(router.getsockopt(zmq.LAST_ENDPOINT)).decode().strip("\0").rpartition(":")[2])
    with socket.socket(fileno=os.dup(listener)) as known:
        port = known.getsockname()[1]
    router.setsockopt(zmq.USE_FD, listener)
    router.bind(f"tcp://{host}:{port}")
    return port


def _require_descriptors(workers: int) -> None:
    """Increase this process's limit of open files if ``workers`` need more. Raises TransportError."""
    needed = DESCRIPTORS_PER_WORKER * workers + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise TransportError(
            f"{workers} workers need {needed} open files in the engine's process, which may open {hard}; "
            f"raise the limit (ulimit -Hn {needed}, LimitNOFILE of systemd) or use fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)


def decode(worker: str, payload: bytes) -> ToEngine:
    """Return a worker's message. Raises WorkerError, naming the worker, if it is invalid."""
    try:
        message: ToEngine = _TO_ENGINE.decode(payload)
    except msgspec.DecodeError as error:
        raise WorkerError(
            worker, f"it sent an invalid message: {error}; run the same release of lamina in all workers"
        ) from error
    return message


class ControlClient:
    """A worker's end of the control plane. One thread owns it.

    Attributes:
        data_secret: key by which workers of this cluster know each other on the data plane.
        local_address: address at which peers reach this worker.
        bind_address: address on which this worker listens for peers.
    """

    def __init__(self, bootstrap: Bootstrap, inspection: Inspection | None = None) -> None:
        """``inspection`` answers ``Inspect``; without it, ``Inspect`` is ignored."""
        self.name = bootstrap.name
        self._bootstrap = bootstrap
        self._inspection = inspection
        self.device, self.shares_gpu = bootstrap.device, bootstrap.shares_gpu
        self.data_secret = bootstrap.data_secret
        self._context = zmq.Context()
        self._socket = self._connect(bootstrap, b"")
        self._socket.linger = 2000  # a last Failed must still be sent
        heartbeat = self._connect(bootstrap, HEARTBEAT)
        threading.Thread(target=_echo, args=(heartbeat,), name="heartbeat", daemon=True).start()
        self.local_address = bootstrap.local_address or local_address(bootstrap.address)
        self.bind_address = bootstrap.bind_address or self.local_address
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._encoder = msgspec.msgpack.Encoder()

    def _connect(self, bootstrap: Bootstrap, suffix: bytes) -> "zmq.Socket[bytes]":
        connected = self._context.socket(zmq.DEALER)
        connected.identity = bootstrap.name.encode() + suffix
        connected.curve_serverkey = bootstrap.engine_key
        connected.curve_publickey, connected.curve_secretkey = bootstrap.public_key, bootstrap.secret_key
        connected.linger = 0
        connected.sndhwm = connected.rcvhwm = 0
        connected.sndtimeo = _milliseconds(REFUSED_S)
        connected.connect(bootstrap.address)
        return connected

    def send(self, message: ToEngine) -> None:
        """Queue one message to the engine. Raises TransportError if it has refused this worker's connection."""
        try:
            self._socket.send(self._encoder.encode(message))
        except zmq.Again:  # without a connection, there is no queue: ZeroMQ does not reconnect after a rejection
            raise TransportError(
                f"the engine at {self._bootstrap.address} has refused {self.name}'s connection; "
                "start this worker with a key of the same cluster"
            ) from None

    def receive(self, timeout_s: float) -> ToWorker:
        """Return the engine's next message. Raises DeadlineError after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            if (message := self.poll(max(deadline - time.monotonic(), 0.0))) is not None:
                return message
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{self.name}: no message from the engine within {timeout_s} s")

    def poll(self, timeout_s: float = 0.0) -> ToWorker | None:
        """Return the engine's next message; None if none has arrived within ``timeout_s``, or after an ``Inspect``,
        which this method answers."""
        if timeout_s and not self._socket.poll(_milliseconds(timeout_s)):
            return None
        try:
            message: ToWorker = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        if not isinstance(message, Inspect):
            return message
        if self._inspection is not None:
            self.send(self._inspection(message.sent_ns, time.monotonic_ns()))
        return None

    def fetch(self, source: FileSource, folder: Path, on_fetched: OnFetched) -> None:
        """Fetch a model's files from the engine's machine into ``folder``; errors are those of
        ``file_transfer.fetch``."""
        host = self._bootstrap.address.rpartition(":")[0]
        where = msgspec.structs.replace(self._bootstrap, address=f"{host}:{source.port}")
        with self._connect(where, b"/files") as connected:
            fetch(connected, source, folder, on_fetched)

    def close(self) -> None:
        """Flush what was sent (at most 2 s) and close."""
        self._socket.close()
        self._context.term()


def _echo(heartbeat: "zmq.Socket[bytes]") -> None:
    """Echo every message until the context ends, in one native call that does not hold Python's lock."""
    with heartbeat, contextlib.suppress(zmq.ContextTerminated):
        zmq.proxy(heartbeat, heartbeat)


def local_address(address: str) -> str:
    """Return the address of this machine that packets to tcp://host:port leave from. Raises TransportError without a
    route."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # sends nothing
        except OSError as error:
            raise TransportError(f"this machine has no route to {host}: {error}") from error
        local: str = probe.getsockname()[0]
    return local


def _milliseconds(timeout_s: float) -> int:
    return max(0, math.ceil(timeout_s * 1000))  # ZeroMQ waits forever on a negative number


def expect(control: ControlClient, kind: type[MessageT], timeout_s: float = SETUP_TIMEOUT_S) -> MessageT:
    """Return the engine's next message during set-up, which must be of ``kind``. Raises DeadlineError, WorkerError."""
    message = control.receive(timeout_s)
    if not isinstance(message, kind):
        raise WorkerError(control.name, f"expected {kind.__name__} from the engine, got {type(message).__name__}")
    return message
