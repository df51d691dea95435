"""Runs the attention of one step on a compute worker: scatters q, k, v to memory workers, gathers and merges partials.

Meanwhile the compute worker attends to segments in its own memory. Rows of prompt chunks also attend there to their
chunk, and to the tokens before it that are in scratch memory (``lamina.compute.local_memory``).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.device.base import Array, Carrier, ExchangedRows, Floats, Partial
from lamina.compute.local_memory import LocalShare, ScratchShare
from lamina.compute.mail import Mail
from lamina.core.heads import WHOLE, HeadShards
from lamina.core.steps import StepPlan
from lamina.core.types import AttentionSpec, Overlap, Segment
from lamina.dataplane.channel import Arrival, Channel, Message
from lamina.dataplane.wire import (
    LENT,
    MessageRows,
    Piece,
    attends_locally,
    body_nbytes,
    message_rows,
    pieces,
    pulled_pieces,
)
from lamina.kernels.attention import merge
from lamina.kernels.segments import SegmentTable
from lamina.memory.device.base import Table
from lamina.splitter import SliceOutput
from lamina.splitter.parts import ONLY, Rank


@dataclass(frozen=True)
class RemoteShare:
    """The part of a step whose attention one memory worker computes, or a compute worker that lends its memory.

    Attributes:
        channel: To the worker that gets the requests, or the last of them.
        lane: Lane of the requests.
        owners: By attention, the channel to the worker that has its K and V, which gets the request; empty: ``channel``
            for all. None for attentions that this worker neither asks for nor merges.
    """

    channel: Channel
    rows: MessageRows
    pieces: tuple[Piece, ...]
    lane: int
    owners: tuple[Channel | None, ...] = ()

    def owner(self, index: int) -> Channel:
        """Return the channel to the worker that computes attention ``index``."""
        return (self.owners[index] or self.channel) if self.owners else self.channel

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the request is sent in one piece."""
        return len(self.pieces) == 1 and not self.rows.pulled


@dataclass(frozen=True)
class LocalChunks:
    """The prompt chunks of a step, which attend to themselves on the compute worker with all heads.

    ``rows``: their rows in the step.
    """

    segments: SegmentTable
    rows: npt.NDArray[np.int64]


