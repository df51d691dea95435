"""Finds tokens that several sequences of a step share, so that a device reads their KV once (cascade attention).

Sequences that share a cached prefix, and samples of one prompt, share the slots of their first tokens.
"""

import collections
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lamina.memory.device.base import Pairs, Slots, SlotsOf

FEWEST_TOKENS = 64
DEEPEST = 32  # levels of shared prefixes within shared prefixes that are searched
KEPT = 64  # results kept: a step of each lane has some, one for each piece of its messages

_Seen = tuple[tuple[Hashable, ...], tuple[int, ...], tuple[int, ...]]
"""Segments, first tokens and query rows of a step's pairs."""


@dataclass(frozen=True)
class Shared:
    """Pairs with one query row each that attend to the same first ``tokens``."""

    pairs: tuple[int, ...]
    tokens: int

    @property
    def saved(self) -> int:
        """Tokens that need not be read again."""
        return (len(self.pairs) - 1) * self.tokens


class SharedPrefixes:
    """Finds the tokens that pairs share, once for all steps with the same sequences. One thread owns it.

    Segments only grow until ``forget`` is called, so that their shared tokens stay the same.
    """

    def __init__(self, least: int) -> None:
        """``least``: fewest tokens that a step must save for the cascade to pay."""
        self._least = least
        self._known = collections.OrderedDict[_Seen, list[Shared]]()

    def forget(self, segments: Collection[Hashable]) -> None:
        """Drop cached results for segments that have ended or lost tokens."""
        gone = frozenset(segments)
        if not gone:
            return
        for key in [key for key in self._known if not gone.isdisjoint(key[0])]:
            del self._known[key]

    def find(self, pairs: Pairs, slots: SlotsOf) -> list[Shared]:
        """Return disjoint sets of pairs with the number of tokens that each shares; empty if they save too little."""
        if len(pairs.keys) < 2:
            return []
        key: _Seen = tuple(pairs.keys), tuple(pairs.first), tuple(pairs.rows)
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        if found is None or any(pairs.stop[i] - pairs.first[i] < one.tokens for one in found for i in one.pairs):
            found = self._known[key] = self._find(pairs, slots)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _find(self, pairs: Pairs, slots: SlotsOf) -> list[Shared]:
        held: dict[int, dict[int, Slots]] = {}  # by position of the first token, and by pair
        for i, (rows, key, first, stop) in enumerate(zip(pairs.rows, pairs.keys, pairs.first, pairs.stop, strict=True)):
            # A token beyond the query's position would be hidden from it.
            seen = min(stop, first + pairs.query_start[i] + 1 - pairs.kv_start[i])
            if rows == 1 and seen - first >= FEWEST_TOKENS:
                held.setdefault(pairs.kv_start[i], {})[i] = slots(key)[first:seen]
        found = [one for some in held.values() for one in _best(tuple(some), some)]
        return found if sum(one.saved for one in found) >= self._least else []


def _common(pairs: Sequence[int], held: Mapping[int, Slots], known: int) -> int:
    """Return the number of tokens that all ``pairs`` share, of which ``known`` are known."""
    shortest = min(len(held[i]) for i in pairs)
    if known == shortest or len({int(held[i][known]) for i in pairs}) > 1:
        return known
    first = held[pairs[0]][known:shortest]
    same = np.ones(len(first), bool)
    for i in pairs[1:]:
        same &= held[i][known:shortest] == first
    return shortest if same.all() else known + int(same.argmin())


def _best(pairs: Sequence[int], held: Mapping[int, Slots], known: int = 0, depth: int = 0) -> list[Shared]:
    """Return the grouping of ``pairs``, which share their first ``known`` tokens, that saves the most tokens."""
    if len(pairs) < 2 or depth > DEEPEST:
        return []
    common = _common(pairs, held, known)
    apart: dict[int, list[int]] = {}
    for i in pairs:
        if len(held[i]) > common:
            apart.setdefault(int(held[i][common]), []).append(i)
    parts = [one for some in apart.values() for one in _best(some, held, common, depth + 1)]
    if common < FEWEST_TOKENS:
        return parts
    # Sets that save more by themselves stay so; all other pairs share what all have in common.
    kept = [one for one in parts if one.saved > len(one.pairs) * common]
    others = set(pairs).difference(*(one.pairs for one in kept))
    joined = [*kept, Shared(tuple(sorted(others)), common)] if len(others) > 1 else kept
    return max(joined, parts, key=lambda found: sum(one.saved for one in found))


def rest_of(pairs: Pairs, shared: Sequence[Shared]) -> Pairs:
    """Return the pairs without the tokens that they share."""
    skipped = np.zeros(len(pairs.keys), int)
    for one in shared:
        skipped[list(one.pairs)] = one.tokens
    kv_start, first = (np.add(each, skipped).tolist() for each in (pairs.kv_start, pairs.first))
    return replace(pairs, kv_start=kv_start, first=first)


def shared_of(pairs: Pairs, shared: Sequence[Shared]) -> tuple[Pairs, Slots]:
    """Return one pair for each set of shared tokens, with all its query rows; and the rows' indices in ``pairs``, int32
    [R]."""
    begins = np.cumsum([0, *pairs.rows])
    which = [one.pairs[0] for one in shared]
    first = [pairs.first[i] for i in which]
    kv_start = [pairs.kv_start[i] for i in which]
    tokens = [one.tokens for one in shared]
    together = Pairs(
        rows=[len(one.pairs) for one in shared],
        query_start=[start + count - 1 for start, count in zip(kv_start, tokens, strict=True)],
        kv_start=kv_start,
        keys=[pairs.keys[i] for i in which],
        first=first,
        stop=[start + count for start, count in zip(first, tokens, strict=True)],
    )
    return together, np.concatenate([begins[list(one.pairs)] for one in shared]).astype(np.int32)
