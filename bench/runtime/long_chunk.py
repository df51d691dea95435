"""Measures decode messages beside the attention of a long prompt chunk, with and without cuts.

    python -m bench.runtime.long_chunk [--prefix 16384] [--rows 512] [--chunks 3] [--threads 1] [--json FILE]

Two memory workers run in turn: an ordinary one, and one that does not cut attention. This process plays the compute
worker over shared memory. In one lane it requests the attention of a chunk of ``rows`` rows over a prefix, one layer of
a Llama-3-8B; in another lane it sends decode messages of 16 rows over 256 tokens each, a millisecond after the last
reply. The chunk's time is also measured alone.
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
from msgspec.structs import replace

from bench.gpu.worker import COMPUTE, MEMORY, PipeControl
from lamina.compute.mail import Mail
from lamina.control.messages import Connect, Grant, Link, LinkWay, MemorySetup, Register, Reserve, Step, Stop
from lamina.control.secret import new
from lamina.core.errors import DeadlineError
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.dataplane.fetching import Fetcher
from lamina.dataplane.leases import messages, slot_rows
from lamina.dataplane.transport_choice import Transport
from lamina.memory.cuts import MOST_PRODUCTS
from lamina.memory.worker import build
from lamina.transport.endpoint import SPIN_S
from lamina.worker.links import Member, open_links

SPEC = AttentionSpec(0, 32, 8, 128, 128, scale=128**-0.5)
DTYPE = DType.BFLOAT16
DECODING, CONTEXT = 16, 256  # sequences, tokens of each
DECODES, PROMPTS = 0, 1  # lanes
LONG = DECODING  # the sequence with the prefix
PER_TOKEN = SPEC.kv_bytes_per_token(DTYPE)
TIMEOUT_S = 300.0
PAUSE_S = 1e-3


def serve(pipe: Connection, secret: bytes, whole: bool) -> None:
    """The memory worker's process."""
    most = 1 << 62 if whole else MOST_PRODUCTS
    with mock.patch("lamina.memory.device.cpu.MOST_PRODUCTS", most), contextlib.ExitStack() as resources:
        build(PipeControl(pipe, secret, "cpu"), resources).serve_until_closed()  # type: ignore[arg-type]


