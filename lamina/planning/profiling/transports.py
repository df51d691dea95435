"""Measures round trips and bandwidth of transports between two processes, on one machine or two.

The far side listens and runs tasks that arrive over a ZeroMQ connection, which needs the shared secret. The near side
connects, opens an endpoint on both sides and times messages through the endpoints' Python API.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import zmq

from lamina.control.secret import Secret
from lamina.control.sockets import local_address
from lamina.core.errors import DeadlineError, LaminaError, TransportError
from lamina.dataplane.transport_choice import Transport
from lamina.transport.base import Endpoint
from lamina.transport.endpoint import SPIN_S
from lamina.transport.listener import LOOPBACK
from lamina.transport.rdma.endpoint import RdmaEndpoint
from lamina.transport.shm import ShmEndpoint
from lamina.transport.tcp import TcpEndpoint

TIMEOUT_S = 60.0
POLL_S = 1.0
SPINS = {"spinning": 0.01, "default": SPIN_S}
MAX_NBYTES = 8 << 20  # per message
IN_FLIGHT_NBYTES = 4 << 20  # limit for a stream
ARENA_NBYTES = 2 * max(MAX_NBYTES, IN_FLIGHT_NBYTES)
MAX_SLOTS = 16
PERCENTILES = (50, 90, 99)
FAR, NEAR = "far side of a measurement", "near side of a measurement"


@dataclass(frozen=True)
class Result:
    """Figures of one transport, or of a program it is compared with, at one size.

    Attributes:
        transport: Name of the transport or program.
        wait: How waits spin before they sleep, a key of ``SPINS``.
        nbytes: Size of a message.
        round_trip_us: Microseconds by percentile; None if not measured.
        gigabytes_per_s: One-way bandwidth in 1e9 bytes per second; None if not measured.
    """

    transport: str
    wait: str
    nbytes: int
    round_trip_us: dict[str, float] | None = None
    gigabytes_per_s: float | None = None


class Task(msgspec.Struct, frozen=True):
    """A task for the far side. ``echo`` and ``take`` have no reply.

    Attributes:
        name: "open" an endpoint of ``transport``, "join" the endpoint of ``descriptor``, "echo" ``count`` messages,
            "take" ``count`` messages and return their slots by doorbells, or "close".
        transport: Transport to open.
        spin_s: How long waits of the endpoint spin.
        descriptor: Descriptor of the near side's endpoint.
        nbytes: Size of an echoed message.
        count: Number of messages.
    """

    name: Literal["open", "join", "echo", "take", "close"]
    transport: Transport = Transport.SHM
    spin_s: float = 0.0
    descriptor: bytes = b""
    nbytes: int = 0
    count: int = 0


class Answer(msgspec.Struct, frozen=True):
    """The far side's reply: the descriptor of an opened endpoint, or why a task failed."""

    descriptor: bytes = b""
    trouble: str = ""


