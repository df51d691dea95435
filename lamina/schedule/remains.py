"""What an epoch leaves to the next one, when steps in flight are dropped. Pure."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamina.placement.prefix_cache import PrefixCache
from lamina.schedule.lane import Lane


@dataclass(frozen=True)
class Remains:
    """What memory workers keep of the requests. Compute workers keep nothing.

    Attributes:
        kept: by memory worker and sequence: tokens whose KV steps have completed. All other KV is forgotten.
        dropped: requests that have lost their KV. recomputed: tokens of these that are computed again.
        on_trial: workers died while they ran requests that were tried again after an earlier death.
        poison: the request that makes workers die, if this loss proves one.
    """

    kept: dict[str, dict[int, int]]
    dropped: int = 0
    recomputed: int = 0
    on_trial: bool = False
    poison: str | None = None


def kept(lanes: Sequence[Lane], prefixes: PrefixCache, workers: Iterable[str]) -> dict[str, dict[int, int]]:
    """By memory worker and sequence: the tokens that stay when no step is in flight."""
    kept: dict[str, dict[int, int]] = {worker: {} for worker in workers}
    for group in (group for own in lanes for group in own.running if group not in own.dealt):
        completions = group.alive if group.forked else group.completions[:1]
        for completion in completions:
            for segment in completion.segments:
                kept[segment.worker][completion.sequence] = group.kept(completion)
    for group, completion in itertools.chain.from_iterable(own.ending for own in lanes):
        if length := prefixes.keepable(group, completion):
            for segment in completion.segments:
                kept[segment.worker][completion.sequence] = length
    for worker in kept:
        kept[worker] |= prefixes.sequences(worker)
    return kept
