"""Text to tokens and back, from a model directory's tokenizer.json. Imports neither torch nor transformers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from lamina.errors import ModelError, RequestError
from lamina.models.directory import TOKENIZER, TOKENIZER_CONFIG, ModelDirectory, read_json

if TYPE_CHECKING:
    from lamina.models.chat import ChatTemplate

CHAT_TEMPLATE = "chat_template.jinja"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no complete character
_PROMPT_CONTEXT = 16  # tokens of the prompt decoded before the first generated one, at least


class Tokenizer:
    """The tokenizer of one model directory; safe to use from several threads.

    Attributes:
        vocab_size: number of tokens, added tokens included. The model's embedding may have more rows.
        eos_token_ids: tokens that end a text, by generation_config.json (else config.json) and by the tokenizer.

    Raises:
        ModelError: tokenizer.json cannot be read.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        file = directory.path / TOKENIZER
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file} is not a tokenizer ({error}): copy the file again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_file = directory.path / TOKENIZER_CONFIG
        config = read_json(config_file) if config_file.is_file() else {}
        self._special_tokens = _special_tokens(config)
        self._template_source = _chat_template(directory.path, config)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        own_eos = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        self.eos_token_ids = directory.eos_token_ids | ({own_eos} if own_eos is not None else set())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. A prompt made by ``apply_chat_template`` brings its special tokens: add none.

        Other threads run meanwhile. It takes about a second and 100 MB per megabyte of text.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        check_unicode(text)
        # For a single text too: only batches are encoded without Python's lock, and "fast" keeps no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids beyond the vocabulary have none.

        Raises:
            RequestError: an id is negative or no integer.
        """
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be integers of at least 0 ({error})") from error
        return text

    def has_text(self, token_id: int) -> bool:
        """False for special tokens and for ids that the tokenizer does not know: ``decode`` skips both."""
        return token_id not in self._special_token_ids and self._tokenizer.id_to_token(token_id) is not None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation, by the model's template or else ``chat.DEFAULT_TEMPLATE``.

        Raises:
            RequestError: the template is broken, a message is malformed, or the template refuses it.
        """
        return self._chat_template.render(messages, add_generation_prompt)

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """The most UTF-8 bytes of text that become one token; None if this tokenizer has no such bound."""
        from lamina.models.token_bytes import most_bytes_per_token

        return most_bytes_per_token(self._tokenizer)

    @cached_property
    def _chat_template(self) -> "ChatTemplate":
        from lamina.models.chat import DEFAULT_TEMPLATE, ChatTemplate  # a fifth of the time to import the SDK

        return ChatTemplate(self._template_source or DEFAULT_TEMPLATE, self._special_tokens)


class IncrementalDetokenizer:
    """Text of a growing sequence, piece by piece: the pieces joined are the text of the whole.

    A token may be part of a character, and what a token decodes to may depend on the token before it (a leading
    space, for one). So each step decodes a short window that starts at an earlier complete character, and hands out
    what is new in it, holding back the bytes of an incomplete character. Special tokens have no text.

    Args:
        prompt_token_ids: what stands before the first generated token; only the end of it is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = self._end_of(prompt_token_ids)
        self._context = 0  # leading tokens of the window that were complete when the window last moved
        text = tokenizer.decode(self._window)
        self._sent = len(text.rstrip(_REPLACEMENT))  # characters of the window's text that were handed out

    def append(self, token_ids: list[int]) -> str:
        """The text that ``token_ids`` complete; empty while a character is incomplete."""
        self._window += self._with_text(token_ids)
        text = self._tokenizer.decode(self._window)
        complete = text.rstrip(_REPLACEMENT)
        new = complete[self._sent :]
        self._sent = max(self._sent, len(complete))
        if new and complete == text:
            self._move_window()
        return new

    def flush(self) -> str:
        """What was held back: the replacement characters of bytes that no token completed."""
        text = self._tokenizer.decode(self._window)
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new

    def _move_window(self) -> None:
        """Drops the old context; what was handed out since is the context of the tokens to come."""
        del self._window[: self._context]
        self._context = len(self._window)
        self._sent = len(self._tokenizer.decode(self._window))

    def _end_of(self, prompt: list[int]) -> list[int]:
        """The last tokens of the prompt: enough to hold one complete character, if there is one."""
        size = _PROMPT_CONTEXT
        while True:
            tail = self._with_text(prompt[-size:])
            if size >= len(prompt) or self._tokenizer.decode(tail).strip(_REPLACEMENT):
                return tail
            size *= 2

    def _with_text(self, ids: list[int]) -> list[int]:
        return [token for token in ids if self._tokenizer.has_text(token)]


def check_unicode(text: str) -> int:
    """The bytes of ``text`` in UTF-8. Raises RequestError if it holds a lone surrogate, which no encoding has."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: character {error.start} is {text[error.start]!r}, half of a surrogate "
            f"pair; remove it or send the whole pair"
        ) from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json, whose values are strings or objects with a content."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The model's template, from its own file or tokenizer_config.json (where there may be several, by name)."""
    if (path / CHAT_TEMPLATE).is_file():
        return (path / CHAT_TEMPLATE).read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
