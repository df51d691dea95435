"""Measures a memory worker on a GPU, with the GPU or the host polling for messages.

    python -m bench.gpu.worker [--device cuda:0] [--layers 16] [--steps 20] [--batches 1 16 64] [--tokens 1024]

The worker is a separate process. This process plays the compute worker on the same host: it sends each layer's request
over shared memory, and the next request as soon as the reply has arrived. ``trip_us`` is the median time from a request
to its reply, for one layer of a Llama-3-8B. ``--device emulated`` runs without a GPU; its times mean nothing.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from msgspec.structs import replace

from lamina.compute.mail import Mail
from lamina.control.messages import (
    Connect,
    Connected,
    Grant,
    Granted,
    Link,
    Linked,
    LinkWay,
    MemorySetup,
    Register,
    Registered,
    Reserve,
    SlabReady,
    Step,
    Stop,
)
from lamina.control.secret import new
from lamina.core.errors import DeadlineError
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap, Polling, Segment
from lamina.dataplane.fetching import Fetcher
from lamina.dataplane.leases import messages, slot_rows
from lamina.dataplane.transport_choice import Transport
from lamina.memory.worker import build
from lamina.transport.endpoint import OWN_CORES_SPIN_S
from lamina.worker.links import Member, open_links

DTYPE = DType.BFLOAT16
COMPUTE, MEMORY = "compute0", "memory0"
TIMEOUT_S = 120.0
WARM = 2  # steps
SETTINGS: tuple[Polling, ...] = ("host", "device")


class PipeControl:
    """A worker's end of a control plane that is a pipe."""

    name, local_address, bind_address = MEMORY, "127.0.0.1", "127.0.0.1"
    shares_gpu = False

    def __init__(self, pipe: Connection, secret: bytes, device: str) -> None:
        self._pipe, self.data_secret, self.device = pipe, secret, device

    def send(self, message: Any) -> None:
        self._pipe.send(message)

    def receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise DeadlineError(f"no message within {timeout_s} s")
        return self._pipe.recv()

    def poll(self, timeout_s: float = 0.0) -> Any:
        return self._pipe.recv() if self._pipe.poll(timeout_s) else None


def serve(pipe: Connection, secret: bytes, device: str) -> None:
    with contextlib.ExitStack() as resources:
        build(PipeControl(pipe, secret, device), resources).serve_until_closed()  # type: ignore[arg-type]


