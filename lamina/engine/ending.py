"""Ends: of an engine, whose workers stop and hand over what they recorded, and of a request that made workers die."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from lamina.cluster.gather import Workers
from lamina.engine.watch import POLL_S
from lamina.errors import LaminaError, TransportError
from lamina.protocol.control import ControlServer
from lamina.protocol.messages import Stop, Traced
from lamina.protocol.timeline import Span
from lamina.schedule.suspects import DEATHS_ALONE

log = logging.getLogger(__name__)

OnTrace = Callable[[Mapping[str, list[Span]]], None]

TRACE_TIMEOUT_S = 10.0


def tell_to_stop(control: ControlServer, workers: Iterable[str]) -> list[str]:
    """Returns the workers that could be told."""
    told = []
    for worker in workers:
        try:
            control.send([worker], Stop())
        except TransportError as error:
            log.info("worker %s could not be told to stop: %s", worker, error)
        else:
            told.append(worker)
    return told


def collect_spans(control: ControlServer, workers: Workers, told: Sequence[str]) -> dict[str, list[Span]]:
    """Spans by worker, without those of workers that do not answer within ``TRACE_TIMEOUT_S``."""
    spans: dict[str, list[Span]] = {}
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while time.monotonic() < deadline and not spans.keys() | workers.ended().keys() >= set(told):
        for worker, message in control.receive(POLL_S):
            if isinstance(message, Traced):
                spans[worker] = message.spans
    return spans


def hand_over(spans: Mapping[str, list[Span]], receivers: Iterable[OnTrace]) -> None:
    """Give all receivers what was recorded, also if one cannot write it."""
    for receiver in receivers:
        try:
            receiver(spans)
        except OSError as error:
            log.error("the timeline could not be written: %s", error)


def poisonous(lost: Mapping[str, LaminaError]) -> str:
    """The error of a request that ran alone when workers died, these ones last."""
    last = "; ".join(str(why).partition("\n")[0] for why in lost.values())
    return (
        f"the request is not run again: {DEATHS_ALONE} times in a row, a worker died while it ran nothing but this "
        f"request. The last time: {last}. Change the request; the workers' logs may show what they died of"
    )
