"""Which token ends a completion. Pure."""

from collections.abc import Collection

from lamina.types import FinishReason, SamplingParams


class TokenEnds:
    """The tokens after which completions of one request end: end of sequence, a stop token, or the last one allowed.

    Stop strings are looked for where there is text (``frontend.stop``).

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

    def at(self, token: int, count: int) -> FinishReason | None:
        """The finish reason if ``token``, number ``count`` of its completion from 1, ends it."""
        if token in self.tokens and count > self._min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == self._max_tokens else None

    def stop_token(self, token: int) -> int | None:
        """The stop token to report for a completion that stopped at ``token``; None for end of sequence."""
        return None if token in self._eos else token
