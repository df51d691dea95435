"""What a data-plane message holds, derived from the StepPlan by both ends alike: no header, no serialisation.

A request carries, for one attention of one step and one memory worker, three blocks one after another:
q [Rq, Hq, D] of the rows that attend there, then k [Rk, Hkv, D] and v [Rk, Hkv, Dv] of the tokens kept there, in the
model's element type. Its reply carries out [Rq, Hq, Dv] and the natural-log lse [Rq, Hq], both float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.types import AttentionSpec, DType, Segment, SequenceStep, StepPlan

Array = npt.NDArray[np.generic]

NUMPY_DTYPE: Mapping[DType, np.dtype[np.generic]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),  # numpy has no bfloat16: its bits
}


@dataclass(frozen=True)
class SegmentRows:
    """Rows [row, row + rows) of a step, the first at position ``start``, attend to tokens [kv_start, kv_stop)."""

    sequence: int
    row: int
    rows: int
    start: int
    kv_start: int
    kv_stop: int


@dataclass(frozen=True)
class MessageRows:
    """The rows of one step that concern one memory worker, in the order their bytes travel.

    ``queries`` int64 [Rq] and ``appends`` int64 [Rk] index the step's rows; ``attends`` covers ``queries`` in order,
    ``kept`` = (sequence, tokens) covers ``appends`` in order.
    """

    queries: npt.NDArray[np.int64]
    appends: npt.NDArray[np.int64]
    attends: tuple[SegmentRows, ...]
    kept: tuple[tuple[int, int], ...]

    @property
    def empty(self) -> bool:
        """True if no message is exchanged."""
        return len(self.queries) == 0 and len(self.appends) == 0


def attends_locally(step: SequenceStep) -> bool:
    """A chunk of several tokens attends to itself on the compute worker; a single token's new k and v are read back
    from the memory worker with all the others."""
    return len(step.tokens) > 1


def message_rows(plan: StepPlan, segments: Mapping[int, Sequence[Segment]], worker: str) -> MessageRows:
    """Which rows of ``plan`` travel to memory worker ``worker``, given the segments of the sequences it knows."""
    queries: list[tuple[int, int]] = []
    appends: list[tuple[int, int]] = []
    attends: list[SegmentRows] = []
    kept: list[tuple[int, int]] = []
    row = 0
    for step in plan.sequences:
        count = len(step.tokens)
        visible = step.start if attends_locally(step) else step.stop
        for segment in segments.get(step.sequence, ()):
            if segment.worker != worker:
                continue
            first, last = segment.tokens[0], step.stop if segment.tokens[1] is None else segment.tokens[1]
            low, high = max(step.start, first), min(step.stop, last)
            if low < high:
                appends.append((row + low - step.start, row + high - step.start))
                kept.append((step.sequence, high - low))
            if first < min(visible, last):
                queries.append((row, row + count))
                attends.append(SegmentRows(step.sequence, row, count, step.start, first, min(visible, last)))
        row += count
    return MessageRows(_ranges(queries), _ranges(appends), tuple(attends), tuple(kept))


def _ranges(ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    if not ranges:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])


def request_nbytes(attentions: Sequence[AttentionSpec], dtype: DType, rows: int) -> int:
    """Bytes of the largest request with ``rows`` rows."""
    return rows * max(spec.query_bytes_per_token(dtype) + spec.kv_bytes_per_token(dtype) for spec in attentions)


def reply_nbytes(attentions: Sequence[AttentionSpec], rows: int) -> int:
    """Bytes of the largest reply with ``rows`` rows."""
    return rows * max(spec.query_heads * (spec.v_dim + 1) * 4 for spec in attentions)


def read_request(
    buffer: memoryview, spec: AttentionSpec, dtype: DType, queries: int, appends: int
) -> tuple[Array, Array, Array]:
    """Views (q [queries, Hq, D], k [appends, Hkv, D], v [appends, Hkv, Dv]) of a request's bytes."""
    element = NUMPY_DTYPE[dtype]
    shapes = (
        (queries, spec.query_heads, spec.qk_dim),
        (appends, spec.kv_heads, spec.qk_dim),
        (appends, spec.kv_heads, spec.v_dim),
    )
    views = []
    offset = 0
    for shape in shapes:
        count = shape[0] * shape[1] * shape[2]
        views.append(np.frombuffer(buffer, element, count, offset).reshape(shape))
        offset += count * element.itemsize
    return views[0], views[1], views[2]


def read_reply(
    buffer: memoryview, spec: AttentionSpec, queries: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Views (out [queries, Hq, Dv], lse [queries, Hq]) of a reply's bytes."""
    count = queries * spec.query_heads * spec.v_dim
    out = np.frombuffer(buffer, np.float32, count).reshape(queries, spec.query_heads, spec.v_dim)
    lse = np.frombuffer(buffer, np.float32, queries * spec.query_heads, count * 4)
    return out, lse.reshape(queries, spec.query_heads)
