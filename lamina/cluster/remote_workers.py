"""Accepts agents of other machines, which start workers there for the engine; see ``lamina.cluster.agent``."""

import collections
import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from lamina.cluster.conversations import Wish
from lamina.cluster.local_workers import STOP_TIMEOUT_S, LocalWorkers, SupervisedWorkers
from lamina.cluster.pool import CPU, REMOTE
from lamina.control.agent_messages import (
    AGENT,
    Apply,
    End,
    Exited,
    Leaving,
    Ping,
    Refused,
    Start,
    Started,
    ToAgent,
    ToEngine,
)
from lamina.control.liveness import Liveness
from lamina.control.secret import Secret
from lamina.control.sockets import KeyedRouter
from lamina.core import __version__
from lamina.core.errors import ConfigError, TransportError
from lamina.core.threads import join_thread
from lamina.core.topology import Pool, Role, may_run
from lamina.transport.shm import host

log = logging.getLogger(__name__)

TURN_S = 0.5
REPORT_S = 3.0  # wait for agents' last messages, after the time in which their workers exit


@dataclass(eq=False)
class _Agent:
    """An agent that has applied for a worker.

    Attributes:
        identity: ZeroMQ identity of its connection.
        key: Public key of its connection.
        about: Its first message.
        worker: Name of its worker; empty before one is assigned.
        pid: Process id of the worker on its machine; 0 before it is started.
        exited: How the worker has ended; None while it runs.
        parting: Whether the engine has ended the worker, and ignores its further messages.
    """

    identity: bytes
    key: bytes
    about: Apply
    worker: str = ""
    pid: int = 0
    exited: str | None = None
    parting: bool = False


@dataclass
class _Vacancy:
    """A worker that the engine has started and no agent has applied for.

    Attributes:
        worker: The worker.
        key: Public key of the only agent that may run it; empty: any agent.
    """

    worker: Start
    key: bytes = b""


