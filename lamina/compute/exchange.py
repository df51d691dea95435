"""Attention of one step as a compute worker sees it: scatter q, k, v to memory workers, gather and merge partials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lamina.kernels.attention import SegmentTable, partial
from lamina.kernels.merge import merge
from lamina.transport.channel import Requester
from lamina.transport.wire import Array, MessageRows, attends_locally, message_rows, read_reply
from lamina.types import AttentionSpec, Segment, StepPlan

REPLY_TIMEOUT_S = 120.0

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Source:
    """Partials for ``rows`` of the step, which become partial number ``part[i]`` of row ``rows[i]``."""

    rows: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Remote:
    """One memory worker's share of a step."""

    requester: Requester
    rows: MessageRows
    source: Source


@dataclass(frozen=True)
class Local:
    """Prompt chunks attend to themselves here, while their K and V travel."""

    segments: SegmentTable
    source: Source


class StepExchange:
    """Planned once per step, run once per attention.

    Tensors have ``rows`` rows, at least as many as the plan has tokens; those beyond are padding and see nothing.
    """

    def __init__(
        self,
        plan: StepPlan,
        segments: Mapping[int, Sequence[Segment]],
        requesters: Mapping[str, Requester],
        threads: int,
        rows: int,
    ) -> None:
        self.rows = rows
        self._threads = threads
        self._total = sum(len(step.tokens) for step in plan.sequences)
        self._parts = np.zeros(self._total, np.int64)  # partials each row has so far
        self._local = self._plan_local(plan)
        named = sorted({segment.worker for step in plan.sequences for segment in segments[step.sequence]})
        shares = {worker: message_rows(plan, segments, worker) for worker in named}
        self._remotes = [
            Remote(requesters[worker], share, self._source(share.queries))
            for worker, share in shares.items()
            if not share.empty
        ]
        self._most_parts = int(self._parts.max(initial=1))
        self._buffers: dict[tuple[int, int], tuple[Floats, Floats]] = {}

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
        # The chunk's own k and v are its "slab": row r of the step is slot r.
        table = SegmentTable(
            query_offsets=bounds, query_start=start, kv_offsets=bounds, kv_start=start, slots=indices.astype(np.int32)
        )
        return Local(table, self._source(indices))

    def attend(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Floats | None
    ) -> torch.Tensor:
        """Attention out [rows, Hq, Dv] in q's dtype, for q [rows, Hq, D], k [rows, Hkv, D], v [rows, Hkv, Dv].

        Raises DeadlineError or PeerLostError if a memory worker does not answer.
        """
        arrays = as_numpy(q), as_numpy(k), as_numpy(v)
        messages = [self._send(remote, *arrays) for remote in self._remotes]
        outs, lses = self._buffer(spec)
        if self._local is not None:
            self._put(self._local.source, *self._attend_locally(self._local, spec, *arrays), outs, lses)
        for remote, message in zip(self._remotes, messages, strict=True):
            if len(remote.rows.queries):
                reply = remote.requester.reply(message, REPLY_TIMEOUT_S)
                self._put(remote.source, *read_reply(reply, spec, len(remote.rows.queries)), outs, lses)
        single = self._most_parts == 1 and sinks is None
        merged = outs[0].copy() if single else merge(list(outs), list(lses), sinks)
        return torch.from_numpy(merged).to(q.dtype)

    def drain(self) -> None:
        """Wait until memory workers keep all of the step's K and V, so that its slots may be given to others."""
        for remote in self._remotes:
            remote.requester.drain(REPLY_TIMEOUT_S)

    def _send(self, remote: Remote, q: Array, k: Array, v: Array) -> int:
        queries, appends = remote.rows.queries, remote.rows.appends
        parts = [self._take(q, queries), self._take(k, appends), self._take(v, appends)]
        return remote.requester.send(parts, REPLY_TIMEOUT_S)

    def _take(self, array: Array, rows: npt.NDArray[np.int64]) -> Array:
        """Rows of ``array``; the array itself when that is all of them in order."""
        return array[: self._total] if len(rows) == self._total else array[rows]

    def _attend_locally(self, local: Local, spec: AttentionSpec, q: Array, k: Array, v: Array) -> tuple[Floats, Floats]:
        return partial(self._take(q, local.source.rows), k, v, local.segments, spec, self._threads)

    def _buffer(self, spec: AttentionSpec) -> tuple[Floats, Floats]:
        """Partials [P, rows, Hq, Dv], lse [P, rows, Hq]; layers write the same places, so -inf stays elsewhere."""
        key = (spec.query_heads, spec.v_dim)
        if key not in self._buffers:
            shape = (self._most_parts, self.rows, spec.query_heads)
            self._buffers[key] = np.zeros((*shape, spec.v_dim), np.float32), np.full(shape, -np.inf, np.float32)
        return self._buffers[key]

    @staticmethod
    def _put(source: Source, out: Floats, lse: Floats, outs: Floats, lses: Floats) -> None:
        outs[source.part, source.rows] = out
        lses[source.part, source.rows] = lse


def as_numpy(tensor: torch.Tensor) -> Array:
    """The tensor's memory as a C-contiguous numpy array; bfloat16 as uint16 bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: Array = tensor.numpy()
    return array
