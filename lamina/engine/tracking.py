"""Tracks what each completion of a request has generated and reported, until all have a finish reason."""

from collections.abc import Collection
from dataclasses import dataclass

from lamina.control.frontend_messages import CompletionTokens
from lamina.control.messages import Draw
from lamina.control.packed_logprobs import unpack
from lamina.core.outputs import FinishReason, Logprob
from lamina.core.requests import Completion, Drawn, Group
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.engine.updates import OnToken, OnTokens, TokenUpdate
from lamina.schedule.beam_search import BeamSearch, Choice


class TokenEnds:
    """Decides at which token a completion of a request ends: end of sequence, a stop token, or the token limit.

    Stop strings are matched where tokens are detokenized (``text.stop_strings``).

    Attributes:
        tokens: Token ids that end a completion.
        max_tokens: Most tokens of one completion; None for no limit.
    """

    __slots__ = ("_eos", "_min_tokens", "max_tokens", "tokens")

    def __init__(self, params: SamplingParams, max_tokens: int | None, eos_token_ids: Collection[int]) -> None:
        self.max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.tokens = self._eos.union(params.stop_token_ids)

    def finish_reason(self, token: int, count: int) -> FinishReason | None:
        """Return the finish reason if ``token`` ends its completion, of which it is token number ``count``, from 1."""
        if token in self.tokens and count > self._min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == self.max_tokens else None

    def stop_token(self, token: int) -> int | None:
        """Return the stop token to report for a completion that stopped at ``token``; None for end of sequence."""
        return None if token in self._eos else token


@dataclass(slots=True)
class _Unfinished:
    """A completion without a finish reason.

    Attributes:
        drawn: Tokens drawn so far.
        news: Tokens not yet passed to the caller; None if all tokens are.
    """

    drawn: int
    news: CompletionTokens | None = None


