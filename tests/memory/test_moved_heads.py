"""Heads of a range of tokens that move to two workers: each gets its own, and the source keeps the other tokens."""

import msgspec
import numpy as np

from lamina.control.messages import MemorySetup
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, KvMove, SequenceStep, StepPlan, Switch
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.memory.store import KvStore

SPEC = AttentionSpec(layer=0, query_heads=2, kv_heads=2, qk_dim=4, v_dim=4, scale=1.0)
TOKENS, START, STOP = 9, 3, 7


def content(store: KvStore, key: tuple[int, int]) -> list[bytes]:
    """Return the K and V of each token of a shard of a segment."""
    slots, size = store.slab.slots(key), SPEC.slab_bytes_per_token(store.element) // 2
    found = [bytearray(size) for _ in slots]
    for slot, kept in zip(slots, found, strict=True):
        store.device.read(0, np.array([slot], np.int32), memoryview(kept))
    return [bytes(kept) for kept in found]


def test_two_workers_get_the_heads_of_a_range_that_moves() -> None:
    names = ("source", "low", "high")
    setup = MemorySetup([SPEC], DType.FLOAT32, 40, 1, Overlap(), False, head_shards=2)
    stores = {name: KvStore(name, setup) for name in names}
    source = stores["source"]

    def apply(**changes: object) -> None:
        for store in stores.values():
            plan = StepPlan(1, 0, 0, [], [], [], [], DecodeRows([], [], []))
            store.apply(msgspec.structs.replace(plan, **changes))

    admission = Admission(0, 1, TOKENS, [Segment(0, "source", (0, 2), (0, None))], SamplingParams(), 0)
    source.apply(
        msgspec.structs.replace(
            StepPlan(1, 0, 0, [], [], [admission], [], DecodeRows([], [], [])),
            chunks=[SequenceStep(0, 0, [7] * TOKENS, [])],
        )
    )
    draw = np.random.default_rng(1)
    for shard in (0, 1):
        k, v = (draw.standard_normal((TOKENS, 1, 4)).astype(np.float32) for _ in "kv")
        source.device.keep(0, k, v, source.slab.slots((0, shard)))
    before = [content(source, (0, shard)) for shard in (0, 1)]
    moves = [KvMove(1, 5, "source", name, START, STOP, 0, heads) for name, heads in (("low", (0, 1)), ("high", (1, 2)))]
    apply(moves=moves)
    for move in moves:
        here, there = source.held.slots_of(move), stores[move.target].held.slots_of(move)
        for slot, other in zip(here, there, strict=True):
            kept = bytearray(SPEC.slab_bytes_per_token(source.element) // 2)
            source.device.read(0, np.array([slot], np.int32), memoryview(kept))
            stores[move.target].device.restore(0, np.array([other], np.int32), memoryview(kept))
    apply(switches=[Switch(5, [Segment(0, move.target, move.heads, (START, STOP)) for move in moves])], released=[5])
    for shard, name in enumerate(("low", "high")):
        assert content(stores[name], (0, 2 * START + shard)) == before[shard][START:STOP]
        assert content(source, (0, shard)) == before[shard][:START]
        assert content(source, (0, 2 * STOP + shard)) == before[shard][STOP:]
        assert stores[name].slab.used == STOP - START
    assert source.slab.used == 2 * (TOKENS - STOP + START)
