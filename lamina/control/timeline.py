"""``Timeline`` records what a worker did and when; ``Clock`` converts the times of another machine's clock."""

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

READINGS = 8  # readings of a clock in one batch, of which at least one is likely to have a short round trip


class ClockReading(NamedTuple):
    """A reading of a remote clock: ``there_ns``, some time from ``sent_ns`` to ``received_ns`` of the local clock."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Time between question and answer, by the local clock."""
        return self.received_ns - self.sent_ns

    @property
    def ahead_ns(self) -> int:
        """How far the remote clock is ahead of the local one, to within half the round trip; 0 if less than that."""
        ahead = self.there_ns - (self.sent_ns + self.received_ns) // 2
        return 0 if 2 * abs(ahead) <= self.round_trip_ns else ahead


@dataclass
class Clock:
    """Converts times of a remote clock to the local clock. ``readings``: the best reading of each batch, by time."""

    readings: list[ClockReading] = field(default_factory=list)

    def add_reading(self, readings: Sequence[ClockReading]) -> None:
        """Add the one of ``readings`` with the shortest round trip."""
        self.readings.append(min(readings, key=lambda each: each.round_trip_ns))

    def to_local(self, there_ns: int) -> int:
        """Return the local time at remote time ``there_ns``. Drift is taken as constant between readings."""
        first, last = self.readings[0], self.readings[-1]
        span = last.there_ns - first.there_ns
        drift = last.ahead_ns - first.ahead_ns
        return there_ns - first.ahead_ns - (drift * (there_ns - first.there_ns) // span if span > 0 else 0)


PARKED = "parked"
"""The stage in which a message waits for K and V of earlier chunks, while its worker serves others."""

MOST_SPANS = 500_000  # kept per timeline; older spans are dropped


class Span(msgspec.Struct, array_like=True, frozen=True):
    """One stage of a worker's work for ``lane`` (-1: no lane), in nanoseconds of the worker's monotonic clock."""

    stage: str
    lane: int
    begin_ns: int
    end_ns: int


OBSERVED_NS = 200_000_000
"""Length of a window of a timeline that somebody watches."""

MOST_OBSERVED = 1_000
"""Spans of one window; later ones are left out."""


class Timeline:
    """Collects the spans of one process if ``enabled``, or while somebody watches; costs next to nothing otherwise."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.spans: collections.deque[Span] = collections.deque(maxlen=MOST_SPANS)
        self._recording = enabled
        self._observed: list[Span] = []
        self._observed_until_ns = 0

    def observe(self) -> list[Span]:
        """Return the spans of the last window except waits, and begin a window of ``OBSERVED_NS``."""
        observed, self._observed = self._observed, []
        self._observed_until_ns = time.monotonic_ns() + OBSERVED_NS
        self._recording = True
        return observed

    def now(self) -> int:
        """Return the time, to pass to ``record_span`` as ``begin_ns``; 0 if nothing is recorded."""
        return time.monotonic_ns() if self._recording else 0

    def record_span(self, stage: str, lane: int, begin_ns: int) -> None:
        """Record a span that began at ``begin_ns`` and ends now; do nothing if ``begin_ns`` is 0."""
        if not self._recording or begin_ns <= 0:
            return
        span = Span(stage, lane, begin_ns, time.monotonic_ns())
        if self.enabled:
            self.spans.append(span)
        if begin_ns > self._observed_until_ns or len(self._observed) >= MOST_OBSERVED:
            self._recording = self.enabled
        elif stage != "wait":
            self._observed.append(span)
