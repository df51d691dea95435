"""Processor time of this process and its descendants while an engine works. Linux; uses the standard library alone.

On cores that other programs use too, tokens per second of processor time vary much less than tokens per second.
"""

import bisect
import os
import threading
import time
from pathlib import Path

INTERVAL_S = 0.01
_PROCESS_CLOCK = 2  # the kernel's CPUCLOCK_SCHED: nanoseconds that all threads of a process have run


def descendants(pid: int) -> list[int]:
    """Return the process ids of a process and of all that it has started, at any depth."""
    found = [pid]
    for parent in found:  # grows meanwhile
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


class ProcessorTime:
    """Samples the processor time of the processes that existed when the context was entered.

    Processes that start later are not counted. An engine that keeps Python's lock during a step is sampled between
    steps.
    """

    def __init__(self) -> None:
        self._clocks = [(~pid << 3) | _PROCESS_CLOCK for pid in descendants(os.getpid())]
        self._times: list[float] = []
        self._used: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_end)

    def __enter__(self) -> "ProcessorTime":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        self._times.append(time.monotonic())
        self._used.append(sum(map(time.clock_gettime, self._clocks)))

    def _sample_until_end(self) -> None:
        ended = False
        while not ended:
            ended = self._end.wait(INTERVAL_S)
            self._sample()

    def at(self, time_s: float) -> float:
        """Return the processor time used until a time of the monotonic clock, interpolated between samples."""
        right = min(max(bisect.bisect(self._times, time_s), 1), len(self._times) - 1)
        begin, end = self._times[right - 1 : right + 1]
        share = min(max((time_s - begin) / (end - begin), 0.0), 1.0)
        return self._used[right - 1] + share * (self._used[right] - self._used[right - 1])
