"""Prompts in scratch memory: attention, what memory workers get, and slots, against whole attention in float64."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.compute.device.base import Carrier
from lamina.compute.device.emulated import Emulated
from lamina.compute.device.gpu import GpuCarrier
from lamina.compute.exchange import StepExchange
from lamina.compute.local_memory import Scratch
from lamina.control.messages import MemorySetup
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.dataplane.wire import SCRATCH, body_nbytes, message_rows
from lamina.memory.store import KvStore
from tests.support.attention_clusters import NATIVE, SPECS, TIMEOUT_S, Connected, attend, connected, expected

NOBODY = DecodeRows([], [], [])
NAMES = ("memory0", "memory1")
KEPT, OTHER = 0, 1


@pytest.fixture(scope="module")
def carriers() -> dict[str, Carrier]:
    """Not objects of this module: they keep what their last step read, and would do so until the interpreter ends."""
    return {"native": NATIVE, "card": GpuCarrier(Emulated(), DType.FLOAT32)}


def scratch(capacity: int = 64, layers: range = range(len(SPECS))) -> Scratch:
    setup = MemorySetup([SPECS[layer] for layer in layers], DType.FLOAT32, capacity, 1, Overlap(), False)
    return Scratch(KvStore(SCRATCH, setup), layers)


def drawn(random: np.random.Generator, spec: AttentionSpec, rows: int) -> tuple[np.ndarray, ...]:
    shapes = (spec.query_heads, spec.qk_dim), (spec.kv_heads, spec.qk_dim), (spec.kv_heads, spec.v_dim)
    return tuple(random.standard_normal((rows, *shape)).astype(np.float32) for shape in shapes)


class Course:
    """Steps of a prompt in scratch memory and of another sequence, each compared with whole attention.

    The first ``cached`` tokens of the prompt are only on memory workers.
    """

    def __init__(self, cluster: Connected, carrier: Carrier, boundary: int | None, seed: int, cached: int = 0) -> None:
        self.cluster, self.carrier, self.scratch, self.cached = cluster, carrier, scratch(), cached
        self.random = np.random.default_rng(seed)
        ends = [(NAMES[0], (0, boundary)), *([(NAMES[1], (boundary, None))] if boundary else [])]
        self.segments = {
            KEPT: [Segment(KEPT, worker, (0, 4), tokens) for worker, tokens in ends],
            OTHER: [Segment(OTHER, NAMES[1], (0, 4), (0, None))],
        }
        self.history: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
        self.lengths, self.step = [0, 0], 0
        if cached:
            self.run((cached, 1), keeps=False)

    def run(self, counts: tuple[int, int], keeps: bool = True, draws: bool = False) -> None:
        """One step with ``counts`` tokens of each sequence; ``keeps``: the prompt is in scratch memory."""
        taken = [
            SequenceStep(
                each, self.lengths[each], [0] * count, [each] * draws, self.cached if keeps and each == KEPT else None
            )
            for each, count in enumerate(counts)
            if count
        ]
        admitted = [Admission(each, 1, 0, self.segments[each], SamplingParams(), 0) for each in self.segments]
        turn = self.step * len(SPECS)
        plan = StepPlan(self.step, 0, turn, [], [], [] if self.step else admitted, taken, NOBODY)
        self.check_requests(plan)
        threads = [memory.serve(plan) for memory in self.cluster.memories.values()]
        share, rows = self.scratch.apply_plan(plan), sum(counts)
        exchange = StepExchange(plan, self.segments, self.cluster.mail, Overlap(), self.carrier, rows, scratch=share)
        for layer, spec in enumerate(SPECS):
            tensors = drawn(self.random, spec, rows)
            got = attend(self.cluster, exchange, layer, tensors, None)
            self.compare(layer, spec, taken, tensors, got)
        for step in taken:
            self.lengths[step.sequence] += len(step.tokens)
        self.step += 1
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def check_requests(self, plan: StepPlan) -> None:
        """Memory workers attend to nothing of a prompt in scratch memory but its cached tokens: with none, and no other
        sequence, requests are empty."""
        kept = {chunk.sequence: chunk.scratch for chunk in plan.chunks if chunk.scratch is not None}
        for name in NAMES:
            rows = message_rows(plan, self.segments, name)
            seen = [one for one in (*rows.attends, *(one for _, one in rows.further)) if one.sequence in kept]
            assert all(one.kv_stop <= self.cached for one in seen)
            if kept.keys() == {chunk.sequence for chunk in plan.chunks} and not seen:
                assert not any(body_nbytes(spec, DType.FLOAT32, rows) for spec in SPECS)

    def compare(
        self,
        layer: int,
        spec: AttentionSpec,
        taken: list[SequenceStep],
        tensors: tuple[np.ndarray, ...],
        got: np.ndarray,
    ) -> None:
        q, k, v = tensors
        row = 0
        for step in taken:
            part = slice(row, row + len(step.tokens))
            row = part.stop
            self.history.setdefault((step.sequence, layer), []).append((k[part].copy(), v[part].copy()))
            keys, values = (np.concatenate(parts) for parts in zip(*self.history[step.sequence, layer], strict=True))
            out, _ = expected(spec, q[part], keys, values, step.start)
            np.testing.assert_allclose(got[part], out, atol=2e-5)


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=5),
    boundary=st.one_of(st.none(), st.integers(1, 12)),
    cached=st.integers(0, 15),
    which=st.sampled_from(["native", "card"]),
    seed=st.integers(0, 9),
)
def test_a_prompt_attends_to_scratch_memory_and_decodes_on_memory_workers(
    steps: list[tuple[int, int]],
    boundary: int | None,
    cached: int,
    which: str,
    seed: int,
    carriers: dict[str, Carrier],
) -> None:
    """Memory workers attend to what was cached. After the last chunk nothing is left in scratch memory, and the next
    token attends to all on memory workers."""
    with connected(NAMES, Overlap()) as cluster:
        course = Course(cluster, carriers[which], boundary, seed, cached)
        for number, counts in enumerate(steps):
            course.run(counts, draws=number == len(steps) - 1)
            if number < len(steps) - 1:
                assert course.scratch.store.slab.used == course.lengths[KEPT] - cached
        assert course.scratch.store.slab.used == 0
        course.run((1, 1), keeps=False)


def test_a_prompt_continues_without_scratch_memory() -> None:
    """A prompt continues without its copy after the end of an epoch, which clears scratch memory."""
    with connected(NAMES, Overlap()) as cluster:
        course = Course(cluster, NATIVE, 5, 0)
        course.run((7, 2))
        course.scratch.end_epoch()
        assert course.scratch.store.slab.used == 0
        course.run((4, 3), keeps=False)
        course.run((1, 1), keeps=False)


@pytest.mark.parametrize("layers", [range(2), range(2, 4)])
def test_a_stage_keeps_its_own_layers(layers: range) -> None:
    """The attentions of other stages are not allocated, and a prompt is forgotten after the stage's last one."""
    under_test, random = scratch(layers=layers), np.random.default_rng(0)
    for step, (start, draws) in enumerate([(0, []), (4, [KEPT])]):
        plan = StepPlan(step, 0, 0, [], [], [], [SequenceStep(KEPT, start, [0] * 4, draws, 0)], NOBODY)
        share = under_test.apply_plan(plan)
        assert share is not None
        for layer in layers:
            assert under_test.store.slab.used == start + 4
            partial = share.attend(layer, *drawn(random, SPECS[layer], 4))
            assert (partial is None) == (start == 0)
    assert under_test.store.slab.used == 0
    assert len(under_test.store.attentions) == len(layers)


