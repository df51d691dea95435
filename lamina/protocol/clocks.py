"""Clocks of other machines: when something happened there, by the monotonic clock here. Pure.

A question leaves here, is answered with the time there, and the answer arrives here: the other clock showed that time
at some moment in between. Of several readings, the one with the shortest round trip says most; the middle of that round
trip is taken for the moment (Cristian's algorithm; NTP's clock filter), which is wrong by half of it at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

READINGS = 8  # at a time: one of them hardly waits for anything


class Reading(NamedTuple):
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

    readings: list[Reading] = field(default_factory=list)

    def note(self, readings: Sequence[Reading]) -> None:
        """It was read again."""
        self.readings.append(min(readings, key=lambda each: each.round_trip_ns))

    def here(self, there_ns: int) -> int:
        """When, by the clock here. Between the first reading and the last, clocks drift apart evenly."""
        first, last = self.readings[0], self.readings[-1]
        span = last.there_ns - first.there_ns
        drift = last.ahead_ns - first.ahead_ns
        return there_ns - first.ahead_ns - (drift * (there_ns - first.there_ns) // span if span > 0 else 0)
