"""Reference attention for tests: float64, one row and head at a time, slow and obvious."""

import numpy as np
import numpy.typing as npt

from lamina.core.types import AttentionSpec
from lamina.kernels.attention import Array, FloatArray, Scales
from lamina.kernels.segments import SegmentTable


def widen(array: Array, scales: FloatArray | None = None) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """float64 values of an array of any type in ``kernels.segments.STORAGE``; codes [..., D] times their scales.

    uint8 are bits of e4m3: sign, 4 bits of exponent biased by 7, 3 of fraction, no infinities, and NaN for all ones.
    """
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif array.dtype == np.uint8:
        exponent, fraction = (array >> 3 & 15).astype(np.int64), (array & 7).astype(np.float64)
        magnitude = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
        array = np.where(array & 127 == 127, np.nan, np.where(array & 128, -magnitude, magnitude))
    values = array.astype(np.float64)
    return values if scales is None else values * scales[..., None].astype(np.float64)


def partial(
    q: Array,
    k: Array,
    v: Array,
    segments: SegmentTable,
    spec: AttentionSpec,
    threads: int,
    out: FloatArray | None = None,
    lse: FloatArray | None = None,
    *,
    scales: Scales | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Same arguments and results as ``lamina.kernels.attention.partial``; ``threads`` is ignored."""
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]), np.float32) if out is None else out
    lse = np.empty(q.shape[:2], np.float32) if lse is None else lse
    k_scales, v_scales = (None, None) if scales is None else scales
    queries, keys, values = widen(q), widen(k, k_scales), widen(v, v_scales)
    group = spec.query_heads // spec.kv_heads
    for pair in range(len(segments.query_start)):
        slots = segments.slots[segments.kv_offsets[pair] : segments.kv_offsets[pair + 1]]
        key_positions = segments.kv_start[pair] + np.arange(len(slots))
        for row in range(segments.query_offsets[pair], segments.query_offsets[pair + 1]):
            position = int(segments.query_start[pair]) + row - int(segments.query_offsets[pair])
            seen = visible(position, key_positions, spec)
            for head in range(spec.query_heads):
                scores = keys[slots[seen], head // group] @ queries[row, head] * spec.scale
                if spec.softcap > 0:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                if spec.alibi_slopes is not None:
                    scores = scores + spec.alibi_slopes[head] * (key_positions[seen] - position)
                if len(scores) == 0:
                    out[row, head], lse[row, head] = 0.0, -np.inf
                    continue
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[slots[seen], head // group] / weights.sum()
                lse[row, head] = scores.max() + np.log(weights.sum())
    return out, lse


def visible(position: int, key_positions: Array, spec: AttentionSpec) -> Array:
    """Which keys a query at ``position`` sees, bool, by the definition in ``AttentionSpec``."""
    seen = key_positions <= position
    if spec.window > 0:
        seen &= position - key_positions < spec.window
    if spec.chunk > 0:
        seen &= key_positions // spec.chunk == position // spec.chunk
    return seen


def read_reply(
    buffer: memoryview, spec: AttentionSpec, queries: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """View (out [queries, Hq, Dv], lse [queries, Hq]) of a reply's bytes."""
    count = queries * spec.query_heads * spec.v_dim
    out = np.frombuffer(buffer, np.float32, count).reshape(queries, spec.query_heads, spec.v_dim)
    lse = np.frombuffer(buffer, np.float32, queries * spec.query_heads, count * 4)
    return out, lse.reshape(queries, spec.query_heads)
