"""Notices that other processes use the processor while this machine is measured.

A measurement on a busy machine is too slow without looking wrong. ``Watch`` compares what the cores of this process
did between two moments with what this process and its children used: the rest is somebody else's, or was taken by the
hypervisor (steal).
"""

import os
import time
from dataclasses import dataclass

import psutil

QUIET = 0.05
"""Share of the cores' time for others up to which a measurement counts as undisturbed: a desktop's own daemons."""


@dataclass(frozen=True)
class Disturbance:
    """Share of the time of this process's cores, 0 to 1, that went to others; over ``seconds`` of wall time."""

    others: float
    seconds: float

    @property
    def disturbed(self) -> bool:
        """Whether it is too much to trust what was measured."""
        return self.others > QUIET

    def __str__(self) -> str:
        return f"other processes took {self.others:.0%} of this machine's processor time"


class Watch:
    """Counts from its creation on. Children count as this process's own: those alive, and those that have ended."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._all_s, self._own_s = _all_seconds(), _own_seconds()

    @classmethod
    def sample(cls) -> Disturbance:
        """The disturbance of the next second, in which this thread does nothing."""
        watch = cls()
        time.sleep(1.0)
        return watch.so_far()

    def so_far(self) -> Disturbance:
        """The disturbance since the beginning."""
        seconds = time.monotonic() - self._begun_s
        others = _all_seconds() - self._all_s - (_own_seconds() - self._own_s)
        available = max(1e-9, seconds * len(os.sched_getaffinity(0)))
        return Disturbance(min(1.0, max(0.0, others / available)), seconds)


def _all_seconds() -> float:
    """Seconds for which this process's cores worked for anybody, or were taken away."""
    cores, times = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
    mine = [times[core] for core in cores if core < len(times)]
    return float(sum(one.user + one.nice + one.system + one.irq + one.softirq + one.steal for one in mine))


def _own_seconds() -> float:
    """Processor seconds of this process and its children. A child's pass to its parent when that has waited for it."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:  # ended since it was listed
            continue
        seconds += used.user + used.system + used.children_user + used.children_system
    return seconds
