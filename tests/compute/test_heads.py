"""Sequences whose heads and tokens are on any workers, against attention over the whole history in float64.

A worker that had more than its own part would not show in the results. So slots are counted by head and token, messages
by byte, and everything that a worker does not own is NaN: the part of the slab that no segment of it has, all the time.
"""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.errors import PlacementError
from lamina.core.heads import HeadShards
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, Fork, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.dataplane.wire import body_nbytes, check_segments, message_rows
from lamina.memory.cuts import MOST_PRODUCTS
from lamina.memory.device import cpu
from tests.support.attended_sequences import NAMES, Sequences, drive
from tests.support.attention_clusters import Connected, connected, overlaps

NOBODY = DecodeRows([], [], [])
Heads = tuple[int, int]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[AttentionSpec], int]:
    """Attentions of two layers with what families have, and into how many shards their heads are cut."""
    kv_heads, group = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    halved = kv_heads % 2 == 0 and kv_heads > 2 and draw(st.booleans())  # the second layer has half as many
    specs = []
    for layer in range(2):
        kept = kv_heads // 2 if halved and layer else kv_heads
        queries = kept * group
        slopes = tuple(0.5 / (1 + head) for head in range(queries)) if draw(st.booleans()) else None
        specs.append(
            AttentionSpec(
                layer=layer,
                query_heads=queries,
                kv_heads=kept,
                qk_dim=draw(st.sampled_from([4, 8])),
                v_dim=draw(st.sampled_from([4, 6])),
                scale=0.35,
                window=draw(st.sampled_from([0, 0, 5])),
                chunk=draw(st.sampled_from([0, 0, 6])),
                softcap=draw(st.sampled_from([0.0, 4.0])),
                sinks=not layer and draw(st.booleans()),
                alibi_slopes=slopes,
            )
        )
    common = kv_heads // 2 if halved else kv_heads
    return specs, draw(st.sampled_from([count for count in range(2, common + 1) if common % count == 0] or [1]))


def bands(shards: HeadShards) -> st.SearchStrategy[list[Heads]]:
    """All heads, cut anywhere between shards."""
    cuts = st.sets(st.integers(1, max(1, shards.count - 1)), max_size=shards.count - 1)
    return cuts.map(lambda inner: [0, *sorted(inner), shards.count]).map(
        lambda bounds: [shards.range_of(*pair) for pair in itertools.pairwise(bounds)]
    )


class HeadSequences(Sequences):
    """Sequences of which every worker has a part of the heads of a part of the tokens."""

    def owner(self, sequence: int, position: int, shard: int) -> str:
        """The worker that has one shard of one token."""
        (worker,) = (
            one.worker
            for one in self.segments[sequence]
            if shard in self.cluster.shards.shards_of(one.heads)
            and one.tokens[0] <= position
            and (one.tokens[1] is None or position < one.tokens[1])
        )
        return worker

    def check_slots(self) -> None:
        held: dict[str, set[tuple[int, int]]] = {name: set() for name in NAMES}
        for sequence, (rows, *_) in self.history.items():
            for (position, (k, _)), shard in itertools.product(enumerate(rows), range(self.cluster.shards.count)):
                held[self.owner(sequence, position, shard)].add((id(k), shard))
        for name, memory in self.cluster.memories.items():
            store = memory.store
            assert store.slab.used == len(held[name])
            owned = [store.slab.slots(key) for key in store.slab.segments]
            poisoned = np.setdiff1d(np.arange(store.slab.capacity), np.concatenate([np.empty(0, np.int32), *owned]))
            for slab in store.device._slabs if isinstance(store.device, cpu.Cpu) else ():
                slab.k[poisoned] = slab.v[poisoned] = np.nan

    def attend(self, plan: StepPlan, steps: list[SequenceStep]) -> None:
        self.check_sizes(plan, steps)
        super().attend(plan, steps)

    def check_sizes(self, plan: StepPlan, steps: list[SequenceStep]) -> None:
        """A request holds q, k and v of the heads that its worker has, counted one by one, and no others."""
        shards = self.cluster.shards
        for spec, name in itertools.product(self.specs, NAMES):
            asking = adding = 0
            for step, shard in itertools.product(steps, range(shards.count)):
                begun, length = step.start, step.start + len(step.tokens)
                visible = begun if len(step.tokens) > 1 else length
                seen = any(self.owner(step.sequence, at, shard) == name for at in range(visible))
                asking += len(step.tokens) * seen
                adding += len(step.tokens) == 1 and self.owner(step.sequence, begun, shard) == name
            q, kept = spec.query_heads * spec.qk_dim, spec.kv_heads * (spec.qk_dim + spec.v_dim)
            rows = message_rows(plan, self.segments, name, shards)
            nbytes = body_nbytes(shards.spec(spec), DType.FLOAT32, rows)
            assert nbytes * shards.count == 4 * (asking * q + adding * kept)


