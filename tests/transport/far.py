"""The far side of the conformance suite: one endpoint that does what the near side asks.

Run as a script, it takes pickled (action, arguments) from standard input, answers with (what went wrong, result).
"""

import pickle
import sys
import zlib
from functools import partial
from typing import Any

import numpy as np

from lamina.protocol.channel import Inbox, Layout, Outbox
from lamina.transport.base import Arena, Endpoint, Peer
from lamina.transport.null import NullEndpoint
from lamina.transport.rdma.endpoint import RdmaEndpoint
from lamina.transport.shm import ShmEndpoint
from lamina.transport.tcp import TcpEndpoint

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
        """Ring every sequence number in turn, whether anybody waits or not."""
        for number in range(1, sequence + 1):
            self.endpoint.ring(self.peer, doorbell, number)

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.arena.view(offset, nbytes))

    def fill(self, offset: int, data: bytes) -> None:
        """Write into one's own arena, for the near side to fetch."""
        self.arena.view(offset, len(data))[:] = data

    def wait(self, targets: list[tuple[int, int]], timeout_s: float) -> int:
        return self.endpoint.wait(targets, timeout_s)

    def ring_many(self, doorbells: int, rounds: int) -> None:
        """Ring every doorbell once a round, and wait for the near side's answer on one's own first doorbell."""
        for round_ in range(1, rounds + 1):
            for doorbell in range(doorbells):
                self.endpoint.ring(self.peer, doorbell, round_)
            self.endpoint.wait([(0, round_)], 30.0)

    def echo(self, layout: Layout, messages: int) -> int:
        """Answer requests of all lanes in turn with their own bytes; returns how many were torn."""
        torn = 0
        for n in range(1, messages + 1):
            inbox = Inbox(self.arena, layout.request(n % layout.lanes))
            self.endpoint.wait([(inbox.doorbell, n)], 30.0)
            request = bytes(inbox.view)
            torn += not whole(request)
            Outbox(self.endpoint, self.peer, layout.reply(n % layout.lanes, 0)).send([request[:5], request[5:]], n)
        return torn

    def echo_one(self, layout: Layout, n: int) -> None:
        """Answer message ``n`` of lane 0 with its own bytes."""
        inbox = Inbox(self.arena, layout.request(0))
        self.endpoint.wait([(inbox.doorbell, n)], 30.0)
        Outbox(self.endpoint, self.peer, layout.reply(0, 0)).send([inbox.view], n)

    def pour(self, messages: int, nbytes: int) -> None:
        """Send stamped messages without end or credit into alternating slots, until killed."""
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
