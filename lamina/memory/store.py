"""The KV of one memory worker: slab bookkeeping plus the arrays it indexes (the rManager). Runs without torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.errors import PlacementError
from lamina.kernels.attention import Scales, append, partial, partial_tasks
from lamina.kernels.elements import STORAGE
from lamina.kernels.memory import allocate
from lamina.kernels.merge import merge
from lamina.kernels.segments import SegmentTable
from lamina.memory.cuts import MOST_PRODUCTS, Cut, cuts
from lamina.memory.slab import Slab
from lamina.protocol.wire import (
    Array,
    MessageRows,
    Piece,
    SegmentRows,
    check_placements,
    for_sequence,
    keys_values,
    message_rows,
    pieces,
    read_queries,
)
from lamina.types import AttentionSpec, DType, Fork, KvCacheDType, KvElement, Migration, Overlap, Segment, StepPlan

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerCache:
    """K [capacity, Hkv, D] and V [capacity, Hkv, Dv] of one attention, with scales if they are codes, by slot."""

    spec: AttentionSpec
    k: Array
    v: Array
    scales: Scales | None

    @classmethod
    def allocate(cls, spec: AttentionSpec, element: KvElement, capacity: int) -> "LayerCache":
        """A cache of ``capacity`` slots; memory is touched only when tokens arrive."""

        def rows(size: int) -> Array:
            stored = STORAGE[element]
            nbytes = capacity * spec.kv_heads * size * stored.itemsize
            return allocate(nbytes).view(stored).reshape(capacity, spec.kv_heads, size)

        def scales() -> Floats:
            return allocate(capacity * spec.kv_heads * 4).view(np.float32).reshape(capacity, spec.kv_heads)

        return cls(spec, rows(spec.qk_dim), rows(spec.v_dim), (scales(), scales()) if element.scaled else None)

    def views(self, content: memoryview, rows: int) -> Iterator[tuple[Array, Array]]:
        """Every array and where ``rows`` of its rows lie in a piece's bytes: scales first, so that they are aligned."""
        offset = 0
        for array in (*(self.scales or ()), self.k, self.v):
            shape = (rows, *array.shape[1:])
            view = np.frombuffer(content, array.dtype, math.prod(shape), offset).reshape(shape)
            offset += view.nbytes
            yield array, view


@dataclass(frozen=True)
class StepTables:
    """What one step needs from this worker, planned once and used for every layer.

    Attributes:
        tables: for every piece of a request, what its query rows attend to when it arrives.
        newest: what all rows attend to beyond that when k and v arrive last; None if they arrive first.
        slots: for the new tokens that arrive with requests. pulled_slots: for those of ``rows.pulled``.
    """

    plan: StepPlan
    rows: MessageRows
    pieces: tuple[Piece, ...]
    tables: tuple[SegmentTable | None, ...]
    newest: SegmentTable | None
    slots: npt.NDArray[np.int32]
    pulled_slots: npt.NDArray[np.int32]


