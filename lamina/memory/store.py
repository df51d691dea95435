"""The KV of one memory worker: slab bookkeeping plus the arrays it indexes (the rManager). Runs without torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.kernels.attention import SegmentTable, append, partial
from lamina.kernels.memory import allocate
from lamina.memory.slab import Slab
from lamina.transport.wire import NUMPY_DTYPE, Array, MessageRows, message_rows
from lamina.types import AttentionSpec, DType, Segment, StepPlan


@dataclass(frozen=True)
class LayerCache:
    """K [capacity, Hkv, D] and V [capacity, Hkv, Dv] of one attention, indexed by slot."""

    spec: AttentionSpec
    k: Array
    v: Array


@dataclass(frozen=True)
class StepTables:
    """What one step needs from this worker, planned once and used for every layer."""

    step: int
    rows: MessageRows
    segments: SegmentTable
    slots: npt.NDArray[np.int32]


class KvStore:
    """Applies plans to the slab and runs their attention. One thread owns it."""

    def __init__(self, worker: str, attentions: list[AttentionSpec], dtype: DType, capacity: int, threads: int) -> None:
        """Allocate ``capacity`` token slots for all ``attentions``; memory is touched only when tokens arrive."""
        self.worker = worker
        self.threads = threads
        self.slab = Slab(capacity)
        self._segments: dict[int, list[Segment]] = {}
        element = NUMPY_DTYPE[dtype]

        def cache(spec: AttentionSpec) -> LayerCache:
            shapes = (capacity, spec.kv_heads, spec.qk_dim), (capacity, spec.kv_heads, spec.v_dim)
            k, v = (allocate(int(np.prod(shape)) * element.itemsize).view(element).reshape(shape) for shape in shapes)
            return LayerCache(spec, k, v)

        self.layers = [cache(spec) for spec in attentions]

    @property
    def sequences(self) -> int:
        """Sequences with a segment here."""
        return len(self._segments)

    def apply(self, plan: StepPlan) -> StepTables:
        """Apply a plan's deltas to the slab, allocate slots for its new tokens, and return the tables of its step.

        Raises CapacityError, having changed nothing of the step's own sequences, if its tokens do not fit.
        """
        for fork in plan.forks:
            if fork.parent in self._segments:
                self.slab.fork(fork.parent, fork.child, fork.tokens)
                self._segments[fork.child] = self._segments[fork.parent]
        for sequence in plan.released:
            if self._segments.pop(sequence, None) is not None:
                self.slab.free(sequence)
        for admission in plan.admitted:
            if any(segment.worker == self.worker for segment in admission.segments):
                self._segments[admission.sequence] = admission.segments
                self.slab.open(admission.sequence)
        return self._plan_step(plan)

    def _plan_step(self, plan: StepPlan) -> StepTables:
        rows = message_rows(plan, self._segments, self.worker)
        appended = self.slab.extend([sequence for sequence, _ in rows.kept], [count for _, count in rows.kept])
        counts = [attend.kv_stop - attend.kv_start for attend in rows.attends]
        # A worker holds one token range of a sequence, so its page table starts at the range's first token.
        tables = [self.slab.slots(attend.sequence)[:count] for attend, count in zip(rows.attends, counts, strict=True)]
        segments = SegmentTable(
            query_offsets=_offsets([attend.rows for attend in rows.attends]),
            query_start=np.array([attend.start for attend in rows.attends], np.int32),
            kv_offsets=_offsets(counts),
            kv_start=np.array([attend.kv_start for attend in rows.attends], np.int32),
            slots=np.concatenate(tables) if tables else np.empty(0, np.int32),
        )
        return StepTables(plan.step, rows, segments, appended)

    def attend(
        self, layer: int, tables: StepTables, q: Array, k: Array, v: Array
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Keep k, v of the step's new tokens, then attend: (out float32 [Rq, Hq, Dv], lse float32 [Rq, Hq])."""
        cache = self.layers[layer]
        append(cache.k, cache.v, k, v, tables.slots, threads=self.threads)
        return partial(q, cache.k, cache.v, tables.segments, cache.spec, self.threads)


def _offsets(counts: list[int]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int32)
