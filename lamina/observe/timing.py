"""Times a running engine: the spans of its steps, as a trace or summed by stage, and the rate of decoding a batch."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lamina.control.timeline import PARKED, Span
from lamina.core.errors import DeadlineError, LaminaError
from lamina.core.sampling import SamplingParams

if TYPE_CHECKING:
    from lamina.engine.engine import Engine
    from lamina.engine.updates import OnUpdate, RequestUpdate

OTHER = "other"
IDLE = {"wait", PARKED, OTHER}
"""Stages in which a worker is idle, or serves other messages; all others are work."""


def write_trace(path: Path, spans: Mapping[str, Sequence[Span]]) -> None:
    """Write spans by worker in Chrome's trace format: a process per worker, a row per lane, in microseconds."""
    start = min((span.begin_ns for own in spans.values() for span in own), default=0)
    events: list[dict[str, object]] = []
    for pid, (worker, own) in enumerate(spans.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": worker}})
        for lane in sorted({span.lane for span in own}):
            name = "all lanes" if lane < 0 else f"lane {lane}"
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane + 1, "args": {"name": name}})
        events += (
            {
                "ph": "X",
                "name": span.stage,
                "pid": pid,
                "tid": span.lane + 1,
                "ts": (span.begin_ns - start) / 1000,
                "dur": (span.end_ns - span.begin_ns) / 1000,
            }
            for span in own
        )
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True)
class Share:
    """Time that one worker spent in one stage: in seconds, and as a share of the observed time."""

    worker: str
    stage: str
    seconds: float
    share: float


def shares(spans: Mapping[str, Sequence[Span]], begin_ns: int, end_ns: int) -> list[Share]:
    """Return the time of every stage inside [begin_ns, end_ns) by worker, longest first; ``OTHER``: without a span."""
    total = (end_ns - begin_ns) / 1e9
    result = []
    for worker, own in spans.items():
        seconds: dict[str, float] = {}
        for span in own:
            inside = (min(span.end_ns, end_ns) - max(span.begin_ns, begin_ns)) / 1e9
            if inside > 0:
                seconds[span.stage] = seconds.get(span.stage, 0.0) + inside
        seconds[OTHER] = max(0.0, total - sum(value for stage, value in seconds.items() if stage != PARKED))
        ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
        result += [Share(worker, stage, value, value / total) for stage, value in ordered]
    return result


def bottleneck(parts: Sequence[Share]) -> Share:
    """Return the stage with work (not waiting) that takes the most time."""
    return max((part for part in parts if part.stage not in IDLE), key=lambda part: part.seconds)


def turnarounds(spans: Mapping[str, Sequence[Span]], begin_ns: int, end_ns: int) -> list[int]:
    """Return the ns from the end of each draw that begins in [begin_ns, end_ns) to its lane's next slice, anywhere.

    With one lane, this is the time on the critical path for planning and starting the next step.
    """
    own = sorted((span for each in spans.values() for span in each), key=lambda span: span.begin_ns)
    drawn: dict[int, int] = {}  # when the latest draw ended, by lane
    result = []
    for span in own:
        if span.stage == "draw" and begin_ns <= span.begin_ns < end_ns:
            drawn[span.lane] = span.end_ns
        elif span.stage == "slice" and span.lane in drawn:
            result.append(span.begin_ns - drawn.pop(span.lane))
    return result


@dataclass(frozen=True)
class Window:
    """The time span in which all requests of a batch decoded, and the tokens drawn in it. Monotonic clock."""

    begin_ns: int
    end_ns: int
    drawn: int

    @property
    def seconds(self) -> float:
        """Length of the span in seconds."""
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def tokens_per_s(self) -> float:
        """Tokens drawn per second by all requests."""
        return self.drawn / self.seconds


def decode_batch(engine: "Engine", prompts: Sequence[list[int]], tokens: int, timeout_s: float) -> list[list[int]]:
    """Generate ``tokens`` tokens greedily for every prompt; submit all prompts at once.

    Returns, by prompt, the arrival time of each token in nanoseconds of the monotonic clock.

    Raises:
        DeadlineError: A request did not end within ``timeout_s``.
        LaminaError: A request ended in an error.
    """
    arrivals: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    errors: list[str] = []
    done = threading.Event()

    def receiver(index: int) -> "OnUpdate":
        def on_update(update: "RequestUpdate") -> None:
            arrivals[index].extend([time.monotonic_ns()] * update.tokens)
            if update.finished:
                errors.extend([update.error] if update.error else [])
                unfinished.discard(index)
                if not unfinished:
                    done.set()

        return on_update

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, params, receiver(index))
    if not done.wait(timeout_s):
        raise DeadlineError(
            f"{len(unfinished)} of {len(prompts)} requests did not end within {timeout_s:.0f} s; "
            "give fewer or shorter requests"
        )
    if errors:
        raise LaminaError(errors[0])
    return arrivals


def decode_window(arrivals: Sequence[Sequence[int]]) -> Window:
    """Return the window from the latest first token to the earliest last token. Raises LaminaError if it is empty."""
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    if end <= begin:
        raise LaminaError(
            "the first request ended before the last prompt was processed; give more tokens or a smaller batch"
        )
    return Window(begin, end, sum(begin < when <= end for times in arrivals for when in times))
