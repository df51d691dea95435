"""Blocks that go to a disk and come back: the same bytes in other slots, whatever ends or fails meanwhile."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lamina.control.messages import MemorySetup
from lamina.core.steps import BLOCK, DecodeRows, Fetch, Fork, KvMove, Spill, StepPlan, Switch
from lamina.core.types import AttentionSpec, DType, KvCacheDType, Overlap, Segment
from lamina.memory.disk_tier import open_tier
from lamina.memory.store import KvStore

SPECS = [AttentionSpec(layer=layer, query_heads=4, kv_heads=2, qk_dim=8, v_dim=4, scale=1.0) for layer in range(3)]
HEADS = (0, 2)


class Worker:
    """A store with a disk, and the cached sequence 1 of 200 tokens."""

    def __init__(self, folder: Path, kv_cache_dtype: KvCacheDType, resources: contextlib.ExitStack) -> None:
        self.store = KvStore("memory0", MemorySetup(SPECS, DType.FLOAT32, 500, 1, Overlap(), False, kv_cache_dtype))
        self.done: list[tuple[int, bool, str]] = []
        tier = open_tier(self.store, str(folder), 3.0, lambda *done: self.done.append(done), resources)
        assert tier is not None
        self.tier = tier
        self._steps = 0
        self.apply(fetches=[Fetch(0, "memory0", 1, 0, [0, 1, 2], HEADS)])
        self.tier.drop()
        draw = np.random.default_rng(1)
        for layer in range(len(SPECS)):
            k, v = (draw.standard_normal((3 * BLOCK, 2, size)).astype(np.float32) for size in (8, 4))
            self.store.device.keep(layer, k, v, self.store.slab.slots((1, 0)))

    def apply(self, **changes: list[object]) -> None:
        self._steps += 1
        plan = StepPlan(self._steps, 0, 0, [], [], [], [], DecodeRows([], [], []))
        for name, change in changes.items():
            plan = msgspec.structs.replace(plan, **{name: change})
        self.store.apply(plan)
        self.tier.apply(plan)

    def content(self, sequence: int, start: int, stop: int) -> list[bytes]:
        slots = self.store.slab.slots((sequence, 0))[start:stop]
        found = []
        for layer, spec in enumerate(SPECS):
            content = bytearray(len(slots) * spec.slab_bytes_per_token(self.store.element))
            self.store.device.read(layer, slots, memoryview(content))
            found.append(bytes(content))
        return found

    def finish(self) -> tuple[int, bool, str]:
        deadline, before = time.monotonic() + 20, len(self.done)
        while len(self.done) == before:
            assert time.monotonic() < deadline, "the disk does not answer"
            self.tier.work()
        return self.done[-1]


@pytest.fixture(params=["auto", "int8"])
def worker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr("lamina.memory.disk_tier.IN_MEMORY", ())
    with contextlib.ExitStack() as resources:
        yield Worker(tmp_path, request.param, resources)
    assert not os.listdir(tmp_path)


def test_blocks_come_back_as_they_were(worker: Worker) -> None:
    before = worker.content(1, 0, 3 * BLOCK)
    worker.apply(spills=[Spill(1, "memory0", 1, [0, 2], [4, 1]), Spill(2, "memory1", 1, [1], [3])])
    assert worker.finish() == (1, True, "")
    worker.apply(spills=[Spill(3, "memory0", 1, [1], [0])])
    assert worker.finish() == (3, True, "") and not worker.tier.active
    parent = Fork(1, 2, BLOCK)
    worker.apply(forks=[parent])
    worker.apply(released=[1])
    worker.apply(fetches=[Fetch(4, "memory0", 2, BLOCK, [0, 1], HEADS)])
    assert worker.finish() == (4, True, "")
    assert worker.content(2, 0, 3 * BLOCK) == before
    worker.apply(fetches=[Fetch(5, "memory0", 3, 0, [4, 0, 1], HEADS)])
    assert worker.finish() == (5, True, "")
    assert worker.content(3, 0, 3 * BLOCK) == before and worker.store.slab.used == 6 * BLOCK


def test_a_sequence_that_is_released_is_not_copied_on(worker: Worker) -> None:
    worker.apply(spills=[Spill(1, "memory0", 1, [0, 1, 2], [0, 1, 2])])
    assert worker.tier.work() and worker.tier.active
    worker.apply(released=[1], spills=[])
    worker.apply(spills=[Spill(2, "memory0", 1, [0], [0])])
    assert worker.done == [(1, False, ""), (2, False, "")] and not worker.tier.active


def test_a_sequence_that_moves_away_is_not_copied_on(worker: Worker) -> None:
    """Its slots are free once the carrier of the move is released."""
    worker.apply(spills=[Spill(1, "memory0", 1, [0, 1, 2], [0, 1, 2])])
    worker.apply(moves=[KvMove(1, 9, "memory0", "memory1", 0, BLOCK, 1, HEADS)])
    assert worker.tier.work() and worker.tier.active
    worker.apply(switches=[Switch(9, [Segment(1, "memory1", HEADS, (0, BLOCK))])])
    assert worker.done == [(1, False, "")] and not worker.tier.active


def test_an_error_of_the_disk_ends_one_transfer_and_says_why(worker: Worker) -> None:
    disk = worker.tier._disk
    os.ftruncate(disk._file, disk.nbytes)
    worker.apply(fetches=[Fetch(1, "memory0", 4, 0, [1], HEADS)])
    number, complete, error = worker.finish()
    assert (number, complete) == (1, False) and error.startswith("OSError: the file ends at byte")
    worker.apply(spills=[Spill(2, "memory0", 1, [0], [0])])
    assert worker.finish() == (2, True, "")


def test_each_shard_of_heads_has_blocks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four shards are here, and come back in other slots."""
    monkeypatch.setattr("lamina.memory.disk_tier.IN_MEMORY", ())
    specs = [AttentionSpec(layer=layer, query_heads=8, kv_heads=4, qk_dim=8, v_dim=4, scale=1.0) for layer in range(2)]
    setup = MemorySetup(specs, DType.FLOAT32, 300, 1, Overlap(), False, head_shards=4)
    done: list[tuple[int, bool, str]] = []

    def content(sequence: int) -> list[bytes]:
        """By shard and layer, the KV of 2 * BLOCK tokens."""
        found = []
        for (layer, spec), shard in itertools.product(enumerate(store.attentions), (1, 2)):
            slots = store.slab.slots(store.held.key(sequence, 0, shard))
            kept = bytearray(len(slots) * spec.slab_bytes_per_token(store.element))
            store.device.read(layer, slots, memoryview(kept))
            found.append(bytes(kept))
        return found

    def apply(**changes: list[object]) -> None:
        plan = msgspec.structs.replace(StepPlan(1, 0, 0, [], [], [], [], DecodeRows([], [], [])), **changes)
        store.apply(plan)
        tier.apply(plan)
        deadline = time.monotonic() + 20
        while tier.active:
            assert time.monotonic() < deadline, "the disk does not answer"
            tier.work()

    with contextlib.ExitStack() as resources:
        store = KvStore("memory0", setup)
        opened = open_tier(store, str(tmp_path), 3.0, lambda *ended: done.append(ended), resources)
        assert opened is not None
        tier = opened
        apply(fetches=[Fetch(1, "memory0", 1, 0, [0, 1, 2, 3], (1, 3))])
        draw = np.random.default_rng(1)
        for layer, shard in itertools.product(range(2), (1, 2)):
            k, v = (draw.standard_normal((2 * BLOCK, 1, size)).astype(np.float32) for size in (8, 4))
            store.device.keep(layer, k, v, store.slab.slots(store.held.key(1, 0, shard)))
        before = content(1)
        assert len({*before}) == 4
        apply(spills=[Spill(2, "memory0", 1, [0, 1], [7, 3, 0, 5])])
        apply(fetches=[Fetch(3, "memory0", 2, 0, [7, 3, 0, 5], (1, 3))])
        assert content(2) == before and store.slab.used == 8 * BLOCK
        apply(forks=[Fork(1, 4, BLOCK)], fetches=[Fetch(4, "memory0", 4, BLOCK, [0, 5], (1, 3))])
        assert content(4) == before and store.slab.used == 10 * BLOCK
    assert done == [(number, True, "") for number in (1, 2, 3, 4)]


def test_without_overcommit_there_is_no_disk() -> None:
    store = KvStore("memory0", MemorySetup(SPECS, DType.FLOAT32, 500, 1, Overlap(), False))
    assert open_tier(store, "", 1.0, lambda *done: None, contextlib.ExitStack()) is None
