"""Ranks that share a KV head: one copy of K and V, and each rank's own queries, in whatever order they arrive."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.control.messages import MemorySetup
from lamina.core.errors import ConfigError
from lamina.core.heads import HeadShards
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.kernels.segments import SegmentTable
from lamina.memory.store import KvStore, StepTables
from tests.support import reference_attention

Floats = np.ndarray


def answer(store: KvStore, layer: int, step: StepTables, q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats]:
    """What the store answers to a rank's request for these rows [T, H, D] of its heads."""
    parts = k[step.rows.appends], v[step.rows.appends], q[step.rows.queries]
    body = memoryview(b"".join(part.tobytes() for part in parts))
    out, lse = store.device.results(len(step.rows.queries), store.attentions[layer])
    for number in range(len(step.pieces)):
        for _ in store.serve(layer, step, number, body, out, lse):
            pass
    return out, lse


def expected(spec: AttentionSpec, q: Floats, k: Floats, v: Floats, start: int) -> tuple[Floats, Floats]:
    bounds = np.array([0, len(k)], np.int32)
    rows, first = np.array([0, len(q)], np.int32), np.array([start], np.int32)
    table = SegmentTable(rows, first, bounds, np.zeros(1, np.int32), np.arange(len(k), dtype=np.int32))
    return reference_attention.partial(q, k, v, table, spec, 1)


@settings(max_examples=40, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2]),
    sharers=st.sampled_from([2, 3]),
    group=st.sampled_from([1, 2]),
    slopes=st.booleans(),
    overlap=st.builds(Overlap, mini_batches=st.integers(1, 2)),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_ranks_that_share_kv_heads_attend_to_all_tokens_kept_once(
    kv_heads: int,
    sharers: int,
    group: int,
    slopes: bool,
    overlap: Overlap,
    steps: list[tuple[int, int]],
    seed: int,
) -> None:
    """Two sequences run decoded tokens and prompt chunks in any mix; a worker of another rank is a layer behind."""
    rng, ranks = np.random.default_rng(seed), kv_heads * sharers
    heads = ranks * group
    alibi = tuple(0.5 / (1 + head) for head in range(heads)) if slopes else None
    specs = [
        AttentionSpec(layer, heads, kv_heads, 8, 6, 0.35, window=3 * layer, alibi_slopes=alibi) for layer in range(2)
    ]
    shards = HeadShards.for_model(specs, 1, ranks)
    assert shards == HeadShards(kv_heads, kv_heads)
    setup = MemorySetup(specs, DType.FLOAT32, 100, 1, overlap, False, head_shards=shards.count, ranks=ranks)
    store = KvStore("memory0", setup)
    segments = [Segment(each, "memory0", shards.whole, (0, None)) for each in range(2)]
    admitted = [Admission(each, 1, 1, [segments[each]], SamplingParams(), 0) for each in range(2)]
    store.apply(StepPlan(0, 0, 0, [], [], admitted, [], DecodeRows([], [], [])))
    history: dict[tuple[int, int], tuple[Floats, Floats]] = {
        (layer, each): (np.empty((0, kv_heads, 8), np.float32), np.empty((0, kv_heads, 6), np.float32))
        for layer in range(2)
        for each in range(2)
    }
    lengths = [0, 0]
    for number, counts in enumerate(steps):
        taken = [SequenceStep(each, lengths[each], [0] * count, []) for each, count in enumerate(counts) if count]
        plan = StepPlan(number + 1, 0, 0, [], [], [], taken, DecodeRows([], [], []))
        shares, total = store.apply(plan), sum(counts)
        assert [bool(share.rows.pulled) for share in shares] == [
            rank % sharers == 0 and max(counts) > 1 for rank in range(ranks)
        ]
        for layer, spec in enumerate(specs):
            shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 6))
            q, k, v = (rng.standard_normal((total, *shape)).astype(np.float32) for shape in shapes)
            wanted, row = [], 0
            for step in taken:
                rows = slice(row, row + len(step.tokens))
                row = rows.stop
                keys, values = history[layer, step.sequence]
                joined = np.concatenate([keys, k[rows]]), np.concatenate([values, v[rows]])
                history[layer, step.sequence] = joined
                seen = step.start if len(step.tokens) > 1 else step.stop
                if seen:
                    wanted.append(expected(spec, q[rows], joined[0][:seen], joined[1][:seen], step.start))
            for rank in rng.permutation(ranks).tolist():
                share, head = shares[rank], slice(rank // sharers, rank // sharers + 1)
                own = slice(rank * group, (rank + 1) * group)
                out, lse = answer(store, layer, share, q[:, own], k[:, head], v[:, head])
                if wanted:
                    outs, sums = (np.concatenate(parts) for parts in zip(*wanted, strict=True))
                    np.testing.assert_allclose(out, outs[:, own], atol=1e-5)
                    np.testing.assert_allclose(lse, sums[:, own], atol=1e-5)
            for share in shares[::sharers]:
                if pulled := share.rows.pulled:
                    which, shard = (
                        np.concatenate([np.arange(one.row, one.row + one.rows) for one in pulled]),
                        pulled[0].shard,
                    )
                    content = k[which, shard].tobytes() + v[which, shard].tobytes()
                    store.keep(layer, share.pulled_slots, memoryview(content))
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        assert store.slab.used == kv_heads * sum(lengths)


@pytest.mark.parametrize(("kv_heads", "ranks"), [((3,), 2), ((4,), 6), ((2, 4), 8), ((1, 2), 2)])
def test_ranks_that_cannot_share_kv_heads_evenly_are_rejected(kv_heads: tuple[int, ...], ranks: int) -> None:
    specs = [AttentionSpec(layer, 24, count, 8, 8, 1.0) for layer, count in enumerate(kv_heads)]
    with pytest.raises(ConfigError, match=f"KV heads, which {ranks} ranks cannot share evenly; give a tensor_parallel"):
        HeadShards.for_model(specs, 1, ranks)
