"""Layout of the body of a data-plane message. Both ends derive it from the StepPlan: nothing is serialised.

A request carries, for one attention of one step and one memory worker, three blocks one after another:
k [Rk, Hkv, D] and v [Rk, Hkv, Dv] of the decoded tokens that the worker stores, then q [Rq, Hq, D] of the rows that
attend to its segments, in the model's element type. K and V of prompt chunks are in a region that the memory worker
fetches (``dataplane.channel``): the pieces of ``pulled_pieces`` one after another, each k and then v.

The reply carries out [Rq, Hq, Dv] and the natural-log lse [Rq, Hq], both float32.

Rows are those of one shard of the heads (``lamina.core.heads``), with its Hq and Hkv heads: a message holds only the
heads of each sequence that the memory worker stores. A ``spec`` is that of a shard.

A request may travel in pieces, each with a ring of the doorbell, so that the memory worker can start on the first:
mini-batches of query rows (Lamina, section 5.2.1). Bytes are in the order in which they travel.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from lamina.core.errors import PlacementError
from lamina.core.heads import WHOLE, HeadShards
from lamina.core.segments import by_sequence
from lamina.core.steps import SequenceStep, StepPlan
from lamina.core.types import MOST_MINI_BATCHES, AttentionSpec, DType, KvElement, Overlap, Segment

Array = npt.NDArray[np.generic]

NUMPY_DTYPE: Mapping[DType, np.dtype[np.generic]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),  # numpy has no bfloat16: its bits
}


SegmentKey = tuple[int, int]
"""Identifies one shard of one segment on a memory worker: the sequence, and first token * shards + shard."""


class SegmentRows(msgspec.Struct, frozen=True, gc=False):
    """Rows [row, row + rows) of a step, the first at position ``start``, attend to tokens [kv_start, kv_stop).

    ``part`` numbers the query heads of the rows, as in ``HeadShards.spec``: the shard's, or a rank's share of them.
    ``key`` is that of the segment.
    """

    sequence: int
    row: int
    rows: int
    start: int
    kv_start: int
    kv_stop: int
    shard: int = 0
    part: int = 0
    key: SegmentKey = 0, 0


class PulledRows(msgspec.Struct, frozen=True, gc=False):
    """Rows [row, row + rows) of a step, whose k and v are fetched into the segment that begins at ``kv_start``."""

    sequence: int
    row: int
    rows: int
    kv_start: int
    shard: int = 0


@dataclass(frozen=True)
class MessageRows:
    """The rows of one step that concern one memory worker, in the order in which their bytes travel: shard by shard.

    ``queries`` and ``appends`` hold row * shards + shard, where each rank of a replica counts its own shards. If a
    worker holds several segments of a sequence, its rows travel once, and the worker merges the partials.

    Attributes:
        queries: int64 [Rq], the rows whose q travels.
        appends: int64 [Rk], the rows whose k and v travel.
        attends: segments that ``queries`` attend to, in order.
        kept: (segment, tokens) that ``appends`` are stored in, in order.
        pulled: rows whose k and v are fetched instead.
        further: (index of ``attends``, another segment of the same sequence that the same rows attend to).
    """

    queries: npt.NDArray[np.int64]
    appends: npt.NDArray[np.int64]
    attends: tuple[SegmentRows, ...]
    kept: tuple[tuple[SegmentKey, int], ...]
    pulled: tuple[PulledRows, ...] = ()
    further: tuple[tuple[int, SegmentRows], ...] = ()

    @property
    def empty(self) -> bool:
        """True if no message is exchanged."""
        return len(self.queries) == 0 and len(self.appends) == 0 and not self.pulled


SCRATCH = "scratch"
"""Stands for the name of a compute worker in segments of its scratch memory (``lamina.compute.local_memory``)."""


def attends_locally(step: SequenceStep) -> bool:
    """True for a chunk that attends to itself on the compute worker: one of several tokens, or of a prompt in scratch
    memory. Other single tokens attend to their own k and v on the memory worker."""
    return len(step.tokens) > 1 or step.scratch is not None


def check_segments(sequence: int, segments: Sequence[Segment], shards: HeadShards) -> None:
    """Raise PlacementError unless the segments of a sequence name it, hold whole shards, and cover the tokens of every
    shard from 0 on, in contiguous ranges of which the last has no end. Other partials would be wrong or lost."""
    if any(segment.sequence != sequence for segment in segments):
        why = "a segment names another sequence"
    elif not all(shards.allows(segment.heads) for segment in segments):
        why = _heads_rule(shards)
    elif not all(
        _follow([one.tokens for one in segments if shard in shards.shards_of(one.heads)])
        for shard in range(shards.count)
    ):
        why = "the segments' tokens must follow one another from 0 on, and the last must have no end"
    else:
        return
    places = ", ".join(f"{each.worker} heads {each.heads} tokens {each.tokens}" for each in segments)
    raise PlacementError(f"sequence {sequence} is placed on {places or 'no worker'}", why)


def _heads_rule(shards: HeadShards) -> str:
    if shards.count == 1:
        return f"a segment must hold all heads, 0 to {shards.heads}"
    return f"a segment must hold some of heads 0 to {shards.heads}, cut at multiples of {shards.heads // shards.count}"


def _follow(tokens: Sequence[tuple[int, int | None]]) -> bool:
    """Return whether ranges of tokens cover all tokens from 0 on, each once."""
    ordered = sorted(tokens, key=lambda one: one[0])
    starts, stops = [start for start, _ in ordered], [stop for _, stop in ordered]
    return [0, *stops] == [*starts, None] and all(start != stop for start, stop in ordered)


def check_placements(plan: StepPlan, shards: HeadShards) -> None:
    """Apply ``check_segments`` to everything that a plan places. Raises PlacementError."""
    for admission in plan.admitted:
        placed = by_sequence(admission.segments)
        if not placed or not placed.keys() <= set(range(admission.sequence, admission.sequence + admission.count)):
            placed = {admission.sequence: admission.segments}
        for sequence, segments in placed.items():
            check_segments(sequence, segments, shards)
    for segment in (segment for switch in plan.switches for segment in switch.segments):
        start, stop = segment.tokens
        if start < 0 or (stop is not None and stop <= start) or not shards.allows(segment.heads):
            raise PlacementError(
                f"sequence {segment.sequence} moves to {segment.worker}: heads {segment.heads} tokens {segment.tokens}",
                f"a range that moves must have tokens; {_heads_rule(shards)}",
            )
    for segment in plan.grown:
        first, last = segment.tokens
        if first < 1 or last is not None or not shards.allows(segment.heads):
            raise PlacementError(
                f"sequence {segment.sequence} grows to {segment.worker} heads {segment.heads} tokens {segment.tokens}",
                f"it must continue there from token 1 or later, without an end; {_heads_rule(shards)}",
            )


def message_rows(
    plan: StepPlan,
    segments: Mapping[int, Sequence[Segment]],
    worker: str,
    shards: HeadShards = WHOLE,
    rank: int = 0,
    ranks: int = 1,
) -> MessageRows:
    """Return which rows of ``plan`` travel to memory worker ``worker``, from ``segments`` by sequence.

    A memory worker calls it with its part of the plan, in which rows have other numbers. With several ``ranks``, the
    result describes the message of one rank, with its shards of every row. Ranks that share a shard all send K and V of
    decoded tokens with their queries, so that no rank waits for another; K and V of prompt chunks are fetched from the
    first of them only. Chunks of prompts in scratch memory attend to what is there (``SCRATCH``), and on other workers
    only to tokens before it.
    """
    queries: list[npt.NDArray[np.int64]] = []
    appends: list[npt.NDArray[np.int64]] = []
    attends: list[SegmentRows] = []
    kept: list[tuple[SegmentKey, int]] = []
    pulled: list[PulledRows] = []
    further: list[tuple[int, SegmentRows]] = []
    several, sharers = shards.count > 1, shards.sharers(ranks)
    own = shards.range_of_rank(rank, ranks)
    for shard in own:
        part = shard if sharers == 1 else rank
        asking: list[tuple[int, int]] = []
        adding: list[tuple[int, int]] = []
        row = 0
        for step in plan.sequences:
            sequence, start, count, chunk = step.sequence, step.start, len(step.tokens), attends_locally(step)
            stop = start + count
            visible, place, held = start if chunk else stop, -1, segments.get(sequence, ())
            if step.scratch is not None:
                visible = start if worker == SCRATCH else step.scratch
            elif worker == SCRATCH:
                held = ()
            for segment in held:
                if segment.worker != worker or (several and shard not in shards.shards_of(segment.heads)):
                    continue
                first, last = segment.tokens
                key = sequence, first * shards.count + shard
                low = start if start > first else first  # ``max`` and ``min`` would take four times as long
                high = stop if last is None or last > stop else last
                if low < high and chunk and rank % sharers:
                    pass  # the first of those who share this shard sends them
                elif low < high and chunk:
                    pulled.append(PulledRows(sequence, row + low - start, high - low, first, shard))
                elif low < high:
                    adding.append((row + low - start, high - low))
                    kept.append((key, high - low))
                seen = visible if high > visible else high
                if first < seen:
                    attend = SegmentRows(sequence, row, count, start, first, seen, shard, part, key)
                    if place >= 0:
                        further.append((place, attend))
                    else:
                        place = len(attends)
                        asking.append((row, count))
                        attends.append(attend)
            row += count
        queries.append(_ranges(asking) * len(own) + shard - own.start if several else _ranges(asking))
        appends.append(_ranges(adding) * len(own) + shard - own.start if several else _ranges(adding))
    indices = (np.concatenate(queries), np.concatenate(appends)) if several else (queries[0], appends[0])
    return MessageRows(*indices, tuple(attends), tuple(kept), tuple(pulled), tuple(further))


def _ranges(ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return all numbers of ranges (start, count), range after range."""
    total = sum(count for _, count in ranges)
    if total == len(ranges):  # a step that decodes
        return np.array([start for start, _ in ranges], np.int64)
    starts, counts = np.array(ranges, np.int64).T
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(total)


