"""Tracks what each completion of a request has generated and reported, until all have a finish reason."""

from collections.abc import Collection
from dataclasses import dataclass, field

from lamina.control.frontend_messages import CompletionTokens
from lamina.control.packed_logprobs import unpack
from lamina.core.outputs import FinishReason, Logprob
from lamina.core.requests import Completion, Drawn, Group
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.engine.updates import OnTokens, PlainTokens, TokenUpdate
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


@dataclass(eq=False, slots=True)
class Unfinished:
    """A completion without a finish reason.

    Attributes:
        index: Its index within the request.
        drawn: Number of tokens drawn so far.
        news: Tokens not yet passed to the caller; None if all tokens are.
        plain: Where ``append_plain`` puts tokens; None: nowhere.
        generated: The completion's list of tokens.
        stops: Tokens that may end the completion.
        most: Most tokens of the completion; None: no limit.
    """

    index: int
    drawn: int
    news: CompletionTokens | None = None
    plain: PlainTokens | None = None
    generated: list[int] = field(default_factory=list)
    stops: frozenset[int] = frozenset()
    most: int | None = None

    def append_plain(self, token: int) -> bool:
        """Add one drawn token to the completion and to ``PlainTokens``.

        Return False, having changed nothing, if more may have to be done than that. For most tokens, nothing has:
        this must touch few objects.
        """
        plain, drawn = self.plain, self.drawn + 1
        if plain is None or self.news is not None or token in self.stops or drawn == self.most:
            return False
        self.drawn = drawn
        self.generated.append(token)
        plain.batch.extend((plain.number, self.index, token))
        return True


class TrackedRequest:
    """A request from its submission to its terminal state. Not thread-safe.

    Attributes:
        group: The request's group in the scheduler; a new group replaces it after its KV was dropped.
        drawn: Tokens that an earlier engine drew; None after ``start``.
        finished: Every completion has a finish reason.
        reasons: Finish reasons of the completions that have one.
        error: Why the request failed.
        has_news: ``publish`` has something to pass on.
        plain: Completions whose tokens are to be added by ``Unfinished.append_plain`` first, by sequence. Some may have
            ended.

    Its memory does not grow with the tokens drawn, and the cost of a token does not depend on how many came before.
    """

    # With hundreds of requests, these objects are not in a CPU cache when a step ends: a __dict__ costs a microsecond.
    __slots__ = (
        "_continuations",
        "_ends",
        "_eos_token_ids",
        "_finished_news",
        "_finished_tokens",
        "_on_tokens",
        "_plain",
        "_search",
        "_unfinished",
        "_with_logprobs",
        "drawn",
        "error",
        "finished",
        "group",
        "has_news",
        "plain",
        "reasons",
        "request",
    )

    def __init__(
        self,
        request: Request,
        eos_token_ids: Collection[int],
        on_tokens: OnTokens,
        drawn: Drawn | None = None,
        plain: PlainTokens | None = None,
    ) -> None:
        """Track a request.

        Args:
            on_tokens: Gets all news.
            drawn: Tokens that the caller already has, of a request that an earlier engine began.
            plain: Gets tokens at once if nothing else is new, but for the first ones.
        """
        self.request = request
        self.drawn = drawn
        self.group: Group | None = None
        self._eos_token_ids = eos_token_ids
        self._on_tokens = on_tokens
        self._plain = plain if request.params.logprobs is None and not request.params.use_beam_search else None
        self.plain: dict[int, Unfinished] = {}
        self.has_news = self.finished = False
        self.reasons: list[FinishReason] = []
        self._finished_tokens = 0  # tokens of completions that have finished
        begun = drawn or {index: list[int]() for index in range(request.params.n)}
        self._unfinished = {index: Unfinished(index, len(tokens)) for index, tokens in begun.items()}
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

    def compare(self, group: Group, completion: Completion, logprobs: bytes) -> Choice | None:
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
        self._continuations[group.completions.index(completion)] = unpack(logprobs)
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

    def append(self, completion: Completion, token: int, logprobs: bytes = b"") -> bool:
        """Add one drawn token and return whether its completion has ended. Tokens after the end are discarded.

        ``logprobs``: packed log-probabilities of the token, if the request wants them.
        """
        index, ends = completion.index, self._ends
        one = self._unfinished.get(index)
        if one is None:  # the caller ended the completion while this token was drawn
            return True
        if ends is None:
            raise RuntimeError(f"request {self.request.request_id} has drawn a token before it was started")
        one.drawn += 1
        reason = ends.finish_reason(token, one.drawn)
        self.has_news = True
        news = one.news
        if news is None:
            news = one.news = CompletionTokens(index, [token])
        else:
            news.token_ids.append(token)
        if self._with_logprobs:
            news.logprobs.append(logprobs)
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
        one.plain = None
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
        self.has_news = False
        for one in self._unfinished.values():
            if one.news is not None:
                news.append(one.news)
                one.news = None
        cached = 0 if self.group is None else self.group.cached_tokens or 0
        self._on_tokens(TokenUpdate(news, self.finished, self.error, cached, self.group))
        if self._plain is not None and self._ends is not None and self.group is not None:
            self._pass_on(self._plain, self._ends, self.group)

    def _pass_on(self, plain: PlainTokens, ends: TokenEnds, group: Group) -> None:
        """Prepare ``Unfinished.append_plain`` for the completions that go on: the caller knows the request now."""
        for completion in group.completions:
            if (one := self._unfinished.get(completion.index)) is not None:
                one.plain, one.generated = plain, completion.generated
                one.stops, one.most = ends.tokens, ends.max_tokens
                self.plain[completion.sequence] = one
