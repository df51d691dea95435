"""Finds the stop string that ends a completion, and decides how much of its text may be streamed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lamina.types import SamplingParams


@dataclass(frozen=True, slots=True)
class StopDecision:
    """``text``: new text to stream. ``stop``: the stop string that has ended the completion."""

    text: str
    stop: str | None = None


class StopStrings:
    """The stop strings of a request with tables for matching, built on first use and shared by its completions."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)

    def __bool__(self) -> bool:
        return bool(self._stops)

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """Every proper prefix of a stop string, including the empty one."""
        return frozenset(stop[:size] for stop in self._stops for size in range(len(stop)))

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """All prefixes of stop strings, including the stop strings themselves."""
        return self.beginnings.union(self._stops)

    @cached_property
    def ending(self) -> dict[str, str]:
        """For each prefix that ends with a stop string, the longest such stop string."""
        return {
            prefix: max((stop for stop in self._stops if prefix.endswith(stop)), key=len)
            for prefix in self.prefixes
            if prefix.endswith(self._stops)
        }


class StopChecker:
    """Follows the text of one completion, token by token, until a stop string ends it.

    The stop string that ends first wins, and the longest if several end there; so the outcome does not depend on how
    the text is divided into tokens. Text that may be the beginning of a stop string is held back until that is decided.

    This is the automaton of Aho and Corasick (1975) with strings as states: the longest suffix of the text that is a
    prefix of a stop string. Each character extends it by one and may shorten it at its front, so that a character takes
    two look-ups on average, however many stop strings there are.
    """

    def __init__(self, params: SamplingParams, stops: StopStrings | None = None) -> None:
        """``stops``: the stop strings of ``params``."""
        self._params = params
        self._stops = StopStrings(params.stop) if stops is None else stops
        self._tokens = 0
        self._begun = ""  # the longest suffix that begins a stop string; held back unless stop strings are kept

    def append(self, text: str) -> StopDecision:
        """Process the text that the next token adds, which may be empty."""
        self._tokens += 1
        return self._match(text, self._tokens > self._params.min_tokens) if self._stops else StopDecision(text)

    def end(self, text: str) -> str:
        """The last text to stream when an end-of-sequence or stop token, which adds ``text``, ends the completion.

        The token's own text is left out unless ``include_stop_str_in_output``.
        """
        return self.flush() + (text if self._params.include_stop_str_in_output else "")

    def flush(self) -> str:
        """Return the text held back when nothing follows: at the length limit, or after an abort."""
        held = "" if self._params.include_stop_str_in_output else self._begun
        self._begun = ""
        return held

    def _match(self, text: str, may_stop: bool) -> StopDecision:
        """Search ``text`` for the first stop string that may end the completion."""
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
                return StopDecision(window[streamed : end if include else end - len(stop)], stop)
        self._begun = window[start:]
        return StopDecision(window[streamed : len(window) if include else start])
