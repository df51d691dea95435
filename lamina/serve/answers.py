"""Parts of answers common to all APIs: pieces of choices, token counts, and blocks for APIs that list them."""

import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from lamina.core.outputs import Logprob
from lamina.engine.updates import CompletionUpdate, RequestUpdate
from lamina.serve.http_errors import APIError
from lamina.serve.requests import GenerationRequest
from lamina.text.answer_reader import AnswerReader
from lamina.text.detokenizer import Position, named
from lamina.text.tokenizer import Tokenizer
from lamina.text.tool_calls import CallArguments, CallBegins, Content, Event, Reasoning

Json = dict[str, Any]

MOST_POSITIONS = 64
"""Most tokens of one event or piece: encoding one must not delay other clients."""


class Piece(NamedTuple):
    """The new part of one choice since its previous piece.

    Attributes:
        choice: Index of the choice.
        text: New text.
        texts: Text of ``text`` that each new token has completed, without an echoed prompt.
        rest: Text of ``text`` after that of the last token.
        logprobs: Log-probabilities of new tokens; None if not requested.
        text_offsets: Offset of each token of ``logprobs`` in the choice's text.
        finish_reason: Why the choice has ended; None if it continues.
        stop_reason: Stop string or stop token that has ended the choice.
        first: Text of an echoed prompt's first token, which has no log-probability; None in all other pieces.
        token_ids: Token ids of ``text`` without an echoed prompt.
        begins: Whether this is the first piece of the choice.
        prompt_logprobs: New log-probabilities of the prompt's tokens but the first.
    """

    choice: int
    text: str
    logprobs: list[list[Logprob]] | None
    text_offsets: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    first: str | None = None
    token_ids: Sequence[int] = ()
    begins: bool = False
    prompt_logprobs: Sequence[list[Logprob]] = ()
    texts: Sequence[str] = ()
    rest: str = ""