class StepExchange:
    """The exchange of one step with its memory workers: planned once per step, run once per attention.

    Tensors have ``rows`` rows, at least as many as the plan has tokens; the rest are padding and attend to nothing.
    """

    def __init__(
        self,
        plan: StepPlan,
        segments: Mapping[int, Sequence[Segment]],
        mail: Mail,
        overlap: Overlap,
        carrier: Carrier,
        rows: int,
        shards: HeadShards = WHOLE,
        share: LocalShare | None = None,
        rank: Rank = ONLY,
        scratch: ScratchShare | None = None,
        door: int | None = None,
        lenders: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Plan the exchange.

        Args:
            plan: the step.
            segments: by sequence, where its KV is.
            mail: messages from memory workers.
            overlap: in how many mini-batches queries are sent.
            carrier: of the device that holds the rows.
            rows: rows of each tensor.
            shards: the heads' shards, over all ranks of the replica.
            share: the part of the step in this worker's own memory.
            rank: this worker's place in the replica. Tensors have its heads only.
            scratch: the step's prompts in this worker's scratch memory.
            door: lane of the requests, ``Pipeline.door`` of this rank; None: the plan's lane.
            lenders: the workers with local memory of other replicas, ``Replica.lenders``.
        """
        self.rows, lenders = rows, lenders or {}
        self._shards = own = shards.of_rank(rank.count)
        self._carrier = carrier
        self._mail = mail
        self._lane, self._turn = plan.lane, plan.turn
        lane = plan.lane if door is None else door
        self._dtype = carrier.dtype
        self._total = plan.row_count
        self._chunks = _plan_chunks(plan)
        self._share, self._scratch = share, scratch
        self._scratch_rows: slice | torch.Tensor = slice(None)  # rows of the chunks that attend to scratch memory too
        if scratch is not None and self._chunks is not None and len(scratch.queries) < len(self._chunks.rows):
            self._scratch_rows = torch.from_numpy(np.searchsorted(self._chunks.rows, scratch.queries))
        self._share_arrays: tuple[Array, Array] | None = None
        self._share_partial: Partial | None = None  # ``_share_arrays`` as tensors
        workers = sorted({segment.worker for step in plan.sequences for segment in segments[step.sequence]})
        workers = [worker for worker in workers if share is None or worker != share.worker]
        messages = {worker: message_rows(plan, segments, worker, shards, rank.number, rank.count) for worker in workers}
        self._remotes = list[RemoteShare]()
        for worker, message in messages.items():
            if not message.empty:
                owners = tuple(mail.channels[name] if name else None for name in lenders.get(worker, ()))
                to, cut = (lane + LENT, Overlap()) if owners else (lane, overlap)
                near = next((one for one in reversed(owners) if one), None) or mail.channels[worker]
                self._remotes.append(RemoteShare(near, message, pieces(message, cut), to, owners))
        self._sizes: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # by shape of heads
        self._unread: list[Arrival] = []  # replies that the device may still read
        here = [] if self._chunks is None else [_shards_of(self._chunks.rows, own.count)]
        if share is not None and len(share.queries):
            here.append(share.queries)
        found = np.zeros(self._total * own.count, np.int64)  # number of partials of each shard so far
        queries = [remote.rows.queries for remote in self._remotes]
        here_parts = [_count(found, shards) for shards in here]
        self._transfers = carrier.transfers(
            ExchangedRows(
                self._total,
                rows,
                own.count,
                queries,
                appends=[remote.rows.appends for remote in self._remotes],
                parts=[_count(found, shards) for shards in queries],
                here=here,
                here_parts=here_parts,
            )
        )

    def repliers(self, index: int) -> list[str]:
        """Return the workers that reply to the requests of attention ``index``."""
        return [remote.owner(index).name for remote in self._remotes]

    @property
    def local_rows(self) -> int:
        """Number of rows of prompt chunks: ``attend_chunks`` computes a partial for each."""
        return 0 if self._chunks is None else len(self._chunks.rows)

    @property
    def only_table(self) -> Table | None:
        """The one table that all rows attend to, if all KV of the step is in this worker's memory; None otherwise."""
        return None if self._share is None or self._remotes or self._chunks is not None else self._share.only_table

    def send_requests(self, index: int, spec: AttentionSpec, output: SliceOutput) -> None:
        """Send q, k and v of attention ``index`` to all memory workers. Raises PeerLostError."""
        if not self._remotes:
            return
        turn, sizes, channels = self._turn + index, self._sizes_of(spec), [one.owner(index) for one in self._remotes]
        slots = [
            channel.place(nbytes[0]) if remote.is_whole else None
            for remote, channel, nbytes in zip(self._remotes, channels, sizes, strict=True)
        ]
        bodies = [
            0 if slot is None else channel.bodies[slot].address for channel, slot in zip(channels, slots, strict=True)
        ]
        queries, keys, values = self._transfers.fill_messages(output.q, output.k, output.v, bodies)
        self._free_replies()
        pulls = any(remote.rows.pulled for remote in self._remotes)
        bulk = self._transfers.bulk(output.k, output.v) if pulls else None
        parts = zip(self._remotes, channels, sizes, slots, queries, keys, values, strict=True)
        for remote, channel, nbytes, slot, rows, k, v in parts:
            if remote.is_whole:
                channel.send_message(remote.lane, turn, nbytes[0], (k, v, rows) if slot is None else (), slot)
                continue
            message = channel.begin(remote.lane, turn, *nbytes)
            if bulk is not None and remote.rows.pulled:
                self._lay_out(remote, message, spec, bulk)
            for piece in remote.pieces:
                message.send_piece([*((k, v) if piece.keeps else ()), rows[piece.start : piece.stop]])

    def _sizes_of(self, spec: AttentionSpec) -> list[tuple[int, int]]:
        """Return, by memory worker, the bytes of a request, and of the k and v that the memory worker fetches."""
        shape = spec.query_heads, spec.kv_heads, spec.qk_dim, spec.v_dim
        sizes = self._sizes.get(shape)
        if sizes is None:
            shard, dtype = self._shards.spec(spec), self._dtype
            token = shard.kv_bytes_per_token(dtype)
            sizes = self._sizes[shape] = [
                (body_nbytes(shard, dtype, remote.rows), token * sum(rows.rows for rows in remote.rows.pulled))
                for remote in self._remotes
            ]
        return sizes

    def _lay_out(self, remote: RemoteShare, message: Message, spec: AttentionSpec, bulk: tuple[Array, Array]) -> None:
        """Write k and v of prompt chunks into the arena, from which the memory worker fetches them."""
        k, v = bulk
        nbytes, at = self._shards.spec(spec).kv_bytes_per_token(self._dtype), 0
        count = self._shards.count
        for piece in pulled_pieces(remote.rows.pulled, self._mail.landing_nbytes // nbytes):
            rows = slice(piece.row, piece.row + piece.rows)
            arrays = [k[rows], v[rows]]
            if count > 1:
                arrays = [np.ascontiguousarray(_sharded(array, count)[:, piece.shard % count]) for array in arrays]
            message.lay_out(at, arrays)
            at += piece.rows * nbytes

    def attend_chunks(self, index: int, spec: AttentionSpec, output: SliceOutput) -> Partial | None:
        """Attend prompt chunks to themselves, and to the tokens before them that are in scratch memory.

        Returns a partial for each of their rows; None if the step has none.
        """
        if self._chunks is None:
            return None
        out, lse = self._carrier.attend(output, self._chunks.rows, self._chunks.segments, spec)
        if self._scratch is not None:
            before = self._scratch.attend(index, *self._lent(output))
            if before is not None:
                _merge_rows(out, lse, self._scratch_rows, *map(self._carrier.borrowed, before))
        return out, lse

    @property
    def attends_here(self) -> bool:
        """Whether the step has a part in this worker's own memory."""
        return self._share is not None

    def must_wait(self, index: int) -> bool:
        """Return whether ``attend_here`` must wait for earlier chunks of other lanes."""
        return self._share is not None and bool(self._share.missing(index))

    def keep_here(self, index: int, output: SliceOutput) -> None:
        """Append k and v to this worker's own memory before ``attend_here``. What that waits for is fetched first."""
        if self._share is not None:
            _, k, v = self._lent(output)
            self._share.keep(index, k, v)
            for earlier in self._share.missing(index):
                self._mail.fetch_first(earlier.door, earlier.turn + index)

    def attend_here(self, index: int, output: SliceOutput) -> bool:
        """Append k and v to this worker's own memory, and attend to it; ``gather`` merges the result.

        Returns False if the step has no part there.
        """
        if self._share is None:
            return False
        partial = self._share.attend(index, *self._lent(output))
        if partial is not self._share_arrays:  # most layers write the same ones
            self._share_arrays, borrowed = partial, self._carrier.borrowed
            self._share_partial = partial and (borrowed(partial[0]), borrowed(partial[1]))
        return True

    @property
    def share_partial(self) -> Partial | None:
        """The partial of the latest ``attend_here``, which the next stage merges if it runs the next slice."""
        return self._share_partial

    def share_shape(self, spec: AttentionSpec) -> tuple[int, int, int]:
        """Return the shape of out of ``attend_here``; 0 rows if the step has no rows there."""
        shard = self._shards.spec(spec)
        return 0 if self._share is None else len(self._share.queries), shard.query_heads, shard.v_dim

    def receive_share(self, partial: Partial) -> None:
        """Let ``gather`` merge the partial that the stage before has computed by ``attend_here``."""
        self._share_partial = partial

    def _lent(self, output: SliceOutput) -> tuple[Any, Any, Any]:
        """Return q, k and v as arrays of the device, without padding rows."""
        arrays, total = self._carrier.lent(output), self._total
        if total == self.rows:
            return arrays
        q, k, v = arrays
        return q[:total], k[:total], v[:total]

    def gather(self, index: int, spec: AttentionSpec, chunks: Partial | None, sinks: Floats | None) -> torch.Tensor:
        """Merge ``chunks``, the partial of ``attend_here`` and the replies of attention ``index``, which must all have
        arrived.

        Returns attention out [rows, Hq, Dv]. The next call for the same numbers and sizes of heads overwrites it.
        """
        arrivals = [self._mail.pop_message(self._lane, peer) for peer in self.repliers(index)]
        local = [] if self._chunks is None or chunks is None else [chunks]
        if self._share_partial is not None:
            local.append(self._share_partial)
        # The device keeps views of slots, which are those of each share's ``channel``.
        replies = [
            (one.slot if one.channel is remote.channel else -1, one.whole)
            for one, remote in zip(arrivals, self._remotes, strict=True)
        ]
        out = self._transfers.merged(spec, local, replies, sinks)
        self._unread = arrivals
        if not self._transfers.lingers:
            self._free_replies()
        return out

    def return_slots(self) -> None:
        """Free all slots and regions, after the last slice on this worker."""
        if self._unread:
            self._transfers.wait_for_reads()
            self._free_replies()

    def _free_replies(self) -> None:
        """Free the slots of replies that have been read; the next request to each peer carries the credits."""
        for arrival in self._unread:
            arrival.free()
        self._unread = []


def _plan_chunks(plan: StepPlan) -> LocalChunks | None:
    offsets, starts, rows = [0], [], []
    row = len(plan.decoding.sequences)
    for chunk in plan.chunks:
        count = len(chunk.tokens)
        if attends_locally(chunk):
            rows.append(np.arange(row, row + count, dtype=np.int64))
            starts.append(chunk.start)
            offsets.append(offsets[-1] + count)
        row += count
    if not rows:
        return None
    indices = np.concatenate(rows)
    bounds, start = np.array(offsets, np.int32), np.array(starts, np.int32)
    # The chunk's own k and v serve as its slab: row r of the step is slot r.
    return LocalChunks(SegmentTable(bounds, start, bounds, start, indices.astype(np.int32)), indices)


def _merge_rows(
    out: torch.Tensor, lse: torch.Tensor, rows: slice | torch.Tensor, more: torch.Tensor, sums: torch.Tensor
) -> None:
    """Merge a partial of ``rows``, (more, sums), into (out, lse). No row of ``lse`` is -inf."""
    if out.is_cpu:
        _merge_host_rows(out.numpy(), lse.numpy(), rows, more.numpy(), sums.numpy())
        return
    rows = rows if isinstance(rows, slice) else rows.to(out.device)
    own = lse[rows]
    both = torch.logaddexp(own, sums)
    out[rows] = out[rows] * (own - both).exp_()[..., None] + more * (sums - both).exp_()[..., None]
    lse[rows] = both


def _merge_host_rows(out: Floats, lse: Floats, rows: slice | torch.Tensor, more: Floats, sums: Floats) -> None:
    """Merge as ``_merge_rows`` does, without torch, whose threads busy-wait after a merge of some rows."""
    threads = torch.get_num_threads()
    if isinstance(rows, slice):
        merge((out, more), (lse, sums), None, out, lse, threads)
        return
    index = rows.numpy()
    some, own = out[index], lse[index]
    merge((some, more), (own, sums), None, some, own, threads)
    out[index], lse[index] = some, own


def _count(found: npt.NDArray[np.int64], shards: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Add one partial of each of ``shards`` to ``found``, the numbers of partials so far; return those before."""
    parts = found[shards]
    found[shards] += 1
    return parts


def _shards_of(rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of all shards of rows, as ``MessageRows`` counts them."""
    return (rows[:, None] * count + np.arange(count)).ravel()


def _sharded(array: Array, count: int) -> Array:
    rows, heads, size = array.shape
    return array.reshape(rows, count, heads // count, size)
