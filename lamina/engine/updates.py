"""Updates of a request since the last one, as token ids and as text, and the output that they add up to."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lamina.control.frontend_messages import CompletionTokens
from lamina.core.requests import Group
from lamina.core.types import CompletionOutput, FinishReason, Logprob, Request, RequestOutput, Segment
from lamina.text.logprobs import Position, named
from lamina.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TokenUpdate:
    """What the engine tells of a request: the completions with news. ``group``: the request in its scheduler.

    ``cached_tokens`` of the prompt were found in the prefix cache.
    """

    completions: list[CompletionTokens]
    finished: bool
    error: str | None = None
    cached_tokens: int = 0
    group: Group | None = None


OnTokens = Callable[[TokenUpdate], None]


@dataclass(slots=True)
class CompletionUpdate:
    """New tokens of one completion: one entry per token in each list.

    Attributes:
        texts: the text that each token completed, which may be more or less than its own.
        logprobs: not named yet, see ``text.logprobs``; None if not requested.
        rest: text held back until the end.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Position] | None = None
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
    """New tokens of a request; ``completions`` holds all of its completions, in order, also unchanged ones.

    ``cached_tokens`` of the prompt were found in the prefix cache.
    """

    request: Request
    completions: list[CompletionUpdate]
    finished: bool
    error: str | None = None
    placement: tuple[Segment, ...] = ()
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of all completions together."""
        return sum(len(completion.token_ids) for completion in self.completions)

    def extend(self, newer: "RequestUpdate") -> None:
        """Add what came after."""
        for mine, its in zip(self.completions, newer.completions, strict=True):
            mine.extend(its)
        self.finished, self.error, self.placement = newer.finished, newer.error, newer.placement
        self.cached_tokens = newer.cached_tokens


OnUpdate = Callable[[RequestUpdate], None]


class Whole:
    """The sum of a request's updates so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._update: RequestUpdate | None = None
        self._logprobs: dict[int, list[list[Logprob]]] = {}  # unpacked so far, by completion

    def append_update(self, update: RequestUpdate) -> None:
        """Add the next update. Takes ownership of ``update``."""
        if self._update is None:
            self._update = update
        else:
            self._update.extend(update)

    def output(self) -> RequestOutput:
        """Return a copy of everything so far, as callers of the SDK see it. Raises ValueError before the first
        update."""
        update = self._update
        if update is None:
            raise ValueError("the request has had no update yet")
        request = update.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(completion) for completion in update.completions],
            finished=update.finished,
            error=update.error,
            placement=update.placement,
            cached_tokens=update.cached_tokens,
        )

    def _completion(self, completion: CompletionUpdate) -> CompletionOutput:
        completion.texts = ["".join(completion.texts)]  # joined once, not on every call
        known: list[list[Logprob]] | None = None
        if completion.logprobs is not None:
            known = self._logprobs.setdefault(completion.index, [])
            known += [named(position, self._tokenizer) for position in completion.logprobs[len(known) :]]
        return CompletionOutput(
            completion.index,
            text=completion.texts[0] + completion.rest,
            token_ids=list(completion.token_ids),
            logprobs=None if known is None else list(known),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )


def whole(tokenizer: Tokenizer, on_output: Callable[[RequestOutput], None]) -> OnUpdate:
    """Return a receiver of one request's updates that passes everything so far to ``on_output``."""
    gathered = Whole(tokenizer)

    def on_update(update: RequestUpdate) -> None:
        gathered.append_update(update)
        on_output(gathered.output())

    return on_update
