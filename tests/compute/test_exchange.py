"""Scatter, attend, gather and merge over real slots against attention over the whole history in float64."""

import contextlib
import itertools
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.compute.device.base import Carrier
from lamina.compute.device.emulated import Emulated
from lamina.compute.device.gpu import GpuCarrier
from lamina.compute.exchange import StepExchange
from lamina.control.messages import MemorySetup
from lamina.core.errors import DeadlineError, PlacementError
from lamina.core.sampling import SamplingParams
from lamina.core.segments import forked
from lamina.core.steps import Admission, DecodeRows, Fork, KvMove, SequenceStep, StepPlan
from lamina.core.types import DType, Overlap, Segment
from lamina.dataplane.channel import Arrival
from lamina.dataplane.wire import MessageRows, SegmentRows, pieces
from lamina.memory.cuts import MOST_PRODUCTS
from lamina.memory.device import cpu
from lamina.memory.store import KvStore
from tests.support.attention_clusters import (
    NATIVE,
    SPECS,
    TIMEOUT_S,
    attend,
    connected,
    expected,
    overlaps,
)
from tests.support.late_backend import LateKit

NOBODY = DecodeRows([], [], [])


class Behind(Emulated):
    """Says what a card may still be reading, and fails if that is freed."""

    reading: ClassVar[list[int]] = []

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.reading.append(source.data_ptr())
        super().upload(target, source)

    def synchronize(self) -> None:
        self.reading.clear()


def free_what_was_read(arrival: Arrival) -> None:
    """In place of ``Arrival.free``."""
    if arrival.body is not None and len(arrival.body):
        assert torch.frombuffer(arrival.body, dtype=torch.uint8).data_ptr() not in Behind.reading
    FREE(arrival)


FREE = Arrival.free


class Carriers:
    """By name, carriers of a compute worker: on the CPU, on a card, and on one whose work runs as late as it may."""

    def __init__(self) -> None:
        self.late = LateKit()
        self.named: dict[str, Carrier] = {
            "native": NATIVE,
            "card": GpuCarrier(Behind(), DType.FLOAT32),
            "late": GpuCarrier(self.late, DType.FLOAT32),
        }


@pytest.fixture(scope="module")
def carriers() -> Carriers:
    """Not objects of this module: they keep what their last step read, and would do so until the interpreter ends."""
    return Carriers()


def in_place(carrier: Carrier, array: np.ndarray) -> np.ndarray:
    """Where slices leave their results: on a card, in fixed memory. q, k and v of a layer differ in shape or use."""
    if not isinstance(carrier, GpuCarrier):
        return array
    fixed = carrier.lines.fixed_rows(f"out {next(_numbers) % 3}", len(array), array.shape[1:], torch.float32)
    return fixed.copy_(torch.from_numpy(array)).numpy()


_numbers = itertools.count()
steps = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=5)


