"""Writes answers and stream chunks in the form of OpenAI's completions and chat completions."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from lamina.core.outputs import Logprob
from lamina.serve.answers import AnswerWriter, Json, Piece, Usage, event, new_call_id
from lamina.serve.http_errors import APIError
from lamina.serve.requests import GenerationRequest
from lamina.text.tool_calls import CallArguments, CallBegins, Content, Event, Reasoning

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class CompletionWriter(AnswerWriter):
    """The form of ``/v1/completions``."""

    answer: Literal["text_completion", "chat.completion"] = "text_completion"
    chunk: Literal["text_completion", "chat.completion.chunk"] = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, wanted: GenerationRequest, model: str) -> None:
        self._wanted = wanted
        self._model = model
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._head = b"data: " + msgspec.json.encode(self._envelope(self.chunk))[:-1] + b","  # how each event begins
        self._between = b""

    def write_events(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        choices = [choice for piece in pieces if (choice := self.delta(piece)) is not None]
        return self._chunk(choices, usage) if choices else b""

    def end_stream(self, usage: Usage) -> bytes:
        last = b"" if self._wanted.usage == "none" else self._chunk([], usage, last=True)
        return last + b"data: [DONE]\n\n"

    def fail_stream(self, error: APIError) -> bytes:
        return event(error.body()) + b"data: [DONE]\n\n"

    def begin_answer(self) -> bytes:
        return msgspec.json.encode(self._envelope(self.answer))[:-1] + b',"choices":['

    def write_choice(self, piece: Piece) -> bytes:
        between, self._between = self._between, b","
        return between + msgspec.json.encode(self.choice(piece))

    def end_answer(self, usage: Usage) -> bytes:
        return b'],"usage":' + msgspec.json.encode(self.counts(usage)) + b"}"

    def counts(self, usage: Usage) -> Json:
        """Return the token counts."""
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.drawn,
            "total_tokens": usage.prompt_tokens + usage.drawn,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def choice(self, piece: Piece) -> Json:
        choice = completion_choice(piece) | self._token_ids(piece)
        if self._wanted.prompt_logprobs:
            choice["prompt_logprobs"] = _prompt_logprobs(piece)
        return choice

    def delta(self, piece: Piece) -> Json | None:
        return completion_choice(piece) | self._token_ids(piece)

    def _token_ids(self, piece: Piece) -> Json:
        """Return a choice's new token ids if requested; the first piece also has its prompt's token ids."""
        if not self._wanted.token_ids:
            return {}
        prompt = self._wanted.prompts[piece.choice // self._wanted.params.n]
        return {"prompt_token_ids": prompt if piece.begins else None, "token_ids": piece.token_ids}

    def _envelope(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choices: Sequence[Json], usage: Usage, last: bool = False, of_prompt: Json | None = None) -> bytes:
        rest: Json = {**(of_prompt or {}), "choices": choices}
        if self._wanted.usage != "none":
            rest["usage"] = self.counts(usage) if last or self._wanted.usage == "every" else None
        return self._head + msgspec.json.encode(rest)[1:] + b"\n\n"


class ChatWriter(CompletionWriter):
    """The form of ``/v1/chat/completions``."""

    answer, chunk, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, wanted: GenerationRequest, model: str) -> None:
        super().__init__(wanted, model)
        self._readers = [wanted.make_reader() for _ in range(wanted.params.n)]
        self._calling = set[int]()  # choices with calls
        self._of_prompt: Json = {"prompt_token_ids": wanted.prompts[0]} if wanted.token_ids else {}

    def begin_stream(self, usage: Usage) -> bytes:
        opening: Json = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        choices = [{"index": i, **opening} for i in range(self._wanted.params.n)]
        return self._chunk(choices, usage, of_prompt=self._of_prompt)

    def counts(self, usage: Usage) -> Json:
        if not any(reader.reasons for reader in self._readers):
            return super().counts(usage)
        reasoning = sum(reader.reasoning_tokens for reader in self._readers)
        return super().counts(usage) | {"completion_tokens_details": {"reasoning_tokens": reasoning}}

    def end_answer(self, usage: Usage) -> bytes:
        return b"]," + msgspec.json.encode({**self._of_prompt, "usage": self.counts(usage)})[1:]

    def choice(self, piece: Piece) -> Json:
        found = _chat_delta(self._readers[piece.choice].read_tokens(piece.texts, piece.rest, last=True))
        if self._wanted.prompt_logprobs and piece.choice == 0:
            self._of_prompt["prompt_logprobs"] = _prompt_logprobs(piece)
        message: Json = {
            "role": "assistant",
            "content": found.get("content", "" if "tool_calls" not in found else None),
        }
        if "reasoning_content" in found:
            message["reasoning_content"] = found["reasoning_content"]
        if calls := found.get("tool_calls"):
            self._calling.add(piece.choice)
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return self._with_rest(piece, "message", message)

    def delta(self, piece: Piece) -> Json | None:
        ends = piece.finish_reason is not None
        found = _chat_delta(self._readers[piece.choice].read_tokens(piece.texts, piece.rest, ends))
        if "tool_calls" in found:
            self._calling.add(piece.choice)
        if not found and piece.logprobs is None and piece.finish_reason is None and not self._wanted.token_ids:
            return None
        return self._with_rest(piece, "delta", found or {"content": ""})

    def _with_rest(self, piece: Piece, key: str, message: Json) -> Json:
        reason = piece.finish_reason
        return {
            "index": piece.choice,
            key: message,
            "logprobs": None if piece.logprobs is None else _chat_logprobs(piece.logprobs),
            "finish_reason": "tool_calls" if reason == "stop" and piece.choice in self._calling else reason,
            **({"token_ids": piece.token_ids} if self._wanted.token_ids else {}),
        }


def _chat_delta(events: Iterable[Event]) -> Json:
    """Return the fields of a delta that has these events; calls that begin have an id."""
    delta: Json = {}
    calls: dict[int, Json] = {}
    for new in events:
        match new:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case CallBegins(index, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": new_call_id(), "type": "function", "function": function}
            case CallArguments(index, text):
                calls.setdefault(index, {"index": index, "function": {"arguments": ""}})["function"]["arguments"] += (
                    text
                )
    if calls:
        delta["tool_calls"] = [*calls.values()]
    return delta


def completion_choice(piece: Piece) -> Json:
    """Return one entry of ``choices`` of a completion or of its chunks."""
    return {
        "index": piece.choice,
        "text": piece.text,
        "logprobs": None if piece.logprobs is None else _completion_logprobs(piece),
        "finish_reason": piece.finish_reason,
    }


def _completion_logprobs(piece: Piece) -> Json:
    positions = piece.logprobs or []
    first = [] if piece.first is None else [piece.first]  # of the prompt, which nothing comes before
    return {
        "tokens": [*first, *(drawn.text for drawn, *_ in positions)],
        "token_logprobs": [*(None for _ in first), *(_finite(drawn.logprob) for drawn, *_ in positions)],
        "top_logprobs": [*(None for _ in first), *map(_by_text, positions)],
        "text_offset": [*(0 for _ in first), *piece.text_offsets],
    }


def _prompt_logprobs(piece: Piece) -> list[Json | None]:
    """Return the log-probabilities of the prompt's tokens, by token id, as vLLM gives them."""
    return [
        None,
        *(
            {
                str(one.token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.text}
                for one in reversed(position)  # the prompt's token is first, and may be among the most likely ones
            }
            for position in piece.prompt_logprobs
        ),
    ]


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
