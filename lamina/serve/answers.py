"""Converts the engine's updates to answers and stream chunks in OpenAI's form."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lamina.core.types import Logprob
from lamina.engine.updates import RequestUpdate
from lamina.text.logprobs import named
from lamina.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]


MOST_POSITIONS = 64
"""Most tokens of one event or piece: encoding one must not delay other clients."""


@dataclass(frozen=True)
class Piece:
    """The new part of one choice since its previous piece.

    Attributes:
        text_offsets: where each token with logprobs begins in the text of the choice.
    """

    choice: int
    text: str
    logprobs: list[list[Logprob]] | None
    text_offsets: list[int]
    finish_reason: str | None


class Sent:
    """Tracks what has been sent of each choice of one HTTP request. Choice = prompt * n + completion.

    Args:
        tokenizer: gives the text of tokens in logprobs.
        n: completions per prompt.
        echo: for each prompt, the text to put before its completions; empty for none.
    """

    def __init__(self, tokenizer: Tokenizer, n: int, echo: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._n = n
        self._echo = echo
        self._offsets: dict[int, int] = {}  # characters of the token texts sent so far, if logprobs are reported
        self._ended = set[int]()

    def advance(self, prompt: int, update: RequestUpdate, most: int = MOST_POSITIONS) -> Iterator[Piece]:
        """Yield the pieces of ``update``, each of at most ``most`` tokens of one completion; they count as sent."""
        for completion in update.completions:
            choice = prompt * self._n + completion.index
            ends = completion.finish_reason is not None and choice not in self._ended
            prefix = self._echo[prompt] if self._echo and choice not in self._offsets else ""
            self._offsets.setdefault(choice, 0)
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
                    yield Piece(choice, text, logprobs, offsets, reason)
                prefix = ""
            if ends:
                self._ended.add(choice)


@dataclass
class Usage:
    """Token counts and finish reasons of one HTTP request."""

    prompts: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    drawn: int = 0
    ends: dict[tuple[int, int], str] = field(default_factory=dict)  # by prompt and completion

    def count(self, prompt: int, update: RequestUpdate) -> None:
        """Count the tokens of an update."""
        self.prompts[prompt] = len(update.request.prompt_token_ids)
        self.cached[prompt] = update.cached_tokens
        self.drawn += update.tokens
        for completion in update.completions:
            if completion.finish_reason is not None:
                self.ends[prompt, completion.index] = completion.finish_reason.value

    def body(self) -> Json:
        """Return the counts in OpenAI's form."""
        prompt = sum(self.prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.drawn,
            "total_tokens": prompt + self.drawn,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }

    def figures(self) -> str:
        """Tokens and finish reasons, for a log."""
        reasons = Counter(self.ends.values())
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "client left"
        return f"{sum(self.prompts.values())} prompt tokens, {self.drawn} generated, {ends}"


def envelope(
    kind: Literal["text_completion", "chat.completion", "chat.completion.chunk"], id_: str, model: str
) -> Json:
    """Return the leading fields of every answer and chunk."""
    return {"id": id_, "object": kind, "created": int(time.time()), "model": model}


def completion_choice(piece: Piece) -> Json:
    """One entry of ``choices`` of a completion or of its chunks."""
    return {
        "index": piece.choice,
        "text": piece.text,
        "logprobs": None if piece.logprobs is None else _completion_logprobs(piece.logprobs, piece.text_offsets),
        "finish_reason": piece.finish_reason,
    }


def chat_choice(piece: Piece, key: Literal["message", "delta"]) -> Json:
    """One entry of ``choices`` of a chat answer (``message``) or of its chunks (``delta``)."""
    content = {"role": "assistant", "content": piece.text} if key == "message" else {"content": piece.text}
    return {
        "index": piece.choice,
        key: content,
        "logprobs": None if piece.logprobs is None else _chat_logprobs(piece.logprobs),
        "finish_reason": piece.finish_reason,
    }


def _completion_logprobs(positions: Sequence[list[Logprob]], offsets: list[int]) -> Json:
    return {
        "tokens": [drawn.text for drawn, *_ in positions],
        "token_logprobs": [_finite(drawn.logprob) for drawn, *_ in positions],
        "top_logprobs": [_by_text(entries) for entries in positions],
        "text_offset": offsets,
    }


def _by_text(entries: Sequence[Logprob]) -> dict[str, float]:
    """Return the log-probability of each token by its text; tokens whose text another one has are named as vLLM names
    ids."""
    tokens: dict[str, int] = {}
    found: dict[str, float] = {}
    for entry in entries:  # the drawn token is first, and its text is its key
        unique = tokens.setdefault(entry.text, entry.token_id) == entry.token_id
        found[entry.text if unique else f"token_id:{entry.token_id}"] = _finite(entry.logprob)
    return found


def _chat_logprobs(positions: Sequence[list[Logprob]]) -> Json:
    content = [_chat_logprob(drawn) | {"top_logprobs": [_chat_logprob(t) for t in top]} for drawn, *top in positions]
    return {"content": content, "refusal": None}


def _chat_logprob(entry: Logprob) -> Json:
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": list(entry.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