class RemoteWorkers:
    """Assigns workers to agents, which connect to a port of this machine. Runs a thread of its own.

    An agent that applies without a vacant worker is one of ``offers``. Only ``kill_worker`` and ``close`` block: they
    wait for agents.

    Attributes:
        port: Port that agents connect to.
    """

    def __init__(self, where: str, port: int, secret: Secret, keys: tuple[bytes, bytes]) -> None:
        """Listen at host ``where`` and ``port`` (0: any free one). Raises ConfigError if the port cannot be used.

        ``keys``: the engine's CURVE keys, public and secret.
        """
        options = {
            zmq.LINGER: 1000,
            zmq.ROUTER_HANDOVER: 1,  # an agent whose connection broke reconnects under its name
            zmq.MAXMSGSIZE: 1 << 16,
        }
        try:
            self._router = KeyedRouter("the port for workers of other machines", keys, where, port, None, options)
        except (zmq.ZMQError, OSError, RuntimeError) as error:
            raise _cannot_listen(where, port, error) from error
        self._router.known[secret.curve_keys(AGENT)[0]] = ""
        self.port = self._router.port
        self._lock = threading.Condition()  # guards everything below
        self._agents: dict[bytes, _Agent] = {}
        self._vacancies: list[_Vacancy] = []
        self._wishes: list[Wish] = []
        self._ended: dict[str, str] = {}
        self._finished = set[str]()  # workers that ``kill_worker`` was called for
        self._silent = set[str]()  # hosts with an agent that did not answer in time: no other agent there is waited for
        self._outbox = collections.deque[tuple[bytes, ToAgent]]()
        self._closing = self._over = False
        self._thread = threading.Thread(target=self._run, name="lamina-remote", daemon=True)
        self._thread.start()

    # -- called by the engine

    def trust(self, key: bytes, worker: str) -> None:
        """Accept the agent with public key ``key``, to run ``worker``, which ``start`` was called for."""
        with self._lock:
            self._router.known[key] = worker
            for vacancy in self._vacancies:
                if vacancy.worker.name == worker:
                    vacancy.key = key

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        """Raise ConfigError, since workers on other machines are started there."""
        raise ConfigError(
            f"{kind} workers are started on their own machines: run lamina worker --engine HOST:{self.port} --role "
            f"{role} there, and it joins"
        )

    def start(self, worker: Start) -> None:
        """Assign a worker to the agent that has waited longest for its pool, or to the next agent that applies."""
        with self._lock:
            if waiting := self._waiting(worker.pool):
                self._appoint(waiting[0], worker)
            else:
                self._vacancies.append(_Vacancy(worker))

    def default_kind(self, pool: Pool) -> str:
        return REMOTE

    def offers(self) -> Sequence[Pool]:
        with self._lock:
            return [one.about.pool for one in self._agents.values() if not one.worker]

    def refuse_offers(self, pool: Pool, reason: str) -> None:
        with self._lock:
            for one in [one for one in self._agents.values() if not one.worker and one.about.pool == pool]:
                self._refuse(one, reason)

    def wishes(self) -> Sequence[Wish]:
        """Return the wishes of agents whose workers want to leave."""
        with self._lock:
            wishes, self._wishes = self._wishes, []
        return wishes

    def ended(self) -> Mapping[str, str]:
        """Return workers whose process has ended, or whose agent does not answer, with the reason."""
        return self._ended

    def give_up(self, worker: str, why: str) -> None:
        """Record that a worker's agent has ended, and the worker with it."""
        with self._lock:
            one = self._of(worker)
            if one is not None:
                one.exited = why
                self._end_here(one)
            if worker not in self._finished:
                self._ended = {**self._ended, worker: why}
            self._lock.notify_all()

    def kill_worker(self, name: str, *, cut: bool = False, reason: str = "") -> None:
        """End one worker. Waits ``STOP_TIMEOUT_S`` at most for its agent, and not at all if its host is silent."""
        with self._lock:
            self._finished.add(name)
            self._vacancies = [vacancy for vacancy in self._vacancies if vacancy.worker.name != name]
            one = self._of(name)
            if one is not None:
                one.parting = True
                self._tell(one, End([name], 0.0, reason))
                there = one.about.host
                self._lock.wait_for(lambda: one.exited is not None or there in self._silent, STOP_TIMEOUT_S)
                if one.exited is None:
                    self._silent.add(there)
                    if not self._end_here(one):
                        self._let_go(one, cut)
                self._agents.pop(one.identity, None)
            self._ended = {worker: how for worker, how in self._ended.items() if worker != name}

    def _end_here(self, one: _Agent) -> bool:
        """Kill a worker of this machine whose agent does not answer; return whether it was one."""
        if one.about.host != host() or not one.pid:
            return False
        try:
            handle = os.pidfd_open(one.pid)
        except ProcessLookupError:
            return True
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return bool(select.select([handle], [], [], STOP_TIMEOUT_S)[0])
        except PermissionError:
            return False
        finally:
            os.close(handle)

    def _let_go(self, one: _Agent, cut: bool) -> None:
        """Give up an unreachable worker. Raises TransportError, unless its peers are cut off from it (``cut``)."""
        why = f"the agent of {one.worker} on {one.about.machine} does not answer"
        if not cut:
            raise TransportError(f"{why}, so that the worker cannot be ended")
        there = [other for other in self._agents.values() if other.about.host == one.about.host and other.worker]
        lost = {other.worker: f"{why}, and shares memory with this worker" for other in there if not other.parting}
        self._ended = {**lost, **self._ended}

    def kill(self, reason: str = "") -> None:
        """End all workers at once. ``reason``: told to whoever started them."""
        self._close(0.0, reason)

    def close(self) -> None:
        """Give workers ``STOP_TIMEOUT_S`` to exit by themselves, then end them. Idempotent."""
        self._close(STOP_TIMEOUT_S, "")

    def _close(self, grace_s: float, reason: str) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for one in self._agents.values():
                refused = Refused(reason or "the engine has stopped")
                self._tell(one, End([one.worker], grace_s, reason) if one.worker else refused)
            self._lock.wait_for(
                lambda: all(one.exited is not None or not one.worker for one in self._agents.values()),
                grace_s + REPORT_S,
            )
            self._over = True
        os.eventfd_write(self._router.wakeup, 1)
        if join_thread(self._thread):
            self._router.close()

    # -- with the lock held

    def _waiting(self, pool: Pool) -> list[_Agent]:
        """Return the agents without a worker that may run one of a pool: those for this pool first, and of these the
        one that has waited longest."""
        fitting = [one for one in self._agents.values() if not one.worker and may_run(one.about.pool, pool)]
        return sorted(fitting, key=lambda one: one.about.pool != pool)

    def _of(self, worker: str) -> _Agent | None:
        return next((one for one in self._agents.values() if one.worker == worker), None)

    def _tell(self, one: _Agent, message: ToAgent) -> None:
        self._outbox.append((one.identity, message))
        os.eventfd_write(self._router.wakeup, 1)

    def _appoint(self, one: _Agent, worker: Start) -> None:
        one.worker = worker.name
        self._tell(one, worker)
        log.info("%s runs on %s", worker.name, one.about.machine)

    def _take(self, identity: bytes, key: bytes, message: ToEngine) -> None:
        one = self._agents.get(identity)
        if isinstance(message, Apply):
            if one is None:
                self._agents[identity] = one = _Agent(identity, key, message)
                self._receive(one)
        elif one is None or one.key != key:
            self._router.refusals.record("NAME", "a message arrived from an agent that has not applied")
        elif isinstance(message, Started):
            one.pid = message.pid
        elif isinstance(message, Leaving):
            if one.worker:
                self._wishes.append(Wish(one.worker))
            else:
                del self._agents[identity]
        elif isinstance(message, Exited):
            self._note_exit(one, message.how)

    def _note_exit(self, one: _Agent, how: str) -> None:
        one.exited = how
        if one.worker and not one.parting:
            self._ended = {**self._ended, one.worker: f"{how} on {one.about.machine}"}
        if not one.worker:
            del self._agents[one.identity]
        self._lock.notify_all()

    def _receive(self, one: _Agent) -> None:
        about = one.about
        own = self._router.known.get(one.key, "")
        if about.version != __version__:
            self._refuse(one, f"it runs lamina {about.version}, the engine {__version__}; install the same release")
            return
        if own != about.name:
            self._refuse(one, f"its key was not issued for the worker {about.name!r}")
            return
        for vacancy in sorted(self._vacancies, key=lambda one: one.worker.pool != about.pool):
            fits = vacancy.worker.name == own if own else not vacancy.key
            if fits and may_run(about.pool, vacancy.worker.pool):
                self._vacancies.remove(vacancy)
                self._appoint(one, vacancy.worker)
                return
        if own:
            self._refuse(one, f"the engine does not wait for {own} any more")

    def _refuse(self, one: _Agent, reason: str) -> None:
        log.warning("a %s worker on %s is refused: %s", one.about.pool, one.about.machine, reason)
        self._tell(one, Refused(reason))
        del self._agents[one.identity]

    # -- the thread

    def _run(self) -> None:
        liveness = Liveness(time.monotonic())
        decoder = msgspec.msgpack.Decoder(ToEngine)
        encoder = msgspec.msgpack.Encoder()
        while True:
            self._router.poll(TURN_S)
            due = liveness.turn(time.monotonic())
            arrived = list(self._decoded(decoder))
            with self._lock:
                for identity, key, message in arrived:
                    liveness.on_message(identity.hex())
                    if (sender := self._agents.get(identity)) is not None:
                        self._silent.discard(sender.about.host)
                    self._take(identity, key, message)
                if due:
                    self._outbox.extend((identity, Ping()) for identity in self._agents)
                self._look_for_silence(liveness)
                leaving, outbox = self._over, list(self._outbox)
                self._outbox.clear()
            for identity, answer in outbox:
                with contextlib.suppress(zmq.ZMQError):  # a disconnected agent is detected by its silence
                    self._router.socket.send_multipart([identity, encoder.encode(answer)], zmq.NOBLOCK)
            if leaving:
                return

    def _decoded(self, decoder: "msgspec.msgpack.Decoder[ToEngine]") -> Iterator[tuple[bytes, bytes, ToEngine]]:
        """Yield the messages that have arrived: identity and key of the sender, message."""
        for identity, key, payload in self._router.receive_frames():
            try:
                yield identity, key, decoder.decode(payload)
            except msgspec.DecodeError as error:
                self._router.refusals.record(
                    "MESSAGE", f"an invalid message arrived: {error}; run the same release of lamina everywhere"
                )

    def _look_for_silence(self, liveness: Liveness) -> None:
        for identity, seconds in liveness.lost().items():
            liveness.unwatch(identity)
            one = self._agents.get(bytes.fromhex(identity))
            if one is None or one.exited is not None:
                continue
            if not one.worker:
                del self._agents[one.identity]
                continue
            lost = [other for other in self._agents.values() if other.about.host == one.about.host]
            self._silent.add(one.about.host)
            self._lock.notify_all()
            why = f"its agent on {one.about.machine} has not answered for {seconds:.0f} s"
            self._ended = {**{each.worker: why for each in lost if each.worker and not each.parting}, **self._ended}


