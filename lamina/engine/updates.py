"""What a request has gained since its caller was told last, and the whole that such updates add up to."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lamina.models.tokenizer import Tokenizer
from lamina.types import CompletionOutput, FinishReason, Logprob, Request, RequestOutput, Segment


@dataclass(slots=True)
class CompletionUpdate:
    """What one completion has gained: one entry per token in each list.

    Attributes:
        texts: that each token completed, often more or less than its own.
        logprobs: packed, see :func:`pack`; None if they were not asked for.
        rest: text that was held back until the end.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] | None = None
    rest: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def extend(self, newer: "CompletionUpdate") -> None:
        """Add what came after."""
        self.token_ids += newer.token_ids
        self.texts += newer.texts
        if self.logprobs is not None:
            self.logprobs += newer.logprobs or []
        self.rest += newer.rest
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason


@dataclass(slots=True)
class RequestUpdate:
    """What a request has gained; ``completions`` are all of it, by index, also those without news."""

    request: Request
    completions: list[CompletionUpdate]
    finished: bool
    error: str | None = None
    placement: tuple[Segment, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens gained by all completions together."""
        return sum(len(completion.token_ids) for completion in self.completions)

    def extend(self, newer: "RequestUpdate") -> None:
        """Add what came after."""
        for mine, its in zip(self.completions, newer.completions, strict=True):
            mine.extend(its)
        self.finished, self.error, self.placement = newer.finished, newer.error, newer.placement


OnUpdate = Callable[[RequestUpdate], None]


class Whole:
    """Everything a request has gained so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._update: RequestUpdate | None = None
        self._logprobs: dict[int, list[list[Logprob]]] = {}  # by completion, those unpacked so far

    def add(self, update: RequestUpdate) -> None:
        """Take in what came next; ``update`` belongs to this object from now on."""
        if self._update is None:
            self._update = update
        else:
            self._update.extend(update)

    def output(self) -> RequestOutput:
        """A copy of all of it, as callers of the SDK see it. At least one update must have come."""
        update = self._update
        if update is None:
            raise ValueError("nothing has come of this request yet")
        request = update.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(completion) for completion in update.completions],
            finished=update.finished,
            error=update.error,
            placement=update.placement,
        )

    def _completion(self, completion: CompletionUpdate) -> CompletionOutput:
        completion.texts = ["".join(completion.texts)]  # joined once, not at every look
        named: list[list[Logprob]] | None = None
        if completion.logprobs is not None:
            named = self._logprobs.setdefault(completion.index, [])
            named += [unpack(position, self._tokenizer) for position in completion.logprobs[len(named) :]]
        return CompletionOutput(
            completion.index,
            text=completion.texts[0] + completion.rest,
            token_ids=list(completion.token_ids),
            logprobs=None if named is None else list(named),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )


def whole(tokenizer: Tokenizer, on_output: Callable[[RequestOutput], None]) -> OnUpdate:
    """A receiver of one request's updates that hands everything so far to ``on_output``."""
    gathered = Whole(tokenizer)

    def on_update(update: RequestUpdate) -> None:
        gathered.add(update)
        on_output(gathered.output())

    return on_update


def pack(entries: Sequence[Logprob]) -> bytes:
    """The drawn token and the most likely ones of a position in 8 bytes each, and 4 for the rank of the drawn one.

    As objects they are thirty times that: a client that asks for twenty and does not read would fill the memory.
    """
    count = len(entries)
    ids, values = [entry.token_id for entry in entries], [entry.logprob for entry in entries]
    return struct.pack(f"<i{count}i{count}f", entries[0].rank if entries else 0, *ids, *values)


def unpack(packed: bytes, tokenizer: Tokenizer) -> list[Logprob]:
    """The entries that were packed, with their texts."""
    count = (len(packed) - 4) // 8
    rank, *numbers = struct.unpack(f"<i{count}i{count}f", packed)
    ids, values = numbers[:count], numbers[count:]
    # The first is the drawn token; the others come in the order of their ranks.
    return [
        Logprob(token, value, place or rank, tokenizer.token_text(token))
        for place, (token, value) in enumerate(zip(ids, values, strict=True))
    ]