class Sent:
    """Tracks what has been sent of each choice of one HTTP request. Choice = prompt * n + completion.

    Args:
        tokenizer: Gives the text of tokens in logprobs.
        wanted: The request.
    """

    def __init__(self, tokenizer: Tokenizer, wanted: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._n = wanted.params.n
        self._echo = wanted.echo
        self._offsets: dict[int, int] = {}  # characters of the token texts sent so far, if logprobs are reported
        self._silent = Counter[int]()  # tokens without a piece since the last piece, by choice
        self._begun = set[int]()
        self._ended = set[int]()

    def advance(self, prompt: int, update: RequestUpdate, most: int | None = MOST_POSITIONS) -> Iterator[Piece]:
        """Yield the pieces of ``update``, which count as sent.

        ``most``: most tokens in one piece; None: one piece per completion.
        """
        for completion in update.completions:
            yield from self._advance_choice(prompt, completion, most)

    def _advance_choice(self, prompt: int, completion: CompletionUpdate, most: int | None) -> Iterator[Piece]:
        choice = prompt * self._n + completion.index
        ends = completion.finish_reason is not None and choice not in self._ended
        begins = choice not in self._begun
        prefix = self._echo[prompt] if begins and self._echo else ""
        first = prefix if begins and self._wanted.echo_logprobs else None
        self._offsets.setdefault(choice, 0 if first is None else len(first))
        of_prompt = completion.prompt_logprobs or []
        texts, positions = completion.texts, completion.logprobs
        scored: Sequence[list[Logprob]] = ()
        likely = self._wanted.params.logprobs
        kept = None if likely is None else 1 + likely  # the prompt's may have more
        if self._wanted.echo_logprobs:
            texts = [*(position.text for position in of_prompt), *texts]
            positions = [*of_prompt, *(positions or [])]
        echoed = len(texts) - len(completion.texts)
        if self._wanted.prompt_logprobs:
            scored = [named(position, self._tokenizer) for position in of_prompt]
        size = most or max(1, len(texts))
        for start in range(0, max(1, len(texts)), size):
            stop = start + size
            last = stop >= len(texts)
            rest = completion.rest if last else ""
            text = prefix + "".join(texts[start:stop]) + rest
            own = slice(max(start - echoed, 0), max(stop - echoed, 0))
            token_ids = completion.token_ids[own]
            logprobs, offsets = None, list[int]()
            if positions is not None:
                logprobs = [named(each, self._tokenizer)[:kept] for each in positions[start:stop]]
                offsets = self._advance_offset(choice, positions[start:stop])
            if text or logprobs or (ends and last) or (self._wanted.token_ids and token_ids):
                reason = completion.finish_reason.value if completion.finish_reason and ends and last else None
                yield Piece(
                    choice,
                    text,
                    logprobs,
                    offsets,
                    reason,
                    completion.stop_reason if last else None,
                    first,
                    token_ids,
                    begins,
                    scored,
                    [""] * self._silent.pop(choice, 0) + completion.texts[own],
                    rest,
                )
                self._begun.add(choice)
                begins, scored = False, ()
                prefix, first = "", None
            else:
                self._silent[choice] += len(token_ids)
        if ends:
            self._ended.add(choice)

    def _advance_offset(self, choice: int, positions: Sequence[Position]) -> list[int]:
        """Return the offset of each token in the choice's text, and advance to the end of the last one."""
        offsets = list[int]()
        for position in positions:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(position.text)
        return offsets


@dataclass
class Usage:
    """Token counts and finish reasons of one HTTP request."""

    prompts: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    drawn: int = 0
    ends: dict[tuple[int, int], str] = field(default_factory=dict)  # by prompt and completion

    def count(self, prompt: int, update: RequestUpdate) -> None:
        """Count the tokens of an update."""
        self.cached[prompt] = update.cached_tokens
        self.drawn += update.tokens
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
        """Return the counts and finish reasons in words, for a log."""
        reasons = Counter(self.ends.values())
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "client left"
        return f"{self.prompt_tokens} prompt tokens, {self.drawn} generated, {ends}"


class AnswerWriter(ABC):
    """Writes the answer of one HTTP request in the form of its API, whole or as events of a stream."""

    def begin_stream(self, usage: Usage) -> bytes:
        """Return the events before the first token."""
        return b""

    @abstractmethod
    def write_events(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """Return the events of new pieces; empty if they add nothing yet."""

    @abstractmethod
    def end_stream(self, usage: Usage) -> bytes:
        """Return the events after the last token."""

    @abstractmethod
    def fail_stream(self, error: APIError) -> bytes:
        """Return the events of a stream that an error ends."""

    def begin_answer(self) -> bytes:
        """Return the beginning of a whole answer."""
        return b""

    @abstractmethod
    def write_choice(self, piece: Piece) -> bytes:
        """Return one choice of a whole answer. ``piece``: all of the choice."""

    @abstractmethod
    def end_answer(self, usage: Usage) -> bytes:
        """Return the end of a whole answer."""


def event(data: Any, name: str = "") -> bytes:
    """Return one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"


def new_call_id() -> str:
    """Return an id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(eq=False)
class Block:
    """One part of an answer.

    Attributes:
        index: Its place among the blocks.
        kind: What it is.
        name: The function of a call.
        text: The text so far; of a call, its arguments.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    text: str = ""


Change = tuple[Literal["open", "add", "close"], Block, str]
"""What happens to a block: it opens, text is added to it, or it is complete."""


class BlockWriter(AnswerWriter):
    """Writes the one choice of an answer as a list of blocks, each complete before the next one opens.

    Subclasses give blocks and events their form.

    Attributes:
        reader: Divides the answer.
        blocks: The blocks so far.
        last: The piece that has ended the choice.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.last: Piece | None = None

    @abstractmethod
    def write_change(self, change: Change) -> bytes:
        """Return the events of a block that opens, grows or closes."""

    @abstractmethod
    def whole(self, usage: Usage) -> Json:
        """Return the whole answer."""

    def write_events(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        return b"".join(self.write_change(change) for piece in pieces for change in self._read(piece))

    def write_choice(self, piece: Piece) -> bytes:
        for _ in self._read(piece):  # the answer is written at its end
            pass
        return b""

    def end_answer(self, usage: Usage) -> bytes:
        return msgspec.json.encode(self.whole(usage))

    def _read(self, piece: Piece) -> Iterator[Change]:
        ends = piece.finish_reason is not None
        for event in self.reader.read_tokens(piece.texts, piece.rest, ends):
            yield from self._add(event)
        if ends:
            self.last = piece
            yield from self._close()

    def _add(self, event: Event) -> Iterator[Change]:
        kind: Literal["text", "reasoning", "call"] = "call"
        name = text = ""
        match event:
            case CallBegins(_, name):
                yield from self._close()
            case CallArguments(_, text):
                pass
            case Content(text):
                kind = "text"
            case Reasoning(text):
                kind = "reasoning"
        block = self._open
        if block is None or block.kind != kind:
            yield from self._close()
            block = self._open = Block(len(self.blocks), kind, name)
            self.blocks.append(block)
            yield "open", block, ""
        if text:
            block.text += text
            yield "add", block, text

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            block, self._open = self._open, None
            yield "close", block, ""
