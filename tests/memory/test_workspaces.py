"""What a GPU's memory worker reserves at its start is all that its steps use later: memory, and compiled kernels."""

import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.control.messages import MemorySetup, Reserve
from lamina.core.heads import HeadShards
from lamina.core.types import AttentionSpec, DType, KvElement, Overlap
from lamina.memory.slab_setup import largest
from lamina.memory.store import StepTables

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.kernels.gpu.backend import Program
from lamina.kernels.gpu.interpreter import Interpreter
from lamina.memory.device import gpu
from lamina.memory.device.workspaces import Workspaces
from tests.support.store_steps import CAPACITY, ROWS, SEQUENCES, opened, plan, serve

SPECS = [
    AttentionSpec(0, 4, 2, 16, 16, 0.25),
    AttentionSpec(1, 40, 2, 16, 24, 0.25, window=9, softcap=5.0),  # a chunk of 2 rows fills a tile
    AttentionSpec(2, 4, 2, 16, 16, 0.25),
]


class Watched(Interpreter):
    """A GPU that counts the bytes in use, and what was not compiled before it was launched. It computes nothing."""

    def __init__(self) -> None:
        self.prepared, self.late = set[Program](), set[Program]()
        self.used = self.peak = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = super().empty(shape, dtype)
        self._count(array.nbytes)
        weakref.finalize(array.base, self._count, -array.nbytes).atexit = False
        return array

    def aligned(self, array: Any) -> Any:
        if array.ctypes.data % 16 == 0:
            return array
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def _count(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def prepare(self, program: Program) -> None:
        self.prepared.add(program)

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        self.late |= {program} - self.prepared


@settings(max_examples=8, deadline=None)
@given(
    overlap=st.sampled_from([Overlap(), Overlap(2), Overlap(3)]),
    shards=st.sampled_from([1, 2]),
    kv=st.sampled_from(["auto", "int8"]),
    steps=st.lists(
        st.tuples(st.sets(st.integers(1, SEQUENCES - 1)), st.integers(0, ROWS - SEQUENCES + 1), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_steps_use_no_more_than_was_reserved(
    overlap: Overlap, shards: int, kv: Any, steps: list[tuple[set[int], int, bool]]
) -> None:
    """Up to 4 steps are planned before the first is served."""
    with (
        mock.patch("lamina.memory.device.workspaces.MOST_CHANGES", 64),  # else the rest would hardly count
        mock.patch("lamina.kernels.gpu.attention.MOST_CHANGES", 64),
    ):
        check(overlap, shards, kv, steps)


def check(overlap: Overlap, shards: int, kv: Any, steps: list[tuple[set[int], int, bool]]) -> None:
    setup = MemorySetup(SPECS, DType.FLOAT32, CAPACITY, 1, overlap, False, kv, shards)
    element = KvElement.from_setting(kv, DType.FLOAT32)
    attentions = [HeadShards(2, shards).spec(spec) for spec in SPECS]
    card = Watched()
    workspaces = Workspaces(card)
    workspaces.reserve(attentions, element, np.dtype(np.float32), largest(Reserve(setup, ROWS, SEQUENCES, 4, ROWS)))
    assert card.used < card.peak
    reserved, card.peak = card.peak, 0
    store, rng = opened("cpu", SPECS, overlap, kv, shards), np.random.default_rng(0)
    store.device = gpu.Gpu(card, attentions, element, shards * CAPACITY, workspaces)
    kept = card.used
    at, waiting = dict.fromkeys(range(SEQUENCES), 0), list[StepTables]()
    for number, (decoding, chunk, serves) in enumerate(steps):
        rows = (0, chunk) if chunk else None
        waiting += store.apply(plan(number, at, sorted(decoding), rows))
        while waiting and (serves or len(waiting) == 4):
            serve(store, waiting.pop(0), rng)
    while waiting:
        serve(store, waiting.pop(0), rng)
    assert card.late == set()
    assert card.peak - kept <= reserved
