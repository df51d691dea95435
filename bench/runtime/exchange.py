"""Measures the host time of one attention's exchange on a compute worker, by numbers of rows and memory workers.

    python -m bench.runtime.exchange [--layers 80] [--rounds 5]

The exchange, its messages, credits and waits are real. No payload is moved: the transport writes only headers, and the
GPU's kernels and copies do nothing. So the figures show how long the host delays a GPU. Figures for the CPU include
moving bytes, since the host gathers rows and merges partials there. Shapes are those of Llama-3-70B in bfloat16. Memory
workers reply between the measured sections.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from lamina.compute.device.cpu import NativeRunner
from lamina.compute.device.emulated import Emulated
from lamina.compute.device.gpu import GpuCarrier
from lamina.compute.device.kit import Replay
from lamina.compute.exchange import StepExchange
from lamina.compute.mail import Mail
from lamina.core.steps import DecodeRows, StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.dataplane.channel import Channel, Hub
from lamina.dataplane.fetching import Fetcher
from lamina.dataplane.leases import SLOTS, ArenaPlan, Lease, Leases, messages
from lamina.dataplane.slot import Body
from lamina.splitter import SliceOutput
from lamina.transport.base import Arena, Endpoint, Fetch, Part, Peer
from lamina.transport.shm import ShmEndpoint

SPEC = AttentionSpec(0, 64, 8, 128, 128, 128**-0.5)
CONTEXT = 1000
CASES = ((1, 1), (64, 1), (64, 6), (256, 6), (256, 16))  # rows, memory workers: messages that fit their slots
WAIT_S = 10.0


class HeadersOnly(ShmEndpoint):
    """An endpoint that writes only the first part of a message, its header, and rings."""

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        self._connected(peer).native.post(offset, nbytes, parts[:1], doorbell, sequence)


@dataclass
class Station:
    """One worker's end of all its links."""

    name: str
    plan: ArenaPlan
    endpoint: Endpoint = field(init=False)
    arena: Arena = field(init=False)
    hub: Hub = field(init=False)
    books: Leases = field(init=False)
    leases: dict[str, Lease] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.endpoint = HeadersOnly(self.name)
        self.arena = self.endpoint.register(self.plan.nbytes, self.plan.doorbells)
        self.hub = Hub(self.arena, self.plan.pool)
        self.books = Leases(self.plan)

    def link(self, other: "Station") -> None:
        """Make this end of a link."""
        peer = self.endpoint.connect(other.endpoint.descriptor(), WAIT_S)
        self.channels[other.name] = Channel(
            self.endpoint, peer, self.arena, self.hub, self.leases[other.name], other.leases[self.name]
        )


