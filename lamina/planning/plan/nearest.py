"""Says which targets ways to serve miss at low load, and the nearest targets that one of them keeps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.planning.plan.ways import Slo, Way

ROOM = 1.5
"""Targets to give, over those kept at low load: requests wait for others at a load that is worth its cost."""


@dataclass(frozen=True)
class Reach:
    """The least targets that a way keeps, at low load: 99th percentiles in seconds."""

    way: Way
    ttft_s: float
    tbt_s: float

    def keeps(self, slo: Slo) -> bool:
        """Return whether the way keeps both targets."""
        return self.ttft_s <= slo.ttft_s and self.tbt_s <= slo.tbt_s


def nearest(reached: Sequence[Reach], slo: Slo) -> list[str]:
    """Return sentences: the best value of each target that no way keeps, and which targets are kept instead.

    ``reached`` is not empty, and none of it keeps both targets.
    """
    first, between = min(reached, key=lambda one: one.ttft_s), min(reached, key=lambda one: one.tbt_s)
    lines = []
    if first.ttft_s > slo.ttft_s:
        lines.append(f"At low load, the shortest p99 TTFT is {seconds(first.ttft_s)}, with {first.way.describe()}.")
    if between.tbt_s > slo.tbt_s:
        lines.append(f"At low load, the shortest p99 TBT is {seconds(between.tbt_s)}, with {between.way.describe()}.")
    if not lines:
        lines.append("At low load, each of them is kept by some way, but no way keeps both.")
    return [*lines, f"Give {', or '.join(_instead(reached, slo))}: {ROOM - 1:.0%} more than at low load."]


def _instead(reached: Sequence[Reach], slo: Slo) -> list[str]:
    """Return options with targets that a way keeps: one target is changed if that suffices, else both."""
    in_time = [one for one in reached if one.tbt_s <= slo.tbt_s]
    soon = [one for one in reached if one.ttft_s <= slo.ttft_s]
    options = []
    if in_time:
        best = min(in_time, key=lambda one: one.ttft_s)
        options.append(f"{_first(best)} for {best.way.describe()}")
    if soon:
        best = min(soon, key=lambda one: one.tbt_s)
        options.append(f"{_between(best)} for {best.way.describe()}")
    if not options:
        best = min(reached, key=lambda one: max(one.ttft_s / slo.ttft_s, one.tbt_s / slo.tbt_s))
        options.append(f"{_first(best)} {_between(best)} for {best.way.describe()}")
    return options


def _first(reach: Reach) -> str:
    return f"--slo-ttft {seconds(ROOM * reach.ttft_s, '')}"


def _between(reach: Reach) -> str:
    return f"--slo-tbt {seconds(ROOM * reach.tbt_s, '')}"


def seconds(value: float, gap: str = " ") -> str:
    """Format a time, rounded up to two digits, so that a target of this value is kept."""
    number, unit = (value, "s") if value >= 1 else (value * 1e3, "ms")
    step = 10.0 ** (math.floor(math.log10(number)) - 1)
    return f"{math.ceil(round(number / step, 6)) * step:.10g}{gap}{unit}"
