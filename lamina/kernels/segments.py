"""The input of every attention kernel: which query rows of a step attend to which tokens of a slab."""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SegmentTable:
    """S (sequence, segment) pairs: which query rows attend to which slots. Planned once per step, used by every layer.

    Args:
        query_offsets: int32 [S + 1], rows of q of each pair, contiguous.
        query_start: int32 [S], position of the pair's first query row; its row i is at ``query_start + i``.
        kv_offsets: int64 or int32 [S + 1], into ``slots``.
        kv_start: int32 [S], position of the segment's first token.
        slots: int32 [N], slab slot of each token, by ascending position.

    Every call checks sizes, order and bounds against its q, k and v.
    """

    query_offsets: IntArray
    query_start: IntArray
    kv_offsets: npt.NDArray[np.int64] | IntArray
    kv_start: IntArray
    slots: IntArray

    @functools.cached_property
    def most_rows(self) -> int:
        """The most query rows of a pair: 1 if all decode."""
        return int(np.diff(self.query_offsets).max(initial=0))
