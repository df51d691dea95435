"""Validates and tokenises prompts and conversations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lamina.core.errors import RequestError
from lamina.core.sampling import SamplingParams
from lamina.text.tokenizer import Tokenizer, check_unicode

Prompt = str | list[int]
"""Text or token ids."""

Message = Mapping[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "..."}``."""


def as_prompts(value: Any) -> list[Prompt]:
    """Return one prompt or a list of prompts as a list of prompts.

    Raises:
        RequestError: ``value`` is neither, or an empty list.
    """
    if isinstance(value, str) or (_is_tokens(value) and value):
        return [value]
    if not isinstance(value, list | tuple) or not all(isinstance(p, str) or _is_tokens(p) for p in value):
        raise RequestError("prompt must be a text, a list of texts, a list of token ids or a list of such lists")
    if not value:
        raise RequestError("prompt is an empty list; give at least one prompt")
    return list(value)


def plain_prompts(value: Any) -> Any:
    """Return ``value`` with arrays, tensors, tuples and generators as lists, at any depth; others unchanged.

    Prompts in vLLM's form, ``{"prompt": TEXT}`` or ``{"prompt_token_ids": TOKENS}``, become what they hold.
    """
    if isinstance(value, str) or _is_tokens(value):
        return value
    if isinstance(value, Mapping) and value.keys() <= {"prompt", "prompt_token_ids"} and value:
        tokens = value.get("prompt_token_ids")
        return plain_prompts(value.get("prompt") if tokens is None else tokens)
    if hasattr(value, "tolist"):  # NumPy's and PyTorch's arrays and numbers
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        return [plain_prompts(each) for each in value]
    return value


def encode_prompt(tokenizer: Tokenizer, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
    """Tokenise a prompt. Other threads can run meanwhile.

    Raises:
        RequestError: the text is not valid Unicode, or so long that it is rejected without being tokenised.
    """
    size, per_token = check_unicode(text), tokenizer.most_bytes_per_token
    if per_token is not None and size > per_token * (max_model_len - 1):
        raise RequestError(
            f"the prompt has {size} bytes, at least {-(-size // per_token)} tokens; at most "
            f"{max_model_len - 1} fit (max_model_len {max_model_len}, one left for the answer). Shorten the prompt or "
            f"raise max_model_len"
        )
    return tokenizer.encode(text, add_special_tokens)


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the tokens of a prompt, cut to its last tokens by ``truncate_prompt_tokens``.

    Raises RequestError as ``encode_prompt`` does; a text to truncate is never too long.
    """
    most = params.truncate_prompt_tokens
    if most is None:
        return encode_prompt(tokenizer, prompt, max_model_len) if isinstance(prompt, str) else list(prompt)
    if isinstance(prompt, str):
        check_unicode(prompt)
        prompt = tokenizer.encode(prompt)
    if most < 0:
        most = max(1, max_model_len - (params.max_tokens or 1))
    return prompt[-most:]


def bad_sequences(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token sequences that must not be generated, given texts, as vLLM makes them.

    They are the tokens of a text alone, and of the text after a space if those are as many and begin differently.
    """
    found = []
    for word in words:
        bare = word.lstrip() or word
        alone = tokenizer.encode(bare, add_special_tokens=False)
        spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
        found.append(alone)
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found.append(spaced)
    return found


def check_tokens(tokens: Sequence[int], vocab_size: int, tokenizer: Tokenizer) -> None:
    """Raise RequestError for a token id without a row in the embedding, which has ``vocab_size`` rows."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            known = tokenizer.token(token)
            remedy = (
                f"use ids from 0 to {vocab_size - 1}"
                if known is None
                else f"the tokenizer has it ({known!r}), but the embedding has no row for it: leave it out of the "
                "prompt, or give the tokenizer and the weights of the same model"
            )
            raise RequestError(f"token id {token} is outside the vocabulary of {vocab_size} tokens; {remedy}")


def check_token_params(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer) -> None:
    """Raise RequestError for a token id in the parameters that no answer can have."""
    check_tokens(params.forced_token_ids, vocab_size, tokenizer)
    for name, tokens in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids)):
        try:
            check_tokens([*(tokens or ())], vocab_size, tokenizer)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from error


def encode_chat(tokenizer: Tokenizer, text: str, max_model_len: int) -> list[int]:
    """Tokenise the output of a chat template. Raises RequestError as ``encode_prompt`` does."""
    return encode_prompt(tokenizer, text, max_model_len, add_special_tokens=False)  # the template has them


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)  # excludes bool
