"""What a worker did and when: spans on the clock that all processes of a machine share. See ``clocks`` for others'."""

import collections
import time

import msgspec

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

    def add(self, stage: str, lane: int, begin_ns: int) -> None:
        """Add a span that ends now."""
        if self.enabled:
            self.spans.append(Span(stage, lane, begin_ns, time.monotonic_ns()))