def poison(cluster: Connected) -> None:
    for memory in cluster.memories.values():
        assert isinstance(memory.store.device, cpu.Cpu)
        for slab in memory.store.device._slabs:
            slab.k[:] = slab.v[:] = np.nan


@settings(max_examples=60)
@given(
    data=st.data(),
    model=models(),
    overlap=overlaps,
    most_products=st.sampled_from([1, MOST_PRODUCTS]),
    seed=st.integers(0, 9),
)
def test_any_splits_of_heads_and_tokens_equal_whole_attention(
    data: st.DataObject, model: tuple[list[AttentionSpec], int], overlap: Overlap, most_products: int, seed: int
) -> None:
    specs, count = model
    with mock.patch.object(cpu, "MOST_PRODUCTS", most_products), connected(NAMES, overlap, specs, count) as cluster:
        poison(cluster)
        drive(data, HeadSequences(cluster, overlap, seed), bands(cluster.shards))


def test_a_fork_has_all_heads_of_a_prefix_whichever_of_them_have_grown() -> None:
    specs = [AttentionSpec(0, 2, 2, 8, 8, 0.35)]
    with connected(NAMES, Overlap(), specs, shards=2) as cluster:
        under_test = HeadSequences(cluster, Overlap(), 0)
        split = [((0, 1), NAMES[1], (0, 2)), ((0, 1), NAMES[0], (2, None)), ((1, 2), NAMES[0], (0, None))]
        placed = [Segment(0, worker, heads, tokens) for heads, worker, tokens in split]
        under_test.run({0: 3}, admitted=[Admission(0, 1, 3, placed, SamplingParams(), 0)])
        under_test.run({0: 1}, grown=[Segment(0, NAMES[0], heads, (3, None)) for heads in [(0, 1), (1, 2)]])
        under_test.run({0: 1, 1: 1}, forks=[Fork(0, 1, 1)])


def test_the_code_for_gpus_attends_with_some_heads_too() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    slopes = (0.5, 0.25, 0.2, 0.1, 0.05, 0.0)
    specs = [AttentionSpec(0, 6, 3, 8, 8, 0.35, alibi_slopes=slopes), AttentionSpec(1, 6, 3, 8, 8, 0.35, window=3)]
    with connected(NAMES, Overlap(), specs, shards=3, device="emulated") as cluster:
        under_test = HeadSequences(cluster, Overlap(), 0)
        split = [((0, 2), NAMES[0], (0, 4)), ((0, 1), NAMES[1], (4, None)), ((1, 2), NAMES[2], (4, None))]
        placed = [Segment(0, worker, heads, tokens) for heads, worker, tokens in split]
        placed.append(Segment(0, NAMES[0], (2, 3), (0, None)))
        under_test.run({0: 5}, admitted=[Admission(0, 1, 5, placed, SamplingParams(), 0)])
        under_test.run({0: 1})


@given(heads=st.integers(1, 12), group=st.integers(1, 4), workers=st.integers(1, 16))
def test_shards_are_as_many_as_workers_need_and_slopes_go_with_their_heads(
    heads: int, group: int, workers: int
) -> None:
    slopes = tuple(float(head) for head in range(heads * group))
    spec = AttentionSpec(0, heads * group, heads, 4, 4, 1.0, alibi_slopes=slopes)
    shards = HeadShards.for_model([spec], workers)
    assert heads % shards.count == 0 and shards.count >= min(heads, workers)
    parts = [shards.spec(spec, shard) for shard in range(shards.count)]
    assert sum((part.alibi_slopes or () for part in parts), ()) == slopes
    assert {(part.query_heads, part.kv_heads) for part in parts} == {
        (heads * group // shards.count, heads // shards.count)
    }
    assert shards.shards_of(shards.whole) == range(shards.count)


def test_segments_that_leave_out_or_repeat_a_head_are_refused() -> None:
    shards = HeadShards(6, 3)

    def check(*parts: tuple[Heads, tuple[int, int | None]]) -> None:
        check_segments(0, [Segment(0, "memory0", heads, tokens) for heads, tokens in parts], shards)

    check(((0, 4), (0, None)), ((4, 6), (0, 3)), ((4, 6), (3, None)))
    check(((0, 2), (0, 5)), ((2, 6), (0, 7)), ((0, 2), (5, None)), ((2, 6), (7, None)))
    with pytest.raises(PlacementError, match="cut at multiples of 2"):
        check(((0, 3), (0, None)), ((3, 6), (0, None)))
    with pytest.raises(PlacementError, match="must follow one another"):
        check(((0, 4), (0, None)))
    with pytest.raises(PlacementError, match="must follow one another"):
        check(((0, 4), (0, None)), ((2, 6), (0, None)))
    with pytest.raises(PlacementError, match="must follow one another"):
        check(((0, 2), (0, 5)), ((2, 6), (0, None)))
