"""A request as the engine answers it: token ids, one terminal state."""

from collections.abc import Collection
from dataclasses import dataclass, field

from lamina.engine.updates import OnTokens, TokenUpdate, pack
from lamina.groups import Completion, Group
from lamina.protocol.frontends import CompletionTokens
from lamina.protocol.messages import Draw
from lamina.schedule.ends import TokenEnds
from lamina.types import FinishReason, Request


@dataclass(slots=True)
class _Drawn:
    """One completion: what its caller has not been told yet, and how many tokens it has in all."""

    index: int
    count: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None


class TrackedRequest:
    """A request from its submission to its terminal state. Not thread-safe.

    Attributes:
        group: the request in the scheduler: another one after its KV was dropped.

    Its memory does not grow with the tokens drawn, and the cost of a token does not depend on how many came before.
    """

    def __init__(self, request: Request, eos_token_ids: Collection[int], on_tokens: OnTokens) -> None:
        self.request = request
        self.group: Group | None = None
        self._eos_token_ids = eos_token_ids
        self._on_tokens = on_tokens
        self._drawn = [_Drawn(index) for index in range(request.params.n)]
        self._open = request.params.n  # completions without a finish reason
        self._news: dict[int, _Drawn] = {}  # those whose caller has not been told everything
        self._with_logprobs = request.params.logprobs is not None
        self._ends: TokenEnds | None = None
        self._error: str | None = None

    def start(self, group: Group) -> None:
        """The request has been added to the scheduler; its completions may now draw tokens."""
        self.group = group
        self._ends = TokenEnds(self.request.params, group.max_tokens, self._eos_token_ids)

    @property
    def finished(self) -> bool:
        """True when every completion has its finish reason."""
        return not self._open

    def append(self, completion: Completion, draw: Draw) -> bool:
        """Add one drawn token; True if the completion has ended. Tokens after its end are discarded."""
        drawn, ends = self._drawn[completion.index], self._ends
        if drawn.finish_reason is not None:  # by its caller, while this token was being drawn
            return True
        if ends is None:
            raise RuntimeError(f"request {self.request.request_id} has drawn a token before it was started")
        token = draw.token
        drawn.count += 1
        drawn.token_ids.append(token)
        if self._with_logprobs:
            drawn.logprobs.append(pack(draw.logprobs))
        self._news[completion.index] = drawn
        reason = ends.at(token, drawn.count)
        if reason is None:
            return False
        self._finish(drawn, reason)
        if reason is FinishReason.STOP:
            drawn.stop_token = ends.stop_token(token)
        return True

    def finish(self, index: int) -> None:
        """A completion has ended at a stop string, which its caller has found: it is told nothing more of it."""
        drawn = self._drawn[index]
        if drawn.finish_reason is None:
            self._finish(drawn, FinishReason.STOP)
            drawn.token_ids, drawn.logprobs = [], []

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Give every completion without a finish reason this one. Does nothing if all have one.

        Also works before ``start``.
        """
        if self.finished:
            return
        self._error = error
        for drawn in self._drawn:
            if drawn.finish_reason is None:
                self._finish(drawn, reason)

    def _finish(self, drawn: _Drawn, reason: FinishReason) -> None:
        drawn.finish_reason = reason
        self._open -= 1
        self._news[drawn.index] = drawn

    def publish(self) -> None:
        """Pass the caller everything new since the last call."""
        news, self._news = self._news, {}
        completions = []
        for drawn in news.values():
            completions.append(
                CompletionTokens(drawn.index, drawn.token_ids, drawn.logprobs, drawn.finish_reason, drawn.stop_token)
            )
            drawn.token_ids = []
            if self._with_logprobs:
                drawn.logprobs = []
        self._on_tokens(TokenUpdate(completions, not self._open, self._error, self.group))
