"""Scatter, attend, gather and merge over real channels against attention over the whole history in float64."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.compute.exchange import StepExchange
from lamina.kernels import reference
from lamina.kernels.attention import SegmentTable
from lamina.memory.store import KvStore
from lamina.transport.channel import ChannelLayout, Requester, Responder
from lamina.transport.shm import ShmEndpoint
from lamina.transport.wire import read_request, reply_nbytes, request_nbytes
from lamina.types import Admission, AttentionSpec, DType, SamplingParams, Segment, SequenceStep, StepPlan

ROWS = 24
TIMEOUT_S = 20.0
SPECS = [
    AttentionSpec(layer=0, query_heads=4, kv_heads=2, qk_dim=8, v_dim=8, scale=0.35),
    AttentionSpec(layer=1, query_heads=4, kv_heads=4, qk_dim=12, v_dim=6, scale=0.3, window=5, softcap=4.0, sinks=True),
]


class Memory:
    """A memory worker on a thread of this process."""

    def __init__(self, name: str) -> None:
        self.endpoint = ShmEndpoint(name)
        self.store = KvStore(name, SPECS, DType.FLOAT32, capacity=200, threads=1)

    def serve(self, responder: Responder, plan: StepPlan) -> threading.Thread:
        tables = self.store.apply(plan)

        def answer() -> None:
            for layer, spec in enumerate(SPECS):
                request = responder.receive(TIMEOUT_S)
                sizes = len(tables.rows.queries), len(tables.rows.appends)
                responder.reply(self.store.attend(layer, tables, *read_request(request, spec, DType.FLOAT32, *sizes)))

        thread = threading.Thread(target=answer if not tables.rows.empty else lambda: None)
        thread.start()
        return thread


@contextmanager
def connected(names: tuple[str, ...]) -> Iterator[tuple[dict[str, Memory], dict[str, Requester], dict[str, Responder]]]:
    layout = ChannelLayout(2, request_nbytes(SPECS, DType.FLOAT32, ROWS), reply_nbytes(SPECS, ROWS))
    compute = ShmEndpoint("compute0")
    arena = compute.register(len(names) * layout.replies_nbytes, len(names))
    memories = {name: Memory(name) for name in names}
    requesters, responders = {}, {}
    for index, (name, memory) in enumerate(memories.items()):
        inbox = memory.endpoint.register(layout.requests_nbytes, 1)
        places = {
            "request_offset": 0,
            "request_doorbell": 0,
            "reply_offset": index * layout.replies_nbytes,
            "reply_doorbell": index,
        }
        peer = compute.connect(memory.endpoint.descriptor(), TIMEOUT_S)
        requesters[name] = Requester(compute, arena, peer, layout, **places)
        back = memory.endpoint.connect(compute.descriptor(), TIMEOUT_S)
        responders[name] = Responder(memory.endpoint, inbox, back, layout, **places)
    try:
        yield memories, requesters, responders
    finally:
        for memory in memories.values():
            memory.endpoint.close()
        compute.close()


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
    return reference.partial(q, k, v, table, spec, 1)


steps = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    steps=steps,
    boundary=st.one_of(st.none(), st.integers(1, 12)),
    padding=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_steps_of_any_mix_equal_whole_attention(
    steps: list[list[int]], boundary: int | None, padding: int, seed: int
) -> None:
    """Two sequences take any numbers of tokens in turn; their KV is on one worker or cut at any token between two."""
    random = np.random.default_rng(seed)
    names = ("memory0", "memory1")
    last = (names[1], (boundary, None)) if boundary else None
    layouts = [
        [(names[0], (0, boundary)), *([last] if last else [])],
        [(names[1], (0, None))],
    ]
    segments = {
        sequence: [Segment(sequence, worker, (0, 4), tokens) for worker, tokens in layout]
        for sequence, layout in enumerate(layouts)
    }
    admitted = [Admission(sequence, 1, segments[sequence], SamplingParams(), 0) for sequence in segments]
    history: dict[tuple[int, int], list[np.ndarray]] = {}
    lengths = [0, 0]
    sinks = random.standard_normal(4).astype(np.float32)
    with connected(names) as (memories, requesters, responders):
        for number, counts in enumerate(steps):
            taken = [SequenceStep(s, lengths[s], [0] * count, []) for s, count in enumerate(counts) if count]
            plan = StepPlan(number, "compute0", [], [], admitted if number == 0 else [], taken)
            threads = [memory.serve(responders[name], plan) for name, memory in memories.items()]
            total = sum(counts)
            exchange = StepExchange(plan, segments, requesters, threads=1, rows=total + padding)
            for layer, spec in enumerate(SPECS if total else []):
                q, k, v = (
                    random.standard_normal((total + padding, heads, dim)).astype(np.float32)
                    for heads, dim in (
                        (spec.query_heads, spec.qk_dim),
                        (spec.kv_heads, spec.qk_dim),
                        (spec.kv_heads, spec.v_dim),
                    )
                )
                logits = sinks if spec.sinks else None
                got = exchange.attend(spec, *map(torch.from_numpy, (q, k, v)), logits).numpy()
                assert not got[total:].any()  # padding sees nothing
                row = 0
                for step in taken:
                    rows = slice(row, row + len(step.tokens))
                    row = rows.stop
                    history.setdefault((step.sequence, layer), []).append((k[rows], v[rows]))
                    keys, values = (np.concatenate(part) for part in zip(*history[step.sequence, layer], strict=True))
                    out, lse = expected(spec, q[rows], keys, values, step.start)
                    if logits is not None:
                        out = out / (1 + np.exp(logits - lse))[..., None]
                    np.testing.assert_allclose(got[rows], out, atol=2e-5)
            for step in taken:
                lengths[step.sequence] += len(step.tokens)
            for thread in threads:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()


def test_a_step_is_drained_only_when_memory_has_taken_in_every_layer() -> None:
    """A prompt's K and V travel without an answer that anyone reads; its slots must not be freed before they arrive."""
    plan = StepPlan(
        1,
        "compute0",
        [],
        [],
        [Admission(0, 1, [Segment(0, "memory0", (0, 4), (0, None))], SamplingParams(), 0)],
        [SequenceStep(0, 0, [0] * 5, [])],
    )
    with connected(("memory0",)) as (memories, requesters, responders):
        store, responder = memories["memory0"].store, responders["memory0"]
        tables = store.apply(plan)
        exchange = StepExchange(plan, {0: plan.admitted[0].segments}, requesters, threads=1, rows=5)
        for spec in SPECS:
            q, k, v = (
                torch.ones(5, heads, dim)
                for heads, dim in (
                    (spec.query_heads, spec.qk_dim),
                    (spec.kv_heads, spec.qk_dim),
                    (spec.kv_heads, spec.v_dim),
                )
            )
            exchange.attend(spec, q, k, v, None)
        drained = threading.Event()
        waiter = threading.Thread(target=lambda: (exchange.drain(), drained.set()))
        waiter.start()
        for layer, spec in enumerate(SPECS):
            assert not drained.wait(0.05)
            request = responder.receive(TIMEOUT_S)
            responder.reply(store.attend(layer, tables, *read_request(request, spec, DType.FLOAT32, 0, 5)))
        assert drained.wait(TIMEOUT_S)
        waiter.join(TIMEOUT_S)
        assert all((layer.k[tables.slots] == 1).all() for layer in store.layers)
