"""Divides the engine's updates into pieces of choices, whichever API asked for them, and counts their tokens."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lamina.core.types import Logprob
from lamina.engine.updates import RequestUpdate
from lamina.text.logprobs import named
from lamina.text.tokenizer import Tokenizer

MOST_POSITIONS = 64
"""Most tokens of one event or piece: encoding one must not delay other clients."""


@dataclass(frozen=True)
class Piece:
    """The new part of one choice since its previous piece.

    Attributes:
        first: the text of the first token of an echoed prompt, which has no log-probability; None in all other pieces.
        stop_reason: the stop string or stop token that has ended the choice.
        text_offsets: where each token with logprobs begins in the text of the choice.
    """

    choice: int
    text: str
    logprobs: list[list[Logprob]] | None
    text_offsets: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    first: str | None = None


class Sent:
    """Tracks what has been sent of each choice of one HTTP request. Choice = prompt * n + completion.

    Args:
        tokenizer: gives the text of tokens in logprobs.
        n: completions per prompt.
        echo: for each prompt, the text to put before its completions; empty for none.
        scored: that text is the first token of each prompt, and the completions repeat the others.
    """

    def __init__(self, tokenizer: Tokenizer, n: int, echo: Sequence[str] = (), scored: bool = False) -> None:
        self._tokenizer = tokenizer
        self._n = n
        self._echo = echo
        self._scored = scored
        self._offsets: dict[int, int] = {}  # characters of the token texts sent so far, if logprobs are reported
        self._ended = set[int]()

    def advance(self, prompt: int, update: RequestUpdate, most: int = MOST_POSITIONS) -> Iterator[Piece]:
        """Yield the pieces of ``update``, each of at most ``most`` tokens of one completion; they count as sent."""
        for completion in update.completions:
            choice = prompt * self._n + completion.index
            ends = completion.finish_reason is not None and choice not in self._ended
            begins = bool(self._echo) and choice not in self._offsets
            prefix = self._echo[prompt] if begins else ""
            first = prefix if begins and self._scored else None
            self._offsets.setdefault(choice, 0 if first is None else len(first))
            for start in range(0, max(1, len(completion.token_ids)), most):
                stop = start + most
                last = stop >= len(completion.token_ids)
                text = prefix + "".join(completion.texts[start:stop]) + (completion.rest if last else "")
                logprobs, offsets = None, list[int]()
                if completion.logprobs is not None:
                    logprobs = [named(position, self._tokenizer) for position in completion.logprobs[start:stop]]
                    for position in completion.logprobs[start:stop]:
                        offsets.append(self._offsets[choice])
                        self._offsets[choice] += len(position.text)
                if text or logprobs or (ends and last):
                    reason = completion.finish_reason.value if completion.finish_reason and ends and last else None
                    yield Piece(
                        choice, text, logprobs, offsets, reason, completion.stop_reason if last else None, first
                    )
                prefix, first = "", None
            if ends:
                self._ended.add(choice)


@dataclass
class Usage:
    """Token counts and finish reasons of one HTTP request."""

    prompts: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    drawn: int = 0
    forced: int = 0  # tokens of prompts that the engine has still to draw
    ends: dict[tuple[int, int], str] = field(default_factory=dict)  # by prompt and completion

    def count(self, prompt: int, update: RequestUpdate) -> None:
        """Count the tokens of an update."""
        self.cached[prompt] = update.cached_tokens
        drawn = update.tokens
        skipped = min(drawn, self.forced)
        self.forced -= skipped
        self.drawn += drawn - skipped
        for completion in update.completions:
            if completion.finish_reason is not None:
                self.ends[prompt, completion.index] = completion.finish_reason.value

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(self.prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that were found in the prefix cache."""
        return sum(self.cached.values())

    def figures(self) -> str:
        """Tokens and finish reasons, for a log."""
        reasons = Counter(self.ends.values())
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "client left"
        return f"{self.prompt_tokens} prompt tokens, {self.drawn} generated, {ends}"
