"""Attention of one step as a compute worker sees it: scatter q, k, v to memory workers, gather and merge partials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.links import LaneLinks
from lamina.kernels.attention import partial
from lamina.kernels.merge import merge
from lamina.kernels.segments import SegmentTable
from lamina.protocol.channel import Inbox, Outbox
from lamina.protocol.wire import (
    Array,
    MessageRows,
    Piece,
    attends_locally,
    keys_values,
    message_rows,
    pieces,
    pulled_pieces,
    query_offset,
    read_reply,
    reply_number,
    request_number,
)
from lamina.splitter import SliceOutput, as_numpy
from lamina.types import AttentionSpec, DType, Overlap, Segment, StepPlan

Floats = npt.NDArray[np.float32]
Partial = tuple[Floats, Floats]  # (out [R, Hq, Dv], lse [R, Hq])


@dataclass(frozen=True)
class Source:
    """Where partials for ``rows`` of the step go: they become partial number ``part[i]`` of row ``rows[i]``."""

    rows: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Remote:
    """One memory worker's share of a step."""

    request: Outbox
    reply: Inbox
    rows: MessageRows
    pieces: tuple[Piece, ...]
    source: Source

    @property
    def queries_first(self) -> bool:
        """True if k and v are the last piece, without queries; otherwise they are in the first piece."""
        return not self.pieces[0].keeps


@dataclass(frozen=True)
class Local:
    """Prompt chunks attend to themselves here, while their K and V travel."""

    segments: SegmentTable
    source: Source


@dataclass(frozen=True)
class Gathering:
    """Where the partials of attentions with one shape of heads arrive, and where the merged result goes.

    Attributes:
        out: [rows, Hq, Dv]; padding rows are 0. tokens: its other rows, as an array.
        replies: partials (out, lse) in the messages of memory workers.
    """

    out: torch.Tensor
    tokens: Array
    replies: list[tuple[Source, Floats, Floats]]


