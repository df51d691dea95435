"""Updates of requests, as token ids and as text: detokenizes, finds stop strings, and sums updates up to outputs."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from lamina.control.frontend_messages import CompletionTokens
from lamina.control.packed_logprobs import cut, drawn_logprob
from lamina.core.errors import RequestError
from lamina.core.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from lamina.core.requests import Group
from lamina.core.types import Request, Segment
from lamina.text.detokenizer import IncrementalDetokenizer, Position, named
from lamina.text.prompts import bad_sequences
from lamina.text.stop_strings import StopChecker, StopStrings
from lamina.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class TokenUpdate(msgspec.Struct):
    """New tokens of a request, as the engine publishes them.

    Attributes:
        completions: Completions with new tokens.
        finished: Whether this is the last update.
        error: Why the request failed.
        cached_tokens: Prompt tokens found in the prefix cache.
        group: The request in the scheduler.
    """

    completions: list[CompletionTokens]
    finished: bool
    error: str | None = None
    cached_tokens: int = 0
    group: Group | None = None


OnTokens = Callable[[TokenUpdate], None]


class PlainTokens(NamedTuple):
    """Where a request's plain tokens go: tokens that end nothing and have no log-probabilities.

    Attributes:
        batch: Three integers are appended for each token: ``number``, index of the completion, token.
        number: Number of the request.
    """

    batch: list[int]
    number: int


class CompletionUpdate(msgspec.Struct):
    """New tokens of one completion: one entry per token in each list.

    Attributes:
        texts: Text that each token completed, which may differ from the token's own text.
        logprobs: Log-probabilities without texts, see ``text.detokenizer``; None if not requested.
        rest: Text held back until the end.
        prompt_logprobs: Like ``logprobs``, for all prompt tokens but the first; they precede the new tokens.
    """

    index: int
    token_ids: list[int] = []
    texts: list[str] = []
    logprobs: list[Position] | None = None
    rest: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[Position] | None = None

    def extend(self, newer: "CompletionUpdate") -> None:
        """Append a later update."""
        self.token_ids += newer.token_ids
        self.texts += newer.texts
        if self.logprobs is not None:
            self.logprobs += newer.logprobs or []
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += newer.prompt_logprobs or []
        self.rest += newer.rest
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason

    def drop_answer(self) -> None:
        """Leave out the tokens, as if none had been allowed; those of the prompt stay."""
        self.token_ids, self.texts, self.rest, self.stop_reason = [], [], "", None
        self.logprobs = None if self.logprobs is None else []
        if self.finish_reason is FinishReason.STOP:
            self.finish_reason = FinishReason.LENGTH


class RequestUpdate(msgspec.Struct):
    """New tokens and text of a request, as callers receive them.

    Attributes:
        request: The request.
        completions: All completions in order, including unchanged ones.
        finished: Whether this is the last update.
        error: Why the request failed.
        placement: Where the request's KV is.
        cached_tokens: Prompt tokens found in the prefix cache.
    """

    request: Request
    completions: list[CompletionUpdate]
    finished: bool
    error: str | None = None
    placement: tuple[Segment, ...] = ()
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of new tokens of all completions."""
        return sum([len(completion.token_ids) for completion in self.completions])  # a generator is slower

    @property
    def positions(self) -> int:
        """Number of new tokens of all completions, plus prompt tokens with new log-probabilities."""
        return self.tokens + sum([len(completion.prompt_logprobs or ()) for completion in self.completions])

    def extend(self, newer: "RequestUpdate") -> None:
        """Append a later update."""
        for mine, its in zip(self.completions, newer.completions, strict=True):
            mine.extend(its)
        self.finished, self.error, self.placement = newer.finished, newer.error, newer.placement
        self.cached_tokens = newer.cached_tokens

    def drop_answers(self) -> None:
        """Leave out the tokens of all completions."""
        for completion in self.completions:
            completion.drop_answer()


OnUpdate = Callable[[RequestUpdate], None]