def request_nbytes(attentions: Sequence[AttentionSpec], dtype: DType, rows: int) -> int:
    """Return the bytes of the largest request with ``rows`` rows."""
    return rows * max(spec.query_bytes_per_token(dtype) + spec.kv_bytes_per_token(dtype) for spec in attentions)


def reply_nbytes(attentions: Sequence[AttentionSpec], rows: int) -> int:
    """Return the bytes of the largest reply with ``rows`` rows."""
    return rows * max(spec.query_heads * (spec.v_dim + 1) * 4 for spec in attentions)


MOST_PIECES = MOST_MINI_BATCHES


@dataclass(frozen=True)
class Piece:
    """Part of a request: query rows [start, stop), those of ``attends[first:last]``. The first piece also has all k and
    v."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def keeps(self) -> bool:
        """True if the k and v of the request are in this piece."""
        return self.start == 0


def pieces(rows: MessageRows, overlap: Overlap) -> tuple[Piece, ...]:
    """Return the pieces of a request with these rows, in the order in which they travel."""
    count = min(overlap.mini_batches, max(1, len(rows.attends) // overlap.least))
    ends = [0, *itertools.accumulate(attend.rows for attend in rows.attends)]
    cuts = [len(rows.attends) * i // count for i in range(count + 1)]
    return tuple(Piece(ends[first], ends[last], first, last) for first, last in itertools.pairwise(cuts))


LENT = 1 << 15
"""Added to the lane in the header of a request to a compute worker, which tells it from a reply in the same link."""


def slot_number(uses: int, piece: int) -> int:
    """Return the doorbell's number for a piece of a message, in a slot that was used ``uses`` times before."""
    return uses * MOST_PIECES + piece + 1


