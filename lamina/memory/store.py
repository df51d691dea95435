"""The KV of one memory worker: slab bookkeeping plus the arrays it indexes (the rManager). Runs without torch."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lamina.errors import PlacementError
from lamina.heads import HeadShards
from lamina.kernels.merge import merge
from lamina.memory.appends import appended_rows
from lamina.memory.device.base import Array, Floats, New, Pairs, Table
from lamina.memory.device.select import make
from lamina.memory.device.windows import STEPS_KEPT
from lamina.memory.slab import Slab
from lamina.memory.starts import brought, step_starts
from lamina.memory.tables import Attended, Further, StepTables
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
from lamina.segments import by_sequence, forked, grown, moved, overlaps
from lamina.spills import BLOCK, Fetch
from lamina.steps import Fork, Migration, StepPlan, Switch
from lamina.types import AttentionSpec, DType, KvCacheDType, KvElement, Overlap, Polling, Segment


class KvStore:
    """Applies plans to the slab and runs their attention. One thread owns it.

    Attributes:
        shards: how heads are cut. attentions: as in messages, with the query heads of one shard, or of one of the ranks
            that share it. slab: a slot holds one shard of a token.
    """

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
        head_shards: int = 1,
        ranks: int = 1,
        forgets: bool = False,
        polling: Polling = "host",
    ) -> None:
        """Allocate slots for ``capacity`` tokens of all ``attentions`` on ``device`` (``memory.device.base.make``).

        Messages hold ``dtype``, the model's element type; ``kv_cache_dtype`` says what the slab holds; segments may
        have some of ``head_shards`` shards of the heads, which the ``ranks`` of a replica share. ``forgets``: layers
        with a window keep no tokens that no step will attend to: a fork of a cached prefix must have all of its tokens.
        ``polling``: see ``memory.device.select.make``.
        Raises ConfigError if the device cannot be used.
        """
        self.worker = worker
        self.threads = threads
        self.dtype = dtype
        self.element = KvElement.of(kv_cache_dtype, dtype)
        self._overlap = overlap
        self._ranks = ranks
        self.shards = HeadShards(max(spec.kv_heads for spec in attentions), head_shards)
        self.slab = Slab[SegmentKey](capacity * head_shards)
        self._segments: dict[int, list[Segment]] = {}  # those here, by sequence
        self._sharers = sharers = self.shards.sharers(ranks)
        parts = head_shards * sharers
        self._by_part = parts > 1 and any(spec.alibi_slopes is not None for spec in attentions)
        alike = 1 if not self._by_part else parts
        self._specs = [[self.shards.spec(spec, part, sharers) for part in range(alike)] for spec in attentions]
        self.attentions = tuple(specs[0] for specs in self._specs)
        # Of the latest steps, by sequence; before the first, where that begins.
        self._starts: dict[int, collections.deque[int]] = {}
        self._forgets = forgets
        needed = self._needed if forgets else None
        capacity = self.slab.capacity
        self.device = make(device, self.attentions, self.element, capacity, threads, needed, polling)

    @property
    def sequences(self) -> int:
        """Sequences with a segment here."""
        return len(self._segments)

    @property
    def used_tokens(self) -> int:
        """Tokens that the slots in use could hold with all heads, rounded up."""
        return -(-self.slab.used // self.shards.count)

    def apply(self, plan: StepPlan) -> list[StepTables]:
        """Apply a plan's deltas to the slab, allocate slots for its new tokens, and return the tables of its step: what
        each rank of a replica sends.

        Raises CapacityError, having changed nothing of the step's own sequences, if its tokens do not fit, and
        PlacementError, having changed nothing at all, for segments that cannot be served.
        """
        check_placements(plan, self.shards)
        for switch in plan.switches:
            self._switch(switch)
        for fork in plan.forks:
            self._fork(fork)
        self.release(plan.released)
        self._migrate(plan)
        for admission in plan.admitted:
            for sequence, segments in by_sequence(admission.segments).items():
                self._open(sequence, [segment for segment in segments if segment.worker == self.worker])
        for segment in plan.grown:
            self._grow(segment)
        for fetch in plan.fetches:
            self._begin_fetch(fetch)
        self.device.forget(self.slab.take_shortened())
        steps = [self._plan_step(plan, rank) for rank in range(self._ranks)]
        if self._forgets:
            self._note_starts([step.rows for step in steps])
        return steps

    def _migrate(self, plan: StepPlan) -> None:
        """Take over what has arrived here, forget what has left, and begin what a plan says."""
        for segment in plan.moved:
            if segment.worker == self.worker:
                self._segments[segment.sequence] = [segment]
            else:
                self._forget(segment.sequence)
        for migration in plan.migrations:
            if migration.target == self.worker:
                self._make_slots(migration)
            elif migration.source == self.worker:
                self._hold_source(migration)

    def truncate(self, kept: Mapping[int, int]) -> None:
        """Keep so many tokens of each of these sequences, counted from their beginning, and forget all others.

        Sequences that have no segment here are ignored.
        """
        # Prefixes of sequences whose steps have completed may be cached with the next plan.
        self._starts = {one: _first(max(0, tokens - STEPS_KEPT)) for one, tokens in kept.items()}
        for sequence in {sequence for sequence, *_ in self.slab.segments}:
            if sequence not in kept or sequence not in self._segments:
                self._forget(sequence)
        for segment in itertools.chain.from_iterable(self._segments.values()):
            start, stop = segment.tokens
            last = kept[segment.sequence] if stop is None else min(kept[segment.sequence], stop)
            for key in self._keys(segment):
                self.slab.truncate(key, max(0, last - start))

    def release(self, sequences: Sequence[int]) -> None:
        """Forget sequences and free their slots. Those not known here are ignored."""
        for sequence in sequences:
            self._forget(sequence)

    def _open(self, sequence: int, segments: list[Segment]) -> None:
        """Begin the segments of a sequence that are here, if any."""
        if segments:
            self._segments[sequence] = segments
            for key in itertools.chain.from_iterable(map(self._keys, segments)):
                if key not in self.slab:  # else it begins as a fork of a cached prefix
                    self.slab.open(key)

    def _keys(self, segment: Segment) -> list[SegmentKey]:
        """Of its shards."""
        return [self._key(segment.sequence, segment.tokens[0], shard) for shard in self.shards.of(segment.heads)]

    def _key(self, sequence: int, first: int, shard: int) -> SegmentKey:
        return sequence, first * self.shards.count + shard

    def _key_of(self, attend: SegmentRows) -> SegmentKey:
        return self._key(attend.sequence, attend.kv_start, attend.shard)

    def _fork(self, fork: Fork) -> None:
        """Let a child share the part of its first tokens that its parent has here. Of tokens that the child has from
        elsewhere, it gets what has been forgotten there."""
        segments = self._segments.get(fork.parent, [])
        if shared := forked(segments, fork.child, fork.tokens):
            self._segments[fork.child] = shared
            self._starts[fork.child] = _first(fork.tokens)
        for segment in segments[: len(shared)]:
            start, stop = segment.tokens
            last = fork.tokens if stop is None else min(fork.tokens, stop)
            for key in self._keys(segment):
                child = self._key(fork.child, start, key[1] % self.shards.count)
                if child in self.slab:
                    begun, source = self.slab.slots(child), self.slab.slots(key)
                    both = min(len(begun), last - start)
                    self.device.renew(begun[:both], source[:both], fork.tokens - start)
                if child not in self.slab or len(self.slab.slots(child)) < last - start:
                    self.slab.fork(key, child, last - start)

    def _grow(self, new: Segment) -> None:
        """Let a sequence continue in another segment, here or elsewhere. What it had planned beyond is empty."""
        sequence, segments = new.sequence, self._segments.pop(new.sequence, [])
        first, _ = new.tokens
        for segment in segments:
            if segment.tokens[0] >= first and overlaps(segment, new):
                for key in self._keys(segment):
                    self.slab.free(key)
        after = [segment for segment in grown(segments, new) if segment.worker == self.worker]
        for key in itertools.chain.from_iterable(map(self._keys, after)):
            if key not in self.slab:  # of the new one, unless the sequence has come back
                self.slab.open(key)
        if after:
            self._segments[sequence] = after

    def _forget(self, sequence: int) -> None:
        """Free the slots of a sequence, if it has any here or is moving here."""
        self._starts.pop(sequence, None)
        segments = self._segments.pop(sequence, ()) or [Segment(sequence, self.worker, self.shards.whole, (0, None))]
        for key in itertools.chain.from_iterable(map(self._keys, segments)):
            if key in self.slab:
                self.slab.free(key)

    def _make_slots(self, migration: Migration) -> None:
        """For tokens that will arrive; nothing attends to them before the plan that moves their segment here."""
        key = migration.sequence, 0
        if key not in self.slab:
            self.slab.open(key)
        held = len(self.slab.slots(key))
        if held != (migration.start if migration.parent is None else 0):
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

    def slots_of(self, migration: Migration) -> npt.NDArray[np.int32]:
        """The slots that a migration copies from or to here: a copy, int32 [stop - start]."""
        slots = self.slab.slots((migration.sequence, 0))
        return (slots if migration.parent is not None else slots[migration.start : migration.stop]).copy()

    def _hold_source(self, migration: Migration) -> None:
        """Let a carrier share the slots of tokens that will be read, or check that their sequence keeps them."""
        if migration.parent is not None:
            self._share_range(migration, migration.parent)
            return
        segments = self._segments.get(migration.sequence, [])
        if [segment.tokens for segment in segments] != [(0, None)]:
            raise PlacementError(
                f"sequence {migration.sequence} cannot move from {self.worker}",
                "only a sequence that is entirely on the source can move",
            )

    def _share_range(self, migration: Migration, parent: int) -> None:
        start, stop = migration.start, migration.stop
        for first in (segment.tokens[0] for segment in self._segments.get(parent, [])):
            if first <= start and stop <= first + len(self.slab.slots((parent, first))):
                self.slab.rearrange([], {(migration.sequence, 0): [((parent, first), start - first, stop - first)]})
                return
        raise PlacementError(
            f"tokens {start} to {stop} of sequence {parent} cannot move from {self.worker}",
            f"of its segments here, {self._segments.get(parent, [])}, none has all of them",
        )

    def _switch(self, switch: Switch) -> None:
        """Let sequences hold a range at the target of its move, and no longer at the source. What they share there they
        share here: the slots of the carrier."""
        for new in switch.segments:
            sequence, (first, last) = new.sequence, new.tokens
            before = self._segments.pop(sequence, [])
            after = [segment for segment in moved(before, new) if segment.worker == self.worker]
            held: list[tuple[int, int, SegmentKey, int]] = []
            if new.worker == self.worker:
                carried = first + len(self.slab.slots((switch.carrier, 0)))
                end = carried if last is None else last
                held.append((first, end, (switch.carrier, 0), first))
                self._starts.setdefault(sequence, _first(end))
            for segment in before:
                start = segment.tokens[0]
                stop = start + len(self.slab.slots((sequence, start)))
                held.append((start, min(stop, first), (sequence, start), start))
                if last is not None:
                    held.append((max(start, last), stop, (sequence, start), start))
            parts = {(sequence, segment.tokens[0]): _parts(segment, sorted(held)) for segment in after}
            self.slab.rearrange([(sequence, segment.tokens[0]) for segment in before], parts)
            if after:
                self._segments[sequence] = after

    def _plan_step(self, plan: StepPlan, rank: int) -> StepTables:
        rows = message_rows(plan, self._segments, self.worker, self.shards, rank, self._ranks)
        kept = brought(rows, self._key)
        if rank % self._sharers:  # these tokens have slots: another rank that has the same shard sends them too
            tails = [self.slab.slots(segment)[-count:] for segment, count in kept]
            appended = np.concatenate([*tails, np.empty(0, np.int32)])
        else:
            appended = self.slab.extend([segment for segment, _ in kept], [count for _, count in kept])
        cut = pieces(rows, self._overlap)
        late = cut[-1].keeps and cut[-1].start == cut[-1].stop and len(rows.queries) > 0
        stops = [min(attend.kv_stop, attend.start) if late else attend.kv_stop for attend in rows.attends]
        new = [] if self._by_part else appended_rows(rows, cut, self._key_of)
        tables = tuple(
            self._tables(rows.attends[piece.first : piece.last], stops[piece.first : piece.last], new=new)
            for piece in cut
        )
        further = tuple(self._further(rows, piece, late) for piece in cut) if rows.further else ((),) * len(cut)
        newest = self._newest(rows) if late else ()
        inline, pulled = appended[: len(rows.appends)], appended[len(rows.appends) :]
        door = plan.lane * self._ranks + rank
        sent, appends = self.device.sent(inline), len(new) > 0
        return StepTables(plan, rows, cut, tables, further, newest, inline, sent, pulled, door, appends)

    def _note_starts(self, messages: Iterable[MessageRows]) -> None:
        """Steps of a lane complete in order, and those in flight are the latest: earlier ones attend no more."""
        steps = [(rows, brought(rows, self._key)) for rows in messages]
        for sequence, start in step_starts(steps, self._end).items():
            self._starts.setdefault(sequence, _first(start)).append(start)

    def _end(self, key: SegmentKey) -> int:
        """The position behind the last token of a segment."""
        return key[1] // self.shards.count + len(self.slab.slots(key))

    def _needed(self, window: int) -> Iterator[npt.NDArray[np.int32]]:
        """See ``Needed``. Of a sequence that has come from elsewhere and not run here, all is needed."""
        for sequence, number in self.slab.segments:
            starts = self._starts.get(sequence)
            lowest = 0 if starts is None else min(starts) - window + 1 - number // self.shards.count
            yield self.slab.slots((sequence, number))[max(lowest, 0) :]

    def _newest(self, rows: MessageRows) -> tuple[Attended, ...]:
        """What rows attend to of the tokens of their own step, which only the last segment of a sequence has."""
        last = dict(enumerate(rows.attends)) | dict(rows.further)
        stops = [attend.kv_stop for attend in last.values()]
        return self._tables(list(last.values()), stops, [min(attend.kv_stop, attend.start) for attend in last.values()])

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
        return tuple(self._further_round(begins, pairs, late) for pairs in rounds)

    def _further_round(
        self, begins: npt.NDArray[np.int64], pairs: Sequence[tuple[int, SegmentRows]], late: bool
    ) -> Further:
        rows = np.concatenate([np.arange(begins[index], begins[index + 1]) for index, _ in pairs])
        stops = [min(attend.kv_stop, attend.start) if late else attend.kv_stop for _, attend in pairs]
        return Further(rows, self.device.sent(rows), self._tables([attend for _, attend in pairs], stops))

    def _tables(
        self,
        attends: Sequence[SegmentRows],
        stops: Sequence[int],
        starts: Sequence[int] | None = None,
        new: Sequence[int] = (),
    ) -> tuple[Attended, ...]:
        """What the rows of ``attends`` see of tokens [start, stop); ``starts`` default to those of the segments.

        One table for all rows, or one for those of each part of the heads if that has slopes of its own.
        """
        starts = [attend.kv_start for attend in attends] if starts is None else starts
        parts = [attend.part if self._by_part else 0 for attend in attends]  # ascending
        tables, row, first = [], 0, 0
        for part, run in itertools.groupby(parts):
            some = slice(first, first + len(list(run)))
            rows = sum(attend.rows for attend in attends[some])
            table = self._table(attends[some], stops[some], starts[some], new)
            tables.append(Attended(row, row + rows, part, table))
            row, first = row + rows, some.stop
        return tuple(tables)

    def _table(
        self, attends: Sequence[SegmentRows], stops: Sequence[int], starts: Sequence[int], new: Sequence[int]
    ) -> Table:
        pairs = Pairs(
            rows=[attend.rows for attend in attends],
            query_start=[attend.start for attend in attends],
            kv_start=starts,
            keys=[self._key_of(attend) for attend in attends],
            first=[start - attend.kv_start for attend, start in zip(attends, starts, strict=True)],
            stop=[stop - attend.kv_start for attend, stop in zip(attends, stops, strict=True)],
            new=new,
        )
        return self.device.table(pairs, self.slab.slots)

    def keep(self, layer: int, slots: npt.NDArray[np.int32], content: memoryview) -> None:
        """Store K and V of a token in each of ``slots`` [T], laid out as k [T, Hkv, D], then v [T, Hkv, Dv]."""
        there = self.device.sent(np.frombuffer(content, np.uint8))
        k, v = keys_values(there, self.attentions[layer], self.dtype, 0, len(slots))
        self.device.keep(layer, k, v, self.device.sent(slots))

    def serve(
        self, layer: int, step: StepTables, number: int, request: memoryview | Array, out: Floats, lse: Floats
    ) -> Iterator[None]:
        """Work on piece ``number`` of a request's bytes, or of a whole one in an inbox: keep its k and v, attend with
        its query rows.

        Writes the piece's rows of out float32 [Rq, Hq, Dv] and lse float32 [Rq, Hq], which are complete after the last
        piece. Yields every few milliseconds, where the work may pause (``lamina.memory.cuts``); the request must not
        change before the end.
        """
        spec, rows, piece = self.attentions[layer], step.rows, step.pieces[number]
        content: Array = np.frombuffer(request, np.uint8) if isinstance(request, memoryview) else request
        sent = self.device.sent
        if len(step.pieces) == 1:
            content, sent = sent(content), _as_it_is  # all at once
        new = None
        if piece.keeps:
            k, v = read_kept(content, spec, self.dtype, rows, step.pieces)
            new = New(sent(k), sent(v), step.sent_slots)
            if not step.appends:
                self.device.keep(layer, new.k, new.v, new.slots)
        if step.tables[number]:
            part = slice(piece.start, piece.stop)
            q = read_queries(content, spec, self.dtype, rows, step.pieces, piece.start, piece.stop)
            given = new if step.appends else None
            yield from self.attend(layer, step, number, sent(q), out[part], lse[part], given)
        elif step.newest:
            q = read_queries(content, spec, self.dtype, rows, step.pieces, 0, len(rows.queries))
            more, sums = self.device.results(len(q), spec)
            yield from self._attend(layer, step.newest, sent(q), more, sums)
            merge([out, more], [lse, sums], None, out, lse, self.threads)

    def attend(
        self, layer: int, step: StepTables, number: int, q: Array, out: Floats, lse: Floats, new: New | None = None
    ) -> Iterator[None]:
        """Attend with q [R, Hq, D], the query rows of piece ``number``, to what is kept of their segments here.

        q has been sent to the device, as has ``new``: k and v of the request, if ``step.appends``. Writes out float32
        [R, Hq, Dv] and lse float32 [R, Hq]. Yields as ``serve`` does.
        """
        yield from self._attend(layer, step.tables[number], q, out, lse, new)
        for further in step.further[number]:
            yield
            yield from self._attend_further(layer, further, q, out, lse)

    def attend_there(
        self, layer: int, step: StepTables, q: Array, out: Array, lse: Array, new: New | None = None
    ) -> None:
        """As ``attend``, of a step in one piece without further segments; out and lse are the device's
        (``Device.made``)."""
        for one in step.tables[0]:
            rows, spec = slice(one.start, one.stop), self._specs[layer][one.part]
            self.device.attend_there(layer, one.table, q[rows], out[rows], lse[rows], spec, new)

    def _attend(
        self,
        layer: int,
        tables: Sequence[Attended],
        q: Array,
        out: Floats,
        lse: Floats,
        new: New | None = None,
    ) -> Iterator[None]:
        """Attention of rows that ``tables`` cover in order; a single one if there are ``new`` tokens."""
        for number, one in enumerate(tables):
            if number:
                yield
            rows, spec = slice(one.start, one.stop), self._specs[layer][one.part]
            yield from one.table.attend(layer, q[rows], out[rows], lse[rows], spec, new)

    def _attend_further(self, layer: int, further: Further, q: Array, out: Floats, lse: Floats) -> Iterator[None]:
        """Merge the attention of some rows over one more segment into ``out`` and ``lse``."""
        rows = further.rows
        more, sums = self.device.results(len(rows), self.attentions[layer])
        yield from self._attend(layer, further.tables, q[further.sent], more, sums)
        merge([out[rows], more], [lse[rows], sums], None, more, sums, self.threads)
        out[rows], lse[rows] = more, sums


def _parts(segment: Segment, held: Sequence[tuple[int, int, SegmentKey, int]]) -> list[tuple[SegmentKey, int, int]]:
    """Where the tokens of a segment are. ``held``: tokens [start, stop) by ascending start, what holds them, and the
    first token of that."""
    low, high = segment.tokens
    ends = [stop if high is None else min(stop, high) for _, stop, _, _ in held]
    return [
        (key, max(start, low) - origin, stop - origin)
        for (start, _, key, origin), stop in zip(held, ends, strict=True)
        if max(start, low) < stop
    ]


def _first(start: int) -> collections.deque[int]:
    """The starts of a sequence whose next step begins there."""
    return collections.deque([start], maxlen=STEPS_KEPT)


def _as_it_is(array: Array) -> Array:
    return array
