"""Measures decode round trips beside fetches of K and V, against the same round trips alone.

    python -m bench.transport.bulk [--transports shm,tcp] [--bulk prompts moves] [--rounds 2000] [--json FILE]

Two processes run, each on its own core if there are two. The compute side is busy for the time of a slice, then sends a
request of one layer for 16 rows of a Llama-3-8B and waits for the reply: the round trip. The memory side replies at
once (attention would take the same time in both cases). In the gaps it fetches prompt chunks with the memory worker's
own ``Puller``, or sequences of another memory worker with ``KvMoves``. The same thread plays the other memory worker
too, which costs messages more time than in a cluster. Rounds alone and with fetches alternate.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from lamina.control.messages import MemorySetup
from lamina.control.secret import Secret, new
from lamina.core.errors import DeadlineError
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, KvMove, SequenceStep, StepPlan
from lamina.core.topology import FIRST
from lamina.core.types import AttentionSpec, DType, KvElement, Overlap, Segment
from lamina.dataplane.leases import DOORBELLS, LANDING_NBYTES, ArenaPlan, Leases, lease_nbytes
from lamina.dataplane.slot import Outbox, Slot
from lamina.dataplane.transport_choice import Transport
from lamina.dataplane.wire import reply_nbytes, request_nbytes
from lamina.memory.device.cpu import Cpu
from lamina.memory.moving import KvMoves, OpenOutbox
from lamina.memory.pulls import GapWork, Puller
from lamina.memory.store import KvStore
from lamina.planning.profiling.transports import SPINS, make_endpoint
from lamina.transport.base import Arena, Endpoint, Target
from lamina.transport.listener import LOOPBACK

SPECS = [AttentionSpec(layer, 32, 8, 128, 128, scale=128**-0.5) for layer in range(8)]
ROWS, CHUNK, MOVED = 16, 512, 8192  # of a decode step, of a prompt's chunk, tokens of a sequence that moves
DECODES, PROMPTS = 0, 1  # lanes
COMPUTE, MEMORY, OTHER = "compute", "memory", "other"
SEQUENCE = 0
DTYPE = DType.BFLOAT16
TIMEOUT_S = 60.0
BLOCK = 100  # rounds alone, then so many with bulk
PER_TOKEN = SPECS[0].kv_bytes_per_token(DTYPE)
# Messages here have slots of their own, of all rows and without credits, behind two leases for the other memory worker.
REQUEST_NBYTES = request_nbytes(SPECS[:1], DTYPE, ROWS)
REPLY_NBYTES = reply_nbytes(SPECS[:1], ROWS)
PLAN = ArenaPlan(
    LANDING_NBYTES,
    stages=True,
    pool_nbytes=CHUNK * PER_TOKEN,
    leases={lease_nbytes(0): 1, lease_nbytes(max(REQUEST_NBYTES, REPLY_NBYTES)): 1},
)
BETWEEN = Leases(PLAN).lease(0)  # of each memory worker's arena to the other
AT, BELL = BETWEEN.offset + BETWEEN.nbytes, BETWEEN.doorbell + DOORBELLS
REQUEST, REPLY = Slot(AT, REQUEST_NBYTES, BELL), Slot(AT, REPLY_NBYTES, BELL)
BULKS = ("prompts", "moves")


@dataclass(frozen=True)
class Result:
    """Round trips in microseconds, and the gigabytes (1e9 bytes) of bulk per second beside them."""

    transport: str
    bulk: str
    slice_us: float
    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float
    bulk_gigabytes_per_s: float

    @property
    def ratio(self) -> float:
        """The 99th percentile beside bulk over that alone."""
        return self.beside_p99 / self.alone_p99


class Slabs(Cpu):
    """Slabs whose memory has been touched, and that count the bytes restored in them."""

    def __init__(self, tokens: int) -> None:
        super().__init__(SPECS, KvElement.BFLOAT16, tokens, 1)
        slots, nothing = np.arange(tokens, dtype=np.int32), memoryview(bytes(tokens * PER_TOKEN))
        for layer in range(len(SPECS)):
            super().restore(layer, slots, nothing)
        self.restored = 0

    def restore(self, layer: int, slots: npt.NDArray[np.int32], content: memoryview) -> None:
        self.restored += len(slots) * PER_TOKEN
        super().restore(layer, slots, content)


class Store(KvStore):
    """A ``KvStore`` that counts the fetched bytes that it stores."""

    def __init__(self, worker: str, tokens: int) -> None:
        super().__init__(worker, MemorySetup(SPECS, DTYPE, tokens, 1, Overlap(), trace=False))
        self.device: Slabs = Slabs(tokens)
        self._pulled = 0

    @property
    def kept(self) -> int:
        return self._pulled + self.device.restored

    def keep(self, layer: int, slots: npt.NDArray[np.int32], content: memoryview) -> None:
        self._pulled += len(slots) * PER_TOKEN
        super().keep(layer, slots, content)


def plan(admitted: list[Admission], chunks: list[SequenceStep], released: list[int], moves: list[KvMove]) -> StepPlan:
    """A step of the lane of prompts in which nothing decodes."""
    return StepPlan(0, PROMPTS, 0, [], released, admitted, chunks, DecodeRows([], [], []), moves=moves)


def begun(worker: str, tokens: int) -> StepPlan:
    """Return a plan that admits a sequence of ``tokens`` tokens on ``worker``."""
    segment = Segment(SEQUENCE, worker, (0, SPECS[0].kv_heads), (0, None))
    admission = Admission(SEQUENCE, 1, tokens, [segment], SamplingParams(), 0)
    return plan([admission], [SequenceStep(SEQUENCE, 0, [0] * tokens, [])], [], [])


class NoGapWork:
    """Implements ``GapWork`` without any work."""

    @property
    def awaited(self) -> list[Target]:
        return []

    def serve(self, index: int) -> None:
        """Never called."""
        raise IndexError(index)


class Prompts:
    """Pulls K and V of one chunk after another from the compute worker."""

    def __init__(self, store: Store, puller: Puller) -> None:
        self._puller = puller
        self.gaps: GapWork = NoGapWork()
        (self._step,) = store.apply(begun(MEMORY, CHUNK))

    def go_on(self) -> None:
        """Begin the next chunk if there is none on its way."""
        if self._puller.is_done(PROMPTS, 0):
            self._puller.request_pull(COMPUTE, PLAN.pool[0], 0, self._step, lambda: None)

    def help(self) -> None:
        """Do nothing: the chunk is in the compute worker's arena."""

    def close(self) -> None:
        """Do nothing."""


