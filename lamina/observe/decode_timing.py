"""Measures decoding of a batch of requests: when each token arrived, and the rate while all of them decoded."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.core.errors import DeadlineError, LaminaError
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import OnUpdate, RequestUpdate


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


def decode_batch(engine: Engine, prompts: Sequence[list[int]], tokens: int, timeout_s: float) -> list[list[int]]:
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

    def receiver(index: int) -> OnUpdate:
        def on_update(update: RequestUpdate) -> None:
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
