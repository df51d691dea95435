"""What a worker did and when, on one clock for all machines."""

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

READINGS = 8  # at a time: one of them hardly waits for anything


class ClockReading(NamedTuple):
    """The other clock showed ``there_ns`` at some moment from ``sent_ns`` to ``received_ns`` of the clock here."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Between question and answer."""
        return self.received_ns - self.sent_ns

    @property
    def ahead_ns(self) -> int:
        """How far the other clock is ahead of the one here, give or take half of the round trip."""
        ahead = self.there_ns - (self.sent_ns + self.received_ns) // 2
        return 0 if 2 * abs(ahead) <= self.round_trip_ns else ahead  # no difference has been seen


@dataclass
class Clock:
    """The clock of another machine, read at one time or several.

    Attributes:
        readings: the best of each time, in order.
    """

    readings: list[ClockReading] = field(default_factory=list)

    def add_reading(self, readings: Sequence[ClockReading]) -> None:
        """Add a reading of the clock: the one of ``readings`` with the shortest round trip."""
        self.readings.append(min(readings, key=lambda each: each.round_trip_ns))

    def here(self, there_ns: int) -> int:
        """When, by the clock here. Between the first reading and the last, clocks drift apart evenly."""
        first, last = self.readings[0], self.readings[-1]
        span = last.there_ns - first.there_ns
        drift = last.ahead_ns - first.ahead_ns
        return there_ns - first.ahead_ns - (drift * (there_ns - first.there_ns) // span if span > 0 else 0)


MOST_SPANS = 500_000  # the latest ones are kept


class Span(msgspec.Struct, array_like=True, frozen=True):
    """One thing a worker did for one lane (-1: for no lane), from ``begin_ns`` to ``end_ns`` of the monotonic clock."""

    stage: str
    lane: int
    begin_ns: int
    end_ns: int


class Timeline:
    """Collects spans if ``enabled``; costs next to nothing otherwise."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.spans: collections.deque[Span] = collections.deque(maxlen=MOST_SPANS)

    def now(self) -> int:
        """When a span begins."""
        return time.monotonic_ns() if self.enabled else 0

    def record_span(self, stage: str, lane: int, begin_ns: int) -> None:
        """Add a span that ends now."""
        if self.enabled:
            self.spans.append(Span(stage, lane, begin_ns, time.monotonic_ns()))
