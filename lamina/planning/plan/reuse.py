"""What prompts have in common with earlier requests, and how much of it a cache of some size finds.

What a prompt says is described by runs of tokens, ``(id, tokens)``: two prompts begin with the same tokens as long as
their runs are equal. A trace's ids give a hit rate for every size of a cache that evicts what was used least recently,
which depends on the order of the requests alone, not on their rate (Mattson et al., 1970). Without a trace,
``Sessions`` has the same for conversations that are idle between turns.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lamina.planning.plan.kernel_times import Floats

Content = tuple[tuple[int, int], ...]
"""A prompt as runs of (id, tokens)."""


class Reuse(Protocol):
    """What a cache beside the running requests finds."""

    def found(self, room: Floats, active: Floats) -> Floats:
        """Tokens of a prompt, on average, found by a cache of ``room`` tokens while ``active`` sequences decode."""

    def each(self, found: float, prompts: Floats) -> Floats:
        """Tokens of each of these prompts, those of the workload's sample, if ``found`` are found on average."""

    @property
    def most(self) -> float:
        """Tokens of a prompt, on average, that a cache without bounds finds."""

    @property
    def shared(self) -> float:
        """Tokens that all running sequences have in common, and that are kept once."""


@dataclass(frozen=True)
class Sessions:
    """Prompts of one length that begin with tokens which all have in common, and with earlier turns of a session.

    Attributes:
        shared: tokens of every prompt that are the same in all.
        resumed: tokens after them, of earlier turns.
        idle: share of the sessions that wait for their user. Until its next turn, a session's KV is either kept, as
            long as there is room, or computed again; sessions are idle for equally distributed times, so that the share
            found is that of the idle KV for which there is room.
    """

    shared: int = 0
    resumed: int = 0
    idle: float = 0.0

    @property
    def most(self) -> float:
        return float(self.shared + self.resumed)

    def found(self, room: Floats, active: Floats) -> Floats:
        waiting = active * self.idle / (1 - self.idle) * self.resumed
        kept = np.clip((room - self.shared) / np.maximum(waiting, 1e-9), 0.0, 1.0)
        return np.asarray(np.where(room >= 0, self.shared, 0.0) + self.resumed * kept)

    def each(self, found: float, prompts: Floats) -> Floats:
        """Return the tokens found of each prompt: all prompts have one length, and equally many tokens of each are
        found."""
        return np.full_like(prompts, math.floor(found))

    def describe(self) -> str:
        """In words."""
        parts = [f"{self.shared} shared"] if self.shared else []
        parts += [f"{self.resumed} of earlier turns, {self.idle:.0%} of sessions idle"] if self.resumed else []
        return ", ".join(parts) or "nothing in common"


NOTHING = Sessions()


@dataclass(frozen=True)
class FromTrace:
    """The hit rate of a trace by the size of the cache, in tokens.

    Attributes:
        sizes, tokens: of caches, and what each finds of a prompt on average. Between two sizes it is interpolated.
        sampled: float64 [sizes, requests of the sample], what each finds of these.
    """

    sizes: tuple[float, ...] = field(repr=False)
    tokens: tuple[float, ...] = field(repr=False)
    sampled: Floats = field(repr=False, compare=False)
    shared: float = 0.0

    @classmethod
    def from_requests(cls, requests: Sequence[tuple[Content, int | None, int]], every: int = 1) -> "FromTrace | None":
        """``requests``: content of the prompt, id of the answer, and its tokens. None if no prompt has ids. The sample
        has one in ``every`` requests, from the first one on."""
        if not any(content for content, _, _ in requests):
            return None
        whole = [_keys(content, answer, output) for content, answer, output in requests]
        largest = sum({key: tokens for keys, _ in whole for key, tokens in keys}.values())
        sizes = [0.0, *np.geomspace(largest / 2**10, largest, 11).tolist()]
        found = np.array([list(_lru(whole, size)) for size in sizes], np.float64)
        return cls(tuple(sizes), tuple(found.mean(axis=1).tolist()), found[:, ::every])

    @property
    def most(self) -> float:
        return self.tokens[-1]

    def found(self, room: Floats, active: Floats) -> Floats:
        return np.asarray(np.interp(room, self.sizes, self.tokens))

    def each(self, found: float, prompts: Floats) -> Floats:
        """Return the tokens found of each prompt: continued conversations almost whole, first prompts not at all."""
        below = min(int(np.searchsorted(self.tokens, found, side="right")), len(self.tokens) - 1) - 1
        low, high = self.tokens[below], self.tokens[below + 1]
        part = (found - low) / max(high - low, 1e-9)
        between = np.floor(self.sampled[below] * (1 - part) + self.sampled[below + 1] * part)
        return np.asarray(np.minimum(between, prompts - 1))


_Keys = tuple[list[tuple[int, int]], int]


def _keys(content: Content, answer: int | None, output: int) -> _Keys:
    """(key, tokens) of every run of a request, its answer's last, and how many are the prompt's.

    A key stands for a run and all before it.
    """
    behind = () if answer is None else ((answer, output),)
    keys, key = [], 0
    for run in (*content, *behind):
        key = hash((key, run))
        keys.append((key, run[1]))
    return keys, len(content)


def _lru(requests: Sequence[_Keys], size: float) -> Iterator[int]:
    """Tokens of each prompt that a cache of ``size`` tokens finds."""
    kept: OrderedDict[int, int] = OrderedDict()
    total = 0
    for keys, prompt in requests:
        yield sum(tokens for _, tokens in itertools.takewhile(lambda one: one[0] in kept, keys[:prompt]))
        for key, tokens in reversed(keys):  # the end of a prefix is evicted before what it begins with
            if key in kept:
                kept.move_to_end(key)
            else:
                kept[key] = tokens
                total += tokens
        while total > size:
            total -= kept.popitem(last=False)[1]
