"""What callers get of a request: updates as token ids and as text, and the output that they add up to."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from lamina.control.frontend_messages import CompletionTokens
from lamina.core.requests import Group
from lamina.core.types import CompletionOutput, FinishReason, Logprob, Request, RequestOutput, Segment
from lamina.text.logprobs import Position, named
from lamina.text.stop_strings import StopChecker, StopStrings
from lamina.text.tokenizer import IncrementalDetokenizer, Tokenizer


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


log = logging.getLogger(__name__)

OnStop = Callable[[str, int], None]
"""Called with a request's id and the index of a completion that a stop string has ended."""


@dataclass(slots=True)
class _Text:
    """One completion: its text so far, as far as the next token needs it, and how it ended."""

    detokenizer: IncrementalDetokenizer
    stop: StopChecker
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Reading:
    """Turns the tokens of one request into text and ends its completions at stop strings. Not thread-safe.

    The engine draws on until it has heard of a stop string: tokens after one are discarded here.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, on_update: OnUpdate, on_stop: OnStop) -> None:
        self._request = request
        self._on_update = on_update
        self._on_stop = on_stop
        self._special_texts = tokenizer.special_texts
        self._skip_special = request.params.skip_special_tokens
        stops = StopStrings(request.params.stop, self._special_texts.values())
        context = tokenizer.context(request.prompt_token_ids)
        self._texts = [
            _Text(IncrementalDetokenizer(tokenizer, context, self._skip_special), StopChecker(request.params, stops))
            for _ in range(request.params.n)
        ]
        self._finished = False

    @property
    def open(self) -> list[int]:
        return [index for index, text in enumerate(self._texts) if text.finish_reason is None]

    def on_update(self, update: TokenUpdate) -> None:
        """Pass on what is new. Does nothing once every completion has ended."""
        if self._finished:
            return
        with_logprobs = self._request.params.logprobs is not None
        news = [CompletionUpdate(index, logprobs=[] if with_logprobs else None) for index in range(len(self._texts))]
        stopped, error = [], update.error
        try:
            for part in update.completions:
                if self._texts[part.index].finish_reason is None and self._read(part, news[part.index]):
                    stopped.append(part.index)
        except Exception as failure:  # a request has a terminal state whatever its tokenizer does
            log.exception("the text of request %s cannot be decoded", self._request.request_id)
            error = f"the answer cannot be decoded: {failure}"
            stopped = [index for index, text in enumerate(self._texts) if text.finish_reason is None]
            for index in stopped:
                self._texts[index].finish_reason = FinishReason.ERROR
        for one, text in zip(news, self._texts, strict=True):
            one.finish_reason, one.stop_reason = text.finish_reason, text.stop_reason
        self._finished = update.finished or all(text.finish_reason is not None for text in self._texts)
        for index in () if update.finished else stopped:
            self._on_stop(self._request.request_id, index)
        placement = () if update.group is None else segments_of(update.group)
        self._on_update(RequestUpdate(self._request, news, self._finished, error, placement, update.cached_tokens))

    def _read(self, part: CompletionTokens, news: CompletionUpdate) -> bool:
        """Add the text of ``part`` to ``news``; True if a stop string has ended the completion."""
        text = self._texts[part.index]
        reason = part.finish_reason
        last = len(part.token_ids) - 1 if reason is FinishReason.STOP else -1  # the token that ended it
        for place, token in enumerate(part.token_ids):
            pending = b"" if news.logprobs is None else text.detokenizer.pending
            new = text.detokenizer.append([token])
            if news.logprobs is not None:
                news.logprobs.append(Position(part.logprobs[place], new, pending))
            special = self._special_texts.get(token, "")
            if place == last:
                decision = text.stop.append_last(new, special)
            else:
                decision = text.stop.append(new, special if self._skip_special else "")
            news.texts.append(decision.text)
            if decision.stop is not None:
                text.finish_reason, text.stop_reason = FinishReason.STOP, decision.stop
                break
        read = len(news.texts)
        news.token_ids = part.token_ids if read == len(part.token_ids) else part.token_ids[:read]
        if text.finish_reason is not None:
            return True
        text.finish_reason, text.stop_reason = reason, part.stop_token
        if reason is not None and last < 0:  # nothing follows that could complete a stop string or a character
            incomplete = text.detokenizer.flush()
            news.rest = text.stop.flush() + incomplete
            if news.logprobs:
                news.logprobs[-1] = news.logprobs[-1]._replace(text=news.logprobs[-1].text + incomplete)
        return False


def segments_of(group: Group) -> tuple[Segment, ...]:
    """Return where KV of a request is, on memory workers that take part: it may have lost some since its last token."""
    if group.lane < 0:
        return ()
    return tuple(
        dataclasses.replace(segment, tokens=(start, kept if stop is None else min(stop, kept)))
        for completion in group.completions
        for kept in [group.kept(completion)]
        for segment in group.expand(completion.segments)
        for start, stop in [segment.tokens]
        if start < max(kept, 1)
    )
