"""The agent of one worker of an engine on another machine: starts its process, reports its exit, stops it."""

import contextlib
import logging
import math
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from lamina.cluster.launchers.local import MODULES, describe_exit, start_process, wait_for_killed, worker_command
from lamina.control.agent_messages import (
    CUT_S,
    ORPHAN_S,
    SUPERVISOR,
    Apply,
    Appointed,
    End,
    Exited,
    Leaving,
    Pong,
    Refused,
    Started,
    ToOffice,
    ToSupervisor,
)
from lamina.control.secret import Secret
from lamina.control.sockets import ENGINE
from lamina.core.errors import ConfigError, TransportError, WorkerError

log = logging.getLogger(__name__)

REACH_S = 60.0  # for an engine that may start at the same time
SILENT_S = 3.0  # until the user is told that none has answered yet
ATTEMPT_S = 10.0
RETRY_S = 0.5
TURN_S = 0.5
LAST_WORDS_S = 3.0  # for the last message to leave

_FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_EVENTS = _FAILED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


@dataclass(frozen=True, repr=False)
class Keys:
    """CURVE keys in Z85: the engine's public one, and the supervisor's."""

    engine: bytes
    public: bytes
    secret: bytes


def keys_of(secret: Secret) -> Keys:
    """Return the keys of a supervisor that has the cluster's secret."""
    return Keys(secret.curve_keys(ENGINE)[0], *secret.curve_keys(SUPERVISOR))


@dataclass(frozen=True)
class Place:
    """Where the worker runs.

    Attributes:
        device: "cpu", "cuda:INDEX", or "emulated".
        address: advertised to other workers; empty: the source address of the route to the engine.
        bind: address that it listens on for them; empty: ``address``.
        own_cores: nothing else computes on the cores that this process may use.
    """

    device: str = "cpu"
    address: str = ""
    bind: str = ""
    own_cores: bool = False


