"""Collects short windows of workers' timelines for the live view, only while a client requests them."""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lamina.cluster.sizing import boot_id
from lamina.control.messages import Observe, Observed, ToWorker
from lamina.control.timeline import OBSERVED_NS, Span
from lamina.core.topology import Topology
from lamina.transport.shm import host

BETWEEN_NS = 500_000_000  # at least, between two windows; several people may watch
SHOWN_NS = 5_000_000_000  # age at which a worker's spans are no longer shown


class TimelineOf(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: the answer to ``GetTimeline`` number ``number``."""

    number: int
    spans: dict[str, list[Span]]


class LiveTimeline:
    """The latest window of each worker. ``spans`` may be called by any thread."""

    def __init__(self, tell: Callable[[Sequence[str], ToWorker], None]) -> None:
        """``tell``: sends a message to workers."""
        self._tell = tell
        self._asked_ns = 0
        self._latest: Mapping[str, tuple[int, list[Span]]] = {}  # by worker: time of arrival, spans

    def request_windows(self, topology: Topology) -> None:
        """Ask all workers for a window, unless that was done a moment ago."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._asked_ns + BETWEEN_NS:
            self._asked_ns = now_ns
            self._tell([member.name for member in topology.members], Observe())

    def keep_window(self, worker: str, message: Observed, topology: Topology) -> None:
        """Keep the window of a worker. Times of another machine are moved by the difference at its arrival."""
        now_ns = time.monotonic_ns()
        there = next((member.host for member in topology.members if member.name == worker), host())
        ahead = 0 if boot_id(there) == boot_id(host()) else message.sent_ns - now_ns
        spans = [Span(span.stage, span.lane, span.begin_ns - ahead, span.end_ns - ahead) for span in message.spans]
        fresh = {name: latest for name, latest in self._latest.items() if now_ns < latest[0] + SHOWN_NS}
        self._latest = {**fresh, worker: (now_ns, spans)}

    def spans(self) -> dict[str, list[Span]]:
        """Return the latest window of each worker that replies, in this process's clock.

        Workers answer with the window before the one that begins, so that the first answer is empty.
        """
        now_ns = time.monotonic_ns()
        fresh = {worker: spans for worker, (at_ns, spans) in self._latest.items() if now_ns < at_ns + SHOWN_NS}
        begin_ns = max((span.end_ns for spans in fresh.values() for span in spans), default=0) - 2 * OBSERVED_NS
        return {worker: [span for span in spans if span.end_ns > begin_ns] for worker, spans in fresh.items()}
