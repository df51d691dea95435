"""The protocol of devices."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lamina.kernels.segments import SegmentTable
from lamina.types import AttentionSpec

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int32]


class Device(Protocol):
    """Holds the slabs of all attentions, by layer. One thread owns it.

    All arrays of these methods are in host memory. Shapes use T tokens, R query rows, Hq query heads, Hkv key/value
    heads, D and Dv head sizes.
    """

    def keep(self, layer: int, k: Array, v: Array, slots: Slots) -> None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] in ``slots`` [T], rounded to the slab's element type."""

    def attend(
        self, layer: int, table: SegmentTable, q: Array, out: Floats, lse: Floats, spec: AttentionSpec | None = None
    ) -> Iterator[None]:
        """Partial attention of q [R, Hq, D] over the segments of ``table``; ``spec``: instead of the layer's own.

        Writes out [R, Hq, Dv] and lse [R, Hq], complete at the end. Yields every few milliseconds, where the work may
        pause; q must not change before the end.
        """

    def read(self, layer: int, slots: Slots, content: memoryview) -> None:
        """Write what ``slots`` hold into ``content``, as it is stored: scales of k and v if they are codes, k, v."""

    def restore(self, layer: int, slots: Slots, content: memoryview) -> None:
        """Store what ``read`` wrote, in these slots."""


def parts(content: memoryview, rows: int, arrays: Sequence[Any]) -> Iterator[tuple[Any, Array]]:
    """Each of ``arrays``, indexed by slot, and where ``rows`` of its rows lie in ``content``, one after another."""
    offset = 0
    for array in arrays:
        shape = (rows, *array.shape[1:])
        view = np.frombuffer(content, array.dtype, math.prod(shape), offset).reshape(shape)
        offset += view.nbytes
        yield array, view
