"""Layers with a window forget what it has left: schedules at random, beside a store that forgets nothing."""

import collections
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lamina.compute.local_memory import LocalShare
from lamina.control.messages import MemorySetup
from lamina.core.steps import KvMove, StepPlan
from lamina.core.types import AttentionSpec, DType, KvElement, Overlap
from lamina.kernels.segments import SegmentTable
from lamina.kv import prefix_cache, prefix_tree
from lamina.memory.device import windows
from lamina.memory.device.cpu import Cpu
from lamina.memory.device.windows import Windows
from lamina.memory.store import KvStore
from lamina.schedule import moves, turn
from lamina.schedule.suspects import Hold
from tests.support.lossy_clusters import NOBODY, Moving, play_out, random_course, random_events, random_requests

SIZES: dict[str, Any] = {"query_heads": 4, "kv_heads": 2, "qk_dim": 8, "v_dim": 8, "scale": 0.3}
WINDOW = 7
SPECS = [AttentionSpec(layer=layer, window=window, **SIZES) for layer, window in enumerate((0, 3, WINDOW, 3))]


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """Tokens are forgotten after almost every step; any number may move; prefixes are short, with many checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "TOKENS_PER_STEP", 1000)
        patch.setattr(prefix_cache, "SHORTEST", 1)
        patch.setattr(prefix_cache, "GRAIN", 1)
        patch.setattr(windows, "FEWEST", 4)
        patch.setattr(windows, "SPARE", 64)
        patch.setattr(prefix_tree, "CHECKPOINT_SHARE", 1)
        yield


class Forgetting(Moving):
    """Every memory worker has two stores, of which one forgets. Steps run when they complete, and moves copy when
    they are done.

    Attributes:
        forgotten: how often a store that forgets had forgotten half of the tokens for the smallest window.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._stores = {memory.name: self._pair(memory.name, memory.slab.capacity) for memory in self.memories}
        self._shares: dict[int, list[tuple[LocalShare, LocalShare]]] = {}
        self._slots: dict[int, list[tuple[Any, Any]]] = {}  # by move: of source and target, in each kind of store
        self._keys: dict[int, list[tuple[int, int]]] = {}  # by step: token and position of its rows
        self._draw = np.random.default_rng(1)
        self._kv = collections.defaultdict[tuple[int, int], npt.NDArray[np.float32]](self._draw_kv)
        self.forgotten = 0

    def _draw_kv(self) -> npt.NDArray[np.float32]:
        """K and V of a token: the same whoever computes them."""
        return self._draw.standard_normal((2, len(SPECS), 2, 8), np.float32)

    def _pair(self, name: str, capacity: int) -> tuple[KvStore, KvStore]:
        made = [
            KvStore(name, MemorySetup(SPECS, DType.FLOAT32, capacity, 1, Overlap(), False, forgets=forgets))
            for forgets in (False, True)
        ]
        return made[0], made[1]

    def _check(self, plan: StepPlan) -> None:
        super()._check(plan)
        shares = []
        for name, (whole, forgets) in self._stores.items():
            if name in self.scheduler.placement.capacities:
                tables = whole.apply(plan)[0], forgets.apply(plan)[0]
                if not tables[0].rows.empty:
                    shares.append((LocalShare(whole, tables[0], {}), LocalShare(forgets, tables[1], {})))
        self._shares[plan.step] = shares
        steps = [(self.tokens_of(step.sequence), step) for step in plan.sequences]
        self._keys[plan.step] = [(tokens[at], at) for tokens, step in steps for at in range(step.start, step.stop)]
        for one in plan.moves:
            ends = self._stores[one.source], self._stores[one.target]
            slots = [[store[kind].held.slots_of(one) for store in ends] for kind in (0, 1)]
            self._slots[one.number] = [(source, target) for source, target in slots]

    def finish_move(self) -> None:
        if self._moves:
            self._copy(self._moves[self.turn % len(self._moves)])
        super().finish_move()

    def _copy(self, one: KvMove) -> None:
        for kind, (there, here) in enumerate(self._slots.pop(one.number)):
            source, target = self._stores[one.source][kind], self._stores[one.target][kind]
            if (one.sequence, 0) not in target.slab or (one.sequence, 0) not in source.slab:
                continue  # it has ended
            for layer, spec in enumerate(SPECS):
                content = memoryview(bytearray(len(there) * spec.slab_bytes_per_token(KvElement.FLOAT32)))
                source.device.read(layer, there, content)
                target.device.restore(layer, here, content)

    def attend(self, plan: StepPlan) -> None:
        """Check that both stores attend alike."""
        kv = np.array([self._kv[key] for key in self._keys.pop(plan.step)])
        for layer, shares in itertools.product(range(len(SPECS)), self._shares.pop(plan.step)):
            q = self._draw.standard_normal((len(kv), 4, 8), np.float32)
            k, v = (np.ascontiguousarray(kv[:, one, layer]) for one in (0, 1))
            whole, forgets = [share.attend(layer, q, k, v) for share in shares]
            if whole is not None and forgets is not None:
                for expected, found in zip(whole, forgets, strict=True):
                    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for _, store in self._stores.values():
            assert isinstance(store.device, Cpu)
            narrow = store.device._windows[1]
            assert narrow is not None
            self.forgotten += narrow.used < store.slab.used // 2

    def complete(self, lane: int) -> None:
        super().complete(lane)
        if not any(self._in_flight):  # else watermarks would keep what local memory has stored
            assert not any(store.watermarks._storing for pair in self._stores.values() for store in pair)

    def end_epoch(self, number: int, hold: Hold = NOBODY) -> None:
        applied = self.scheduler.end_epoch
        remains = []
        self.scheduler.end_epoch = lambda topology: remains.append(applied(topology)) or remains[0]  # type: ignore
        super().end_epoch(number, hold)
        self.scheduler.end_epoch = applied  # type: ignore[method-assign]
        self._slots.clear()
        self._moves.clear()
        for name, pair in self._stores.items():
            for one in pair:
                one.truncate(remains[0].kept.get(name, {}))


