"""Constrains sampling to the grammars of structured outputs: tracks each sequence's grammar state, masks its logits.

A grammar's state follows from the tokens generated so far. It is rebuilt from them after an epoch, a preemption or a
change of replica.
"""

import functools
from collections.abc import Callable, Sequence

import llguidance
import numpy as np
import torch
from torch import Tensor

from lamina.core.sampling import StructuredOutputs
from lamina.lowering.native_operators import masked
from lamina.text.grammars import compile_grammar, run_deep
from lamina.text.tokenizer import Tokenizer

MOST_GRAMMARS = 128
"""Grammars whose compiled form a worker keeps."""
MASKED_IN_PLACE = 1 << 20
"""Up to so many scores, this thread computes the masks itself: waking other threads would take longer."""


class Constraint:
    """The state of a grammar after the tokens of one sequence."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self._consumed = 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance to the end of ``tokens``, all tokens that the sequence has generated.

        They begin with the tokens of the last call.
        """
        for token in tokens[self._consumed :]:
            if self.matcher.is_stopped():
                break  # drawn after the end, which the engine discards
            self.matcher.consume_token(token)
        self._consumed = len(tokens)


class Grammars:
    """Compiles grammars for one model's tokens, each once."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_token_ids: Sequence[int]) -> None:
        """``load_tokenizer``: called when the first grammar is compiled."""
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = list(eos_token_ids)
        self._matcher = functools.lru_cache(maxsize=MOST_GRAMMARS)(self._compile)

    def begin(self, wanted: StructuredOutputs, vocabulary: int) -> Constraint:
        """Return the grammar's state before the first token. ``vocabulary``: width of the logits."""
        return Constraint(self._matcher(wanted, vocabulary).deep_copy())

    def _compile(self, wanted: StructuredOutputs, vocabulary: int) -> llguidance.LLMatcher:
        tokens, grammar = self._tokens(vocabulary), compile_grammar(wanted)
        return run_deep(lambda: llguidance.LLMatcher(tokens, grammar, log_level=0))

    @functools.cache  # noqa: B019 - one object per process
    def _tokens(self, vocabulary: int) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(self._load_tokenizer(), vocabulary, self._eos_token_ids)),
            eos_token=self._eos_token_ids,
        )


class _Tokens:
    """Adapts a model's tokenizer to llguidance's interface."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        known = [token for token in range(vocabulary) if tokenizer.token(token) is not None]
        self.special_token_ids = [token for token in known if token in tokenizer.special_texts]
        self.tokens = [b""] * vocabulary  # ids that the tokenizer does not know are never allowed
        for token in known:
            self.tokens[token] = tokenizer.token_bytes(token)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text, add_special_tokens=False)


def forbid(scores: Tensor, rows: Sequence[int], constraints: Sequence[Constraint]) -> Tensor:
    """Return a copy of the scores [R, V] with -inf for tokens that may not come next in ``rows``.

    If a grammar allows no token, or has become too complex, all scores of its row become -inf.
    """
    count, width = scores.shape
    bits = np.full((count, -(-width // 32)), -1, dtype=np.int32)  # rows without a constraint allow every token
    matchers = [(constraint.matcher, row) for row, constraint in zip(rows, constraints, strict=True)]
    if len(rows) * width > MASKED_IN_PLACE:
        _executor().unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * 4, count)
    else:
        nbytes, address = bits.shape[1] * 4, bits.ctypes.data
        for matcher, row in matchers:
            matcher.unsafe_compute_mask_ptr(address + row * nbytes, nbytes)
    for matcher, row in matchers:
        if matcher.stop_reason() == "InternalError":  # llguidance then allows the end of the answer
            bits[row] = 0
    return masked(scores, bits)


@functools.cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor(num_threads=torch.get_num_threads())
