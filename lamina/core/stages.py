"""Divides slices into pipeline stages. Pure: compute workers load the stages, and the simulator plays them."""

import math
from collections.abc import Callable, Mapping, Sequence

from lamina.core.errors import ConfigError


def divide(slices: Sequence[Mapping[str, int]], stages: int) -> tuple[int, ...]:
    """Divide slices into consecutive pipeline stages with weights of about equal size.

    A stage holds a weight once, however many of its slices need it. A weight that several stages need, such as an
    embedding tied to the head, is held by each of them. The largest stage is as small as possible; of all such
    divisions, the one with the least sum of squared sizes is returned.

    Args:
        slices: By slice, the bytes of each weight that it needs, by name.
        stages: Number of stages. Each gets at least one slice.

    Returns:
        Index of the first slice of each stage.

    Raises ConfigError if there are fewer slices than stages.
    """
    count = len(slices)
    require_slices(count, stages)
    held = _span_nbytes(slices)
    largest, _ = _best_division(held, stages, max, math.inf)
    _, starts = _best_division(held, stages, lambda before, own: before + own * own, largest)
    return starts


def require_slices(count: int, stages: int) -> None:
    """Raise ConfigError if a model has fewer slices (``count``) than stages."""
    if stages > count:
        raise ConfigError(
            f"pipeline_parallel is {stages}, and the model has {count} slices to divide; give at most {count}"
        )


def _span_nbytes(slices: Sequence[Mapping[str, int]]) -> list[list[int]]:
    """Return ``nbytes[i][j]``: bytes of the weights that slices i to i + j need together."""
    held = []
    for first in range(len(slices)):
        together: dict[str, int] = {}
        row = []
        for needed in slices[first:]:
            together.update(needed)
            row.append(sum(together.values()))
        held.append(row)
    return held


def _best_division(
    held: Sequence[Sequence[int]], stages: int, add: Callable[[float, int], float], most: float
) -> tuple[float, tuple[int, ...]]:
    """Return the least cost of a division into stages of at most ``most`` bytes, and the first slice of each stage.

    Dynamic programming. ``add(cost, nbytes)`` is the cost of stages that cost ``cost`` followed by a stage of
    ``nbytes``. It grows with both, so that the best division begins with a best division of fewer slices.
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
