"""The agent on a remote machine: starts one worker process for an engine, reports its exit, and ends it."""

import contextlib
import logging
import math
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from lamina.cluster.local_workers import LocalWorkers
from lamina.config.environment import environment
from lamina.control.agent_messages import (
    AGENT,
    CUT_S,
    ORPHAN_S,
    Apply,
    End,
    Exited,
    Leaving,
    Pong,
    Refused,
    Start,
    Started,
    ToAgent,
    ToEngine,
)
from lamina.control.secret import Secret
from lamina.control.sockets import ENGINE
from lamina.core import __version__
from lamina.core.errors import ConfigError, LaminaError, TransportError, WorkerError
from lamina.core.topology import Pool, Role
from lamina.transport.shm import host

log = logging.getLogger(__name__)

REACH_S = 60.0  # wait for an engine that does not listen yet
SILENT_S = 3.0  # wait before the user is told that the agent is waiting
ATTEMPT_S = 10.0  # longest wait in one connection attempt, and for the engine's first message
RETRY_S = 0.5  # wait between connection attempts
TURN_S = 0.5  # most time of one poll
LAST_WORDS_S = 3.0  # longest wait until the last message is sent

_FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_EVENTS = _FAILED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


@dataclass(frozen=True, repr=False)
class Keys:
    """CURVE keys in Z85: the engine's public one, and the agent's."""

    engine: bytes
    public: bytes
    secret: bytes


def keys_of(secret: Secret) -> Keys:
    """Return the keys of an agent that has the cluster's secret."""
    return Keys(secret.curve_keys(ENGINE)[0], *secret.curve_keys(AGENT))


def application(pool: Pool, kind: str, name: str = "") -> Apply:
    """Return the first message of an agent. ``name``: The worker that the agent was started for; empty for any."""
    return Apply(__version__, pool, kind, host(), platform.node(), name)


@dataclass(frozen=True)
class WorkerPlace:
    """Device, addresses and cores of the worker.

    Attributes:
        device: "cpu", "cuda:INDEX", or "emulated".
        address: Address advertised to other workers; empty for the source address of the route to the engine.
        bind: Address on which the worker listens for other workers; empty for ``address``.
        own_cores: Whether no other worker uses the cores of this process.
    """

    device: str = "cpu"
    address: str = ""
    bind: str = ""
    own_cores: bool = False


