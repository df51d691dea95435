"""The rows of a step that a compute worker exchanges with memory workers, as indices for its device. Pure.

A *shard* is an equal part of a row's heads: with n shards to a row, shard s of row r has number r * n + s. One shard to
a row is all of its heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moves:
    """The rows to write into messages and to merge from replies. Planned once per step, used for every attention.

    Attributes:
        total: rows of the step.
        rows: the same with padding.
        shards: number per row.
        queries: by memory worker in the order of messages, the shards whose q it gets; it replies with their partials.
        appends: by memory worker, the shards whose k and v it keeps.
        parts: by memory worker, for each of its partials its number among the partials of its shard, from 0 on.
        here, here_parts: as ``queries`` and ``parts``, by source of partials on the compute worker itself.
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
    """Where partials lie in one array of float32: by source its out [n, h, Dv], then its lse [n, h].

    A source begins at a multiple of ``h * Dv``. At the array's beginning lie a partial of nothing: an out of 0, and
    after it an lse of -inf.

    Attributes:
        starts: where each source begins.
        end: of the last one.
        outs: int64 [P, S]: which row of the array, seen as rows of h * Dv, is partial p of shard s.
        lses: the same for its lse, seen as rows of h.
    """

    starts: tuple[int, ...]
    end: int
    outs: Indices
    lses: Indices


def arrange(moves: Moves, heads: int, v_dim: int) -> Arrivals:
    """Return where partials of ``heads`` heads to a shard arrive: those from here first, then those of memory
    workers."""
    unit = heads * v_dim
    shape = moves.most_parts, moves.rows * moves.shards
    outs, lses = np.zeros(shape, np.int64), np.full(shape, v_dim, np.int64)
    starts, at = [], 2 * unit
    for shards, parts in zip((*moves.here, *moves.queries), (*moves.here_parts, *moves.parts), strict=True):
        count = np.arange(len(shards))
        starts.append(at)
        outs[parts, shards] = at // unit + count
        lses[parts, shards] = (at + len(shards) * unit) // heads + count
        at += -(-len(shards) * (unit + heads) // unit) * unit
    return Arrivals(tuple(starts), at, outs, lses)
