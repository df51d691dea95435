"""Attention of one step as a compute worker sees it: scatter q, k, v to memory workers, gather and merge partials."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.device.base import Attend, Floats, Partial
from lamina.compute.links import Letter, Mail
from lamina.compute.runner import attend_natively
from lamina.kernels.merge import merge
from lamina.kernels.segments import SegmentTable
from lamina.protocol.channel import Channel, Message
from lamina.protocol.wire import (
    Array,
    MessageRows,
    Piece,
    attends_locally,
    body_nbytes,
    message_rows,
    pieces,
    pulled_pieces,
    read_reply,
)
from lamina.splitter import SliceOutput, as_numpy
from lamina.types import AttentionSpec, DType, Overlap, Segment, StepPlan


@dataclass(frozen=True)
class Source:
    """Where partials for ``rows`` of the step go: they become partial number ``part[i]`` of row ``rows[i]``."""

    rows: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Remote:
    """One memory worker's share of a step.

    Attributes:
        sizes: bytes of a request and of what it leaves to be fetched, by shape of heads.
        partials: views of replies, by slot and shape of heads.
    """

    channel: Channel
    rows: MessageRows
    pieces: tuple[Piece, ...]
    source: Source
    sizes: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    partials: dict[tuple[int, ...], Partial] = field(default_factory=dict)

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
    """

    out: torch.Tensor
    tokens: Array


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
        mail: Mail,
        dtype: DType,
        overlap: Overlap,
        threads: int,
        rows: int,
        attend: Attend | None = None,
    ) -> None:
        """``attend``: how prompt chunks attend to themselves; None: natively, with ``threads``."""
        self.rows = rows
        self._attend = attend or functools.partial(attend_natively, threads=threads)
        self._mail = mail
        self._lane, self._turn = plan.lane, plan.turn
        self._dtype = dtype
        self._threads = threads
        self._total = sum(len(step.tokens) for step in plan.sequences)
        self._parts = np.zeros(self._total, np.int64)  # partials each row has so far
        self._local = self._plan_local(plan)
        named = sorted({segment.worker for step in plan.sequences for segment in segments[step.sequence]})
        shares = {worker: message_rows(plan, segments, worker) for worker in named}
        self._remotes = [
            Remote(mail.channels[worker], share, pieces(share, overlap), self._source(share.queries))
            for worker, share in shares.items()
            if not share.empty
        ]
        self._begun: list[Message] = []  # requests whose queries have been sent and whose k and v follow
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
                message = self._begin(remote, index, spec)
                self._begun.append(message)
                for piece in remote.pieces[:-1]:
                    message.send([rows[piece.start : piece.stop]])

    def send(self, index: int, spec: AttentionSpec, output: SliceOutput) -> None:
        """Send the rest: k, v and the queries not sent yet. Raises PeerLostError."""
        q, k, v = output.arrays
        begun, self._begun = iter(self._begun), []
        for remote in self._remotes:
            appends = remote.rows.appends
            message = next(begun) if remote.queries_first else self._begin(remote, index, spec)
            if remote.rows.pulled:
                self._lay_out(remote, message, spec, k, v)
            keys_values = [self._take(k, appends), self._take(v, appends)]
            if remote.queries_first:
                message.send(keys_values)
                continue
            rows = self._take(q, remote.rows.queries)
            for piece in remote.pieces:
                message.send([*(keys_values if piece.keeps else ()), rows[piece.start : piece.stop]])

    def _begin(self, remote: Remote, index: int, spec: AttentionSpec) -> Message:
        shape = (spec.query_heads, spec.kv_heads, spec.qk_dim, spec.v_dim)
        sizes = remote.sizes.get(shape)
        if sizes is None:
            bulk = sum(rows.rows for rows in remote.rows.pulled) * spec.kv_bytes_per_token(self._dtype)
            sizes = remote.sizes[shape] = body_nbytes(spec, self._dtype, remote.rows), bulk
        return remote.channel.begin(self._lane, self._turn + index, *sizes)

    def _lay_out(self, remote: Remote, message: Message, spec: AttentionSpec, k: Array, v: Array) -> None:
        """Put k and v of prompt chunks where the memory worker fetches them once the request has arrived."""
        nbytes, at = spec.kv_bytes_per_token(self._dtype), 0
        for piece in pulled_pieces(remote.rows.pulled, self._mail.landing_nbytes // nbytes):
            rows = slice(piece.row, piece.row + piece.rows)
            message.lay_out(at, [k[rows], v[rows]])
            at += piece.rows * nbytes

    def attend_chunks(self, spec: AttentionSpec, output: SliceOutput) -> Partial | None:
        """Partials of the rows of prompt chunks over their own chunk; None if the step has none."""
        if self._local is None:
            return None
        return self._attend(output, self._local.source.rows, self._local.segments, spec)

    @property
    def peers(self) -> list[str]:
        """The memory workers that reply to every attention."""
        return [remote.channel.name for remote in self._remotes]

    def gather(self, spec: AttentionSpec, chunks: Partial | None, sinks: Floats | None) -> torch.Tensor:
        """Attention out [rows, Hq, Dv], merged from ``chunks`` and the replies, all of which must have arrived.

        The next call for the same shape of heads overwrites the tensor.
        """
        gathering = self._gathering(spec)
        letters = [self._mail.take(self._lane, remote.channel.name) for remote in self._remotes]
        partials = [] if self._local is None or chunks is None else [(self._local.source, *chunks)]
        partials += self._read(spec, letters)
        if len(partials) == 1 and len(partials[0][0].rows) == self._total:  # all rows in order, as they arrived
            outs, lses = [partials[0][1]], [partials[0][2]]
        else:
            outs, lses = self._scattered(spec, partials)
        merge(outs, lses, sinks, gathering.tokens, None, self._threads)
        for letter in letters:
            letter.free()
        return gathering.out

    def _read(self, spec: AttentionSpec, letters: Sequence[Letter]) -> list[tuple[Source, Floats, Floats]]:
        """The partials (out, lse) in the messages of memory workers."""
        found: list[tuple[Source, Floats, Floats]] = []
        for remote, letter in zip(self._remotes, letters, strict=True):
            if not len(remote.rows.queries):
                continue
            key = (letter.slot, spec.query_heads, spec.v_dim)
            views = remote.partials.get(key)
            if views is None:
                views = read_reply(letter.body, spec, len(remote.rows.queries))
                if letter.slot >= 0:  # the next reply may come in the same slot
                    remote.partials[key] = views
            found.append((remote.source, *views))
        return found

    def _gathering(self, spec: AttentionSpec) -> Gathering:
        key = (spec.query_heads, spec.v_dim)
        if key not in self._gatherings:
            out = torch.zeros(self.rows, *key, dtype=getattr(torch, self._dtype.value))
            self._gatherings[key] = Gathering(out, as_numpy(out)[: self._total])
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
