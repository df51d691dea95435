"""A request as its caller sees it: text, stop conditions, one terminal state."""

import dataclasses
from dataclasses import dataclass

from lamina.engine.updates import CompletionUpdate, OnUpdate, RequestUpdate, pack
from lamina.frontend.stop import StopChecker, StopStrings
from lamina.groups import Completion, Group
from lamina.models.tokenizer import IncrementalDetokenizer, Tokenizer
from lamina.protocol.messages import Draw
from lamina.types import FinishReason, Request, Segment


@dataclass
class _Text:
    """Turns the tokens of one completion into text and decides when it ends."""

    detokenizer: IncrementalDetokenizer
    stop: StopChecker


class TrackedRequest:
    """A request from its submission to its terminal state. Not thread-safe.

    Attributes:
        group: the request in the scheduler: another one after its KV was dropped.

    Its memory does not grow with the tokens drawn, and the cost of a token does not depend on how many came before.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, on_update: OnUpdate) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._prompt_end = tokenizer.context(request.prompt_token_ids)
        self._on_update = on_update
        self._news = [self._no_news(index) for index in range(request.params.n)]
        self._texts: list[_Text] = []
        self._error: str | None = None
        self.group: Group | None = None

    def start(self, group: Group) -> None:
        """The request has been added to the scheduler; its completions may now draw tokens."""
        self.group = group
        params = dataclasses.replace(self.request.params, max_tokens=group.max_tokens)
        stops = StopStrings(params.stop)
        for _ in group.completions:
            self._texts.append(
                _Text(
                    IncrementalDetokenizer(self._tokenizer, self._prompt_end),
                    StopChecker(params, self._tokenizer.eos_token_ids, stops),
                )
            )

    @property
    def finished(self) -> bool:
        """True when every completion has its finish reason."""
        return all(news.finish_reason is not None for news in self._news)

    def append(self, completion: Completion, draw: Draw) -> bool:
        """Add one drawn token; True if it ends the completion."""
        text = self._texts[completion.index]
        news = self._news[completion.index]
        decision = text.stop.append(draw.token, text.detokenizer.append([draw.token]))
        news.token_ids.append(draw.token)
        news.texts.append(decision.text)
        if news.logprobs is not None:
            news.logprobs.append(pack(draw.logprobs))
        if decision.finish_reason is FinishReason.LENGTH:
            news.rest = text.detokenizer.flush()  # an unfinished character
        news.finish_reason, news.stop_reason = decision.finish_reason, decision.stop_reason
        return decision.finish_reason is not None

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Give every completion without a finish reason this one. Does nothing if all have one.

        Also works before ``start``. The reasons are set even if this raises.
        """
        if self.finished:
            return
        self._error = error
        open_ones = [news for news in self._news if news.finish_reason is None]
        for news in open_ones:
            news.finish_reason = reason
        for news in open_ones if self._texts else ():
            text = self._texts[news.index]
            news.rest = text.stop.flush() + text.detokenizer.flush()

    def publish(self) -> None:
        """Pass the caller everything new since the last call."""
        news, finished = self._news, self.finished
        self._news = [self._no_news(one.index) for one in news]
        for one, before in zip(self._news, news, strict=True):
            one.finish_reason, one.stop_reason = before.finish_reason, before.stop_reason
        cached = 0 if self.group is None else self.group.cached_tokens or 0
        self._on_update(RequestUpdate(self.request, news, finished, self._error, self._placement(), cached))

    def _no_news(self, index: int) -> CompletionUpdate:
        return CompletionUpdate(index, logprobs=None if self.request.params.logprobs is None else [])

    def _placement(self) -> tuple[Segment, ...]:
        group = self.group
        if group is None or group.lane < 0:
            return ()
        heads = group.heads
        return tuple(
            Segment(completion.sequence, group.memory, heads, (0, group.kept(completion)))
            for completion in group.completions
        )