class UpdateSum:
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
        """Return a copy of the sum, as the SDK's callers see it. Raises ValueError before the first update."""
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
            prompt_logprobs=None
            if (of_prompt := update.completions[0].prompt_logprobs) is None
            else [None, *(named(position, self._tokenizer) for position in of_prompt)],
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


def engine_request(request: Request, tokenizer: Tokenizer, max_model_len: int) -> Request:
    """Return the request that the engine runs for a caller's request; ``RequestText`` converts its tokens back.

    ``best_of`` becomes ``n``, bad words become tokens, and a prompt to be scored becomes its first token with the other
    tokens forced. Raises RequestError for a prompt that is too long.
    """
    params, tokens = request.params, request.prompt_token_ids
    if params.prompt_logprobs is None and params.best_of is None and not params.bad_words:
        return request
    changes: dict[str, Any] = {"best_of": None, "prompt_logprobs": None, "bad_words": []}
    if params.bad_words:
        changes["bad_token_ids"] = [*params.bad_token_ids, *bad_sequences(params.bad_words, tokenizer)]
    if params.best_of is not None and params.best_of > params.n:
        changes |= {"n": params.best_of, "logprobs": params.logprobs or 0}
    if params.prompt_logprobs is not None:
        if len(tokens) >= max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; at most {max_model_len - 1} fit (max_model_len {max_model_len})"
            )
        tokens, forced = tokens[:1], tokens[1:]
        changes |= {
            "logprobs": max(params.prompt_logprobs, params.logprobs or 0),
            "forced_token_ids": [*forced, *params.forced_token_ids],
            "min_tokens": params.min_tokens + len(forced),  # the prompt may have tokens that end a completion
            "max_tokens": None if params.max_tokens is None else params.max_tokens + len(forced),
        }
    return dataclasses.replace(request, prompt_token_ids=tokens, params=dataclasses.replace(params, **changes))


OnStop = Callable[[str, int], None]
"""Called with a request's id and the index of a completion that a stop string has ended."""


