"""Partial attention over segments of a KV slab on the CPU: append, attend, merge."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina import _native
from lamina.core.types import AttentionSpec
from lamina.kernels.segments import IntArray, SegmentTable

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]


def merge(
    outs: Sequence[FloatArray],
    lses: Sequence[FloatArray],
    sinks: FloatArray | None = None,
    out: Array | None = None,
    lse: FloatArray | None = None,
    threads: int = 1,
) -> Array:
    """Merge P partial attentions of the same R query rows, over disjoint tokens, into one.

    Args:
        outs: P arrays float32 [R, Hq, Dv].
        lses: P arrays float32 [R, Hq], the log-sum-exp of scores, natural log; partials with -inf do not contribute.
        sinks: float32 [Hq], one more logit per head in the softmax's denominator: give it once, in the last merge.
        out: [R, Hq, Dv] to write, float32, float16 or uint16 (bfloat16 bits), may be ``outs[0]``; None: float32,
            allocated.
        lse: float32 [R, Hq] to write with the merged lse (sinks included), may be ``lses[0]``; None: not wanted.
        threads: threads to use at most, this one included.

    Returns:
        out; 0 for a row that saw no token in any partial.

    Raises:
        ValueError: no partials, or an invalid shape, element type or memory order.
    """
    out = np.empty_like(outs[0]) if out is None and len(outs) else out
    if out is None:
        raise ValueError("merge got no partials; give at least one")
    _native.attention_merge(list(outs), list(lses), sinks, out, lse, threads)
    return out


Path = _native.AttentionPath
Scales = tuple[FloatArray, FloatArray]
"""Scales of k and v, each float32 [slots, Hkv], if the slab is quantised to one-byte codes."""

BEST_PATH = _native.attention_paths()[-1]

# A dtype is compared with another dtype ten times as fast as with a type.
_FLOAT32 = np.dtype(np.float32)
_CODES = np.dtype(np.int8), np.dtype(np.uint8)
_QUANTISED = _FLOAT32, np.dtype(np.float16), np.dtype(np.uint16)


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
    path: Path = BEST_PATH,
) -> tuple[FloatArray, FloatArray]:
    """Attend from every query row to its pair's segment. Attention sinks are left to ``merge``.

    CuPy arrays are processed on their GPU (``lamina.kernels.gpu``); ``threads`` and ``path`` are then ignored.

    Args:
        q: [R, Hq, D], float32 or the element type of k; float32, float16 or uint16 if k holds codes. It is rounded to
            bfloat16 on ``Path.AVX512_BF16`` and ``Path.AMX`` if k holds bfloat16.
        k: [slots, Hkv, D], float32, float16, uint16 (bfloat16 bits), or int8 or uint8 codes.
        v: [slots, Hkv, Dv], of the same element type.
        segments: Which query rows attend to which slots.
        spec: scale, window, chunk, softcap and alibi slopes; its head counts and sizes must be those of q, k and v.
        threads: threads to use, this one included.
        out: Array to write the output to; None: allocated.
        lse: Array to write the log-sum-exp to; None: allocated.
        scales: Scales of k and v, if and only if they hold codes.
        path: instruction set, one of ``lamina._native.attention_paths()``.

    Returns:
        out float32 [R, Hq, Dv] and natural-log lse float32 [R, Hq]; 0 and -inf for a row that attends to no token.

    Raises:
        ValueError: a shape, an element type, a memory order or a slot is invalid.

    One query at position 2 of a sequence whose tokens are in slots 5, 0 and 3; the value of each is its position:

    >>> k, v = np.zeros((6, 1, 8), np.float32), np.zeros((6, 1, 8), np.float32)
    >>> v[[5, 0, 3]] = np.array([0.0, 1.0, 2.0], np.float32)[:, None, None]
    >>> table = SegmentTable(*(np.array(one, np.int32) for one in ([0, 1], [2], [0, 3], [0], [5, 0, 3])))
    >>> spec = AttentionSpec(layer=0, query_heads=1, kv_heads=1, qk_dim=8, v_dim=8, scale=1.0)
    >>> out, lse = partial(np.zeros((1, 1, 8), np.float32), k, v, table, spec, threads=1)
    >>> out[0, 0, 0], bool(np.isclose(lse[0, 0], np.log(3)))
    (np.float32(1.0), True)
    """
    if hasattr(q, "__cuda_array_interface__"):
        from lamina.kernels.gpu import cuda

        return cuda.partial(q, k, v, segments, spec, out, lse, scales)
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]), np.float32) if out is None else out
    lse = np.empty(q.shape[:2], np.float32) if lse is None else lse
    arrays, scoring = _arguments(q, k, v, segments, spec, out, lse, scales)
    _native.attention_partial(*arrays, **scoring, threads=threads, path=path)
    return out, lse


def partial_tasks(
    q: Array,
    k: Array,
    v: Array,
    segments: SegmentTable,
    spec: AttentionSpec,
    threads: int,
    out: FloatArray,
    lse: FloatArray,
    tasks: tuple[int, int],
    *,
    adds: bool,
    scales: Scales | None = None,
    path: Path = BEST_PATH,
) -> None:
    """Run tasks [first, last) of the ``count_tasks`` tasks of ``partial``: several calls make one attention.

    Each task writes its own rows and heads of ``out`` and ``lse``. With ``adds``, the call attends to further tokens of
    the same rows, and merges its result into ``out`` and ``lse``. Together the calls give the result of ``partial``
    over all tokens, up to rounding. Raises ValueError like ``partial``, and for tasks out of range.
    """
    first, last = tasks
    arrays, scoring = _arguments(q, k, v, segments, spec, out, lse, scales)
    _native.attention_partial_tasks(*arrays, **scoring, threads=threads, path=path, first=first, last=last, adds=adds)


def count_tasks(query_offsets: IntArray, spec: AttentionSpec) -> int:
    """Return the number of tasks of an attention of these query rows: blocks of rows x key/value heads."""
    return _native.attention_count_tasks(query_offsets, spec.query_heads, spec.kv_heads)


def _arguments(
    q: Array,
    k: Array,
    v: Array,
    segments: SegmentTable,
    spec: AttentionSpec,
    out: FloatArray,
    lse: FloatArray,
    scales: Scales | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the native kernels. Raises ValueError for arrays that do not fit the spec."""
    shapes = (q.shape[1:], k.shape[1:], v.shape[1:])
    wanted = ((spec.query_heads, spec.qk_dim), (spec.kv_heads, spec.qk_dim), (spec.kv_heads, spec.v_dim))
    if shapes != wanted:
        raise ValueError(f"q, k and v have rows of shapes {shapes}; the spec of layer {spec.layer} says {wanted}")
    slopes = None if spec.alibi_slopes is None else np.asarray(spec.alibi_slopes, np.float32)
    k_scales, v_scales = scales or (None, None)
    return (q, k, v, *segments.arrays, out, lse), {
        "scale": spec.scale,
        "window": spec.window,
        "chunk": spec.chunk,
        "softcap": spec.softcap,
        "alibi_slopes": slopes,
        "k_scales": k_scales,
        "v_scales": v_scales,
    }


