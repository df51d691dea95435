"""Millions of small messages and gigabytes of large ones between two processes: nothing lost, reordered or changed.

    python -m tests.transport.soak [--transports tcp,shm] [--messages 10000000] [--gigabytes 100]

Every message carries its number. Small ones end with a checksum over all of it; large ones are one of a few random
blocks whose checksums both sides know. The receiver checks each before it releases its slot.
"""

import argparse
import multiprocessing
import struct
import time
import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from lamina.transport.base import Arena, Endpoint, Peer
from tests.transport.far import IMPLEMENTATIONS

TIMEOUT_S = 300.0  # the machine may be busy with other work
SLOTS = 64
ACKNOWLEDGE = 16  # messages whose slots are released together
SMALL = struct.Struct("<QQQ32sI")  # number, its square, its complement, its repetition, checksum over these
BULK_NBYTES = 1 << 20
BLOCKS = [np.random.default_rng(seed).bytes(BULK_NBYTES - 8) for seed in range(8)]
SUMS = [zlib.crc32(block) for block in BLOCKS]
MASK = 2**64 - 1


@dataclass
class Side:
    """One end: doorbell 0 announces messages, doorbell 1 releases slots."""

    endpoint: Endpoint
    arena: Arena
    peer: Peer

    def send(self, first: int, count: int, nbytes: int, bulk: bool) -> None:
        """Send ``count`` messages, numbered from ``first``, never more than SLOTS ahead of the receiver."""
        for n in range(first, first + count):
            if n - first >= SLOTS:
                self.endpoint.wait([(1, n - SLOTS)], TIMEOUT_S)
            parts = [struct.pack("<Q", n), BLOCKS[n % len(BLOCKS)]] if bulk else [small(n)]
            self.endpoint.post(self.peer, n % SLOTS * nbytes, nbytes, parts, 0, n)
        self.endpoint.wait([(1, first + count - 1)], TIMEOUT_S)

    def receive(self, first: int, count: int, nbytes: int, bulk: bool) -> None:
        """Check every message. Raises ValueError naming the first that differs from what was sent."""
        views = [self.arena.view(slot * nbytes, nbytes) for slot in range(SLOTS)]
        last = first + count - 1
        for n in range(first, last + 1):
            self.endpoint.wait([(0, n)], TIMEOUT_S)
            view = views[n % SLOTS]
            if bulk:
                good = view[:8] == struct.pack("<Q", n) and zlib.crc32(view[8:]) == SUMS[n % len(SUMS)]
            else:
                good = bytes(view) == small(n)
            if not good:
                raise ValueError(f"message {n} of {last} arrived changed")
            if n % ACKNOWLEDGE == 0 or n == last:
                self.endpoint.ring(self.peer, 1, n)


def small(n: int) -> bytes:
    """Message ``n``: bytes that depend on it everywhere, and their checksum."""
    body = SMALL.pack(n, n * n & MASK, ~n & MASK, struct.pack("<4Q", n, n, n, n), 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def open_side(transport: str, name: str, pipe: Connection) -> Side:
    """An endpoint connected with the one at the other end of the pipe."""
    endpoint = IMPLEMENTATIONS[transport](name)
    arena = endpoint.register(SLOTS * BULK_NBYTES, 2)
    pipe.send(endpoint.descriptor())
    return Side(endpoint, arena, endpoint.connect(pipe.recv(), TIMEOUT_S))


def far(transport: str, pipe: Connection, messages: int, blocks: int) -> None:
    """The receiving process."""
    side = open_side(transport, "far", pipe)
    side.receive(1, messages, SMALL.size, bulk=False)
    side.receive(messages + 1, blocks, BULK_NBYTES, bulk=True)
    pipe.send("all good")
    pipe.recv()  # until the near side has left
    side.endpoint.close()


def soak(transport: str, messages: int, blocks: int) -> None:
    """Run one transport. Raises what the endpoints raise; RuntimeError if the receiver found something wrong."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    receiver = context.Process(target=far, args=(transport, theirs, messages, blocks))
    receiver.start()
    theirs.close()  # so that the pipe ends with the receiver
    try:
        side = open_side(transport, "near", pipe)
        for first, count, nbytes, bulk in ((1, messages, SMALL.size, False), (messages + 1, blocks, BULK_NBYTES, True)):
            begun = time.monotonic()
            side.send(first, count, nbytes, bulk)
            seconds = time.monotonic() - begun
            print(f"{transport}: {count} messages of {nbytes} bytes in {seconds:.0f} s, every one checked", flush=True)
        if pipe.recv() != "all good":
            raise RuntimeError("the receiver found something wrong; its message is above")
        side.endpoint.disconnect(side.peer)
        pipe.send("done")
        side.endpoint.close()
        receiver.join(TIMEOUT_S)
    finally:
        receiver.kill()
        receiver.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="tcp,shm", help="of tcp, tls, shm and rdma")
    parser.add_argument("--messages", type=int, default=10_000_000, help="small ones")
    parser.add_argument("--gigabytes", type=float, default=100.0, help="of large ones")
    args = parser.parse_args()
    for name in args.transports.split(","):
        soak(name, args.messages, max(1, round(args.gigabytes * 1e9 / BULK_NBYTES)))


if __name__ == "__main__":
    main()
