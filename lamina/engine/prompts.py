"""What callers may hand over as prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from lamina.errors import RequestError
from lamina.models.tokenizer import Tokenizer

Prompt = str | list[int]
"""Text or token ids."""

Message = Mapping[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "..."}``."""


def as_prompts(value: Any) -> list[Prompt]:
    """One prompt or a list of prompts, as a list of prompts.

    Raises:
        RequestError: it is neither, or there is no prompt in it.
    """
    if isinstance(value, str) or (_is_tokens(value) and value):
        return [value]
    if not isinstance(value, list | tuple) or not all(isinstance(p, str) or _is_tokens(p) for p in value):
        raise RequestError("prompt must be a text, a list of texts, a list of token ids or a list of such lists")
    if not value:
        raise RequestError("prompt is an empty list; give at least one prompt")
    return list(value)


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation by the model's chat template, up to where the answer begins.

    Raises:
        RequestError: there is no message, or the template refuses them.
    """
    # The template writes the special tokens itself.
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)  # a bool is no token
