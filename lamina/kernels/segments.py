"""Input of the attention kernels: element types of a slab, and the table of which rows attend to which slots."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina.core.types import KvElement

STORAGE: Mapping[KvElement, np.dtype[Any]] = {
    KvElement.FLOAT32: np.dtype(np.float32),
    KvElement.FLOAT16: np.dtype(np.float16),
    KvElement.BFLOAT16: np.dtype(np.uint16),  # numpy has no bfloat16: its bits
    KvElement.INT8: np.dtype(np.int8),
    KvElement.FP8: np.dtype(np.uint8),  # the bits of e4m3
}
"""The numpy type of a slab's elements, from which kernels know the element type."""


IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SegmentTable:
    """S (sequence, segment) pairs: which query rows attend to which slots. Made once per step, used by every layer.

    Kernels check sizes, order and bounds against q, k and v.

    Args:
        query_offsets: int32 [S + 1], pair s has rows [query_offsets[s], query_offsets[s + 1]) of q.
        query_start: int32 [S], position of the pair's first query row; the others follow.
        kv_offsets: int64 or int32 [S + 1], pair s has tokens [kv_offsets[s], kv_offsets[s + 1]) of ``slots``.
        kv_start: int32 [S], position of the segment's first token.
        slots: int32 [N], slab slot of each token, by ascending position.
    """

    query_offsets: IntArray
    query_start: IntArray
    kv_offsets: npt.NDArray[np.int64] | IntArray
    kv_start: IntArray
    slots: IntArray

    @functools.cached_property
    def arrays(self) -> tuple[IntArray, IntArray, npt.NDArray[np.int64], IntArray, IntArray]:
        """All arrays in the order above, as the native kernels take them."""
        offsets = self.kv_offsets.astype(np.int64, copy=False)
        return self.query_offsets, self.query_start, offsets, self.kv_start, self.slots

    @functools.cached_property
    def most_rows(self) -> int:
        """The most query rows of a pair: 1 if all decode."""
        return int(np.diff(self.query_offsets).max(initial=0))
