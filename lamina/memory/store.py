"""The KV of one memory worker: slab bookkeeping plus the arrays it indexes (the rManager). Runs without torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.errors import PlacementError
from lamina.kernels.merge import merge
from lamina.kernels.segments import SegmentTable
from lamina.memory.device.base import Array, Floats
from lamina.memory.device.select import make
from lamina.memory.slab import Slab
from lamina.protocol.wire import (
    MessageRows,
    Piece,
    SegmentKey,
    SegmentRows,
    check_placements,
    keys_values,
    message_rows,
    pieces,
    read_kept,
    read_queries,
)
from lamina.segments import by_sequence, forked, grown
from lamina.spills import BLOCK, Fetch
from lamina.types import AttentionSpec, DType, Fork, KvCacheDType, KvElement, Migration, Overlap, Segment, StepPlan


@dataclass(frozen=True)
class Further:
    """What some query rows of a piece attend to besides: tokens of one more segment of their sequences.

    ``rows`` int64 [R] index the piece's; ``table`` covers them in order.
    """

    rows: npt.NDArray[np.int64]
    table: SegmentTable


@dataclass(frozen=True)
class StepTables:
    """What one step needs from this worker, planned once and used for every layer.

    Attributes:
        tables: for every piece of a request, what its query rows attend to when it arrives. further: and besides.
        newest: what all rows attend to beyond that when k and v arrive last; None if they arrive first.
        slots: for the new tokens that arrive with requests. pulled_slots: for those of ``rows.pulled``.
    """

    plan: StepPlan
    rows: MessageRows
    pieces: tuple[Piece, ...]
    tables: tuple[SegmentTable | None, ...]
    further: tuple[tuple[Further, ...], ...]
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
        device: str = "cpu",
    ) -> None:
        """Allocate ``capacity`` token slots for all ``attentions`` on ``device`` (``memory.device.base.make``).

        Messages hold ``dtype``, the model's element type; ``kv_cache_dtype`` says what the slab holds. Raises
        ConfigError if the device cannot be used.
        """
        self.worker = worker
        self.threads = threads
        self.dtype = dtype
        self.element = KvElement.of(kv_cache_dtype, dtype)
        self._overlap = overlap
        self.slab = Slab[SegmentKey](capacity)
        self._kv_heads = max(spec.kv_heads for spec in attentions)
        self._segments: dict[int, list[Segment]] = {}  # those here, by sequence
        self.attentions = tuple(attentions)
        self.device = make(device, self.attentions, self.element, capacity, threads)

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
            for sequence, segments in by_sequence(admission.segments).items():
                self._open(sequence, [segment for segment in segments if segment.worker == self.worker])
        for segment in plan.grown:
            self._grow(segment)
        for fetch in plan.fetches:
            self._begin_fetch(fetch)
        return self._plan_step(plan)

    def truncate(self, kept: Mapping[int, int]) -> None:
        """Keep so many tokens of each of these sequences, counted from their beginning, and forget all others.

        Sequences that have no segment here are ignored.
        """
        for sequence in {sequence for sequence, _ in self.slab.segments}:
            if sequence not in kept or sequence not in self._segments:
                self._forget(sequence)
        for sequence, segments in self._segments.items():
            for start, stop in (segment.tokens for segment in segments):
                last = kept[sequence] if stop is None else min(kept[sequence], stop)
                self.slab.truncate((sequence, start), max(0, last - start))

    def release(self, sequences: Sequence[int]) -> None:
        """Forget sequences and free their slots. Those not known here are ignored."""
        for sequence in sequences:
            self._forget(sequence)

    def _open(self, sequence: int, segments: list[Segment]) -> None:
        """Begin the segments of a sequence that are here, if any."""
        if segments:
            self._segments[sequence] = segments
            for segment in segments:
                if (sequence, segment.tokens[0]) not in self.slab:  # else it begins as a fork of a cached prefix
                    self.slab.open((sequence, segment.tokens[0]))

    def _fork(self, fork: Fork) -> None:
        """Let a child share the part of its first tokens that its parent has here."""
        segments = self._segments[fork.parent]
        if shared := forked(segments, fork.child, fork.tokens):
            self._segments[fork.child] = shared
        for segment in segments[: len(shared)]:
            start, stop = segment.tokens
            last = fork.tokens if stop is None else min(fork.tokens, stop)
            self.slab.fork((fork.parent, start), (fork.child, start), last - start)

    def _grow(self, new: Segment) -> None:
        """Let a sequence continue in another segment, here or elsewhere. What it had planned beyond is empty."""
        sequence, segments = new.sequence, self._segments.pop(new.sequence, [])
        first, _ = new.tokens
        for segment in segments:
            if segment.tokens[0] >= first:
                self.slab.free((sequence, segment.tokens[0]))
        *ended, last = grown(segments, new)
        if last.worker == self.worker:
            self.slab.open((sequence, first))
            ended.append(last)
        if ended:
            self._segments[sequence] = ended

    def _forget(self, sequence: int) -> None:
        """Free the slots of a sequence, if it has any here or is moving here."""
        segments = self._segments.pop(sequence, ())
        for start in [segment.tokens[0] for segment in segments] or [0]:
            if (sequence, start) in self.slab:
                self.slab.free((sequence, start))

    def _make_slots(self, migration: Migration) -> None:
        """For tokens that will arrive; nothing attends to them before the plan that moves their segment here."""
        key = migration.sequence, 0
        if key not in self.slab:
            self.slab.open(key)
        held = len(self.slab.slots(key))
        if held != migration.start:
            raise PlacementError(
                f"tokens {migration.start} to {migration.stop} of sequence {migration.sequence} cannot move to "
                f"{self.worker}",
                f"it has {held} tokens, and new ones must follow these",
            )
        self.slab.append(key, migration.stop - migration.start)

    def _begin_fetch(self, fetch: Fetch) -> None:
        """Make slots for blocks that come from the disk: the plan may have forked the tokens before them."""
        if fetch.worker == self.worker:
            key = fetch.child, 0
            if key not in self.slab:
                self._open(fetch.child, [Segment(fetch.child, self.worker, fetch.heads, (0, None))])
            self.slab.append(key, len(fetch.blocks) * BLOCK)

    def _check_source(self, migration: Migration) -> None:
        segments = self._segments.get(migration.sequence, [])
        if [segment.tokens for segment in segments] != [(0, None)]:
            raise PlacementError(
                f"sequence {migration.sequence} cannot move from {self.worker}",
                "only a sequence that is entirely on the source can move",
            )

    def _plan_step(self, plan: StepPlan) -> StepTables:
        rows = message_rows(plan, self._segments, self.worker)
        kept = [*rows.kept, *(((pulled.sequence, pulled.kv_start), pulled.rows) for pulled in rows.pulled)]
        appended = self.slab.extend([segment for segment, _ in kept], [count for _, count in kept])
        cut = pieces(rows, self._overlap)
        late = cut[-1].keeps and cut[-1].start == cut[-1].stop and len(rows.queries) > 0
        stops = [min(attend.kv_stop, attend.start) if late else attend.kv_stop for attend in rows.attends]
        tables = tuple(
            self._table(rows.attends[piece.first : piece.last], stops[piece.first : piece.last])
            if piece.first < piece.last
            else None
            for piece in cut
        )
        further = tuple(self._further(rows, piece, late) for piece in cut) if rows.further else ((),) * len(cut)
        newest = self._newest(rows) if late else None
        inline = len(rows.appends)
        return StepTables(plan, rows, cut, tables, further, newest, appended[:inline], appended[inline:])

    def _newest(self, rows: MessageRows) -> SegmentTable:
        """What rows attend to of the tokens of their own step, which only the last segment of a sequence has."""
        last = dict(enumerate(rows.attends)) | dict(rows.further)
        stops = [attend.kv_stop for attend in last.values()]
        return self._table(list(last.values()), stops, [min(attend.kv_stop, attend.start) for attend in last.values()])

    def _further(self, rows: MessageRows, piece: Piece, late: bool) -> tuple[Further, ...]:
        """The second segments of a piece's sequences, then the third ones, and so on."""
        begins = np.cumsum([0, *(attend.rows for attend in rows.attends)]) - piece.start
        rounds: list[list[tuple[int, SegmentRows]]] = []
        counts: dict[int, int] = {}
        for index, attend in rows.further:
            if piece.first <= index < piece.last:
                counts[index] = number = counts.get(index, -1) + 1
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append((index, attend))
        return tuple(
            Further(
                np.concatenate([np.arange(begins[index], begins[index + 1]) for index, _ in pairs]),
                self._table(
                    [attend for _, attend in pairs],
                    [min(attend.kv_stop, attend.start) if late else attend.kv_stop for _, attend in pairs],
                ),
            )
            for pairs in rounds
        )

    def _table(
        self, attends: Sequence[SegmentRows], stops: Sequence[int], starts: Sequence[int] | None = None
    ) -> SegmentTable:
        """What the rows of ``attends`` see of tokens [start, stop); ``starts`` default to those of the segments."""
        starts = [attend.kv_start for attend in attends] if starts is None else starts
        slots = [
            self.slab.slots((attend.sequence, attend.kv_start))[start - attend.kv_start : stop - attend.kv_start]
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
        self.device.keep(layer, *keys_values(content, self.attentions[layer], self.dtype, 0, len(slots)), slots)

    def serve(
        self, layer: int, step: StepTables, number: int, request: memoryview, out: Floats, lse: Floats
    ) -> Iterator[None]:
        """Work on piece ``number`` of a request's bytes: keep its k and v, attend with its query rows.

        Writes the piece's rows of out float32 [Rq, Hq, Dv] and lse float32 [Rq, Hq], which are complete after the last
        piece. Yields every few milliseconds, where the work may pause (``lamina.memory.cuts``); the request must not
        change before the end.
        """
        spec, rows, piece, table = self.attentions[layer], step.rows, step.pieces[number], step.tables[number]
        if piece.keeps:
            self.device.keep(layer, *read_kept(request, spec, self.dtype, rows, step.pieces), step.slots)
        if table is not None:
            part = slice(piece.start, piece.stop)
            q = read_queries(request, spec, self.dtype, rows, step.pieces, piece.start, piece.stop)
            yield from self.device.attend(layer, table, q, out[part], lse[part])
            for further in step.further[number]:
                yield
                yield from self._attend_further(layer, further, q, out[part], lse[part])
        elif step.newest is not None:
            q = read_queries(request, spec, self.dtype, rows, step.pieces, 0, len(rows.queries))
            more, sums = np.empty_like(out), np.empty_like(lse)
            yield from self.device.attend(layer, step.newest, q, more, sums)
            merge([out, more], [lse, sums], None, out, lse, self.threads)

    def _attend_further(self, layer: int, further: Further, q: Array, out: Floats, lse: Floats) -> Iterator[None]:
        """Merge the attention of some rows over one more segment into ``out`` and ``lse``."""
        rows = further.rows
        more, sums = np.empty((len(rows), *out.shape[1:]), np.float32), np.empty((len(rows), lse.shape[1]), np.float32)
        yield from self.device.attend(layer, further.table, q[rows], more, sums)
        merge([out[rows], more], [lse[rows], sums], None, more, sums, self.threads)
        out[rows], lse[rows] = more, sums


def _offsets(counts: list[int]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int32)
