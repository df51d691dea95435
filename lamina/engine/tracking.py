"""A request as the engine answers it: token ids, one terminal state."""

from collections.abc import Collection
from dataclasses import dataclass

from lamina.control.frontend_messages import CompletionTokens
from lamina.control.logprobs import unpack
from lamina.control.messages import Draw
from lamina.core.requests import Completion, Drawn, Group
from lamina.core.types import FinishReason, Logprob, Request, SamplingParams
from lamina.engine.updates import OnTokens, TokenUpdate
from lamina.schedule.beam_search import BeamSearch, Choice


class TokenEnds:
    """The tokens after which completions of one request end: end of sequence, a stop token, or the last one allowed.

    Stop strings are looked for where there is text (``text.stop_strings``).

    Attributes:
        tokens: those that end a completion.
    """

    __slots__ = ("_eos", "_max_tokens", "_min_tokens", "tokens")

    def __init__(self, params: SamplingParams, max_tokens: int | None, eos_token_ids: Collection[int]) -> None:
        """``max_tokens``: of one completion; None: no limit here."""
        self._max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.tokens = self._eos.union(params.stop_token_ids)

    def finish_reason(self, token: int, count: int) -> FinishReason | None:
        """Return the finish reason if ``token``, number ``count`` of its completion from 1, ends it."""
        if token in self.tokens and count > self._min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == self._max_tokens else None

    def stop_token(self, token: int) -> int | None:
        """Return the stop token to report for a completion that stopped at ``token``; None for end of sequence."""
        return None if token in self._eos else token


@dataclass(slots=True)
class _Open:
    """A completion without a finish reason: tokens drawn so far, and what the caller has not been told of it."""

    drawn: int
    news: CompletionTokens | None = None


class TrackedRequest:
    """A request from its submission to its terminal state. Not thread-safe.

    Attributes:
        group: the request in the scheduler: another one after its KV was dropped.
        drawn: as given, until ``start``.
        finished: every completion has its finish reason.

    Its memory does not grow with the tokens drawn, and the cost of a token does not depend on how many came before.
    """

    # Of hundreds of requests, what a step touches is not in any cache when it ends: a dict more costs a microsecond.
    __slots__ = (
        "_continuations",
        "_ended",
        "_ends",
        "_eos_token_ids",
        "_error",
        "_on_tokens",
        "_open",
        "_search",
        "_with_logprobs",
        "drawn",
        "finished",
        "group",
        "request",
    )

    def __init__(
        self, request: Request, eos_token_ids: Collection[int], on_tokens: OnTokens, drawn: Drawn | None = None
    ) -> None:
        """``drawn``: what the caller has of a request that another engine had begun."""
        self.request = request
        self.drawn = drawn
        self.group: Group | None = None
        self._eos_token_ids = eos_token_ids
        self._on_tokens = on_tokens
        self.finished = False
        begun = drawn or {index: list[int]() for index in range(request.params.n)}
        self._open = {index: _Open(len(tokens)) for index, tokens in begun.items()}
        self._ended: list[CompletionTokens] = []  # completions with one, of which the caller has not been told
        self._with_logprobs = request.params.logprobs is not None
        self._ends: TokenEnds | None = None
        self._search: BeamSearch | None = None
        self._continuations: dict[int, list[Logprob]] = {}  # of the beams that have run their last tokens
        self._error: str | None = None

    def start(self, group: Group) -> None:
        """The request has been added to the scheduler; its completions may now draw tokens."""
        self.group, self.drawn = group, None
        self._ends = TokenEnds(self.request.params, group.max_tokens, self._eos_token_ids)
        if group.searches:
            self._search = BeamSearch(self.request.params, group.max_tokens, self._ends.tokens)

    def compare(self, group: Group, completion: Completion, draw: Draw) -> Choice | None:
        """Take the most likely continuations of one beam; once those of all are known, return how they go on.

        All completions have ended if the search is done.
        """
        if self.group is not group:
            self.group = group
            self._continuations.clear()  # the KV of the others was dropped: their continuations come again
        search = self._search
        if search is None or self.finished:
            return None
        completion.answered = True
        self._continuations[group.completions.index(completion)] = unpack(draw.logprobs)
        if len(self._continuations) < search.places:
            return None
        choice = search.advance([self._continuations[place] for place in range(search.places)])
        self._continuations.clear()
        if search.done:
            self._conclude(search)
        return choice

    def _conclude(self, search: BeamSearch) -> None:
        """The completions are the best hypotheses, in order."""
        for index, best in enumerate(search.hypotheses):
            news = self._open[index].news = CompletionTokens(index, best.token_ids)
            self._finish(index, FinishReason.STOP if best.ended else FinishReason.LENGTH)
            if best.ended and self._ends is not None:
                news.stop_token = self._ends.stop_token(best.token_ids[-1])

    def append(self, completion: Completion, draw: Draw) -> bool:
        """Add one drawn token; True if the completion has ended. Tokens after its end are discarded."""
        index, token, ends = completion.index, draw.token, self._ends
        one = self._open.get(index)
        if one is None:  # its caller has ended it while this token was being drawn
            return True
        if ends is None:
            raise RuntimeError(f"request {self.request.request_id} has drawn a token before it was started")
        one.drawn += 1
        news = one.news
        if news is None:
            news = one.news = CompletionTokens(index, [token])
        else:
            news.token_ids.append(token)
        if self._with_logprobs:
            news.logprobs.append(draw.logprobs)
        reason = ends.finish_reason(token, one.drawn)
        if reason is None:
            return False
        self._finish(index, reason)
        if reason is FinishReason.STOP:
            news.stop_token = ends.stop_token(token)
        return True

    def end_completion(self, index: int) -> None:
        """A completion has ended at a stop string, which its caller has found: it is told nothing more of it."""
        if index in self._open:
            self._open[index].news = None
            self._finish(index, FinishReason.STOP)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """Give every completion without a finish reason this one. Does nothing if all have one.

        Also works before ``start``.
        """
        if not self.finished:
            self._error = error
            for index in sorted(self._open):
                self._finish(index, reason)

    def _finish(self, index: int, reason: FinishReason) -> None:
        news = self._open.pop(index).news or CompletionTokens(index, [])
        news.finish_reason = reason
        self._ended.append(news)
        self.finished = not self._open

    def publish(self) -> None:
        """Pass the caller everything new since the last call."""
        news, self._ended = self._ended, []
        for one in self._open.values():
            if one.news is not None:
                news.append(one.news)
                one.news = None
        cached = 0 if self.group is None else self.group.cached_tokens or 0
        self._on_tokens(TokenUpdate(news, self.finished, self._error, cached, self.group))
