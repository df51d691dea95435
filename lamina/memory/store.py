"""Applies plans to the KV slab of one memory worker and runs attention over it. Needs no torch.

In Infinite-LLM's terms: the rManager.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.control.messages import MemorySetup
from lamina.core.heads import HeadShards
from lamina.core.steps import StepPlan
from lamina.core.types import KvElement
from lamina.dataplane.wire import (
    MessageRows,
    Piece,
    SegmentRows,
    check_placements,
    keys_values,
    message_rows,
    pieces,
    read_kept,
    read_queries,
)
from lamina.kernels.attention import merge
from lamina.memory.device import make
from lamina.memory.device.base import Array, Floats, New, Pairs, Table
from lamina.memory.holdings import Holdings, brought
from lamina.memory.watermarks import ALONE, ChunkOrder, Watermarks


@dataclass(frozen=True)
class Attended:
    """The tokens that query rows [start, stop) of a piece attend to.

    If parts of the heads have different slopes, ``part`` says which part's heads the rows have.
    """

    start: int
    stop: int
    part: int
    table: Table


@dataclass(frozen=True)
class Further:
    """One more segment that some query rows of a piece attend to.

    Attributes:
        rows: int64 [R], indices of the rows in the piece.
        sent: ``rows`` on the device.
        tables: cover ``rows`` in order.
    """

    rows: npt.NDArray[np.int64]
    sent: Array
    tables: tuple[Attended, ...]


@dataclass(frozen=True)
class StepTables:
    """The part of one step on this worker, planned once and used for every layer.

    Attributes:
        plan: the step.
        rows: rows of the step's messages.
        pieces: pieces in which a request is sent.
        tables: by piece, the first segments that its query rows attend to; empty without query rows.
        further: by piece, further segments that its query rows attend to.
        slots: slots of the new tokens that arrive with requests.
        sent_slots: ``slots`` on the device.
        pulled_slots: slots of the tokens ``rows.pulled``.
        door: Number of the stream of messages that the step's requests belong to (``Pipeline.door``).
        appends: whether attention stores the new tokens of requests, so that they need no separate ``keep``.
        order: the chunks of other lanes that the step waits for, and the chunks that wait for it.
    """

    plan: StepPlan
    rows: MessageRows
    pieces: tuple[Piece, ...]
    tables: tuple[tuple[Attended, ...], ...]
    further: tuple[tuple[Further, ...], ...]
    slots: npt.NDArray[np.int32]
    sent_slots: Array
    pulled_slots: npt.NDArray[np.int32]
    door: int
    appends: bool = False
    order: ChunkOrder = ALONE

    @functools.cached_property
    def is_served_at_once(self) -> bool:
        """Whether a request is served without a pause: all its rows decode, each over one segment."""
        pauses = len(self.pieces) > 1 or any(self.further) or any(len(attended) > 1 for attended in self.tables)
        waits = self.rows.pulled or self.order.after
        return not pauses and not waits and all(len(one.tokens) == 1 for one in self.plan.sequences)


class KvStore:
    """Applies plans to the slab and runs their attention. One thread owns it.

    Attributes:
        shards: how heads are sharded.
        attentions: specs with the query heads of one shard, or of one rank if several ranks share the shard.
        held: the worker's segments.
        slab: the slots of ``held``; each holds one shard of a token.
        watermarks: prompt chunks whose K and V are not all stored.
        first: index of the model's attention that is number 0 here, above 0 in the local memory of a later stage.
    """

    def __init__(self, worker: str, setup: MemorySetup, device: str = "cpu") -> None:
        """Allocate the slab of ``setup`` on ``device`` (``memory.device.make``).

        If windowed layers drop tokens, a fork of a cached prefix must share all of the prefix. Raises ConfigError if
        the device cannot be used.
        """
        self.worker = worker
        self.threads, self.dtype = setup.threads, setup.dtype
        self.element = KvElement.from_setting(setup.kv_cache_dtype, setup.dtype)
        self._overlap, self._ranks = setup.overlap, setup.ranks
        attentions = setup.own
        self.shards = HeadShards(max(spec.kv_heads for spec in setup.attentions), setup.head_shards)
        self.first, stop = setup.layers or (0, len(attentions))
        self.held = Holdings(worker, self.shards, setup.capacity * setup.head_shards)
        self.slab = self.held.slab
        self._sharers = sharers = self.shards.sharers(setup.ranks)
        parts = setup.head_shards * sharers
        self._by_part = parts > 1 and any(spec.alibi_slopes is not None for spec in attentions)
        alike = 1 if not self._by_part else parts
        self._specs = [[self.shards.spec(spec, part, sharers) for part in range(alike)] for spec in attentions]
        self.attentions = tuple(specs[0] for specs in self._specs)
        self.watermarks = Watermarks(stop - self.first, setup.head_shards)
        self._forgets = setup.forgets
        needed = self.held.needed if setup.forgets else None
        capacity = self.slab.capacity
        self.device = make(device, self.attentions, self.element, capacity, setup.threads, needed, setup.polling)

    @property
    def sequences(self) -> int:
        """Number of sequences with a segment on this worker."""
        return len(self.held.segments)

    @property
    def used_tokens(self) -> int:
        """Tokens that the slots in use could hold with all heads, rounded up."""
        return -(-self.slab.used // self.shards.count)

    def truncate(self, kept: Mapping[int, int]) -> None:
        self.watermarks.clear()
        self.held.truncate(kept)

    def release(self, sequences: Sequence[int]) -> None:
        self.held.release(sequences)

    def apply(self, plan: StepPlan, ranks: int | None = None) -> list[StepTables]:
        """Apply a plan's deltas to the slab and allocate slots for its new tokens.

        ``ranks``: ranks of the replica that runs the plan; None: those of the replicas that have most.

        Returns the tables of its step, by rank of the replica. Raises CapacityError if the tokens do not fit, with the
        step's own sequences unchanged, and PlacementError for segments that cannot be served, with nothing changed.
        """
        check_placements(plan, self.shards)
        self.held.apply(plan, self.device.renew)
        self.device.forget(self.slab.take_shortened())
        count = ranks or self._ranks
        steps = [self._plan_step(plan, rank, count) for rank in range(count)]
        self.device.prepare(self.slab.reach)
        if self._forgets:
            self.held.note_starts(plan.lane, [step.rows for step in steps])
        if plan.chunks:
            orders = self.watermarks.plan_chunks(plan, [(step.door, step.rows) for step in steps])
            steps = [dataclasses.replace(step, order=order) for step, order in zip(steps, orders, strict=True)]
        return steps

    def _plan_step(self, plan: StepPlan, rank: int, ranks: int) -> StepTables:
        rows = message_rows(plan, self.held.segments, self.worker, self.shards, rank, ranks)
        kept = brought(rows, self.held.key)
        if rank % self._sharers:  # these tokens have slots: another rank that has the same shard sends them too
            tails = [self.slab.slots(segment)[-count:] for segment, count in kept]
            appended = np.concatenate([*tails, np.empty(0, np.int32)])
        else:
            appended = self.slab.extend([segment for segment, _ in kept], [count for _, count in kept])
        cut = pieces(rows, self._overlap)
        new = [] if self._by_part else _appended_rows(rows, cut)
        tables = tuple(self._tables(rows.attends[piece.first : piece.last], new) for piece in cut)
        further = tuple(self._further(rows, piece) for piece in cut) if rows.further else ((),) * len(cut)
        inline, pulled = appended[: len(rows.appends)], appended[len(rows.appends) :]
        door = plan.lane * self._ranks + rank
        sent, appends = self.device.sent(inline), len(new) > 0
        return StepTables(plan, rows, cut, tables, further, inline, sent, pulled, door, appends)

    def _further(self, rows: MessageRows, piece: Piece) -> tuple[Further, ...]:
        """Return the second segments of a piece's sequences, then the third ones, and so on."""
        begins = np.cumsum([0, *(attend.rows for attend in rows.attends)]) - piece.start
        rounds: list[list[tuple[int, SegmentRows]]] = []
        counts: dict[int, int] = {}
        for index, attend in rows.further:
            if piece.first <= index < piece.last:
                counts[index] = number = counts.get(index, -1) + 1
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append((index, attend))
        return tuple(self._further_round(begins, pairs) for pairs in rounds)

    def _further_round(self, begins: npt.NDArray[np.int64], pairs: Sequence[tuple[int, SegmentRows]]) -> Further:
        rows = np.concatenate([np.arange(begins[index], begins[index + 1]) for index, _ in pairs])
        return Further(rows, self.device.sent(rows), self._tables([attend for _, attend in pairs]))

    def _tables(self, attends: Sequence[SegmentRows], new: Sequence[int] = ()) -> tuple[Attended, ...]:
        """Return one table for all rows of ``attends``, or one for each part of the heads with slopes of its own."""
        parts = [attend.part if self._by_part else 0 for attend in attends]  # ascending
        tables, row, first = [], 0, 0
        for part, run in itertools.groupby(parts):
            some = slice(first, first + len(list(run)))
            rows = sum(attend.rows for attend in attends[some])
            tables.append(Attended(row, row + rows, part, self._table(attends[some], new)))
            row, first = row + rows, some.stop
        return tuple(tables)

    def _table(self, attends: Sequence[SegmentRows], new: Sequence[int]) -> Table:
        pairs = Pairs(
            rows=[attend.rows for attend in attends],
            query_start=[attend.start for attend in attends],
            kv_start=[attend.kv_start for attend in attends],
            keys=[attend.key for attend in attends],
            first=[0] * len(attends),
            stop=[attend.kv_stop - attend.kv_start for attend in attends],
            new=new,
        )
        return self.device.table(pairs, self.slab.slots)

    def keep(self, layer: int, slots: npt.NDArray[np.int32], content: memoryview) -> None:
        """Store K and V of a token in each of ``slots`` [T], laid out as k [T, Hkv, D], then v [T, Hkv, Dv]."""
        there = self.device.sent(np.frombuffer(content, np.uint8))
        k, v = keys_values(there, self.attentions[layer], self.dtype, len(slots))
        self.device.keep(layer, k, v, self.device.sent(slots))

    def serve(
        self, layer: int, step: StepTables, number: int, request: memoryview | Array, out: Floats, lse: Floats
    ) -> Iterator[None]:
        """Serve one piece of a request: store its k and v and attend with its query rows.

        Yields every few milliseconds, where the work may pause (``lamina.memory.cuts``).

        Args:
            layer: Index of the attention.
            step: Tables of the step.
            number: Index of the piece.
            request: Bytes of the piece's request, or the whole request in an inbox. Must not change before the end.
            out: Result float32 [Rq, Hq, Dv], complete after the request's last piece.
            lse: Result float32 [Rq, Hq], like ``out``.
        """
        spec, rows, piece = self.attentions[layer], step.rows, step.pieces[number]
        content: Array = np.frombuffer(request, np.uint8) if isinstance(request, memoryview) else request
        sent = self.device.sent
        if len(step.pieces) == 1:
            content, sent = sent(content), _as_it_is  # all at once
        new = None
        if piece.keeps:
            k, v = read_kept(content, spec, self.dtype, rows)
            new = New(sent(k), sent(v), step.sent_slots)
            if not step.appends:
                self.device.keep(layer, new.k, new.v, new.slots)
        if step.tables[number]:
            part = slice(piece.start, piece.stop)
            q = read_queries(content, spec, self.dtype, rows, piece.start, piece.stop)
            given = new if step.appends else None
            yield from self.attend(layer, step, number, sent(q), out[part], lse[part], given)

    def attend(
        self, layer: int, step: StepTables, number: int, q: Array, out: Floats, lse: Floats, new: New | None = None
    ) -> Iterator[None]:
        """Attend with q [R, Hq, D], the query rows of piece ``number``, to their segments on this worker.

        Writes out float32 [R, Hq, Dv] and lse float32 [R, Hq]. Yields every few milliseconds. ``q`` and ``new`` are on
        the device; ``new`` has k and v of the request if ``step.appends``.
        """
        yield from self._attend(layer, step.tables[number], q, out, lse, new)
        for further in step.further[number]:
            yield
            yield from self._attend_further(layer, further, q, out, lse)

    def attend_there(
        self, layer: int, step: StepTables, q: Array, out: Array, lse: Array, new: New | None = None
    ) -> None:
        """Attend for a step in one piece without further segments; ``out`` and ``lse`` are in device memory."""
        for one in step.tables[0]:
            given = q, out, lse
            if len(step.tables[0]) > 1:
                given = q[one.start : one.stop], out[one.start : one.stop], lse[one.start : one.stop]
            self.device.attend_there(layer, one.table, *given, self._specs[layer][one.part], new)

    def _attend(
        self,
        layer: int,
        tables: Sequence[Attended],
        q: Array,
        out: Floats,
        lse: Floats,
        new: New | None = None,
    ) -> Iterator[None]:
        """Attend with rows that ``tables`` cover in order. With ``new`` tokens there is only one table."""
        for number, one in enumerate(tables):
            if number:
                yield
            rows, spec = slice(one.start, one.stop), self._specs[layer][one.part]
            yield from one.table.attend(layer, q[rows], out[rows], lse[rows], spec, new)

    def _attend_further(self, layer: int, further: Further, q: Array, out: Floats, lse: Floats) -> Iterator[None]:
        rows = further.rows
        more, sums = self.device.results(len(rows), self.attentions[layer])
        yield from self._attend(layer, further.tables, q[further.sent], more, sums)
        merge([out[rows], more], [lse[rows], sums], None, more, sums, self.threads)
        out[rows], lse[rows] = more, sums


def _as_it_is(array: Array) -> Array:
    return array


def _appended_rows(rows: MessageRows, pieces: tuple[Piece, ...]) -> list[int]:
    """Return, for each of ``rows.attends``, the row of the message's k and v that belongs to its only query, or -1.

    Empty unless the message has one piece and every row of its k and v belongs to such a query, as in decode steps.
    """
    if len(pieces) > 1 or not rows.kept or any(tokens != 1 for _, tokens in rows.kept):
        return []
    places = {segment: place for place, (segment, _) in enumerate(rows.kept)}
    own = [each.rows == 1 and each.kv_stop == each.start + 1 for each in rows.attends]
    found = [places.pop(each.key, -1) if last else -1 for each, last in zip(rows.attends, own, strict=True)]
    return [] if places else found
