"""Decides after each token whether a completion has ended, and which of its text may be streamed already."""

from collections.abc import Collection
from dataclasses import dataclass

from lamina.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class StopDecision:
    """``text`` is new and final: stream it. ``stop_reason`` is the stop string or token, None for end of sequence."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopChecker:
    """Follows one completion, token by token, until it ends.

    The stop string whose last character comes first wins, the longest of those that end there; so the outcome does not
    depend on how the text is cut into pieces. Text that may be the beginning of a stop string is held back until that
    is decided. The order at one token is: end of sequence, stop token, stop string, length.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Collection[int]) -> None:
        """``params.max_tokens`` is the limit on tokens; None is no limit here."""
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._tokens = 0
        # The end of the text so far, as much of it as a match may reach back into; its last _held characters are
        # not streamed yet.
        self._tail = ""
        self._tail_length = max(map(len, params.stop), default=1) - 1
        self._held = 0

    def append(self, token_id: int, text: str) -> StopDecision:
        """Take the next token and the text that it adds, which may be empty.

        The text of an end-of-sequence or stop token is left out unless ``include_stop_str_in_output``.
        """
        self._tokens += 1
        may_stop = self._tokens > self._params.min_tokens
        if may_stop and (token_id in self._eos_token_ids or token_id in self._stop_token_ids):
            stop_reason = None if token_id in self._eos_token_ids else token_id
            last = text if self._params.include_stop_str_in_output else ""
            return StopDecision(self.flush() + last, FinishReason.STOP, stop_reason)
        window = self._tail + text
        streamed = len(self._tail) - self._held
        match = self._first_match(window) if may_stop else None
        if match is not None:
            start, stop = match
            cut = start + len(stop) if self._params.include_stop_str_in_output else start
            self._held = 0
            return StopDecision(window[streamed:cut], FinishReason.STOP, stop)
        if self._tokens == self._params.max_tokens:
            self._held = 0
            return StopDecision(window[streamed:], FinishReason.LENGTH)
        self._held = self._undecided(window)
        self._tail = window[max(0, len(window) - self._tail_length) :]
        return StopDecision(window[streamed : len(window) - self._held])

    def flush(self) -> str:
        """The text held back, once nothing follows it: after an abort, or at the end of the model's context."""
        held = self._tail[len(self._tail) - self._held :]
        self._held = 0
        return held

    def _first_match(self, window: str) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first, among those that end after the tail."""
        best: tuple[int, int, str] | None = None
        for stop in self._params.stop:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else best[1:]

    def _undecided(self, window: str) -> int:
        """Characters at the end of ``window`` that begin a stop string which may yet be completed and cut out."""
        if self._params.include_stop_str_in_output:
            return 0  # they stay in the output either way
        return max((_begun(stop, window) for stop in self._params.stop), default=0)


def _begun(stop: str, text: str) -> int:
    """Characters at the end of ``text`` that begin ``stop``, fewer than all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