class TrackedRequest:
    """A request from its submission to its terminal state. Not thread-safe.

    Attributes:
        group: The request's group in the scheduler; a new group replaces it after its KV was dropped.
        drawn: Tokens that an earlier engine drew; None after ``start``.
        finished: Every completion has a finish reason.
        reasons: Finish reasons of the completions that have one.
        error: Why the request failed.
        has_news: ``publish`` has something to pass on.

    Its memory does not grow with the tokens drawn, and the cost of a token does not depend on how many came before.
    """

    # With hundreds of requests, these objects are not in a CPU cache when a step ends: a __dict__ costs a microsecond.
    __slots__ = (
        "_continuations",
        "_ends",
        "_eos_token_ids",
        "_finished_news",
        "_finished_tokens",
        "_is_known",
        "_on_token",
        "_on_tokens",
        "_search",
        "_unfinished",
        "_with_logprobs",
        "drawn",
        "error",
        "finished",
        "group",
        "has_news",
        "reasons",
        "request",
    )

    def __init__(
        self,
        request: Request,
        eos_token_ids: Collection[int],
        on_tokens: OnTokens,
        drawn: Drawn | None = None,
        on_token: OnToken | None = None,
    ) -> None:
        """Track a request.

        Args:
            on_tokens: Gets all news.
            drawn: Tokens that the caller already has, of a request that an earlier engine began.
            on_token: Gets tokens at once if nothing else is new, but for the first ones.
        """
        self.request = request
        self.drawn = drawn
        self.group: Group | None = None
        self._eos_token_ids = eos_token_ids
        self._on_tokens = on_tokens
        self._on_token = on_token if request.params.logprobs is None else None
        self.has_news = self.finished = False
        self.reasons: list[FinishReason] = []
        self._is_known = False  # the caller has heard of the request
        self._finished_tokens = 0  # of completions that have finished
        begun = drawn or {index: list[int]() for index in range(request.params.n)}
        self._unfinished = {index: _Unfinished(len(tokens)) for index, tokens in begun.items()}
        self._finished_news: list[
            CompletionTokens
        ] = []  # news of completions that have finished since the last publish
        self._with_logprobs = request.params.logprobs is not None
        self._ends: TokenEnds | None = None
        self._search: BeamSearch | None = None
        self._continuations: dict[int, list[Logprob]] = {}  # by beam: its most likely next tokens, once known
        self.error: str | None = None

    def start(self, group: Group) -> None:
        """Record the request's ``group`` in the scheduler: its completions may draw tokens from now on."""
        self.group, self.drawn = group, None
        self._ends = TokenEnds(self.request.params, group.max_tokens, self._eos_token_ids)
        if group.searches:
            self._search = BeamSearch(self.request.params, group.max_tokens, self._ends.tokens)

    def compare(self, group: Group, completion: Completion, draw: Draw) -> Choice | None:
        """Record the most likely next tokens of one beam; once all beams have theirs, return which beams survive.

        When the search is done, all completions are finished with its best hypotheses.
        """
        if self.group is not group:
            self.group = group
            self._continuations.clear()  # the KV was dropped: every beam runs its last token again
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
            self._finish_search(search)
        return choice

    def _finish_search(self, search: BeamSearch) -> None:
        """Finish the completions with the best hypotheses of the search, best first."""
        for index, best in enumerate(search.hypotheses):
            news = self._unfinished[index].news = CompletionTokens(index, best.token_ids)
            self._finish(index, FinishReason.STOP if best.ended else FinishReason.LENGTH)
            if best.ended and self._ends is not None:
                news.stop_token = self._ends.stop_token(best.token_ids[-1])

    def append(self, completion: Completion, draw: Draw) -> bool:
        """Add one drawn token and return whether its completion has ended. Tokens after the end are discarded."""
        index, token, ends = completion.index, draw.token, self._ends
        one = self._unfinished.get(index)
        if one is None:  # the caller ended the completion while this token was drawn
            return True
        if ends is None:
            raise RuntimeError(f"request {self.request.request_id} has drawn a token before it was started")
        one.drawn = count = one.drawn + 1
        may_end = token in ends.tokens or count == ends.max_tokens
        news, reason = one.news, ends.finish_reason(token, count) if may_end else None
        if news is None and reason is None and self._is_known and self._on_token is not None:
            self._on_token(index, token)
            return False
        self.has_news = True
        if news is None:
            news = one.news = CompletionTokens(index, [token])
        else:
            news.token_ids.append(token)
        if self._with_logprobs:
            news.logprobs.append(draw.logprobs)
        if reason is None:
            return False
        self._finish(index, reason)
        if reason is FinishReason.STOP:
            news.stop_token = ends.stop_token(token)
        return True

    def end_completion(self, index: int) -> None:
        """End a completion in which the caller found a stop string; tokens not yet published are discarded."""
        if index in self._unfinished:
            self._unfinished[index].news = None
            self._finish(index, FinishReason.STOP)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """Finish every unfinished completion with ``reason``. Does nothing if all have finished.

        May be called before ``start``.
        """
        if not self.finished:
            self.error = error
            for index in sorted(self._unfinished):
                self._finish(index, reason)

    def _finish(self, index: int, reason: FinishReason) -> None:
        one = self._unfinished.pop(index)
        self.reasons.append(reason)
        self._finished_tokens += one.drawn
        news = one.news or CompletionTokens(index, [])
        news.finish_reason = reason
        self._finished_news.append(news)
        self.finished, self.has_news = not self._unfinished, True

    @property
    def generated(self) -> int:
        """Number of tokens drawn so far. Any thread may read it."""
        return self._finished_tokens + sum(one.drawn for one in list(self._unfinished.values()))

    def publish(self) -> None:
        """Pass to ``on_tokens`` all tokens and finish reasons since the last call."""
        news, self._finished_news = self._finished_news, []
        self.has_news, self._is_known = False, True
        for one in self._unfinished.values():
            if one.news is not None:
                news.append(one.news)
                one.news = None
        cached = 0 if self.group is None else self.group.cached_tokens or 0
        self._on_tokens(TokenUpdate(news, self.finished, self.error, cached, self.group))