class Cluster:
    """A memory worker in a process of its own, and this process as its engine and compute worker."""

    def __init__(self, prefix: int, rows: int, threads: int, whole: bool) -> None:
        self._rows, self._prefix = rows, prefix
        secret = new().data_plane
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, secret, whole), daemon=True)
        self._process.start()
        capacity = prefix + 4 * rows * 64 + DECODING * (CONTEXT + 100_000)
        setup = MemorySetup([SPEC], DTYPE, capacity, threads, Overlap(), trace=False)
        self._pipe.send(Reserve(setup, rows, DECODING + 1, 4, slot_rows(rows, 1)))
        self._pipe.send(setup)
        self._pipe.recv()
        bulk = max(prefix, rows, DECODING * CONTEXT) * PER_TOKEN
        sizes = messages([SPEC], DTYPE, rows, 0)
        sizes = replace(sizes, fetched_from_compute=sizes.fetched_from_compute + bulk)
        self._pipe.send(Register(sizes.memory_arena(1, 1), [Transport.SHM], SPIN_S))
        offer = self._pipe.recv().offer
        register = Register(sizes.compute_arena(1, 1), [Transport.SHM], SPIN_S)
        self._links = open_links(Member(COMPUTE, secret, "127.0.0.1"), register)
        own = self._links.grant(Grant({MEMORY: sizes.reply})).leases[MEMORY]
        self._pipe.send(Grant({COMPUTE: sizes.request}))
        theirs = self._pipe.recv().leases[COMPUTE]
        self._pipe.send(Link(1, {COMPUTE: LinkWay(Transport.SHM, self._links.offer.descriptors[Transport.SHM], own)}))
        self._links.link(Link(1, {MEMORY: LinkWay(Transport.SHM, offer.descriptors[Transport.SHM], theirs)}))
        self._pipe.recv()
        connect = Connect([COMPUTE], [MEMORY], Pipeline(2, 1))
        self._pipe.send(connect)
        self._pipe.recv()
        self._wait = self._links.close_unused_endpoints()
        fetcher = Fetcher(self._links.fetch, self._links.arena, self._links.plan)
        self._mail = Mail(self._links.hub, {MEMORY: self._links.channel(MEMORY)}, fetcher)
        self._turns, self._starts, self._steps = [0, 0], [0] * (DECODING + 1), 0
        random = np.random.default_rng(0)
        self._values = (
            (random.standard_normal(2**20, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        )
        self._prompt(DECODES, list(range(DECODING)), CONTEXT)
        self._prompt(PROMPTS, [LONG], prefix)

    def _prompt(self, lane: int, sequences: list[int], tokens: int) -> None:
        admitted = [
            Admission(each, 1, tokens, [Segment(each, MEMORY, (0, SPEC.kv_heads), (0, None))], SamplingParams(), 0)
            for each in sequences
        ]
        self._plan(lane, admitted, [SequenceStep(each, 0, [0] * tokens, []) for each in sequences], [])
        for each in sequences:
            self._starts[each] = tokens
        self._send(lane, 0, len(sequences) * tokens * PER_TOKEN)
        self.receive(lane)

    def _plan(self, lane: int, admitted: list[Admission], chunks: list[SequenceStep], decoding: list[int]) -> None:
        rows = DecodeRows(decoding, [self._starts[each] for each in decoding], [])
        for each in decoding:
            self._starts[each] += 1
        self._steps += 1
        self._pipe.send(Step(StepPlan(self._steps, lane, self._turns[lane], [], [], admitted, chunks, rows)))

    def plan_decode(self) -> None:
        """Announce the next step of all sequences that decode."""
        self._plan(DECODES, [], [], list(range(DECODING)))

    def send_decode(self) -> None:
        nbytes = DECODING * (PER_TOKEN + SPEC.query_bytes_per_token(DTYPE))
        self._send(DECODES, nbytes)

    def send_chunk(self) -> None:
        """Announce a chunk on top of the prefix, and send its message."""
        start = self._starts[LONG]
        self._plan(PROMPTS, [], [SequenceStep(LONG, start, [0] * self._rows, [])], [])
        self._starts[LONG] += self._rows
        self._send(PROMPTS, self._rows * SPEC.query_bytes_per_token(DTYPE), self._rows * PER_TOKEN)

    def _send(self, lane: int, nbytes: int, bulk: int = 0) -> None:
        message = self._mail.channels[MEMORY].begin(lane, self._turns[lane], nbytes, bulk)
        message.lay_out(0, [np.resize(self._values, bulk)])
        message.send_piece([np.resize(self._values, nbytes)])
        self._mail.expect(lane, [MEMORY])

    def receive(self, lane: int, timeout_s: float = TIMEOUT_S) -> bool:
        """Wait for the lane's answer; False if it does not come in time."""
        try:
            while self._mail.missing[lane]:
                self._mail.receive(self._wait, [MEMORY], timeout_s)
        except DeadlineError:
            return False
        self._mail.pop_message(lane, MEMORY).free()
        self._mail.flush()
        self._turns[lane] += 1
        while self._pipe.poll():
            self._pipe.recv()
        return True

    def decode(self) -> float:
        """One decode message's round trip in seconds."""
        self.plan_decode()
        time.sleep(PAUSE_S)
        begun = time.perf_counter()
        self.send_decode()
        self.receive(DECODES)
        return time.perf_counter() - begun

    def chunk_alone(self) -> float:
        """Seconds of a chunk with nothing beside it, of the worker's processor time: others may use the machine."""
        begun = self._busy_s()
        self.send_chunk()
        self.receive(PROMPTS)
        return self._busy_s() - begun

    def _busy_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def chunk_beside(self) -> list[float]:
        """Seconds of the decode messages beside a chunk."""
        self.send_chunk()
        trips = []
        while not self.receive(PROMPTS, 0.0):
            trips.append(self.decode())
        return trips

    def close(self) -> None:
        self._pipe.send(Stop())
        self._process.join(TIMEOUT_S)
        self._links.close()


@dataclass(frozen=True)
class Result:
    """Milliseconds: processor time of a chunk alone, then decode messages alone (medians of both) and beside chunks."""

    how: str
    chunk_alone: float
    decode_alone: float
    beside_p50: float
    beside_p99: float
    messages: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    clusters = {how: Cluster(args.prefix, args.rows, args.threads, how == "whole") for how in ("whole", "cut")}
    alone: dict[str, list[float]] = {how: [] for how in clusters}
    trips: dict[str, list[float]] = {how: [] for how in clusters}
    decodes: dict[str, list[float]] = {how: [] for how in clusters}
    for _ in range(args.chunks):
        for how, cluster in clusters.items():
            alone[how].append(cluster.chunk_alone())
            decodes[how] += [cluster.decode() for _ in range(20)]
            trips[how] += cluster.chunk_beside()
    results = []
    for how, cluster in clusters.items():
        cluster.close()
        p50, p99 = np.percentile(trips[how], (50, 99)) * 1e3
        medians = statistics.median(alone[how]) * 1e3, statistics.median(decodes[how]) * 1e3
        results.append(Result(how, *medians, float(p50), float(p99), len(trips[how])))
        print(results[-1])
    ratio = statistics.median(cut / whole for cut, whole in zip(alone["cut"], alone["whole"], strict=True))
    print(f"chunk cut over whole: {ratio:.3f}")
    if args.json:
        figures = {
            "arguments": vars(args) | {"json": None},
            "ratio": ratio,
            "results": [asdict(each) for each in results],
        }
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
