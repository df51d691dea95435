"""Records the life of each request for the dashboard: its queue, chunks of its prompt, moves of its KV, its end."""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lamina.core.outputs import FinishReason
from lamina.core.steps import StepPlan

MOST_ENDED = 64
"""Requests whose lives are kept after their end."""
MOST_RETURNED = 64
"""Requests that ``Lives.newest`` returns."""
MOST_EVENTS = 128
"""Events kept of a request: the first half and the latest half."""


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Something that has happened to a request.

    Attributes:
        at_s: Seconds since the request was queued.
        what: "queued", "admitted", "cached", "chunk", "first token", "moved" or "ended".
        detail: Figures and names, in words.
    """

    at_s: float
    what: str
    detail: str = ""


class Life(msgspec.Struct):
    """What has happened to one request.

    Attributes:
        request: Id of the request in the engine.
        queued: Unix time at which it was queued.
        prompt_tokens: Tokens of its prompt.
        events: What has happened, oldest first; of many, some in the middle are left out.
        generated: Tokens of its completions so far.
        ended: Finish reasons of its completions; empty while it waits or runs.
    """

    request: str
    queued: float
    prompt_tokens: int
    events: list[Event] = []
    generated: int = 0
    ended: str = ""


class LivesOf(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: the answer to ``GetLives`` number ``number``."""

    number: int
    lives: list[Life]


class _Running:
    """A request that has not ended: its life, when it was queued on the monotonic clock, and its sequences."""

    def __init__(self, life: Life, begun: float) -> None:
        self.life, self.begun = life, begun
        self.sequences: list[int] = []
        self.ran = 0  # tokens of its prompt that have run or were found in the cache
        self.has_token = False

    def note(self, now: float, what: str, detail: str = "") -> None:
        events = self.life.events
        if len(events) == MOST_EVENTS:
            del events[MOST_EVENTS // 2]
        events.append(Event(round(now - self.begun, 6), what, detail))


class Lives:
    """The lives of all requests that wait or run, and of the latest that have ended. Any thread may call ``newest``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, Life] = {}
        self._of: dict[int, _Running] = {}  # by sequence
        self._chunks: dict[int, list[tuple[_Running, int, int, float]]] = {}  # by step in flight: tokens, when planned

    def note_queued(self, request: str, prompt_tokens: int) -> None:
        """Begin the life of a request."""
        running = self._running[request] = _Running(Life(request, time.time(), prompt_tokens, []), self._clock())
        running.note(running.begun, "queued")

    def note_plan(self, plan: StepPlan) -> None:
        """Record admissions, and moves that have arrived. Chunks are recorded once they have run."""
        if not (plan.admitted or plan.chunks or plan.switches):
            return
        now = self._clock()
        for admission in plan.admitted:
            if (running := self._running.get(admission.request)) is None:
                continue
            sequences = range(admission.sequence, admission.sequence + admission.count)
            running.sequences += sequences
            running.ran = 0
            self._of.update(dict.fromkeys(sequences, running))
            holders = sorted({segment.worker for segment in admission.segments})
            again = any(event.what == "admitted" for event in running.life.events)
            where = f"lane {plan.lane}, KV on {', '.join(holders)}"
            running.note(now, "admitted", f"again, its KV was dropped: {where}" if again else where)
        for switch in plan.switches:
            for segment in switch.segments:
                if (running := self._of.get(segment.sequence)) is not None:
                    begin, stop = segment.tokens
                    end = "the last" if stop is None else stop
                    running.note(now, "moved", f"tokens {begin} to {end}, to {segment.worker}")
        found = [(self._of[one.sequence], one.start, one.stop, now) for one in plan.chunks if one.sequence in self._of]
        if found:
            self._chunks[plan.step] = found

    def note_done(self, step: int) -> None:
        """Record that the chunks of a step have run."""
        for running, start, stop, planned in self._chunks.pop(step, ()):
            now = self._clock()
            if start > running.ran:
                running.note(now, "cached", f"tokens {running.ran} to {start} were in the prefix cache")
            running.note(now, "chunk", f"tokens {start} to {stop}, {1e3 * (now - planned):.1f} ms after it was planned")
            running.ran = max(running.ran, stop)
            if stop >= running.life.prompt_tokens and not running.has_token:
                running.has_token = True
                running.note(now, "first token")

    def drop_steps(self) -> None:
        """Forget the steps in flight: their epoch has ended, and they will not complete."""
        self._chunks.clear()

    def note_end(self, request: str, reasons: Sequence[FinishReason], generated: int, error: str | None) -> None:
        """End the life of a request."""
        running = self._running.pop(request, None)
        if running is None:
            return
        for sequence in running.sequences:
            self._of.pop(sequence, None)
        life = running.life
        life.generated, life.ended = generated, ", ".join(sorted({reason.value for reason in reasons}))
        running.note(self._clock(), "ended", f"{life.ended}, {generated} tokens" + (f": {error}" if error else ""))
        self._ended[request] = life
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def newest(self, generated: Mapping[str, int]) -> list[Life]:
        """Return the lives of the newest requests, running ones first.

        ``generated``: by running request, tokens generated so far.
        """
        running = [each.life for each in list(self._running.values())[-MOST_RETURNED:]][::-1]
        for life in running:
            life.generated = generated.get(life.request, life.generated)
        ended = list(self._ended.values())[::-1]
        return [*running, *ended][:MOST_RETURNED]