class Case:
    """A step that decodes ``rows`` rows whose sequences are spread over ``workers`` memory workers."""

    def __init__(self, rows: int, workers: int, carrier: NativeRunner | GpuCarrier) -> None:
        self.carrier = carrier
        sizes = messages([SPEC], DType.BFLOAT16, rows, 0)
        names = [f"memory{number}" for number in range(workers)]
        self.compute = Station("compute0", sizes.compute_arena(1, workers))
        self.memories = [Station(name, sizes.memory_arena(1, workers)) for name in names]
        for memory in self.memories:
            self.compute.leases[memory.name] = self.compute.books.lease(sizes.reply)
            memory.leases["compute0"] = memory.books.lease(sizes.request)
        for memory in self.memories:
            self.compute.link(memory)
            memory.link(self.compute)
            if isinstance(carrier, GpuCarrier):  # which writes messages itself
                self.compute.channels[memory.name].bodies = [Body(1, memoryview(b""))] * SLOTS

        self.mail = Mail(
            self.compute.hub,
            self.compute.channels,
            Fetcher(_fetch_nothing, self.compute.arena, sizes.compute_arena(1, workers)),
        )
        self.rows = rows
        self.segments = {
            row: [Segment(row, names[row % workers], (0, SPEC.kv_heads), (0, None))] for row in range(rows)
        }
        heads = (SPEC.query_heads, SPEC.qk_dim), (SPEC.kv_heads, SPEC.qk_dim), (SPEC.kv_heads, SPEC.v_dim)
        self.output = SliceOutput(tuple(made(carrier, f"out {place}", rows, s) for place, s in enumerate(heads)))
        self.turn = 0

    def close(self) -> None:
        for station in (self.compute, *self.memories):
            station.endpoint.close()

    def step(self, layers: int) -> list[float]:
        """Seconds of the compute worker's host time for each attention of one step."""
        rows = list(range(self.rows))
        plan = StepPlan(0, 0, self.turn, [], [], [], [], DecodeRows(rows, [CONTEXT] * self.rows, []))
        self.turn += layers
        exchange = StepExchange(plan, self.segments, self.mail, Overlap(), self.carrier, self.rows)
        times: list[float] = []
        for layer in range(layers):
            begun = time.perf_counter()
            exchange.send_requests(layer, SPEC, self.output)
            self.mail.expect(0, exchange.repliers(layer))
            sending_s = time.perf_counter() - begun
            for memory in self.memories:
                _answer(memory)
            begun = time.perf_counter()
            while missing := self.mail.missing[0]:
                self.mail.receive(self.compute.endpoint.wait, missing, WAIT_S)
            exchange.gather(layer, SPEC, None, None)
            self.mail.flush()
            times.append(sending_s + time.perf_counter() - begun)
        exchange.return_slots()
        return times


class Idle(Emulated):
    """A ``Kit`` whose kernels and copies do nothing."""

    def capture(self, work: Callable[[], object]) -> Replay:
        return lambda: None

    def fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        """See ``Kit``."""

    def write(self, source: torch.Tensor, table: torch.Tensor, bodies: torch.Tensor, lead: int) -> None:
        """See ``Kit``."""

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Kit``."""


def made(carrier: NativeRunner | GpuCarrier, what: str, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    if isinstance(carrier, GpuCarrier):
        return carrier.lines.fixed_rows(what, rows, shape, torch.bfloat16)
    return torch.zeros(rows, *shape, dtype=torch.bfloat16)


def _fetch_nothing(peer: str, fetch: Fetch) -> None:
    raise RuntimeError(f"a message of {peer} did not fit its slot: {fetch}")


def _answer(memory: Station) -> None:
    """Take the request and send a reply of the right length."""
    channel = memory.channels["compute0"]
    awaited = list(channel.awaited.items())
    slot = awaited[memory.endpoint.wait([target for _, target in awaited], WAIT_S)][0]
    channel.close_slot(slot)
    request = channel.read(slot)
    rows = request.nbytes // (SPEC.query_bytes_per_token(DType.BFLOAT16) + SPEC.kv_bytes_per_token(DType.BFLOAT16))
    channel.free(slot)
    out, lse = rows * SPEC.query_heads * SPEC.v_dim * 4, rows * SPEC.query_heads * 4
    channel.begin(request.lane, request.turn, out + lse).send_piece([bytes(0)])
    memory.hub.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    table = Table(title="Microseconds of host time per attention")
    for name in ("rows", "memory workers", "GPU", "CPU", "CPU / GPU"):
        table.add_column(name, justify="right")
    for rows, workers in CASES:
        gpu = Case(rows, workers, GpuCarrier(Idle(), DType.BFLOAT16))
        cpu = Case(rows, workers, NativeRunner(DType.BFLOAT16))
        times: dict[Case, list[float]] = {gpu: [], cpu: []}
        try:
            for case in times:
                case.step(4)
            for _ in range(args.rounds):
                for case, seconds in times.items():
                    seconds.extend(case.step(args.layers))
        finally:
            for case in times:
                case.close()
        us = [statistics.median(each) * 1e6 for each in times.values()]
        table.add_row(str(rows), str(workers), *(f"{each:.0f}" for each in us), f"{us[1] / us[0]:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