class Checkpointed(Forgetting):
    """Requests go on from cached prefixes where these have a checkpoint, and nowhere else."""

    window = WINDOW


class Uncached(Forgetting):
    """No request goes on from another."""

    prefix_cache = False


def forget_at_random(kind: type[Forgetting], seeds: Iterable[int]) -> tuple[int, int]:
    """Returns how often a worker had forgotten more than half of what its sequences have, and how often a request began
    with a cached prefix."""
    forgotten = hits = 0
    for seed in seeds:
        draw = random.Random(seed)
        prompts, others = random_requests(draw)
        course = random_course(draw, draw.randint(1, 3), draw.choice([None, None, 5, 11]), random_events(draw))
        cluster = kind(others, prompts, *course.sizes)
        play_out(cluster, course)
        forgotten += cluster.forgotten
        hits += cluster.hits
    return forgotten, hits


@pytest.mark.parametrize("kind", [Uncached, Checkpointed])
def test_layers_with_a_window_attend_as_if_nothing_had_been_forgotten(kind: type[Forgetting]) -> None:
    """Whatever is forked, grows, moves, is dropped, aborted or lost."""
    # With the last seed, tokens of a step that attends to nothing were forgotten between two of its layers.
    forgotten, hits = forget_at_random(kind, [*range(10), 1455])
    assert forgotten > 20 and (hits > 5) == kind.prefix_cache


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Uncached, Checkpointed])
def test_many_schedules(kind: type[Forgetting]) -> None:
    forgotten, hits = forget_at_random(kind, range(1000, 2000))
    assert forgotten > 2000 and (hits > 500) == kind.prefix_cache


def test_more_steps_are_kept_than_may_be_in_flight() -> None:
    assert windows.STEPS_KEPT >= turn.DEPTH


def test_a_step_that_attends_to_forgotten_tokens_is_an_error() -> None:
    """It would be wrong in silence."""
    one = np.arange(10, dtype=np.int32)
    known = Windows(3, 100, lambda window: iter([one[-3:]]))
    known.place(one)
    known.place(one + 10)
    assert known.used == 13

    def table(start: int) -> SegmentTable:
        query_offsets, query_start, kv_offsets, kv_start = (
            np.array(each, np.int32) for each in ([0, 1], [start], [0, start], [0])
        )
        return SegmentTable(query_offsets, query_start, kv_offsets, kv_start, one[:start])

    assert known.table(table(10)).kv_start.tolist() == [8]
    with pytest.raises(AssertionError, match="window of 3 tokens, have been freed"):
        known.table(table(8))
