"""Collects workers' timelines: all of them when the engine ends, or short windows while a client requests them."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from lamina.cluster.conversations import Gather, Workers, converse
from lamina.cluster.joining import Fabric, read_clock
from lamina.cluster.sizing import boot_id
from lamina.control.messages import Observe, Observed, ToWorker, Traced
from lamina.control.sockets import ControlServer
from lamina.control.timeline import OBSERVED_NS, Clock, Span
from lamina.core.errors import LaminaError
from lamina.core.topology import Topology
from lamina.engine.losses import POLL_S
from lamina.transport.shm import host

log = logging.getLogger(__name__)

OnTrace = Callable[[Mapping[str, list[Span]]], None]

TRACE_TIMEOUT_S = 10.0
BETWEEN_NS = 500_000_000  # least time between two windows; several people may watch
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


def read_clocks(control: ControlServer, workers: Workers, fabric: Fabric) -> None:
    """Read the clocks of other machines again, which have drifted since their workers joined."""
    gather = Gather(control, workers, lambda worker, progress: None)
    for name in {hello.host: name for name, hello in fabric.greetings.items()}.values():
        try:
            converse(gather, read_clock(control, fabric, name))
        except LaminaError as error:
            log.info("clocks of other machines are taken as when they joined, from %s on: %s", name, error)
            return


def collect_spans(
    control: ControlServer, workers: Workers, told: Sequence[str], fabric: Fabric | None
) -> dict[str, list[Span]]:
    """Return spans by worker, in this process's clock, of workers that reply within ``TRACE_TIMEOUT_S``.

    ``fabric``: has the clocks of other machines.
    """
    spans: dict[str, list[Span]] = {}
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while time.monotonic() < deadline and not spans.keys() | workers.ended().keys() >= set(told):
        for worker, message in control.receive(POLL_S):
            if isinstance(message, Traced):
                clock = None if fabric is None else fabric.clock_of(worker)
                spans[worker] = message.spans if clock is None else [_moved(span, clock) for span in message.spans]
    return spans


def _moved(span: Span, clock: Clock) -> Span:
    return Span(span.stage, span.lane, clock.to_local(span.begin_ns), clock.to_local(span.end_ns))


def hand_over(spans: Mapping[str, list[Span]], receivers: Iterable[OnTrace]) -> None:
    """Pass spans to all receivers, even if one of them fails."""
    for receiver in receivers:
        try:
            receiver(spans)
        except OSError as error:
            log.error("the timeline could not be written: %s", error)