class Moves:
    """Fetches one sequence after another from another memory worker, which it plays itself."""

    def __init__(self, transport: Transport, secret: Secret, endpoint: Endpoint, arena: Arena) -> None:
        self._other_endpoint = make_endpoint(transport, OTHER, 0.0, secret, LOOPBACK)
        other_arena = self._other_endpoint.register(PLAN.nbytes, PLAN.doorbells)
        other = endpoint.connect(self._other_endpoint.descriptor(), TIMEOUT_S)
        own = self._other_endpoint.connect(endpoint.descriptor(), TIMEOUT_S)
        self.store = Store(MEMORY, MOVED)
        self.puller = Puller(lambda _, fetch: endpoint.fetch(other, fetch), arena, PLAN, self.store)
        self._moves = KvMoves(
            self.store,
            self.puller,
            arena,
            PLAN,
            {OTHER: (BETWEEN, BETWEEN)},
            lambda _, slot: Outbox(endpoint, other, slot),
            self._end,
            FIRST,
        )
        self.gaps: GapWork = self._moves
        store = Store(OTHER, MOVED)
        store.apply(begun(OTHER, MOVED))
        puller = Puller(lambda _, fetch: self._other_endpoint.fetch(own, fetch), other_arena, PLAN, store)
        outbox: OpenOutbox = lambda _, slot: Outbox(self._other_endpoint, own, slot)  # noqa: E731
        leases = {MEMORY: (BETWEEN, BETWEEN)}
        self._other = KvMoves(store, puller, other_arena, PLAN, leases, outbox, lambda _: None, FIRST)
        self._number, self._is_done = 0, True

    def go_on(self) -> None:
        """Begin the next sequence if there is none on its way."""
        if not self._is_done:
            return
        released = [SEQUENCE] if self._number else []
        self._number, self._is_done = self._number + 1, False
        move = KvMove(self._number, SEQUENCE, OTHER, MEMORY, 0, MOVED, SEQUENCE, (0, SPECS[0].kv_heads))
        moves = plan([], [], released, [move])
        self.store.apply(moves)
        self._moves.apply(moves)
        self._other.apply(plan([], [], [], [move]))

    def help(self) -> None:
        """Let the other worker stage a piece, if a staging slot is free."""
        if awaited := self._other.awaited:
            with contextlib.suppress(DeadlineError):
                self._other.serve(self._other_endpoint.wait(awaited, 0.0))

    def _end(self, _: KvMove) -> None:
        self._is_done = True

    def close(self) -> None:
        """Free the other worker's arena."""
        self._other_endpoint.close()


