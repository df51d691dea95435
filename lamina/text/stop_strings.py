"""Finds the stop string that ends a completion, and decides how much of its text may be streamed."""

import itertools
import operator
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

from lamina.core.sampling import SamplingParams


class StopDecision(NamedTuple):
    """New ``text`` to stream, and the stop string that has ended the completion, if one has."""

    text: str
    stop: str | None = None


class StopStrings:
    """The stop strings of a request with tables for matching, built on first use and shared by its completions."""

    def __init__(self, stops: Sequence[str], special_texts: Collection[str] = ()) -> None:
        """``special_texts`` are the texts of the model's special tokens."""
        self._stops = tuple(stops)
        self._special_texts = special_texts

    def __bool__(self) -> bool:
        return bool(self._stops)

    @cached_property
    def with_special(self) -> "StopStrings":
        """The stop strings that contain the text of a special token."""
        return StopStrings([stop for stop in self._stops if any(text in stop for text in self._special_texts)])

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """Every proper prefix of a stop string, including the empty one."""
        return frozenset(stop[:size] for stop in self._stops for size in range(len(stop))) | {""}

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """All prefixes of stop strings, including the stop strings themselves."""
        return self.beginnings.union(self._stops)

    @cached_property
    def ending(self) -> dict[str, str]:
        """The longest stop string at the end of each prefix that ends with one."""
        return {
            prefix: max((stop for stop in self._stops if prefix.endswith(stop)), key=len)
            for prefix in self.prefixes
            if prefix.endswith(self._stops)
        }


class _Automaton:
    """The automaton of Aho and Corasick (1975) with strings as states.

    Each character extends the state by one and may shorten it at its front, so that a character takes two look-ups on
    average, however many stop strings there are.

    Attributes:
        begun: the state: the longest suffix of the text that is a prefix of a stop string.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self.begun = ""

    def advance(self, character: str, may_stop: bool) -> str:
        """Return the longest stop string that ends with this character; empty for none."""
        known = self._stops.prefixes if may_stop else self._stops.beginnings
        begun = self.begun + character
        while begun not in known:
            begun = begun[1:]
        self.begun = begun
        return self._stops.ending.get(begun, "") if may_stop else ""


class StopChecker:
    """Follows the text of one completion, token by token, until a stop string ends it.

    The stop string that ends first wins, and the longest if several end there; so the outcome does not depend on how
    the text is divided into tokens. Text that may be the beginning of a stop string is held back until that is decided.

    Special tokens are not in the text of the completion. A stop string that contains the text of a special token is
    also looked for in the text with special tokens written out.
    """

    def __init__(self, params: SamplingParams, stops: StopStrings | None = None) -> None:
        self._params = params
        self._stops = StopStrings(params.stop) if stops is None else stops
        self._tokens = 0
        self._plain = _Automaton(self._stops)
        self._written = _Automaton(self._stops.with_special) if self._stops.with_special else None
        self._held: list[str] = []  # the characters held back, in order; those of special tokens among them
        self._hidden: list[bool] = []  # whether each of them is of a special token

    def append(self, text: str, special: str = "") -> StopDecision:
        """Process the next token.

        Args:
            text: text that the token adds to the completion; may be empty.
            special: text of a special token that is left out of the completion; else empty.
        """
        self._tokens += 1
        if not self._stops:
            return StopDecision(text)
        may_stop = self._tokens > self._params.min_tokens
        for written, hidden in ((text, False), (special if self._written is not None else "", True)):
            for character in written:
                self._held.append(character)
                self._hidden.append(hidden)
                stop = "" if hidden else self._plain.advance(character, may_stop)
                with_special = "" if self._written is None else self._written.advance(character, may_stop)
                if stop or with_special:
                    return self._cut(stop, with_special)
        return StopDecision(self._release(len(self._held) - self._kept()))

    def append_last(self, text: str, special: str) -> StopDecision:
        """Return the last text to stream when an end-of-sequence or stop token ends the completion.

        Args:
            text: text of the last token, left out unless ``include_stop_str_in_output``.
            special: text of the last token if it is a special token, which may complete a stop string; else empty.
        """
        decision = self.append("", special)
        if decision.stop is not None:
            return decision
        return StopDecision(decision.text + self.flush() + (text if self._params.include_stop_str_in_output else ""))

    def flush(self) -> str:
        """Return the text held back when nothing follows: at the length limit, or after an abort."""
        return self._release(len(self._held))

    def _cut(self, stop: str, with_special: str) -> StopDecision:
        """End the completion at the longer of two stop strings that end with the last character held back.

        Args:
            stop: found in the text of the completion; empty for none.
            with_special: found in the text with special tokens written out; empty for none.
        """
        include = self._params.include_stop_str_in_output
        if len(with_special) <= len(stop):
            text = self.flush()
            return StopDecision(text if include else text[: -len(stop)], stop)
        before = len(self._held) - len(with_special)
        text = self._release(max(0, before))
        self._held.clear()
        self._hidden.clear()
        return StopDecision(text + with_special[max(0, -before) :] if include else text, with_special)

    def _kept(self) -> int:
        """Return how many of the characters held back stay held back: those that may be part of a stop string.

        Where stop strings stay in the output, text is held back only to be in order with a special token's.
        """
        with_special = 0 if self._written is None else len(self._written.begun)
        if self._params.include_stop_str_in_output:
            return next((n for n in range(min(with_special, len(self._held)), 0, -1) if self._hidden[-n]), 0)
        kept, left = 0, len(self._plain.begun)
        while left:
            kept += 1
            left -= not self._hidden[-kept]
        return max(kept, with_special)

    def _release(self, count: int) -> str:
        """Stream the first ``count`` characters held back, without those of special tokens."""
        text = "".join(itertools.compress(self._held[:count], map(operator.not_, self._hidden[:count])))
        del self._held[:count], self._hidden[:count]
        return text
