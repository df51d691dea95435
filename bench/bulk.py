"""Decode round trips while K and V of prompt chunks are pulled beside them, against the same round trips alone.

    python bench/bulk.py [--transports shm,tcp] [--rounds 2000] [--json FILE]

Two processes, each with a core of its own if there are two. One computes: it is busy for as long as a slice takes,
then sends a request of one layer for 16 rows of a Llama-3-8B and waits for the answer; the time from one to the other
is the round trip. The other holds memory: it answers at once (attention would take the same time in both cases) and,
in the gaps, pulls chunk after chunk with the memory worker's own ``Puller``. Rounds alone and with bulk take turns.
"""

import argparse
import json
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lamina.config import Overlap
from lamina.errors import DeadlineError
from lamina.memory.pulls import Puller
from lamina.memory.store import KvStore
from lamina.transport.channel import LANDING_NBYTES, Inbox, Layout, Outbox
from lamina.transport.choice import Transport
from lamina.transport.listener import LOOPBACK
from lamina.transport.measure import SPINS, make_endpoint
from lamina.transport.secret import Secret, new
from lamina.transport.wire import reply_nbytes, request_nbytes
from lamina.types import Admission, AttentionSpec, DecodeRows, DType, SamplingParams, Segment, SequenceStep, StepPlan

SPEC = AttentionSpec(layer=0, query_heads=32, kv_heads=8, qk_dim=128, v_dim=128, scale=128**-0.5)
ROWS, CHUNK = 16, 512
DECODES, PROMPTS = 0, 1  # lanes
DTYPE = DType.BFLOAT16
TIMEOUT_S = 60.0
BLOCK = 100  # rounds alone, then so many with bulk
PER_TOKEN = SPEC.kv_bytes_per_token(DTYPE)
LAYOUT = Layout(
    lanes=2,
    memories=1,
    request_nbytes=request_nbytes([SPEC], DTYPE, ROWS),
    reply_nbytes=reply_nbytes([SPEC], ROWS),
    bulk_nbytes=CHUNK * PER_TOKEN,
    landing_nbytes=LANDING_NBYTES,
)


@dataclass(frozen=True)
class Result:
    """Round trips in microseconds, and the gigabytes (1e9 bytes) of bulk per second beside them."""

    transport: str
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


def hold_memory(transport: Transport, secret: Secret, pipe: Connection, core: int) -> None:
    """The memory worker's side. Told "alone" or "beside" before a block and "end" after the last."""
    os.sched_setaffinity(0, {core})
    endpoint = make_endpoint(transport, "memory", SPINS["default"], secret, LOOPBACK)
    arena = endpoint.register(*LAYOUT.memory_arena)
    pipe.send(endpoint.descriptor())
    peer = endpoint.connect(pipe.recv(), TIMEOUT_S)
    store = KvStore("memory", [SPEC], DTYPE, CHUNK, 1, Overlap())
    admission = Admission(0, 1, CHUNK, [Segment(0, "memory", (0, SPEC.query_heads), (0, None))], SamplingParams(), 0)
    chunk, nobody = SequenceStep(0, 0, [0] * CHUNK, []), DecodeRows([], [], [])
    step = store.apply(StepPlan(0, PROMPTS, 0, [], [], [admission], [chunk], nobody))
    puller = Puller(lambda _, *place: endpoint.fetch(peer, *place), arena, LAYOUT, store)
    inbox, outbox = Inbox(arena, LAYOUT.request(DECODES)), Outbox(endpoint, peer, LAYOUT.reply(DECODES, 0))
    answer, number, pulled = np.zeros(LAYOUT.reply_nbytes, np.uint8), 0, 0
    while (told := pipe.recv()) != "end":
        begun, last = time.perf_counter(), number + BLOCK
        while number < last:
            if told == "beside" and puller.is_done(PROMPTS, 0):
                puller.add("compute", 0, step)
                pulled += CHUNK * PER_TOKEN
            try:
                ready, _ = puller.wait(endpoint.wait, [(inbox.doorbell, number + 1)], TIMEOUT_S)
            except DeadlineError:
                continue
            if ready is not None:
                number += 1
                outbox.send([answer], number)
        seconds = time.perf_counter() - begun
        while not puller.is_done(PROMPTS, 0):
            puller.wait(endpoint.wait, [], 0.0)
        pipe.send((pulled, seconds))
        pulled = 0
    endpoint.close()


def measure(transport: Transport, rounds: int, slice_us: float, cores: tuple[int, int]) -> Result:
    """Both cases over one transport."""
    secret = new()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    memory = context.Process(target=hold_memory, args=(transport, secret, theirs, cores[1]))
    memory.start()
    theirs.close()
    os.sched_setaffinity(0, {cores[0]})
    try:
        endpoint = make_endpoint(transport, "compute", SPINS["default"], secret, LOOPBACK)
        arena = endpoint.register(*LAYOUT.compute_arena)
        pipe.send(endpoint.descriptor())
        peer = endpoint.connect(pipe.recv(), TIMEOUT_S)
        outbox, inbox = Outbox(endpoint, peer, LAYOUT.request(DECODES)), Inbox(arena, LAYOUT.reply(DECODES, 0))
        request = np.zeros(LAYOUT.request_nbytes, np.uint8)
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
                outbox.send([request], number)
                endpoint.wait([(inbox.doorbell, number)], TIMEOUT_S)
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
    (alone_p50, alone_p99), (beside_p50, beside_p99) = (np.percentile(times[key], (50, 99)) for key in times)
    rate = pulled / seconds / 1e9
    return Result(transport.value, slice_us, *map(float, (alone_p50, alone_p99, beside_p50, beside_p99)), rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--rounds", type=int, default=2000, help="of each case")
    parser.add_argument("--slice-us", type=float, default=500.0, help="between an answer and the next request")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[-1])
    results = [measure(Transport(name), args.rounds, args.slice_us, cores) for name in args.transports.split(",")]
    table = Table(
        "transport", "alone p50", "p99", "beside bulk p50", "p99", "p99 ratio", "bulk GB/s", title="round trips, us"
    )
    for result in results:
        figures = (result.alone_p50, result.alone_p99, result.beside_p50, result.beside_p99)
        row = [*(f"{figure:.0f}" for figure in figures), f"{result.ratio:.2f}", f"{result.bulk_gigabytes_per_s:.2f}"]
        table.add_row(result.transport, *row)
    Console().print(table)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