@dataclass(slots=True)
class _Text:
    """Detokenization state of one completion, and how it ended.

    Attributes:
        detokenizer: Converts its tokens to text.
        stop: Finds stop strings.
        of_prompt: Prompt tokens that the engine has yet to return, if the prompt is scored.
        score: Sum of the log-probabilities of its tokens, if the best completions are selected (``best_of``).
        tokens: Number of tokens in ``score``.
        finish_reason: Why it ended.
        stop_reason: Stop string or stop token that ended it.
    """

    detokenizer: IncrementalDetokenizer
    stop: StopChecker
    of_prompt: int = 0
    score: float = 0.0
    tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class RequestText:
    """Converts the tokens of one request to text and ends its completions at stop strings. Not thread-safe.

    ``request`` is the caller's; the tokens come from ``engine_request(request)``. Tokens that the engine draws before
    it learns of a stop string are discarded.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, on_update: OnUpdate, on_stop: OnStop) -> None:
        self._request = request
        self._on_update = on_update
        self._on_stop = on_stop
        self._special_texts = tokenizer.special_texts
        self._skip_special = request.params.skip_special_tokens
        stops = StopStrings(request.params.stop, self._special_texts.values())
        params, tokens = request.params, request.prompt_token_ids
        scored = params.prompt_logprobs is not None
        context = tokenizer.context(tokens[:1] if scored else tokens)
        self._selects = params.best_of is not None and params.best_of > params.n
        self._unselected: RequestUpdate | None = None  # sum of updates while the best completions are not known
        self._texts = [
            _Text(
                IncrementalDetokenizer(tokenizer, context, self._skip_special),
                StopChecker(params, stops),
                of_prompt=len(tokens) - 1 if scored else 0,
            )
            for _ in range(params.best_of or params.n)
        ]
        self._finished = False

    @property
    def open(self) -> list[int]:
        return [index for index, text in enumerate(self._texts) if text.finish_reason is None]

    def on_update(self, update: TokenUpdate) -> None:
        """Pass on new text. Does nothing once every completion has ended."""
        if self._finished:
            return
        params = self._request.params
        news = [
            CompletionUpdate(
                index,
                logprobs=None if params.logprobs is None else [],
                prompt_logprobs=None if params.prompt_logprobs is None else [],
            )
            for index in range(len(self._texts))
        ]
        stopped, error = [], update.error
        try:
            for part in update.completions:
                if self._texts[part.index].finish_reason is None and self._read(part, news[part.index]):
                    stopped.append(part.index)
        except Exception as failure:  # a failing tokenizer ends the request in an error
            log.exception("the text of request %s cannot be decoded", self._request.request_id)
            error = f"the answer cannot be decoded: {failure}"
            stopped = [index for index, text in enumerate(self._texts) if text.finish_reason is None]
            for index in stopped:
                self._texts[index].finish_reason = FinishReason.ERROR
        for one, text in zip(news, self._texts, strict=True):
            one.finish_reason, one.stop_reason = text.finish_reason, text.stop_reason
        self._finished = update.finished or not self.open
        for index in () if update.finished else stopped:
            self._on_stop(self._request.request_id, index)
        placement = () if update.group is None else segments_of(update.group)
        whole = RequestUpdate(self._request, news, self._finished, error, placement, update.cached_tokens)
        if not self._selects:
            self._on_update(whole)
            return
        if self._unselected is not None:
            self._unselected.extend(whole)
            whole = self._unselected
        self._unselected = whole
        if self._finished:
            self._on_update(self._best(whole))

    def _best(self, whole: RequestUpdate) -> RequestUpdate:
        def score(completion: CompletionUpdate) -> float:
            text = self._texts[completion.index]
            return text.score / max(text.tokens, 1)

        best = sorted(whole.completions, key=score, reverse=True)[: self._request.params.n]
        completions = [msgspec.structs.replace(one, index=place) for place, one in enumerate(best)]
        return msgspec.structs.replace(whole, completions=completions)

    def _read(self, part: CompletionTokens, news: CompletionUpdate) -> bool:
        """Add the text of ``part`` to ``news``; return True if a stop string has ended the completion."""
        text = self._texts[part.index]
        reason = part.finish_reason
        last = len(part.token_ids) - 1 if reason is FinishReason.STOP else -1  # the token that ended it
        params = self._request.params
        of_prompt = min(text.of_prompt, len(part.token_ids))
        text.of_prompt -= of_prompt
        for place, token in enumerate(part.token_ids):
            reports = news.prompt_logprobs if place < of_prompt else news.logprobs
            pending = b"" if reports is None else text.detokenizer.pending
            new = text.detokenizer.append([token])
            if reports is not None:
                most = params.prompt_logprobs if place < of_prompt else params.logprobs
                reports.append(Position(cut(part.logprobs[place], most or 0), new, pending))
            if place < of_prompt:
                continue
            if self._selects:
                text.score += drawn_logprob(part.logprobs[place])
                text.tokens += 1
            special = self._special_texts.get(token, "")
            if place == last:
                decision = text.stop.append_last(new, special)
            else:
                decision = text.stop.append(new, special if self._skip_special else "")
            news.texts.append(decision.text)
            if decision.stop is not None:
                text.finish_reason, text.stop_reason = FinishReason.STOP, decision.stop
                break
        read = of_prompt + len(news.texts)
        whole = of_prompt == 0 and read == len(part.token_ids)
        news.token_ids = part.token_ids if whole else part.token_ids[of_prompt:read]
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
    """Return the segments of a request on current memory workers; some may have been lost since its last token."""
    if group.lane < 0:
        return ()
    return tuple(
        Segment(segment.sequence, segment.worker, segment.heads, (start, kept if stop is None else min(stop, kept)))
        for completion in group.completions
        for kept in [group.stored_tokens(completion)]
        for segment in group.expand(completion.segments)
        for start, stop in [segment.tokens]
        if start < max(kept, 1)
    )
