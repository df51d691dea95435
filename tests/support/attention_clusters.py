"""A compute worker and memory workers in one process, linked by real slots, and attention over whole histories."""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from lamina.compute.device.cpu import NativeRunner
from lamina.compute.exchange import StepExchange
from lamina.compute.mail import Mail
from lamina.control.messages import MemorySetup
from lamina.core.heads import HeadShards
from lamina.core.steps import StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap
from lamina.dataplane.leases import ArenaPlan, lease_nbytes
from lamina.dataplane.slot import Direct
from lamina.dataplane.wire import piece_nbytes
from lamina.kernels.segments import SegmentTable
from lamina.memory.pulls import Puller
from lamina.memory.store import KvStore
from lamina.splitter import SliceOutput
from lamina.transport.shm import ShmEndpoint, ShmPeer
from tests.support import reference_attention
from tests.support.channels import Station, link

ROWS = 24
TIMEOUT_S = 20.0
SLOT_NBYTES = 64 + 640  # for a message of about three rows
NATIVE = NativeRunner(DType.FLOAT32)
SPECS = [
    AttentionSpec(layer=0, query_heads=4, kv_heads=2, qk_dim=8, v_dim=8, scale=0.35),
    AttentionSpec(layer=1, query_heads=4, kv_heads=4, qk_dim=12, v_dim=6, scale=0.3, window=5, softcap=4.0, sinks=True),
    AttentionSpec(layer=2, query_heads=4, kv_heads=1, qk_dim=4, v_dim=8, scale=0.5, alibi_slopes=(0.5, 0.25, 0.1, 0.0)),
    AttentionSpec(layer=3, query_heads=2, kv_heads=2, qk_dim=4, v_dim=4, scale=0.5, chunk=6),
]


overlaps = st.builds(Overlap, mini_batches=st.integers(1, 3))


class Memory:
    """A memory worker on a thread of this process: the worker's own body, without its control plane."""

    def __init__(
        self, station: Station, overlap: Overlap, specs: list[AttentionSpec], shards: int, capacity: int, device: str
    ) -> None:
        self.station = station
        self.store = KvStore(
            station.name,
            MemorySetup(specs, DType.FLOAT32, capacity, 1, overlap, False, head_shards=shards),
            device,
        )
        self.puller = Puller(station.fetch, station.arena, station.plan, self.store)

    def pull(self, turn: int) -> None:
        """All up to this turn, and no more."""
        while not self.puller.is_done(0, turn):
            self._fetch_one()

    def _fetch_one(self) -> None:
        if self.puller.can_start:
            self.puller.start_next()
        else:
            self.puller.finish(self.station.endpoint.wait(self.puller.awaited, TIMEOUT_S))
            self.station.hub.flush()

    def serve(self, plan: StepPlan) -> threading.Thread:
        (step,) = self.store.apply(plan)

        def answer() -> None:
            channel = self.station.channels["compute0"]
            for layer, spec in enumerate(self.store.attentions):
                shape = (len(step.rows.queries), spec.query_heads, spec.v_dim)
                out, lse = np.empty(shape, np.float32), np.empty(shape[:2], np.float32)
                turn, slot, at, body = plan.turn + layer, -1, 0, memoryview(b"")
                for number, piece in enumerate(step.pieces):
                    awaited = list(channel.awaited.items())
                    index = self.station.endpoint.wait([target for _, target in awaited], TIMEOUT_S)
                    slot = awaited[index][0]
                    if number == 0:
                        request = channel.read(slot)
                        body = memoryview(bytearray(request.nbytes)) if request.body is None else request.body
                    assert (request.turn, request.slot) == (turn, slot)
                    nbytes = piece_nbytes(spec, DType.FLOAT32, step.rows, piece)
                    if request.body is None and nbytes:
                        fetched: list[int] = []
                        into = body[at : at + nbytes]
                        done = functools.partial(fetched.append, number)
                        self.puller.add_body("compute0", request.fetched_at + at, into, done)
                        while not fetched:
                            self._fetch_one()
                    at += nbytes
                    for _ in self.store.serve(layer, step, number, body, out, lse):
                        pass
                    if number < len(step.pieces) - 1:
                        channel.open_slot(slot)
                assert at == request.nbytes
                channel.free(slot)
                done = functools.partial(channel.fetched, request.number)
                if step.rows.pulled:
                    self.puller.request_pull("compute0", request.bulk_at, layer, step, done)
                elif request.fetched_at >= 0:
                    done()
                self.pull(turn if layer == len(self.store.attentions) - 1 else -1)
                parts = [out, lse] if len(step.rows.queries) else []
                message = channel.begin(0, turn, sum(part.nbytes for part in parts))
                message.send_piece(parts)
                while self.station.hub.keeping:
                    self.station.endpoint.wait(self.station.hub.credits, TIMEOUT_S)
                    self.station.hub.send_kept()
                self.station.hub.flush()

        thread = threading.Thread(target=answer if not step.rows.empty else lambda: None)
        thread.start()
        return thread