def append(
    k_slab: Array,
    v_slab: Array,
    k: Array,
    v: Array,
    slots: IntArray,
    threads: int = 1,
    scales: Scales | None = None,
) -> None:
    """Write k [T, Hkv, D] and v [T, Hkv, Dv] into rows ``slots`` [T] of k_slab and v_slab, which are mutated.

    k and v hold float32, rounded to nearest even, or the slab's element type. A slab of codes takes float32, float16 or
    uint16 and has ``scales``, which are mutated too; a row with NaN or an infinity gets NaN as its scale, so that the
    error is not hidden.

    Raises:
        ValueError: a shape, an element type, a memory order or a slot is invalid; nothing has been written.
    """
    k_scales, v_scales = (None, None) if scales is None else scales
    _check_values(v_slab, v, slots, k_slab, v_scales)
    _native.attention_append(k_slab, k, slots, threads, k_scales)
    _native.attention_append(v_slab, v, slots, threads, v_scales)


def _check_values(v_slab: Array, v: Array, slots: IntArray, k_slab: Array, v_scales: FloatArray | None) -> None:
    """Check v before k is written, so that an error leaves both unchanged; slots are checked with k."""
    if v_slab.ndim != 3 or len(v_slab) != len(k_slab) or v_slab.dtype != k_slab.dtype:
        raise ValueError(
            f"v_slab is {v_slab.dtype} of shape {v_slab.shape}; give it the slots and elements of k_slab, "
            f"{k_slab.dtype} of shape {k_slab.shape}"
        )
    wanted = (len(slots), *v_slab.shape[1:])
    codes = v_slab.dtype in _CODES
    if v.shape != wanted or v.dtype not in (_QUANTISED if codes else (_FLOAT32, v_slab.dtype)):
        types = "float32, float16 or uint16" if codes else f"float32 or the slab's {v_slab.dtype}"
        raise ValueError(f"v is {v.dtype} of shape {v.shape}; expected {types} of shape {wanted}")
    if codes and (v_scales is None or v_scales.dtype != _FLOAT32 or v_scales.shape != v_slab.shape[:2]):
        given = "missing" if v_scales is None else f"{v_scales.dtype} of shape {v_scales.shape}"
        raise ValueError(f"the scales of v are {given}; codes need float32 of shape {v_slab.shape[:2]}")
    if not (v.flags.c_contiguous and v_slab.flags.c_contiguous):
        raise ValueError("v and v_slab must be C-contiguous; pass numpy.ascontiguousarray(v)")
    if not v_slab.flags.writeable:
        raise ValueError("v_slab is read-only; give one that can be written")
