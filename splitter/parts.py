"""``Part``: the indices of each dimension of a tensor that a tensor-parallel rank holds. Pure.

A part is a product of index sets, one per dimension; a dimension without an index set is whole. Index sets are sorted,
so that views and slices of a part keep the order of the whole tensor.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Part = Mapping[int, Indices]
"""By dimension, the sorted indices that are held. Empty: the whole tensor."""

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of indices, ascending."""

WHOLE: Part = {}


@dataclass(frozen=True)
class Rank:
    """One of the ``count`` processes of a tensor-parallel replica, each of which runs a part of every slice."""

    number: int
    count: int


ONLY = Rank(0, 1)
"""The only rank of a replica without tensor parallelism."""


class MixesError(ValueError):
    """An operator cannot be computed from parts of its inputs, or is not known."""


def block(size: int, rank: int, ranks: int) -> Indices:
    """Return the contiguous indices below ``size`` that ``rank`` holds; the ranks' counts differ by at most 1."""
    return np.arange(rank * size // ranks, (rank + 1) * size // ranks)


def union(parts: Iterable[Part], shape: Sequence[Any]) -> Part:
    """Return the smallest part of a tensor of ``shape`` that includes all of ``parts``, at least one part."""
    first, *others = parts
    joined = dict(first)
    for other in others:
        joined = {dim: np.union1d(indices, other[dim]) for dim, indices in joined.items() if dim in other}
    return {dim: indices for dim, indices in joined.items() if len(indices) != shape[dim]}


def equal(a: Part, b: Part) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[dim], b[dim]) for dim in a)


def reshaped(part: Part, old: Sequence[Any], new: Sequence[Any]) -> Part:
    """Convert a part of a tensor of shape ``old`` to a part of its view of shape ``new``.

    Dimensions of symbolic size must be whole. Raises MixesError if the result is not a product of index sets.
    """
    result: dict[int, Indices] = {}
    for before, after in _groups(old, new):
        if not any(dim in part for dim in before):
            continue
        sizes = [[shape[dim] for dim in dims] for shape, dims in ((old, before), (new, after))]
        if not all(isinstance(size, int) for size in itertools.chain(*sizes)):
            raise MixesError
        held = [part.get(dim, np.arange(old[dim])) for dim in before]
        flat = np.ravel_multi_index(np.meshgrid(*held, indexing="ij"), sizes[0]).ravel()
        found = [np.unique(indices) for indices in np.unravel_index(flat, sizes[1])] if after else []
        if np.prod([len(indices) for indices in found], dtype=np.int64) != len(flat):
            raise MixesError
        result |= {
            dim: indices.astype(np.int64) for dim, indices in zip(after, found, strict=True) if len(indices) != new[dim]
        }
    return result


def _groups(old: Sequence[Any], new: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Return pairs of groups of dimensions of ``old`` and ``new`` whose sizes have equal products, from the last back.

    The final pair is the rest: all dimensions that could not be matched, possibly none.
    """
    groups = []
    i, j = len(old), len(new)
    while i and j:
        before, after = [i - 1], [j - 1]
        if not (isinstance(old[i - 1], int) and isinstance(new[j - 1], int)):
            if str(old[i - 1]) != str(new[j - 1]):
                break
            groups.append((before, after))
            i, j = i - 1, j - 1
            continue
        a, b = old[i - 1], new[j - 1]
        while a != b:
            shape, dims = (old, before) if a < b else (new, after)
            dim = dims[0] - 1
            if dim < 0 or not isinstance(shape[dim], int):
                return [*groups, (list(range(i)), list(range(j)))]
            dims.insert(0, dim)
            if a < b:
                a *= shape[dim]
            else:
                b *= shape[dim]
        groups.append((before, after))
        i, j = before[0], after[0]
    return [*groups, (list(range(i)), list(range(j)))]


def positions(held: Indices | None, wanted: Indices) -> Indices:
    """Return the positions of the indices ``wanted`` among the indices ``held``; None: all indices are held."""
    if held is None:
        return wanted
    places = np.searchsorted(held, wanted)
    assert np.array_equal(held[np.minimum(places, len(held) - 1)], wanted), "not all indices are held"
    return places


def runs(indices: Indices) -> Runs:
    """Return the contiguous ranges of ``indices``, which ascend."""
    if not len(indices):
        return ()
    ends = np.flatnonzero(np.diff(indices) != 1)
    firsts, lasts = indices[np.r_[0, ends + 1]], indices[np.r_[ends, len(indices) - 1]]
    return tuple((int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True))