class StepExchange:
    """Planned once per step, run once per attention.

    Tensors have ``rows`` rows, at least as many as the plan has tokens; the others are padding and attend to nothing.

    Attributes:
        sends_queries_first: True if ``send_queries`` has anything to send.
    """

    def __init__(
        self,
        plan: StepPlan,
        segments: Mapping[int, Sequence[Segment]],
        links: LaneLinks,
        dtype: DType,
        overlap: Overlap,
        threads: int,
        rows: int,
    ) -> None:
        self.rows = rows
        self._links = links
        self._turn = plan.turn
        self._dtype = dtype
        self._threads = threads
        self._total = sum(len(step.tokens) for step in plan.sequences)
        self._parts = np.zeros(self._total, np.int64)  # partials each row has so far
        self._local = self._plan_local(plan)
        named = sorted({segment.worker for step in plan.sequences for segment in segments[step.sequence]})
        shares = {worker: message_rows(plan, segments, worker) for worker in named}
        self._remotes = [
            Remote(
                links.requests[worker],
                links.replies[worker],
                share,
                pieces(share, overlap),
                self._source(share.queries),
            )
            for worker, share in shares.items()
            if not share.empty
        ]
        self._pulled = any(remote.rows.pulled for remote in self._remotes)
        self.sends_queries_first = any(remote.queries_first for remote in self._remotes)
        self._most_parts = int(self._parts.max(initial=1))
        self._buffers: dict[tuple[int, int], Partial] = {}
        self._gatherings: dict[tuple[int, int], Gathering] = {}

    def _source(self, rows: npt.NDArray[np.int64]) -> Source:
        part = self._parts[rows].copy()
        np.add.at(self._parts, rows, 1)
        return Source(rows, part)

    def _plan_local(self, plan: StepPlan) -> Local | None:
        offsets, starts, rows = [0], [], []
        row = 0
        for step in plan.sequences:
            count = len(step.tokens)
            if attends_locally(step):
                rows.append(np.arange(row, row + count, dtype=np.int64))
                starts.append(step.start)
                offsets.append(offsets[-1] + count)
            row += count
        if not rows:
            return None
        indices = np.concatenate(rows)
        bounds, start = np.array(offsets, np.int32), np.array(starts, np.int32)
        # The chunk's own k and v serve as its slab: row r of the step is slot r.
        table = SegmentTable(
            query_offsets=bounds, query_start=start, kv_offsets=bounds, kv_start=start, slots=indices.astype(np.int32)
        )
        return Local(table, self._source(indices))

    @property
    def local_rows(self) -> int:
        """Rows of prompt chunks, for which ``attend_chunks`` computes partials."""
        return 0 if self._local is None else len(self._local.source.rows)

    def send_queries(self, index: int, spec: AttentionSpec, q: torch.Tensor) -> None:
        """Send the queries of attention ``index`` ahead of k and v, where the step's overlap says so.

        q is [rows, Hq, D]. Raises PeerLostError.
        """
        for remote in self._remotes:
            if remote.queries_first:
                rows = self._take(as_numpy(q), remote.rows.queries)
                for number in range(len(remote.pieces) - 1):
                    self._send_piece(remote, index, spec, number, rows)

    def send(self, index: int, spec: AttentionSpec, output: SliceOutput) -> None:
        """Send the rest: k, v and the queries not sent yet. Raises PeerLostError."""
        q, k, v = output.arrays
        if self._pulled:
            self._lay_out(index, spec, k, v)
        for remote in self._remotes:
            appends = remote.rows.appends
            keys_values = [self._take(k, appends), self._take(v, appends)]
            if remote.queries_first:
                self._send_piece(remote, index, spec, len(remote.pieces) - 1, q[:0], keys_values)
                continue
            rows = self._take(q, remote.rows.queries)
            for number in range(len(remote.pieces)):
                self._send_piece(remote, index, spec, number, rows, keys_values if number == 0 else ())

    def _lay_out(self, index: int, spec: AttentionSpec, k: Array, v: Array) -> None:
        """Put k and v of prompt chunks where memory workers fetch them once the request has arrived."""
        nbytes = spec.kv_bytes_per_token(self._dtype)
        bulk = self._links.bulk[(self._turn + index) % len(self._links.bulk)]
        for remote in self._remotes:
            for piece in pulled_pieces(remote.rows.pulled, self._links.landing_nbytes // nbytes):
                rows = slice(piece.row, piece.row + piece.rows)
                place_k, place_v = keys_values(bulk, spec, self._dtype, piece.row * nbytes, piece.rows)
                place_k[:], place_v[:] = k[rows], v[rows]

    def _send_piece(
        self,
        remote: Remote,
        index: int,
        spec: AttentionSpec,
        number: int,
        q: Array,
        keys_values: Sequence[Array] = (),
    ) -> None:
        """Send piece ``number`` of the request: k and v, then its rows of ``q``, which are the whole request's."""
        piece = remote.pieces[number]
        at = 0 if piece.keeps else query_offset(spec, self._dtype, remote.rows, piece.start)
        rows = q[piece.start : piece.stop]
        remote.request.send([*keys_values, rows], request_number(self._turn + index, number), at)

    def attend_chunks(self, spec: AttentionSpec, output: SliceOutput) -> Partial | None:
        """Partials of the rows of prompt chunks over their own chunk; None if the step has none."""
        if self._local is None:
            return None
        q, k, v = output.arrays
        return partial(self._take(q, self._local.source.rows), k, v, self._local.segments, spec, self._threads)

    def replies(self, index: int) -> list[tuple[int, int]]:
        """The doorbells of the replies to attention ``index``, for ``Endpoint.wait``."""
        return [(remote.reply.doorbell, reply_number(self._turn + index)) for remote in self._remotes]

    def gather(self, spec: AttentionSpec, chunks: Partial | None, sinks: Floats | None) -> torch.Tensor:
        """Attention out [rows, Hq, Dv], merged from ``chunks`` and the replies, all of which must have arrived.

        The next call for the same shape of heads overwrites the tensor.
        """
        gathering = self._gathering(spec)
        partials = [] if self._local is None or chunks is None else [(self._local.source, *chunks)]
        partials += gathering.replies
        if len(partials) == 1 and len(partials[0][0].rows) == self._total:  # all rows in order, as they arrived
            outs, lses = [partials[0][1]], [partials[0][2]]
        else:
            outs, lses = self._scattered(spec, partials)
        merge(outs, lses, sinks, gathering.tokens, None, self._threads)
        return gathering.out

    def _gathering(self, spec: AttentionSpec) -> Gathering:
        key = (spec.query_heads, spec.v_dim)
        if key not in self._gatherings:
            remotes = [remote for remote in self._remotes if len(remote.rows.queries)]
            replies = [
                (remote.source, *read_reply(remote.reply.view, spec, len(remote.rows.queries))) for remote in remotes
            ]
            out = torch.zeros(self.rows, *key, dtype=getattr(torch, self._dtype.value))
            self._gatherings[key] = Gathering(out, as_numpy(out)[: self._total], replies)
        return self._gatherings[key]

    def _scattered(
        self, spec: AttentionSpec, partials: Sequence[tuple[Source, Floats, Floats]]
    ) -> tuple[list[Floats], list[Floats]]:
        """Partials number 0, 1, ... of all rows; lse is -inf where a row has fewer."""
        outs, lses = self._buffer(spec)
        for source, part, lse in partials:
            outs[source.part, source.rows] = part
            lses[source.part, source.rows] = lse
        return list(outs), list(lses)

    def _take(self, array: Array, rows: npt.NDArray[np.int64]) -> Array:
        """Rows of ``array``; a view if they are all of them in order."""
        return array[: self._total] if len(rows) == self._total else array[rows]

    def _buffer(self, spec: AttentionSpec) -> Partial:
        """Partials [P, T, Hq, Dv] and lse [P, T, Hq] of the step's T tokens.

        All layers write the same places, so the others stay -inf.
        """
        key = (spec.query_heads, spec.v_dim)
        if key not in self._buffers:
            shape = (self._most_parts, self._total, spec.query_heads)
            self._buffers[key] = np.zeros((*shape, spec.v_dim), np.float32), np.full(shape, -np.inf, np.float32)
        return self._buffers[key]
