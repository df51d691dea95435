"""Decides after each token whether a completion has ended, and which of its text may be streamed already."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from lamina.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class StopDecision:
    """``text`` is new and final: stream it. ``stop_reason`` is the stop string or token, None for end of sequence."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopStrings:
    """The stop strings of a request, prepared for matching; shared by its completions, built when first used."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)

    def __bool__(self) -> bool:
        return bool(self._stops)

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """Every beginning of a stop string that is not all of it, the empty one included."""
        return frozenset(stop[:size] for stop in self._stops for size in range(len(stop)))

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """The beginnings and the stop strings themselves."""
        return self.beginnings.union(self._stops)

    @cached_property
    def ending(self) -> dict[str, str]:
        """By prefix that ends with a stop string: the longest such."""
        return {
            prefix: max((stop for stop in self._stops if prefix.endswith(stop)), key=len)
            for prefix in self.prefixes
            if prefix.endswith(self._stops)
        }


class StopChecker:
    """Follows one completion, token by token, until it ends.

    The stop string whose last character comes first wins, the longest of those that end there; so the outcome does not
    depend on how the text is cut into pieces. Text that may be the beginning of a stop string is held back until that
    is decided. The order at one token is: end of sequence, stop token, stop string, length.

    This is Aho and Corasick's automaton (1975) with its states as strings: the longest end of the text that is a
    prefix of a stop string. A character makes it longer by one and then shorter at its front, so that each is looked up
    twice on average, however many stop strings there are.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], stops: StopStrings | None = None
    ) -> None:
        """``params.max_tokens`` is the limit on tokens; None is no limit here. ``stops`` are those of ``params``."""
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._stops = StopStrings(params.stop) if stops is None else stops
        self._tokens = 0
        self._begun = ""  # the longest end of the text that begins a stop string; held back if that may be cut out

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
        decision = self._match(text, may_stop) if self._stops else StopDecision(text)
        if decision.finish_reason is None and self._tokens == self._params.max_tokens:
            return StopDecision(decision.text + self.flush(), FinishReason.LENGTH)
        return decision

    def flush(self) -> str:
        """The text held back, once nothing follows it: after an abort, or at the end of the model's context."""
        held = "" if self._params.include_stop_str_in_output else self._begun
        self._begun = ""
        return held

    def _match(self, text: str, may_stop: bool) -> StopDecision:
        """Follow ``text`` up to the first stop string that may end the completion."""
        include = self._params.include_stop_str_in_output
        window = self._begun + text
        streamed = len(self._begun) if include else 0
        known = self._stops.prefixes if may_stop else self._stops.beginnings
        start = 0
        for end in range(len(self._begun) + 1, len(window) + 1):
            while window[start:end] not in known:
                start += 1
            stop = self._stops.ending.get(window[start:end]) if may_stop else None
            if stop is not None:
                self._begun = ""
                return StopDecision(window[streamed : end if include else end - len(stop)], FinishReason.STOP, stop)
        self._begun = window[start:]
        return StopDecision(window[streamed : len(window) if include else start])