class Supervisor:
    """Comes to the engine at ``host`` and ``port`` and supervises the worker that it is given. One thread runs it."""

    def __init__(self, engine: tuple[str, int], keys: Keys, about: Apply, place: Place) -> None:
        self._host, self._port = engine
        self._keys, self._about, self._place = keys, about, place
        self._process: subprocess.Popen[bytes] | None = None
        self._exit = -1  # a descriptor of the process
        self._name = ""
        self._end_at: float | None = None  # when to kill it
        self._reason = ""  # why
        self._leaves = 0  # calls of ``request_leave``
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToSupervisor)

    def request_leave(self) -> None:
        """Ask the engine to let the worker go; at the second call, end it. Any thread, and signal handlers."""
        os.eventfd_write(self._wakeup, 1)

    def run(self) -> str:
        """Supervise until the worker has ended; returns its name, or nothing if it left before it had one.

        Raises:
            ConfigError: the engine cannot be reached or refuses this machine; says why.
            WorkerError: the worker failed. TransportError: the engine does not answer any more.
        """
        self._reach()
        context = zmq.Context()
        try:
            with context.socket(zmq.DEALER) as dealer:
                return self._serve(dealer)
        finally:
            context.destroy(linger=0)
            self._kill()
            os.close(self._wakeup)

    def _reach(self) -> None:
        """Wait until the engine listens."""
        begin, told, where = time.monotonic(), False, f"{self._host}:{self._port}"
        remedy = "start the engine with --listen, and give its address and port to --engine"
        while True:
            try:
                socket.create_connection((self._host, self._port), ATTEMPT_S).close()
                return
            except ConnectionRefusedError as error:
                waited = time.monotonic() - begin
                if waited > REACH_S:
                    raise ConfigError(f"nothing has listened at {where} for {REACH_S:.0f} s; {remedy}") from error
                if waited > SILENT_S and not told:
                    told = True
                    log.warning("nobody answers at %s; trying for %.0f s. If this lasts, %s", where, REACH_S, remedy)
            except OSError as error:
                raise ConfigError(
                    f"no engine can be reached at {where}: {error}; check the address, and the firewalls between"
                ) from error
            time.sleep(RETRY_S)

    def _serve(self, dealer: "zmq.Socket[bytes]") -> str:
        dealer.identity = secrets.token_hex(16).encode()
        dealer.curve_serverkey = self._keys.engine
        dealer.curve_publickey, dealer.curve_secretkey = self._keys.public, self._keys.secret
        dealer.linger = int(LAST_WORDS_S * 1000)
        monitor = dealer.get_monitor_socket(_EVENTS)
        dealer.connect(f"tcp://{self._host}:{self._port}")
        self._send(dealer, self._about)
        poller = zmq.Poller()
        for one in (dealer, monitor, self._wakeup):
            poller.register(one, zmq.POLLIN)
        known, silent_at = False, time.monotonic() + ATTEMPT_S
        tell_at = time.monotonic() + SILENT_S
        while True:
            ready = dict(poller.poll(self._patience(silent_at)))
            if monitor in ready:
                for event in _events(monitor):
                    if event & _FAILED and not known:
                        raise ConfigError(
                            f"the server at {self._host}:{self._port} has another cluster secret, or is not a "
                            f"Lamina engine; give both the same secret"
                        )
                    known = known or bool(event & zmq.Event.HANDSHAKE_SUCCEEDED)
                    if event & zmq.Event.DISCONNECTED:
                        silent_at = min(silent_at, time.monotonic() + CUT_S)
            if dealer in ready:
                silent_at = time.monotonic() + ORPHAN_S
                self._take_all(dealer, poller)
            if self._wakeup in ready and self._leave(dealer):
                return ""
            if self._process is not None and self._process.poll() is not None:
                return self._ended(dealer, self._process)
            now = time.monotonic()
            if self._end_at is not None and now >= self._end_at and self._process is not None:
                self._process.kill()
            if known and not self._name and now >= tell_at:
                tell_at = math.inf
                log.warning(
                    "the engine at %s:%d has no place for this worker yet; waiting for one", self._host, self._port
                )
            if now >= silent_at:
                raise self._silence(known)

    def _patience(self, silent_at: float) -> int:
        """Milliseconds until something is due."""
        due = silent_at if self._end_at is None else min(silent_at, self._end_at)
        return int(1000 * min(TURN_S, max(0.0, due - time.monotonic()))) + 1

    def _silence(self, known: bool) -> Exception:
        where = f"{self._host}:{self._port}"
        if not known:
            return ConfigError(f"{where} accepts connections, but does not answer as an engine; check the address")
        lost = f"; {self._name} is stopped" if self._name else ""
        return TransportError(f"the engine at {where} does not answer any more{lost}")

    def _take_all(self, dealer: "zmq.Socket[bytes]", poller: zmq.Poller) -> None:
        while True:
            try:
                message = self._decoder.decode(dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Refused):
                raise ConfigError(f"the engine at {self._host}:{self._port} refuses this worker: {message.reason}")
            if isinstance(message, Appointed):
                self._start(message)
                poller.register(self._exit, zmq.POLLIN)
                self._send(dealer, Started(self._process.pid if self._process else 0))
            elif isinstance(message, End):
                self._end_at, self._reason = time.monotonic() + message.grace_s, message.reason
                if self._process is None:
                    raise ConfigError(f"the engine at {self._host}:{self._port} refuses this worker: {message.reason}")
            else:
                self._send(dealer, Pong())

    def _start(self, message: Appointed) -> None:
        port = message.bootstrap.address.rpartition(":")[2]
        bootstrap = msgspec.structs.replace(
            message.bootstrap,
            address=f"tcp://{socket.gethostbyname(self._host)}:{port}",
            parent_pid=os.getpid(),
            device=self._place.device,
            local_address=self._place.address,
            bind_address=self._place.bind,
        )
        self._name = bootstrap.name
        command = worker_command(MODULES[message.role])
        self._process = start_process(command, bootstrap, shared_cores=not self._place.own_cores)
        self._exit = os.pidfd_open(self._process.pid)
        log.warning("this machine runs %s for the engine at %s:%d", self._name, self._host, self._port)

    def _leave(self, dealer: "zmq.Socket[bytes]") -> bool:
        """True if there is no worker to wait for."""
        self._leaves += os.eventfd_read(self._wakeup)
        if self._process is not None and self._leaves > 1:
            self._process.kill()
        else:
            self._send(dealer, Leaving())
        return self._process is None

    def _ended(self, dealer: "zmq.Socket[bytes]", process: subprocess.Popen[bytes]) -> str:
        how = describe_exit(process)
        self._send(dealer, Exited(how))
        if process.returncode == 0 or self._leaves > 1 or (self._end_at is not None and not self._reason):
            return self._name
        raise WorkerError(self._name, self._reason or how)

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            wait_for_killed(self._name, self._process)
        if self._exit >= 0:
            os.close(self._exit)
            self._exit = -1

    def _send(self, dealer: "zmq.Socket[bytes]", message: ToOffice) -> None:
        dealer.send(self._encoder.encode(message))


def _events(monitor: "zmq.Socket[bytes]") -> Iterator[int]:
    """Events of a connection that have happened."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
