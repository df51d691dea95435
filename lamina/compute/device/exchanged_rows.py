"""Indices of the rows that a compute worker exchanges with memory workers in a step. Pure.

A *shard* is an equal part of a row's heads: with n shards per row, shard s of row r has number r * n + s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExchangedRows:
    """The rows to write into messages and to merge from replies. Planned once per step, used for every attention.

    Attributes:
        total: Rows of the step.
        rows: ``total`` plus padding rows.
        shards: Shards per row.
        queries: By memory worker, the shards whose q it receives and whose partials it replies with.
        appends: By memory worker, the shards whose k and v it receives.
        parts: By memory worker, the index of each of its partials among all partials of the same shard.
        here: By source of partials on the compute worker itself, the shards of its partials.
        here_parts: Like ``parts``, for ``here``.
    """

    total: int
    rows: int
    shards: int
    queries: Sequence[Indices]
    appends: Sequence[Indices]
    parts: Sequence[Indices]
    here: Sequence[Indices]
    here_parts: Sequence[Indices]

    @property
    def most_parts(self) -> int:
        """The largest number of partials of any shard, at least 1."""
        parts = [*self.parts, *self.here_parts]
        return 1 + max((int(each.max()) for each in parts if len(each)), default=0)


@dataclass(frozen=True)
class Arrivals:
    """Layout of all partials in one float32 array: for each source, out [n, h, Dv], then lse [n, h].

    A source begins at a multiple of ``h * Dv``. The array begins with an empty partial: out 0, lse -inf.

    Attributes:
        starts: Offset of each source.
        end: Offset after the last source.
        outs: int64 [P, S], the row of partial p of shard s in the array viewed as rows of h * Dv.
        lses: int64 [P, S], the row of the partial's lse in the array viewed as rows of h.
    """

    starts: tuple[int, ...]
    end: int
    outs: Indices
    lses: Indices


def arrange(exchanged: ExchangedRows, heads: int, v_dim: int) -> Arrivals:
    """Return the layout of partials with ``heads`` heads per shard: this worker's first, then memory workers'."""
    unit = heads * v_dim
    shape = exchanged.most_parts, exchanged.rows * exchanged.shards
    outs, lses = np.zeros(shape, np.int64), np.full(shape, v_dim, np.int64)
    starts, at = [], 2 * unit
    for shards, parts in zip(
        (*exchanged.here, *exchanged.queries), (*exchanged.here_parts, *exchanged.parts), strict=True
    ):
        count = np.arange(len(shards))
        starts.append(at)
        outs[parts, shards] = at // unit + count
        lses[parts, shards] = (at + len(shards) * unit) // heads + count
        at += -(-len(shards) * (unit + heads) // unit) * unit
    return Arrivals(tuple(starts), at, outs, lses)