def _cannot_listen(where: str, port: int, error: Exception) -> ConfigError:
    if isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE:
        return ConfigError(f"port {port} of {where}, for workers of other machines, is in use; give --listen another")
    return ConfigError(f"cannot listen on {where}:{port} for workers of other machines: {error}; see --listen")


Local = LocalWorkers | SupervisedWorkers


class LocalAndRemote:
    """Launcher of workers on this machine and, with kind ``REMOTE``, on other machines.

    Attributes:
        local: Workers of this machine.
        remote: Workers of other machines.
    """

    def __init__(self, local: Local, remote: RemoteWorkers) -> None:
        self.local, self.remote = local, remote

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        (self.remote if kind == REMOTE else self.local).validate_pool(role, kind, count)

    def start(self, worker: Start) -> None:
        (self.remote if worker.kind == REMOTE else self.local).start(worker)

    def default_kind(self, pool: Pool) -> str:
        return CPU

    def offers(self) -> Sequence[Pool]:
        return self.remote.offers()

    def refuse_offers(self, pool: Pool, reason: str) -> None:
        self.remote.refuse_offers(pool, reason)

    def wishes(self) -> Sequence[Wish]:
        return self.remote.wishes()

    def ended(self) -> Mapping[str, str]:
        local, remote = self.local.ended(), self.remote.ended()
        return {**local, **remote} if remote else local

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        if worker in self.local.processes:
            self.local.kill_worker(worker)
        else:
            self.remote.kill_worker(worker, cut=cut, reason=reason)

    def kill(self, reason: str = "") -> None:
        """End all workers at once. ``reason``: for those who have started them elsewhere."""
        self.local.kill()
        self.remote.kill(reason)

    def close(self) -> None:
        self.local.close()
        self.remote.close()
