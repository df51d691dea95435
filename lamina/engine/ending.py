"""Stops an engine's workers and collects their spans; words the error of a request that made workers die."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from lamina.cluster.conversations import Gather, Workers, converse
from lamina.cluster.joining import Fabric, read_clock
from lamina.control.messages import Stop, Traced
from lamina.control.sockets import ControlServer
from lamina.control.timeline import Clock, Span
from lamina.core.errors import LaminaError, TransportError
from lamina.engine.losses import POLL_S
from lamina.schedule.suspects import DEATHS_ALONE

log = logging.getLogger(__name__)

OnTrace = Callable[[Mapping[str, list[Span]]], None]

TRACE_TIMEOUT_S = 10.0


def tell_to_stop(control: ControlServer, workers: Iterable[str]) -> list[str]:
    """Tell workers to stop; return those that could be reached."""
    told = []
    for worker in workers:
        try:
            control.send([worker], Stop())
        except TransportError as error:
            log.info("worker %s could not be told to stop: %s", worker, error)
        else:
            told.append(worker)
    return told


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


def poisonous(lost: Mapping[str, LaminaError]) -> str:
    """Return the error of a request that ran alone when workers died. ``lost``: the workers that died last."""
    last = "; ".join(str(why).partition("\n")[0] for why in lost.values())
    return (
        f"the request is not run again: {DEATHS_ALONE} times in a row, a worker died while it ran nothing but this "
        f"request. The last time: {last}. Change the request; the workers' logs may show what they died of"
    )