@given(
    steps=steps,
    boundary=st.one_of(st.none(), st.integers(1, 12)),
    overlap=overlaps,
    padding=st.integers(0, 3),
    most_products=st.sampled_from([1, MOST_PRODUCTS]),
    which=st.sampled_from(["native", "card", "late"]),
    seed=st.integers(0, 9),
)
def test_steps_of_any_mix_equal_whole_attention(
    steps: list[list[int]],
    boundary: int | None,
    overlap: Overlap,
    padding: int,
    most_products: int,
    which: str,
    seed: int,
    carriers: Carriers,
) -> None:
    """Two sequences take any numbers of tokens in turn; their KV is on one worker or cut at any token between two.

    Their attention is served whole or in cuts.
    """
    random, carrier = np.random.default_rng(seed), carriers.named[which]
    names = ("memory0", "memory1")
    last = (names[1], (boundary, None)) if boundary else None
    layouts: list[list[tuple[str, tuple[int, int | None]]]] = [
        [(names[0], (0, boundary)), *([last] if last else [])],
        [(names[1], (0, None))],
    ]
    segments = {
        sequence: [Segment(sequence, worker, (0, 4), tokens) for worker, tokens in layout]
        for sequence, layout in enumerate(layouts)
    }
    admitted = [Admission(sequence, 1, 0, segments[sequence], SamplingParams(), 0) for sequence in segments]
    history: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    lengths = [0, 0]
    turn = 0
    sinks = random.standard_normal(4).astype(np.float32)
    with (
        mock.patch.object(cpu, "MOST_PRODUCTS", most_products),
        mock.patch.object(Arrival, "free", free_what_was_read),
        connected(names, overlap) as cluster,
        carriers.late.mode if which == "late" else contextlib.nullcontext(),
    ):
        for number, counts in enumerate(steps):
            taken = [SequenceStep(s, lengths[s], [0] * count, []) for s, count in enumerate(counts) if count]
            plan = StepPlan(number, 0, turn, [], [], admitted if number == 0 else [], taken, NOBODY)
            threads = [memory.serve(plan) for memory in cluster.memories.values()]
            total = sum(counts)
            rows = total + padding
            if isinstance(carrier, GpuCarrier):
                cluster.map_peers()
            exchange = StepExchange(plan, segments, cluster.mail, overlap, carrier, rows)
            turn += len(SPECS) if total else 0
            for layer, spec in enumerate(SPECS if total else []):
                q, k, v = (
                    in_place(carrier, random.standard_normal((rows, heads, dim)).astype(np.float32))
                    for heads, dim in (
                        (spec.query_heads, spec.qk_dim),
                        (spec.kv_heads, spec.qk_dim),
                        (spec.kv_heads, spec.v_dim),
                    )
                )
                logits = sinks if spec.sinks else None
                got = attend(cluster, exchange, layer, (q, k, v), logits)
                assert not got[total:].any()  # padding sees nothing
                row = 0
                for step in taken:
                    part = slice(row, row + len(step.tokens))
                    row = part.stop
                    history.setdefault((step.sequence, layer), []).append((k[part].copy(), v[part].copy()))
                    keys, values = (np.concatenate(parts) for parts in zip(*history[step.sequence, layer], strict=True))
                    out, lse = expected(spec, q[part], keys, values, step.start)
                    if logits is not None:
                        out = out / (1 + np.exp(logits - lse))[..., None]
                    np.testing.assert_allclose(got[part], out, atol=2e-5)
            for step in taken:
                lengths[step.sequence] += len(step.tokens)
            for thread in threads:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()


@given(
    attends=st.lists(st.integers(1, 4), max_size=9),
    appends=st.integers(0, 5),
    overlap=overlaps,
)
def test_pieces_cover_a_request_once_and_in_order(attends: list[int], appends: int, overlap: Overlap) -> None:
    segments = tuple(SegmentRows(i, 0, rows, 0, 0, 1) for i, rows in enumerate(attends))
    rows = MessageRows(np.arange(sum(attends)), np.arange(appends), segments, ())
    cut = pieces(rows, overlap)
    assert [part.start for part in cut] == [0, *(part.stop for part in cut[:-1])]
    assert cut[-1].stop == sum(attends)
    assert all(sum(attends[part.first : part.last]) == part.stop - part.start for part in cut)
    assert [part.keeps for part in cut] == [True, *[False] * (len(cut) - 1)]
    assert len(cut) <= overlap.mini_batches


def test_a_prompt_alone_is_answered_too() -> None:
    """Nobody reads that answer, but it says that K and V are kept: only then may the step end and slots be freed."""
    admission = Admission(0, 1, 5, [Segment(0, "memory0", (0, 4), (0, None))], SamplingParams(), 0)
    plan = StepPlan(1, 0, 0, [], [], [admission], [SequenceStep(0, 0, [0] * 5, [])], NOBODY)
    with connected(("memory0",), Overlap()) as cluster:
        exchange = StepExchange(plan, {0: admission.segments}, cluster.mail, Overlap(), NATIVE, 5)
        assert exchange.repliers(0) == ["memory0"]
        with pytest.raises(DeadlineError):
            cluster.mail.receive(cluster.compute.endpoint.wait, exchange.repliers(0), 0.0)
        thread = cluster.memories["memory0"].serve(plan)
        for layer, spec in enumerate(SPECS):
            heads = (spec.query_heads, spec.qk_dim), (spec.kv_heads, spec.qk_dim), (spec.kv_heads, spec.v_dim)
            attend(cluster, exchange, layer, [np.ones((5, *shape), np.float32) for shape in heads], None)
        thread.join(TIMEOUT_S)
        store = cluster.memories["memory0"].store
        slots = store.slab.slots((0, 0))
        for layer, spec in enumerate(SPECS):
            held = bytearray(len(slots) * spec.kv_bytes_per_token(store.dtype))
            store.device.read(layer, slots, memoryview(held))
            assert (np.frombuffer(held, np.float32) == 1).all()