def hold_memory(transport: Transport, bulk: str, secret: Secret, pipe: Connection, core: int) -> None:
    """The memory worker's side. Told "alone" or "beside" before a block and "end" after the last."""
    os.sched_setaffinity(0, {core})
    endpoint = make_endpoint(transport, MEMORY, SPINS["default"], secret, LOOPBACK)
    arena = endpoint.register(PLAN.nbytes, PLAN.doorbells)
    pipe.send(endpoint.descriptor())
    peer = endpoint.connect(pipe.recv(), TIMEOUT_S)
    work: Prompts | Moves
    if bulk == "prompts":
        store = Store(MEMORY, CHUNK)
        puller = Puller(lambda _, fetch: endpoint.fetch(peer, fetch), arena, PLAN, store)
        work = Prompts(store, puller)
    else:
        work = Moves(transport, secret, endpoint, arena)
        store, puller = work.store, work.puller
    outbox = Outbox(endpoint, peer, REPLY)
    answer, number = np.zeros(REPLY_NBYTES, np.uint8), 0
    while (told := pipe.recv()) != "end":
        start, last, kept = time.perf_counter(), number + BLOCK, store.kept
        gaps = work.gaps if told == "beside" else NoGapWork()
        while number < last:
            if told == "beside":
                work.go_on()
                work.help()
            ready, _ = puller.wait(endpoint.wait, [(BELL, number + 1)], TIMEOUT_S, gaps)
            if ready is not None:
                number += 1
                outbox.write_and_ring([answer], number)
        pulled, seconds = store.kept - kept, time.perf_counter() - start
        while puller.awaited or puller.can_start:
            puller.wait(endpoint.wait, [], 0.0, NoGapWork())
        pipe.send((pulled, seconds))
    work.close()
    endpoint.close()


def measure(transport: Transport, bulk: str, rounds: int, slice_us: float, cores: tuple[int, int]) -> Result:
    """Both cases over one transport."""
    secret = new()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    memory = context.Process(target=hold_memory, args=(transport, bulk, secret, theirs, cores[1]))
    memory.start()
    theirs.close()
    os.sched_setaffinity(0, {cores[0]})
    try:
        endpoint = make_endpoint(transport, COMPUTE, SPINS["default"], secret, LOOPBACK)
        endpoint.register(PLAN.nbytes, PLAN.doorbells)
        pipe.send(endpoint.descriptor())
        peer = endpoint.connect(pipe.recv(), TIMEOUT_S)
        outbox = Outbox(endpoint, peer, REQUEST)
        request = np.zeros(REQUEST_NBYTES, np.uint8)
        times: dict[str, list[float]] = {"alone": [], "beside": []}
        pulled, seconds, number = 0, 0.0, 0
        for block in range(2 * rounds // BLOCK + 2):
            told = ("alone", "beside")[block % 2]
            pipe.send(told)
            trips = []
            for _ in range(BLOCK):
                busy_until = time.perf_counter() + slice_us * 1e-6
                while time.perf_counter() < busy_until:
                    pass
                number += 1
                sent = time.perf_counter()
                outbox.write_and_ring([request], number)
                endpoint.wait([(BELL, number)], TIMEOUT_S)
                trips.append((time.perf_counter() - sent) * 1e6)
            nbytes, took = pipe.recv()
            if block >= 2:  # the first two warm up
                times[told] += trips
                pulled, seconds = pulled + nbytes, seconds + took * (told == "beside")
        pipe.send("end")
        memory.join(TIMEOUT_S)
        endpoint.close()
    finally:
        memory.kill()
        memory.join()
    (alone_p50, alone_p99), (beside_p50, beside_p99) = (
        map(float, np.percentile(times[key], (50, 99))) for key in times
    )
    rate = pulled / seconds / 1e9
    return Result(transport.value, bulk, slice_us, alone_p50, alone_p99, beside_p50, beside_p99, rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--bulk", choices=BULKS, nargs="+", default=BULKS)
    parser.add_argument("--rounds", type=int, default=2000, help="of each case")
    parser.add_argument("--slice-us", type=float, default=500.0, help="between an answer and the next request")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[-1])
    results = [
        measure(Transport(name), bulk, args.rounds, args.slice_us, cores)
        for name in args.transports.split(",")
        for bulk in args.bulk
    ]
    figures_of = ("alone p50", "p99", "beside bulk p50", "p99", "p99 ratio", "bulk GB/s")
    table = Table("transport", "bulk", *figures_of, title="round trips, us")
    for result in results:
        figures = (result.alone_p50, result.alone_p99, result.beside_p50, result.beside_p99)
        row = [*(f"{figure:.0f}" for figure in figures), f"{result.ratio:.2f}", f"{result.bulk_gigabytes_per_s:.2f}"]
        table.add_row(result.transport, result.bulk, *row)
    Console().print(table)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
