"""Divides a model's slices among the stages of a pipeline, by bytes of weights. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence

from lamina.core.errors import ConfigError


def divide(slices: Sequence[Mapping[str, int]], stages: int) -> tuple[int, ...]:
    """Return the first slice of each of ``stages`` stages, which have at least one slice each, in order.

    ``slices``: bytes of the weights that each slice needs, by name. A stage holds a weight once, whichever of its
    slices need it; stages that need the same weight, such as an embedding tied to the head, hold it each. The largest
    stage is as small as possible; of all such divisions, the most even one is taken: the least sum of squares.

    Raises ConfigError if there are fewer slices than stages.
    """
    count = len(slices)
    if stages > count:
        raise ConfigError(
            f"pipeline_parallel is {stages}, and the model has {count} slices to divide; give at most {count}"
        )
    held = _held(slices)
    largest, _ = _least(held, stages, max, math.inf)
    _, starts = _least(held, stages, lambda before, own: before + own * own, largest)
    return starts


def _held(slices: Sequence[Mapping[str, int]]) -> list[list[int]]:
    """Bytes of the weights that slices i to i + j need together, by i and j."""
    held = []
    for first in range(len(slices)):
        together: dict[str, int] = {}
        row = []
        for needed in slices[first:]:
            together.update(needed)
            row.append(sum(together.values()))
        held.append(row)
    return held


def _least(
    held: Sequence[Sequence[int]], stages: int, add: Callable[[float, int], float], most: float
) -> tuple[float, tuple[int, ...]]:
    """Return the least cost of a division into stages of at most ``most`` bytes, and their first slices.

    ``add``: the cost of stages with another one of so many bytes. It grows with both, so that the best division of all
    slices contains the best ones of those before its last stage.
    """
    count = len(held)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by slices divided so far
    for _ in range(stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (cost, starts) in best.items():
            for stop in range(first + 1, count + 1):
                nbytes = held[first][stop - first - 1]
                if nbytes > most:
                    break
                total = add(cost, nbytes)
                if stop not in following or total < following[stop][0]:
                    following[stop] = total, (*starts, first)
        best = following
    return best[count]