@pytest.mark.parametrize("boundary", [2, 5, 6, 9])
def test_a_forked_completion_attends_to_what_it_shares_on_both_workers(boundary: int) -> None:
    """A prompt of 6 tokens, wherever it is cut; then both completions decode a token of their own."""
    random = np.random.default_rng(boundary)
    names = ("memory0", "memory1")
    placed = [Segment(0, names[0], (0, 4), (0, boundary)), Segment(0, names[1], (0, 4), (boundary, None))]
    segments = {0: placed, 1: forked(placed, 1, 6)}
    plans = [
        StepPlan(
            0,
            0,
            0,
            [],
            [],
            [Admission(0, 2, 6, placed, SamplingParams(), 0)],
            [SequenceStep(0, 0, [0] * 6, [])],
            NOBODY,
        ),
        StepPlan(1, 0, len(SPECS), [Fork(0, 1, 6)], [], [], [], DecodeRows([0, 1], [6, 6], [])),
    ]
    history = []
    with connected(names, Overlap()) as cluster:
        for plan in plans:
            threads = [memory.serve(plan) for memory in cluster.memories.values()]
            rows = sum(len(step.tokens) for step in plan.sequences)
            exchange = StepExchange(plan, segments, cluster.mail, Overlap(), NATIVE, rows)
            for layer, spec in enumerate(SPECS):
                shapes = (spec.query_heads, spec.qk_dim), (spec.kv_heads, spec.qk_dim), (spec.kv_heads, spec.v_dim)
                q, k, v = (random.standard_normal((rows, *shape)).astype(np.float32) for shape in shapes)
                got = attend(cluster, exchange, layer, (q, k, v), None)
                if plan.step == 0:
                    history.append((k, v))
                    continue
                for row in range(2):
                    keys, values = (
                        np.concatenate([old, new[row : row + 1]])
                        for old, new in zip(history[layer], (k, v), strict=True)
                    )
                    out, _ = expected(spec, q[row : row + 1], keys, values, 6)
                    np.testing.assert_allclose(got[row : row + 1], out, atol=2e-5)
            for thread in threads:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()
        for name, memory in cluster.memories.items():
            here = [segment for segment in segments[1] if segment.worker == name]
            assert memory.store.held.segments.get(1, []) == here


def test_plans_that_a_worker_would_serve_wrongly_are_refused_and_change_nothing() -> None:
    store = KvStore("memory0", MemorySetup(SPECS, DType.FLOAT32, 20, 1, Overlap(), False))

    def apply(**deltas: list) -> None:
        nothing: dict[str, Any] = {"forks": [], "released": [], "admitted": [], "chunks": [], "decoding": NOBODY}
        store.apply(StepPlan(0, 0, 0, **(nothing | deltas)))

    cut = [Segment(0, "memory0", (0, 4), (0, 3)), Segment(0, "memory1", (0, 4), (4, None))]
    with pytest.raises(PlacementError, match="must follow"):
        apply(admitted=[Admission(0, 1, 5, cut, SamplingParams(), 0)], chunks=[SequenceStep(0, 0, [0] * 5, [])])
    with pytest.raises(PlacementError, match="must continue there"):
        apply(grown=[Segment(0, "memory0", (0, 4), (0, None))])
    assert (store.slab.used, store.sequences) == (0, 0)
    apply(admitted=[Admission(0, 1, 5, [*cut[:1], Segment(0, "memory1", (0, 4), (3, None))], SamplingParams(), 0)])
    with pytest.raises(PlacementError, match="none has all of them"):
        apply(moves=[KvMove(1, 7, "memory0", "memory2", 0, 4, 0, (0, 2))])
