"""Control plane: msgspec messages over ZeroMQ, every peer authenticated by its CURVE key.

The engine owns a ROUTER socket, every worker a DEALER. Messages from one sender arrive in the order they were sent.
"""

import logging
import os
import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.auth.thread

from lamina.errors import DeadlineError, TransportError
from lamina.types import AttentionSpec, DType, Logprob, StepPlan

log = logging.getLogger(__name__)


class ComputeSetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to compute worker: load this model."""

    model: str
    dtype: DType | None
    load_format: str
    seed: int
    threads: int


class MemorySetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to memory worker: make a slab of ``capacity`` tokens for these attentions."""

    attentions: list[AttentionSpec]
    dtype: DType
    capacity: int
    threads: int


class ChannelSetup(msgspec.Struct, frozen=True):
    """One compute-memory channel: where its slots and doorbells lie in the two arenas."""

    compute: str
    memory: str
    slots: int
    request_nbytes: int
    reply_nbytes: int
    request_offset: int
    request_doorbell: int
    reply_offset: int
    reply_doorbell: int


class Register(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: make an arena of this size; answered by Registered."""

    nbytes: int
    doorbells: int


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: open these peers' arenas and use these channels; answered by Connected."""

    descriptors: dict[str, bytes]
    channels: list[ChannelSetup]


class Step(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: run this plan."""

    plan: StepPlan


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: end now."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: started."""


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: ``done`` of ``total`` tensors of ``stage`` are there."""

    worker: str
    stage: str
    done: int
    total: int


class ModelLoaded(msgspec.Struct, tag=True, frozen=True):
    """Compute worker to engine: the model is split and its weights are in memory."""

    attentions: list[AttentionSpec]
    dtype: DType
    parameters: int


class SlabReady(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: the slab is allocated."""

    capacity: int


class Registered(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: the arena exists; peers connect with this descriptor."""

    descriptor: bytes


class Connected(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: all channels are open."""


class Draw(msgspec.Struct, array_like=True, frozen=True):
    """The token drawn for one sequence; ``logprobs`` has the drawn token first, empty if none were asked for."""

    sequence: int
    token: int
    logprobs: list[Logprob] = []


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """Compute worker to engine: the step ran; one draw per sequence named in ``draws`` of the plan."""

    step: int
    draws: list[Draw]


class SlabUsage(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: slots in use and sequences known after plan ``step`` was applied."""

    step: int
    used: int
    sequences: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it cannot go on. ``kind`` is the exception's class name; ``user`` marks a UserError."""

    kind: str
    message: str
    user: bool
    traceback: str


ToWorker = ComputeSetup | MemorySetup | Register | Connect | Step | Stop
ToEngine = (
    Hello | LoadProgress | ModelLoaded | SlabReady | Registered | Connected | StepDone | SlabUsage | Failed
)


class Bootstrap(msgspec.Struct, frozen=True):
    """What a worker process is born with, read from its standard input: never on a command line."""

    name: str
    address: str
    engine_key: bytes
    public_key: bytes
    secret_key: bytes
    parent_pid: int


@dataclass
class _IssuedKeys:
    """ZAP credentials provider: only keys that this engine issued may connect."""

    workers: dict[bytes, str] = field(default_factory=dict)

    def callback(self, domain: str, key: bytes) -> bool:
        if key in self.workers:
            return True
        log.warning("control plane: refused a connection with a key this engine did not issue")
        return False


class ControlServer:
    """The engine's end. One thread at a time may use it."""

    def __init__(self, workers: Sequence[str], parent_pid: int | None = None) -> None:
        self._context = zmq.Context()
        self._keys = _IssuedKeys()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self._keys)
        public, secret = zmq.curve_keypair()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.router_mandatory = True
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.bootstraps: Mapping[str, Bootstrap] = {
            name: self._issue(name, f"tcp://127.0.0.1:{port}", public, parent_pid or os.getpid()) for name in workers
        }
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._closed = False

    def _issue(self, name: str, address: str, engine_key: bytes, parent_pid: int) -> Bootstrap:
        public, secret = zmq.curve_keypair()
        self._keys.workers[public] = name
        return Bootstrap(name, address, engine_key, public, secret, parent_pid)

    def send(self, workers: Sequence[str], message: ToWorker) -> None:
        """Send one message to several workers; encoded once."""
        payload = self._encoder.encode(message)
        for worker in workers:
            try:
                self._socket.send_multipart([worker.encode(), payload], copy=True)
            except zmq.ZMQError as error:
                raise TransportError(f"cannot reach worker {worker} on the control plane: {error}") from error

    def wake(self) -> None:
        """End the current or next ``receive`` early. Any thread."""
        os.eventfd_write(self._wakeup, 1)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToEngine]]:
        """All messages that are there, waiting at most ``timeout_s`` for the first or for ``wake``."""
        ready = dict(self._poller.poll(timeout_s * 1000))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            worker = self._keys.workers.get(str(frame.get("User-Id")).encode())
            if worker is None or identity.bytes != worker.encode():
                log.warning("control plane: dropped a message whose name is not its key's")
                continue
            yield worker, self._decoder.decode(frame.bytes)

    def close(self) -> None:
        """Close sockets and the authenticator's thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._poller.unregister(self._wakeup)
        os.close(self._wakeup)
        self._socket.close()
        self._authenticator.stop()
        self._context.term()


class ControlClient:
    """A worker's end. One thread owns it."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.name = bootstrap.name
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = bootstrap.name.encode()
        self._socket.curve_serverkey = bootstrap.engine_key
        self._socket.curve_publickey, self._socket.curve_secretkey = bootstrap.public_key, bootstrap.secret_key
        self._socket.linger = 2000  # a last Failed must still leave
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(bootstrap.address)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToEngine) -> None:
        """Queue one message to the engine."""
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_s: float) -> ToWorker:
        """The engine's next message. Raises DeadlineError after ``timeout_s``."""
        if not self._socket.poll(timeout_s * 1000):
            raise DeadlineError(f"{self.name}: no message from the engine within {timeout_s} s")
        return self._decoder.decode(self._socket.recv())

    def poll(self) -> ToWorker | None:
        """The engine's next message if one is there."""
        try:
            return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        """Flush what was sent (at most 2 s) and close."""
        self._socket.close()
        self._context.term()


def exit_with(pid: int) -> None:
    """End this process as soon as process ``pid`` (its engine) has ended, however that happens."""
    handle = os.pidfd_open(pid)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
