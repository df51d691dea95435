"""The far side of the conformance suite: one endpoint that runs the near side's commands.

Run as a script, it reads pickled (action, arguments) from standard input and answers with (error, result).
"""

import pickle
import sys
import zlib
from functools import partial
from typing import Any

import numpy as np

from lamina.transport.base import Arena, Endpoint, Peer
from lamina.transport.rdma.endpoint import RdmaEndpoint
from lamina.transport.shm import ShmEndpoint
from lamina.transport.tcp import TcpEndpoint
from tests.support.null_transport import NullEndpoint

SECRET = b"a secret of the conformance suite"
IMPLEMENTATIONS: dict[str, Any] = {
    "null": NullEndpoint,
    "shm": ShmEndpoint,
    "tcp": partial(TcpEndpoint, secret=SECRET),
    "tls": partial(TcpEndpoint, secret=SECRET, tls=True),
    "rdma": partial(RdmaEndpoint, secret=SECRET),
}


def stamped(n: int, nbytes: int) -> bytes:
    """Message n: bytes that depend on n everywhere, and a checksum over them in the last four."""
    body = np.random.default_rng(n).bytes(nbytes - 4)
    return body + zlib.crc32(body).to_bytes(4, "little")


def whole(message: bytes) -> bool:
    """True if no byte of a stamped message is missing or from another one."""
    return zlib.crc32(message[:-4]) == int.from_bytes(message[-4:], "little")


class Far:
    """Actions on one endpoint, its arena and its one peer."""

    endpoint: Endpoint
    arena: Arena
    peer: Peer

    def open(self, kind: str, nbytes: int, doorbells: int) -> bytes:
        self.endpoint = IMPLEMENTATIONS[kind]("far")
        self.arena = self.endpoint.register(nbytes, doorbells)
        return self.endpoint.descriptor()

    def connect(self, descriptor: bytes) -> tuple[str, int, int]:
        self.peer = self.endpoint.connect(descriptor, 120.0)
        return self.peer.name, self.peer.nbytes, self.peer.doorbells

    def write(self, offset: int, data: bytes) -> None:
        self.endpoint.write(self.peer, offset, data)

    def ring(self, doorbell: int, sequence: int) -> None:
        self.endpoint.ring(self.peer, doorbell, sequence)

    def ring_up_to(self, doorbell: int, sequence: int) -> None:
        """Ring every sequence number in turn, even while nothing waits."""
        for number in range(1, sequence + 1):
            self.endpoint.ring(self.peer, doorbell, number)

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.arena.view(offset, nbytes))

    def fill(self, offset: int, data: bytes) -> None:
        """Write into this side's arena, for the near side to fetch."""
        self.arena.view(offset, len(data))[:] = data

    def wait(self, targets: list[tuple[int, int]], timeout_s: float) -> int:
        return self.endpoint.wait(targets, timeout_s)

    def ring_many(self, doorbells: int, rounds: int) -> None:
        """Ring every doorbell once a round, and wait for the near side's answer on this side's first doorbell."""
        for round_ in range(1, rounds + 1):
            for doorbell in range(doorbells):
                self.endpoint.ring(self.peer, doorbell, round_)
            self.endpoint.wait([(0, round_)], 30.0)

    def echo(self, slots: int, nbytes: int, messages: int) -> int:
        """Answer messages in ``slots`` slots in turn with their own bytes; returns how many were torn."""
        torn = 0
        for n in range(1, messages + 1):
            slot = n % slots
            self.endpoint.wait([(slot, n)], 30.0)
            request = bytes(self.arena.view(slot * nbytes, nbytes))
            torn += not whole(request)
            self.endpoint.post(self.peer, slot * nbytes, nbytes, [request[:5], request[5:]], slot, n)
        return torn

    def echo_one(self, nbytes: int, n: int) -> None:
        """Answer message ``n`` in slot 0 with its own bytes."""
        self.endpoint.wait([(0, n)], 30.0)
        self.endpoint.post(self.peer, 0, nbytes, [self.arena.view(0, nbytes)], 0, n)

    def pour(self, messages: int, nbytes: int) -> None:
        """Send stamped messages into alternating slots, until killed."""
        for n in range(1, messages + 1):
            self.endpoint.write(self.peer, n % 2 * nbytes, stamped(n, nbytes))
            self.endpoint.ring(self.peer, 0, n)
            self.endpoint.wait([(0, n - 1)], 30.0)

    def close(self) -> None:
        self.endpoint.close()


def serve() -> None:
    far = Far()
    while True:
        try:
            action, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: tuple[str | None, Any] = (None, getattr(far, action)(*arguments))
        except Exception as error:
            answer = (f"{type(error).__name__}: {error}", None)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
