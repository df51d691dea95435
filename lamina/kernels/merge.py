"""Merges partial attention results; merging is associative, so every split of the tokens gives the same result."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina import _native

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
    """Merges P partials of the same R rows, over disjoint tokens, into one.

    Args:
        outs: P arrays float32 [R, Hq, Dv]. lses: P arrays float32 [R, Hq], natural log; -inf partials are neutral.
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