def body_nbytes(spec: AttentionSpec, dtype: DType, rows: MessageRows) -> int:
    """Return the bytes of a request."""
    kept = len(rows.appends) * spec.kv_bytes_per_token(dtype)
    return kept + len(rows.queries) * spec.query_bytes_per_token(dtype)


def read_queries(body: Array, spec: AttentionSpec, dtype: DType, rows: MessageRows, start: int, stop: int) -> Array:
    """View query rows [start, stop) of a request's bytes, uint8 [n] in any memory, as q [stop - start, Hq, D]."""
    before = len(rows.appends) * spec.kv_bytes_per_token(dtype)
    shape = (stop - start, spec.query_heads, spec.qk_dim)
    return _view(body, dtype, shape, before + start * spec.query_bytes_per_token(dtype))


def read_kept(body: Array, spec: AttentionSpec, dtype: DType, rows: MessageRows) -> tuple[Array, Array]:
    """View k and v of a request's bytes, uint8 [n] in any memory, with the shapes of ``keys_values``."""
    return keys_values(body, spec, dtype, len(rows.appends))


def piece_nbytes(spec: AttentionSpec, dtype: DType, rows: MessageRows, part: Piece) -> int:
    """Return the bytes of one piece of a request."""
    kept = len(rows.appends) * spec.kv_bytes_per_token(dtype) if part.keeps else 0
    return kept + (part.stop - part.start) * spec.query_bytes_per_token(dtype)