def test_a_released_prompt_is_forgotten_and_its_slots_are_used_again() -> None:
    under_test = scratch(capacity=6)
    for sequence in range(3):
        plan = StepPlan(sequence, 0, 0, [], [], [], [SequenceStep(sequence, 0, [0] * 5, [], 0)], NOBODY)
        assert under_test.apply_plan(plan) is not None
        assert under_test.store.slab.used == 5
        under_test.store.release([sequence])
    with mock.patch.object(KvStore, "apply") as applied:
        other = StepPlan(4, 0, 0, [], [], [], [SequenceStep(4, 0, [0] * 5, [])], NOBODY)
        assert under_test.apply_plan(other) is None and not applied.called


def test_a_sequence_that_decodes_before_its_last_chunk_has_run_does_not_attend_to_scratch_memory() -> None:
    """Its next step may be planned while the last chunk runs, after which another prompt has its slots."""
    under_test, random = scratch(capacity=15), np.random.default_rng(0)

    def step(*chunks: SequenceStep, decoding: DecodeRows = NOBODY) -> StepPlan:
        return StepPlan(0, 0, 0, [], [], [], list(chunks), decoding)

    shares = [
        under_test.apply_plan(step(SequenceStep(KEPT, 0, [0] * 4, [], 0))),
        under_test.apply_plan(step(SequenceStep(KEPT, 4, [0] * 3, [KEPT], 0))),
        under_test.apply_plan(step(SequenceStep(OTHER, 0, [0] * 2, [], 0), decoding=DecodeRows([KEPT], [7], []))),
        under_test.apply_plan(step(SequenceStep(OTHER, 2, [0] * 2, [], 0), decoding=DecodeRows([KEPT], [8], []))),
    ]
    assert [share.queries.tolist() for share in shares if share is not None] == [[], [0, 1, 2], [], [1, 2]]
    for share, rows in zip(shares, (4, 3, 3, 3), strict=True):
        for layer, spec in enumerate(SPECS):
            assert share is not None
            share.attend(layer, *drawn(random, spec, rows))
    assert under_test.store.slab.used == 4