class Connected(NamedTuple):
    """A compute worker's end of one lane, and the memory workers with their ends."""

    compute: Station
    mail: Mail
    memories: dict[str, Memory]
    specs: list[AttentionSpec]
    shards: HeadShards

    def map_peers(self) -> None:
        """The compute worker's device writes messages into slots of memory workers."""
        for name, channel in self.compute.channels.items():
            peer = self.compute.peers[name]
            assert isinstance(peer, ShmPeer)
            lease = self.memories[name].station.leases["compute0"]
            channel.bodies = Direct(peer.native, peer.native, lease, lease).bodies


@contextmanager
def connected(
    names: tuple[str, ...],
    overlap: Overlap,
    specs: list[AttentionSpec] = SPECS,
    shards: int = 1,
    capacity: int = 200,
    device: str = "cpu",
) -> Iterator[Connected]:
    """Slots hold a few rows; larger messages are fetched. ``device``: of the first memory worker."""
    per_token = max(spec.kv_bytes_per_token(DType.FLOAT32) for spec in specs)
    plan = ArenaPlan(2 * per_token, False, 4 * ROWS * 1024, {lease_nbytes(SLOT_NBYTES): 4})
    stations = [Station(name, ShmEndpoint(name), plan) for name in ("compute0", *names)]
    pairs = [("compute0", name) for name in names]
    link(stations, dict.fromkeys(pairs + [(name, own) for own, name in pairs], SLOT_NBYTES))
    compute, *others = stations
    try:
        mail = Mail(compute.hub, compute.channels, compute.fetcher())
        devices = [device, *["cpu"] * len(others)]  # Triton's interpreter runs in one thread at a time
        memories = {
            one.name: Memory(one, overlap, specs, shards, capacity, own)
            for one, own in zip(others, devices, strict=False)
        }
        yield Connected(compute, mail, memories, specs, HeadShards(max(spec.kv_heads for spec in specs), shards))
    finally:
        for station in stations:
            station.endpoint.close()


def attend(
    cluster: Connected, exchange: StepExchange, layer: int, tensors: Sequence[np.ndarray], sinks: np.ndarray | None
) -> np.ndarray:
    """One attention as a step runs it."""
    spec = cluster.specs[layer]
    output = SliceOutput(tuple(map(torch.from_numpy, tensors)))
    exchange.send_requests(layer, spec, output)
    chunks = exchange.attend_chunks(layer, spec, output)
    cluster.mail.expect(0, exchange.repliers(layer))
    while missing := cluster.mail.missing[0]:
        cluster.mail.receive(cluster.compute.endpoint.wait, missing, TIMEOUT_S)
    out = exchange.gather(layer, spec, chunks, sinks).clone().numpy()
    if layer == len(cluster.specs) - 1:
        exchange.return_slots()
    cluster.mail.flush()
    return out


def expected(
    spec: AttentionSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Whole attention of rows at positions ``start``.. over all tokens of one sequence."""
    bounds = np.array([0, len(k)], np.int32)
    table = SegmentTable(
        query_offsets=np.array([0, len(q)], np.int32),
        query_start=np.array([start], np.int32),
        kv_offsets=bounds,
        kv_start=np.zeros(1, np.int32),
        slots=np.arange(len(k), dtype=np.int32),
    )
    return reference_attention.partial(q, k, v, table, spec, 1)