def keys_values(buffer: Array, spec: AttentionSpec, dtype: DType, rows: int) -> tuple[Array, Array]:
    """Return views (k [rows, Hkv, D], v [rows, Hkv, Dv]) of the first bytes of a request or a landing slot."""
    k = _view(buffer, dtype, (rows, spec.kv_heads, spec.qk_dim), 0)
    return k, _view(buffer, dtype, (rows, spec.kv_heads, spec.v_dim), k.nbytes)


def pulled_pieces(pulled: Sequence[PulledRows], most: int) -> Iterator[PulledRows]:
    """Yield the pieces in which rows are laid out and fetched: at most ``most`` rows of one sequence each."""
    for rows in pulled:
        for first in range(0, rows.rows, most):
            count = min(most, rows.rows - first)
            yield PulledRows(rows.sequence, rows.row + first, count, rows.kv_start, rows.shard)


def move_pieces(
    attentions: Sequence[AttentionSpec], element: KvElement, tokens: int, most_nbytes: int
) -> list[tuple[int, int, int]]:
    """Return the pieces in which ``tokens`` tokens of a segment travel: (layer, first token, last token + 1)."""
    pieces = []
    for layer, spec in enumerate(attentions):
        most = most_nbytes // spec.slab_bytes_per_token(element)
        pieces += [(layer, first, min(first + most, tokens)) for first in range(0, tokens, most)]
    return pieces


def _view(buffer: Array, dtype: DType, shape: tuple[int, ...], offset: int) -> Array:
    element = NUMPY_DTYPE[dtype]
    return buffer[offset : offset + math.prod(shape) * element.itemsize].view(element).reshape(shape)


def nbytes_per_token(attentions: Sequence[AttentionSpec], dtype: DType) -> int:
    """Return the bytes that travel for one decoded token with KV on one memory worker: q, k, v there; out, lse back."""
    return sum(request_nbytes([spec], dtype, 1) + reply_nbytes([spec], 1) for spec in attentions)


def paper_nbytes_per_token(attentions: Sequence[AttentionSpec], dtype: DType) -> float:
    """Return the paper's count for one token: 4 e d L bytes (Lamina, section 4.2), (2 + 2/G) e d L with grouped heads.

    In each of L layers, q and out have d = Hq x D elements of e bytes, k and v have d / G. The paper counts no lse, and
    out in the model's element type, whereas ``nbytes_per_token`` counts float32 partials.
    """
    element = NUMPY_DTYPE[dtype].itemsize
    return float(sum(2 * (spec.query_heads + spec.kv_heads) * spec.qk_dim * element for spec in attentions))