def slots_for(nbytes: int) -> int:
    """Return the number of messages in flight in a stream."""
    return max(2, min(MAX_SLOTS, IN_FLIGHT_NBYTES // nbytes))


def make_endpoint(transport: Transport, name: str, spin_s: float, secret: Secret, host: str) -> Endpoint:
    """Open an endpoint that is reachable at ``host`` and whose waits spin for ``spin_s`` seconds before they sleep."""
    match transport:
        case Transport.SHM:
            return ShmEndpoint(name, spin_s=spin_s)
        case Transport.TCP:
            return TcpEndpoint(name, spin_s=spin_s, secret=secret.data_plane, host=host)
        case Transport.RDMA:
            return RdmaEndpoint(name, spin_s=spin_s, secret=secret.data_plane)


def _pair(context: zmq.Context[zmq.Socket[bytes]], secret: Secret, side: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = secret.curve_keys(side)
    return socket


class Far:
    """The side that runs tasks, for one near side after another. Port 0: any free port."""

    def __init__(self, secret: Secret, host: str = LOOPBACK, port: int = 0) -> None:
        self._secret, self._host = secret, host
        self._endpoint: Endpoint | None = None
        self._context = zmq.Context()
        self._socket = _pair(self._context, secret, FAR)
        self._socket.curve_server = True
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot listen on {host}:{port}: {error}; give another address or port") from error
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        self._decoder = msgspec.msgpack.Decoder(Task)

    def serve(self) -> None:
        """Run one task, if one arrives within POLL_S."""
        if not self._socket.poll(round(POLL_S * 1000)):
            return
        try:
            answer = self._do(self._decoder.decode(self._socket.recv()))
        except LaminaError as error:
            answer = Answer(trouble=str(error))
        if answer is not None:
            with contextlib.suppress(zmq.Again):  # the near side has left
                self._socket.send(msgspec.msgpack.encode(answer), zmq.NOBLOCK)

    def _do(self, task: Task) -> Answer | None:
        match task.name:
            case "open":
                self._leave()
                self._endpoint = make_endpoint(task.transport, "far", task.spin_s, self._secret, self._host)
                self._arena = self._endpoint.register(ARENA_NBYTES, 1)
                self._sequence = 0
                return Answer(self._endpoint.descriptor())
            case "join":
                self._peer = self._opened().connect(task.descriptor, TIMEOUT_S)
                return Answer()
            case "close":
                self._leave()
                return Answer()
        for _ in range(task.count):
            self._sequence += 1
            self._opened().wait([(0, self._sequence)], TIMEOUT_S)
            if task.name == "take":
                self._opened().ring(self._peer, 0, self._sequence)
            else:
                message = [self._arena.view(0, task.nbytes)]
                self._opened().post(self._peer, 0, task.nbytes, message, 0, self._sequence)
        return None

    def _opened(self) -> Endpoint:
        if self._endpoint is None:
            raise TransportError("no endpoint is open on the far side")
        return self._endpoint

    def _leave(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def close(self) -> None:
        """Close the endpoint and the socket."""
        self._leave()
        self._socket.close()
        self._context.term()


class Near:
    """The side that measures, connected to a far side."""

    def __init__(self, secret: Secret, host: str, port: int) -> None:
        self._secret, self._address = secret, f"tcp://{host}:{port}"
        self._host = local_address(self._address)
        self._context = zmq.Context()
        self._socket = _pair(self._context, secret, NEAR)
        self._socket.curve_serverkey = secret.curve_keys(FAR)[0]
        self._socket.connect(self._address)
        self._decoder = msgspec.msgpack.Decoder(Answer)

    def _tell(self, task: Task) -> None:
        self._socket.send(msgspec.msgpack.encode(task))

    def _ask(self, task: Task) -> Answer:
        self._tell(task)
        if not self._socket.poll(round(TIMEOUT_S * 1000)):
            raise DeadlineError(
                f"no answer from {self._address} within {TIMEOUT_S:g} s; is the other side listening there, with the "
                "same secret file?"
            )
        answer: Answer = self._decoder.decode(self._socket.recv())
        if answer.trouble:
            raise TransportError(f"the far side: {answer.trouble}")
        return answer

    def measure(self, transport: Transport, wait: str, sizes: Sequence[int], seconds: float) -> Iterator[Result]:
        """Measure every size, for about ``seconds`` each for latency and for bandwidth. Raises TransportError."""
        endpoint = make_endpoint(transport, "near", SPINS[wait], self._secret, self._host)
        try:
            endpoint.register(ARENA_NBYTES, 1)
            opened = self._ask(Task("open", transport, SPINS[wait]))
            self._endpoint, self._sequence = endpoint, 0
            self._peer = endpoint.connect(opened.descriptor, TIMEOUT_S)
            self._ask(Task("join", descriptor=endpoint.descriptor()))
            for nbytes in sizes:
                once_s = self._round_trips(nbytes, 20)["p50"] * 1e-6
                trips = self._round_trips(nbytes, max(20, min(50_000, int(seconds / once_s))))
                pace = self._stream(nbytes, 20)
                rate = self._stream(nbytes, max(20, min(200_000, int(seconds * pace * 1e9 / nbytes))))
                yield Result(transport.value, wait, nbytes, trips, rate)
            endpoint.disconnect(self._peer)
            self._ask(Task("close"))
        finally:
            endpoint.close()

    def _round_trips(self, nbytes: int, rounds: int) -> dict[str, float]:
        """Return percentiles of the round-trip time in microseconds; the first tenth is warm-up."""
        self._tell(Task("echo", nbytes=nbytes, count=rounds))
        message, times = [os.urandom(nbytes)], np.empty(rounds)
        for i in range(rounds):
            self._sequence += 1
            start = time.perf_counter()
            self._endpoint.post(self._peer, 0, nbytes, message, 0, self._sequence)
            self._endpoint.wait([(0, self._sequence)], TIMEOUT_S)
            times[i] = time.perf_counter() - start
        values = np.percentile(times[rounds // 10 :] * 1e6, PERCENTILES)
        return {f"p{percentile}": float(value) for percentile, value in zip(PERCENTILES, values, strict=True)}

    def _stream(self, nbytes: int, messages: int) -> float:
        self._tell(Task("take", count=messages))
        message, slots, first = [os.urandom(nbytes)], slots_for(nbytes), self._sequence
        start = time.perf_counter()
        for i in range(messages):
            if i >= slots:
                self._endpoint.wait([(0, first + i + 1 - slots)], TIMEOUT_S)
            self._endpoint.post(self._peer, i % slots * nbytes, nbytes, message, 0, first + i + 1)
        self._sequence = first + messages
        self._endpoint.wait([(0, self._sequence)], TIMEOUT_S)
        return messages * nbytes / (time.perf_counter() - start) / 1e9

    def close(self) -> None:
        """Disconnect; the far side can then serve others."""
        self._socket.close()
        self._context.term()


def main() -> None:
    """Run a far side for the parent process, which writes the secret to standard input.

    Prints the port; exits when standard input is closed.
    """
    import select

    far = Far(Secret(bytes.fromhex(sys.stdin.readline())))
    print(far.port, flush=True)
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        far.serve()
    far.close()


if __name__ == "__main__":
    main()