class Cluster:
    """A memory worker in a process of its own, and this process as its engine and compute worker.

    ``batch`` sequences decode in one lane, from ``tokens`` tokens each.
    """

    def __init__(self, device: str, polling: Polling, layers: int, batch: int, tokens: int, steps: int) -> None:
        self._specs = [AttentionSpec(layer, 32, 8, 128, 128, scale=128**-0.5) for layer in range(layers)]
        self._spec, self._batch, self._steps, self._turn = self._specs[0], batch, 0, 0
        self._per_token = self._spec.kv_bytes_per_token(DTYPE)
        secret = new().data_plane
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, secret, device), daemon=True)
        self._process.start()
        capacity, bulk = batch * (tokens + steps + 1), batch * tokens * self._per_token
        setup = MemorySetup(self._specs, DTYPE, capacity, 1, Overlap(), trace=False, polling=polling)
        self._pipe.send(Reserve(setup, batch, batch, 2, slot_rows(batch, 1)))
        self._pipe.send(setup)
        self._hear(SlabReady)
        sizes = messages(self._specs, DTYPE, batch, 0)
        sizes = replace(sizes, fetched_from_compute=sizes.fetched_from_compute + bulk)
        self._pipe.send(Register(sizes.memory_arena(1, 1), [Transport.SHM], OWN_CORES_SPIN_S))
        offer = self._hear(Registered).offer
        register = Register(sizes.compute_arena(1, 1), [Transport.SHM], OWN_CORES_SPIN_S)
        self._links = open_links(Member(COMPUTE, secret, "127.0.0.1"), register)
        own = self._links.grant(Grant({MEMORY: sizes.reply})).leases[MEMORY]
        self._pipe.send(Grant({COMPUTE: sizes.request}))
        there = self._hear(Granted).leases[COMPUTE]
        self._pipe.send(Link(1, {COMPUTE: LinkWay(Transport.SHM, self._links.offer.descriptors[Transport.SHM], own)}))
        self._links.link(Link(1, {MEMORY: LinkWay(Transport.SHM, offer.descriptors[Transport.SHM], there)}))
        assert not self._hear(Linked).failures
        self._pipe.send(Connect([COMPUTE], [MEMORY], Pipeline(1, 1)))
        self._hear(Connected)
        self._wait = self._links.close_unused_endpoints()
        fetcher = Fetcher(self._links.fetch, self._links.arena, self._links.plan)
        self._mail = Mail(self._links.hub, {MEMORY: self._links.channel(MEMORY)}, fetcher)
        nbytes = batch * (self._per_token + self._spec.query_bytes_per_token(DTYPE))
        random = np.random.default_rng(0)
        self._request = (random.standard_normal(nbytes // 2, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self._prompt(tokens)

    def _hear(self, kind: type) -> Any:
        while True:
            if not self._pipe.poll(TIMEOUT_S):
                raise DeadlineError(f"the memory worker has sent no {kind.__name__} within {TIMEOUT_S:g} s")
            if isinstance(message := self._pipe.recv(), kind):
                return message

    def _prompt(self, tokens: int) -> None:
        segments = [Segment(each, MEMORY, (0, 8), (0, None)) for each in range(self._batch)]
        admitted = [Admission(each.sequence, 1, tokens, [each], SamplingParams(), 0) for each in segments]
        chunks = [SequenceStep(each, 0, [0] * tokens, []) for each in range(self._batch)]
        self._plan(admitted, chunks, DecodeRows([], [], []))
        self._starts = tokens
        nbytes = self._batch * tokens * self._per_token
        for _ in self._specs:
            message = self._mail.channels[MEMORY].begin(0, self._turn, 0, nbytes)
            message.lay_out(0, [np.resize(self._request.view(np.uint8), nbytes)])
            message.send_piece([])
            self._receive()

    def _plan(self, admitted: list[Admission], chunks: list[SequenceStep], rows: DecodeRows) -> None:
        self._steps += 1
        self._pipe.send(Step(StepPlan(self._steps, 0, self._turn, [], [], admitted, chunks, rows)))

    def step(self) -> list[float]:
        sequences = list(range(self._batch))
        self._plan([], [], DecodeRows(sequences, [self._starts] * self._batch, []))
        self._starts += 1
        time.sleep(0.005)  # the last slice and the first one
        trips = []
        for _ in self._specs:
            begun = time.perf_counter()
            self._mail.channels[MEMORY].send_message(0, self._turn, self._request.nbytes, [self._request])
            self._receive()
            trips.append(time.perf_counter() - begun)
        return trips

    def _receive(self) -> None:
        self._mail.expect(0, [MEMORY])
        while self._mail.missing[0]:
            self._mail.receive(self._wait, [MEMORY], TIMEOUT_S)
        self._mail.pop_message(0, MEMORY).free()
        self._mail.flush()
        self._turn += 1
        while self._pipe.poll():
            self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(Stop())
        self._process.join(TIMEOUT_S)
        self._links.close()


def worker(device: str, layers: int, batches: list[int], tokens: int, steps: int) -> list[dict[str, Any]]:
    """One row for each batch: the trips of both, and the ratio."""
    rows = []
    for batch in batches:
        row: dict[str, Any] = {"batch": batch, "tokens": tokens}
        for polling in SETTINGS:
            cluster = Cluster(device, polling, layers, batch, tokens, steps)
            trips = [cluster.step() for _ in range(steps)][WARM:]
            cluster.close()
            row[f"{polling}_us"] = 1e6 * statistics.median(trip for each in trips for trip in each)
        rows.append(row | {"host_over_device": row["host_us"] / row["device_us"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    for row in worker(args.device, args.layers, args.batches, args.tokens, args.steps):
        print(row)


if __name__ == "__main__":
    main()