class KvStore:
    """Applies plans to the slab and runs their attention. One thread owns it."""

    def __init__(
        self,
        worker: str,
        attentions: list[AttentionSpec],
        dtype: DType,
        capacity: int,
        threads: int,
        overlap: Overlap,
        kv_cache_dtype: KvCacheDType = "auto",
    ) -> None:
        """Allocate ``capacity`` token slots for all ``attentions``; memory is touched only when tokens arrive.

        Messages hold ``dtype``, the model's element type; ``kv_cache_dtype`` says what the slab holds.
        """
        self.worker = worker
        self.threads = threads
        self.dtype = dtype
        self.element = KvElement.of(kv_cache_dtype, dtype)
        self._overlap = overlap
        self.slab = Slab(capacity)
        self._kv_heads = max(spec.kv_heads for spec in attentions)
        self._segments: dict[int, list[Segment]] = {}
        self.layers = [LayerCache.allocate(spec, self.element, capacity) for spec in attentions]

    @property
    def sequences(self) -> int:
        """Sequences with a segment here."""
        return len(self._segments)

    def apply(self, plan: StepPlan) -> StepTables:
        """Apply a plan's deltas to the slab, allocate slots for its new tokens, and return the tables of its step.

        Raises CapacityError, having changed nothing of the step's own sequences, if its tokens do not fit, and
        PlacementError, having changed nothing at all, for segments that cannot be served.
        """
        check_placements(plan, self._kv_heads)
        for fork in plan.forks:
            if fork.parent in self._segments:
                self._fork(fork)
        self.release(plan.released)
        for segment in plan.moved:
            if segment.worker == self.worker:
                self._segments[segment.sequence] = [segment]
            else:
                self._forget(segment.sequence)
        for migration in plan.migrations:
            if migration.target == self.worker:
                self._make_slots(migration)
            elif migration.source == self.worker:
                self._check_source(migration)
        for admission in plan.admitted:
            if any(segment.worker == self.worker for segment in admission.segments):
                if admission.sequence not in self._segments:  # else it begins as a fork of a cached prefix
                    self.slab.open(admission.sequence)
                self._segments[admission.sequence] = admission.segments
        return self._plan_step(plan)

    def truncate(self, kept: Mapping[int, int]) -> None:
        """Keep so many tokens of each of these sequences, counted from their beginning, and forget all others.

        Sequences that have no segment here are ignored.
        """
        for sequence in self.slab.sequences:
            if sequence not in kept or sequence not in self._segments:
                self._forget(sequence)
        for sequence, segments in self._segments.items():
            start, stop = self._range(segments)
            self.slab.truncate(sequence, max(0, min(kept[sequence], stop or kept[sequence]) - start))

    def release(self, sequences: Sequence[int]) -> None:
        """Forget sequences and free their slots. Those not known here are ignored."""
        for sequence in sequences:
            self._forget(sequence)

    def _fork(self, fork: Fork) -> None:
        """Let a child share the part of its first tokens that its parent has here."""
        segments = self._segments[fork.parent]
        start, stop = self._range(segments)
        shared = max(0, fork.tokens - start) if stop is None else max(0, min(fork.tokens, stop) - start)
        self.slab.fork(fork.parent, fork.child, shared)
        self._segments[fork.child] = for_sequence(fork.child, segments)

    def _range(self, segments: Sequence[Segment]) -> tuple[int, int | None]:
        """The tokens of the one segment on this worker."""
        return next(segment.tokens for segment in segments if segment.worker == self.worker)

    def _forget(self, sequence: int) -> None:
        """Free the slots of a sequence, if it has any here or is moving here."""
        self._segments.pop(sequence, None)
        if sequence in self.slab:
            self.slab.free(sequence)

    def _make_slots(self, migration: Migration) -> None:
        """For tokens that will arrive; nothing attends to them before the plan that moves their segment here."""
        if migration.sequence not in self.slab:
            self.slab.open(migration.sequence)
        held = len(self.slab.slots(migration.sequence))
        if held != migration.start:
            raise PlacementError(
                f"tokens {migration.start} to {migration.stop} of sequence {migration.sequence} cannot move to "
                f"{self.worker}",
                f"it has {held} tokens, and new ones must follow these",
            )
        self.slab.append(migration.sequence, migration.stop - migration.start)

    def _check_source(self, migration: Migration) -> None:
        segments = self._segments.get(migration.sequence, [])
        if [segment.tokens for segment in segments] != [(0, None)]:
            raise PlacementError(
                f"sequence {migration.sequence} cannot move from {self.worker}",
                "only a sequence that is entirely on the source can move",
            )

    def _plan_step(self, plan: StepPlan) -> StepTables:
        rows = message_rows(plan, self._segments, self.worker)
        kept = [*rows.kept, *((pulled.sequence, pulled.rows) for pulled in rows.pulled)]
        appended = self.slab.extend([sequence for sequence, _ in kept], [count for _, count in kept])
        cut = pieces(rows, self._overlap)
        late = cut[-1].keeps and cut[-1].start == cut[-1].stop and len(rows.queries) > 0
        stops = [min(attend.kv_stop, attend.start) if late else attend.kv_stop for attend in rows.attends]
        tables = tuple(
            self._table(rows.attends[piece.first : piece.last], stops[piece.first : piece.last])
            if piece.first < piece.last
            else None
            for piece in cut
        )
        newest = self._table(rows.attends, [attend.kv_stop for attend in rows.attends], stops) if late else None
        inline = len(rows.appends)
        return StepTables(plan, rows, cut, tables, newest, appended[:inline], appended[inline:])

    def _table(
        self, attends: Sequence[SegmentRows], stops: Sequence[int], starts: Sequence[int] | None = None
    ) -> SegmentTable:
        """What the rows of ``attends`` see of tokens [start, stop); ``starts`` default to those of the segments."""
        starts = [attend.kv_start for attend in attends] if starts is None else starts
        slots = [
            # The page table begins at the first token of the sequence's range on this worker.
            self.slab.slots(attend.sequence)[start - attend.kv_start : stop - attend.kv_start]
            for attend, start, stop in zip(attends, starts, stops, strict=True)
        ]
        return SegmentTable(
            query_offsets=_offsets([attend.rows for attend in attends]),
            query_start=np.array([attend.start for attend in attends], np.int32),
            kv_offsets=_offsets([len(part) for part in slots]).astype(np.int64),  # the kernel's type: no copy there
            kv_start=np.array(starts, np.int32),
            slots=np.concatenate(slots),
        )

    def keep(self, layer: int, slots: npt.NDArray[np.int32], content: memoryview) -> None:
        """Store K and V of a token in each of ``slots`` [T], laid out as k [T, Hkv, D], then v [T, Hkv, Dv]."""
        cache = self.layers[layer]
        k, v = keys_values(content, cache.spec, self.dtype, 0, len(slots))
        append(cache.k, cache.v, k, v, slots, self.threads, cache.scales)

    def read(self, layer: int, slots: npt.NDArray[np.int32], content: memoryview) -> None:
        """Write what the slab holds of ``slots`` into ``content``, for ``restore`` on another worker."""
        for array, view in self.layers[layer].views(content, len(slots)):
            view[:] = array[slots]

    def restore(self, layer: int, slots: npt.NDArray[np.int32], content: memoryview) -> None:
        """Store what ``read`` wrote, in these slots: the same bytes, so that moving codes does not round again."""
        for array, view in self.layers[layer].views(content, len(slots)):
            array[slots] = view

    def serve(
        self, layer: int, step: StepTables, number: int, request: memoryview, out: Floats, lse: Floats
    ) -> Iterator[None]:
        """Work on piece ``number`` of a request's bytes: keep its k and v, attend with its query rows.

        Writes the piece's rows of out float32 [Rq, Hq, Dv] and lse float32 [Rq, Hq], which are complete after the last
        piece. Yields every few milliseconds, where the work may pause (``lamina.memory.cuts``); the request must not
        change before the end.
        """
        cache, rows, piece, table = self.layers[layer], step.rows, step.pieces[number], step.tables[number]
        if piece.keeps:
            k, v = keys_values(request, cache.spec, self.dtype, 0, len(rows.appends))
            append(cache.k, cache.v, k, v, step.slots, self.threads, cache.scales)
        if table is not None:
            part = slice(piece.start, piece.stop)
            q = read_queries(request, cache.spec, self.dtype, rows, piece.start, piece.stop)
            for place, cut in enumerate(cuts(table, cache.spec, self.threads, MOST_PRODUCTS)):
                if place:
                    yield
                self._attend(cache, cut, q, out[part], lse[part])
        elif step.newest is not None:
            q = read_queries(request, cache.spec, self.dtype, rows, 0, len(rows.queries))
            newest = partial(q, cache.k, cache.v, step.newest, cache.spec, self.threads, scales=cache.scales)
            merge([out, newest[0]], [lse, newest[1]], None, out, lse, self.threads)

    def _attend(self, cache: LayerCache, cut: Cut, q: Array, out: Floats, lse: Floats) -> None:
        part = slice(cut.start, cut.stop)
        arrays = q[part], cache.k, cache.v, cut.table, cache.spec, self.threads, out[part], lse[part]
        if cut.tasks is None:
            partial(*arrays, scales=cache.scales)
        else:
            partial_tasks(*arrays, cut.tasks, adds=cut.adds, scales=cache.scales)


def _offsets(counts: list[int]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int32)
