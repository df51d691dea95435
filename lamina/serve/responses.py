"""Answers and stream chunks in OpenAI's form, from the engine's cumulative outputs."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lamina.types import CompletionOutput, FinishReason, Logprob, RequestOutput

LOWEST_LOGPROB = -9999.0  # JSON knows no infinity
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Body = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """What one choice has gained since it was looked at last."""

    choice: int
    text: str
    logprobs: list[list[Logprob]] | None
    text_offset: int
    finish_reason: str | None


@dataclass
class _Mark:
    """How much of one choice has been handed out."""

    characters: int = 0
    tokens: int = 0  # counted where logprobs are reported
    token_characters: int = 0  # of those tokens' own texts
    ended: bool = False


class Sent:
    """What has been handed out of each choice of one HTTP request. Choice = prompt * n + completion.

    Args:
        n: completions per prompt.
        echo: texts to put before each prompt's completions; none if empty.
    """

    def __init__(self, n: int, echo: Sequence[str] = ()) -> None:
        self._n = n
        self._echo = echo
        self._marks: dict[int, _Mark] = {}

    def advance(self, prompt: int, output: RequestOutput) -> Iterator[Piece]:
        """The news of each completion in ``output``; they count as handed out."""
        for completion in output.outputs:
            choice = prompt * self._n + completion.index
            prefix = self._echo[prompt] if self._echo and choice not in self._marks else ""
            mark = self._marks.setdefault(choice, _Mark())
            text = prefix + completion.text[mark.characters :]
            logprobs = None if completion.logprobs is None else completion.logprobs[mark.tokens :]
            ends = completion.finish_reason is not None and not mark.ended
            if text or logprobs or ends:
                yield Piece(choice, text, logprobs, mark.token_characters, finish_reason(completion) if ends else None)
            mark.characters = len(completion.text)
            mark.tokens += len(logprobs or ())
            mark.token_characters += sum(len(drawn.text) for drawn, *_ in logprobs or ())
            mark.ended |= ends


def finish_reason(completion: CompletionOutput) -> str | None:
    """``stop``, ``length`` or ``abort``; None while it runs."""
    reason: FinishReason | None = completion.finish_reason
    return None if reason is None else reason.value


def usage(outputs: Iterable[RequestOutput]) -> Body:
    """Token counts of one HTTP request."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    drawn = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def envelope(
    kind: Literal["text_completion", "chat.completion", "chat.completion.chunk"], id_: str, model: str
) -> Body:
    """The fields every answer and chunk begins with."""
    return {"id": id_, "object": kind, "created": int(time.time()), "model": model}


def completion_choice(piece: Piece) -> Body:
    """One entry of ``choices`` of a completion or of its chunks."""
    return {
        "index": piece.choice,
        "text": piece.text,
        "logprobs": None if piece.logprobs is None else _completion_logprobs(piece.logprobs, piece.text_offset),
        "finish_reason": piece.finish_reason,
    }


def chat_choice(piece: Piece, key: Literal["message", "delta"]) -> Body:
    """One entry of ``choices`` of a chat answer (``message``) or of its chunks (``delta``)."""
    content = {"role": "assistant", "content": piece.text} if key == "message" else {"content": piece.text}
    return {
        "index": piece.choice,
        key: content,
        "logprobs": None if piece.logprobs is None else _chat_logprobs(piece.logprobs),
        "finish_reason": piece.finish_reason,
    }


def _completion_logprobs(positions: Sequence[list[Logprob]], offset: int) -> Body:
    offsets = []
    for drawn, *_ in positions:
        offsets.append(offset)
        offset += len(drawn.text)
    return {
        "tokens": [drawn.text for drawn, *_ in positions],
        "token_logprobs": [_finite(drawn.logprob) for drawn, *_ in positions],
        "top_logprobs": [{entry.text: _finite(entry.logprob) for entry in entries} for entries in positions],
        "text_offset": offsets,
    }


def _chat_logprobs(positions: Sequence[list[Logprob]]) -> Body:
    content = [_chat_logprob(drawn) | {"top_logprobs": [_chat_logprob(t) for t in top]} for drawn, *top in positions]
    return {"content": content, "refusal": None}


def _chat_logprob(entry: Logprob) -> Body:
    # A token may be part of a character; its text then no longer tells its bytes.
    encoded = None if REPLACEMENT in entry.text else list(entry.text.encode())
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": encoded}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