class Agent:
    """Offers a worker to the engine at address ``engine`` (host, port), and runs it. One thread runs the agent."""

    def __init__(self, engine: tuple[str, int], keys: Keys, about: Apply, place: WorkerPlace) -> None:
        self._host, self._port = engine
        self._where = f"{self._host}:{self._port}"
        self._keys, self._about, self._place = keys, about, place
        self._workers = LocalWorkers()
        self._name = ""
        self._end: End | None = None
        self._end_at = math.inf
        self._silent_at = math.inf
        self._leaves = 0  # calls of ``request_leave``
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._decoder = msgspec.msgpack.Decoder(ToAgent)

    def request_leave(self) -> None:
        """Ask the engine to let the worker leave; a second call ends it. Safe in any thread or signal handler."""
        os.eventfd_write(self._wakeup, 1)

    def host_worker(self) -> str:
        """Run until the worker has ended. Returns the worker's name; empty if the agent left before it had a worker.

        Raises:
            ConfigError: The engine cannot be reached, or refuses this machine.
            WorkerError: The worker failed.
            TransportError: The engine has stopped answering.
        """
        self._reach()
        context = zmq.Context()
        try:
            with context.socket(zmq.DEALER) as dealer:
                return self._serve(dealer)
        finally:
            context.destroy(linger=0)
            self._workers.kill()
            os.close(self._wakeup)

    def _reach(self) -> None:
        begin, told = time.monotonic(), False
        remedy = "start the engine with --listen, and give its address and port to --engine"
        while True:
            try:
                socket.create_connection((self._host, self._port), ATTEMPT_S).close()
                return
            except ConnectionRefusedError as error:
                waited = time.monotonic() - begin
                if waited > REACH_S:
                    raise ConfigError(f"nothing has listened at {self._where} for {REACH_S:.0f} s; {remedy}") from error
                if waited > SILENT_S and not told:
                    told = True
                    log.warning(
                        "nobody answers at %s; trying for %.0f s. If this lasts, %s", self._where, REACH_S, remedy
                    )
            except OSError as error:
                raise ConfigError(
                    f"no engine can be reached at {self._where}: {error}; check the address, and the firewalls between"
                ) from error
            time.sleep(RETRY_S)

    def _serve(self, dealer: "zmq.Socket[bytes]") -> str:
        dealer.identity = secrets.token_hex(16).encode()
        dealer.curve_serverkey = self._keys.engine
        dealer.curve_publickey, dealer.curve_secretkey = self._keys.public, self._keys.secret
        dealer.linger = int(LAST_WORDS_S * 1000)
        monitor = dealer.get_monitor_socket(_EVENTS)
        dealer.connect(f"tcp://{self._where}")
        _send(dealer, self._about)
        poller = zmq.Poller()
        for one in (dealer, monitor, self._wakeup, self._workers.exits):
            poller.register(one, zmq.POLLIN)
        known, tell_at = False, time.monotonic() + SILENT_S
        self._silent_at = time.monotonic() + ATTEMPT_S
        while True:
            due = min(self._silent_at, self._end_at) - time.monotonic()
            ready = dict(poller.poll(int(1000 * min(TURN_S, max(0.0, due))) + 1))
            known = self._read_events(monitor, known)
            if dealer in ready:
                self._silent_at = time.monotonic() + ORPHAN_S
                self._read_messages(dealer)
            if self._wakeup in ready and self._leave(dealer):
                return ""
            if how := self._workers.ended().get(self._name):
                return self._on_exit(dealer, how)
            now = time.monotonic()
            if now >= self._end_at:
                self._workers.processes[self._name].kill()
            if known and not self._name and now >= tell_at:
                tell_at = math.inf
                log.warning("the engine at %s has no place for this worker yet; waiting for one", self._where)
            if now >= self._silent_at:
                raise self._silence(known)

    def _read_events(self, monitor: "zmq.Socket[bytes]", known: bool) -> bool:
        """Return whether the engine has accepted this agent's key. ``known``: the result of the last call."""
        for event in _events(monitor):
            if event & _FAILED and not known:
                raise ConfigError(
                    f"the server at {self._where} has another cluster secret, or is not a Lamina engine; give both the "
                    f"same secret"
                )
            known = known or bool(event & zmq.Event.HANDSHAKE_SUCCEEDED)
            if event & zmq.Event.DISCONNECTED:
                self._silent_at = min(self._silent_at, time.monotonic() + CUT_S)
        return known

    def _silence(self, known: bool) -> Exception:
        if not known:
            return ConfigError(
                f"{self._where} accepts connections, but does not answer as an engine; check the address"
            )
        lost = f"; {self._name} is stopped" if self._name else ""
        return TransportError(f"the engine at {self._where} does not answer any more{lost}")

    def _read_messages(self, dealer: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                message = self._decoder.decode(dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Start):
                self._start(message)
                _send(dealer, Started(self._workers.processes[self._name].pid))
            elif isinstance(message, Refused) or (isinstance(message, End) and not self._name):
                raise ConfigError(f"the engine at {self._where} refuses this worker: {message.reason}")
            elif isinstance(message, End):
                self._end, self._end_at = message, time.monotonic() + message.grace_s
            else:
                _send(dealer, Pong())

    def _start(self, message: Start) -> None:
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
        cores = frozenset(os.sched_getaffinity(0))
        self._workers.start(Start(message.pool, message.kind, bootstrap, cores, not self._place.own_cores))
        log.warning("this machine runs %s for the engine at %s", self._name, self._where)

    def _leave(self, dealer: "zmq.Socket[bytes]") -> bool:
        """Ask the engine to let the worker leave; end it at the second call. Returns True if there is no worker."""
        self._leaves += os.eventfd_read(self._wakeup)
        if self._name and self._leaves > 1:
            self._end_at = 0.0
        else:
            _send(dealer, Leaving())
        return not self._name

    def _on_exit(self, dealer: "zmq.Socket[bytes]", how: str) -> str:
        _send(dealer, Exited(self._name, how))
        wanted = self._leaves > 1 or (self._end is not None and not self._end.reason)
        if wanted or self._workers.processes[self._name].returncode == 0:
            return self._name
        raise WorkerError(self._name, self._end.reason if self._end is not None else how)


class AgentActor:
    """Runs an agent as a Ray actor; its worker's process ends with the actor's. Does not import Ray.

    No secret goes through Ray: the actor generates its key pair and returns the public key. Everything else reaches the
    worker over its connection to the engine, encrypted with that pair.
    """

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()

    def key(self) -> bytes:
        """Return the public key, for the engine to trust."""
        return bytes(self._public)

    def host_worker(
        self, engine: tuple[str, int], engine_key: bytes, name: str, role: Role, kind: str, device: str
    ) -> str:
        """Run worker ``name`` until it has ended. Returns an error that was not reported to the engine, or ""."""
        environment()  # report invalid variables of this node here, not from the worker
        keys = Keys(engine_key, self._public, self._secret)
        try:
            Agent(engine, keys, application(role, kind, name), WorkerPlace(device)).host_worker()
        except WorkerError:
            return ""  # the agent has told the engine
        except LaminaError as error:
            return str(error)
        return ""


def _events(monitor: "zmq.Socket[bytes]") -> Iterator[int]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])


def _send(dealer: "zmq.Socket[bytes]", message: ToEngine) -> None:
    dealer.send(msgspec.msgpack.encode(message))
