"""Encodes text to tokens and decodes tokens, with a model directory's tokenizer.json."""

import codecs
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from lamina.core.errors import ModelError, RequestError
from lamina.core.types import ChatSettings
from lamina.models.directory import SPECIAL_TOKENS_MAP, TOKENIZER, TOKENIZER_CONFIG, ModelDirectory, read_json
from lamina.models.hub import NAMED_TEMPLATES

if TYPE_CHECKING:
    from lamina.text.chat_format import ChatFormat
    from lamina.text.chat_template import ChatTemplate

log = logging.getLogger(__name__)

_NFC_SHRINKS = 9
"""A text has at most 9 times the bytes of its NFC: its NFD has at most 3 times those of the NFC (Unicode's FAQ on
normalization, UTF-8), and a character at most 3 times those of its NFD (U+212A, 3 bytes, becomes K)."""

_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
_BYTES = 256


def most_bytes_per_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the most UTF-8 bytes of text that become a single token; None if they are unbounded.

    A bound exists only if every byte of the text is part of a token: not if text is dropped (whitespace by a
    pre-tokenizer, accents by a normalizer, unknown characters by a model without tokens for all 256 bytes), or if an
    added token strips the whitespace around it. Unknown components count as dropping text.
    """
    shrinks = _shrinks_by(_state(tokenizer.normalizer))
    parts = list(_parts(_state(tokenizer.pre_tokenizer), "pretokenizers"))
    added = tokenizer.get_added_tokens_decoder().values()
    if shrinks is None or not all(map(_keeps_text, parts)) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE | tokenizers.models.Unigram):
        return None  # other models replace a whole unknown word by one token
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if byte_level and set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys():
        longest = max(map(len, vocabulary))  # each character represents a byte
    elif _falls_back_to_bytes(model) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTES)):
        longest = max(len(token.encode()) for token in vocabulary)
    else:
        return None
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


def _state(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer as in tokenizer.json; one implemented in Python cannot be serialized."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except Exception:  # the library raises plain Exception
        return {"type": "custom"}


def _parts(state: Any, key: str) -> Iterable[dict[str, Any]]:
    if state is None:
        return
    if state["type"] == "Sequence":
        for part in state[key]:
            yield from _parts(part, key)
    else:
        yield state


def _shrinks_by(normalizer: Any) -> int | None:
    """Return the factor by which normalization may at most reduce a text's bytes; None if it is unbounded."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "NFC":
            factor *= _NFC_SHRINKS
        elif part["type"] == "Replace" and _grows(part):
            continue
        elif part["type"] != "Prepend":
            return None
    return factor


def _grows(replace: dict[str, Any]) -> bool:
    literal = replace["pattern"].get("String")
    return literal is not None and len(replace["content"].encode()) >= len(literal.encode())


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"


def _falls_back_to_bytes(model: Any) -> bool:
    if isinstance(model, tokenizers.models.BPE):
        return bool(model.byte_fallback)
    return bool(json.loads(model.__getstate__())["byte_fallback"])  # Unigram does not expose it as an attribute


CHAT_TEMPLATE = "chat_template.jinja"
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names of chat templates
_IDS = 1 << 32  # the library's ids have 32 bits
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for bytes that do not form a character
_PROMPT_CONTEXT = 16  # tokens of the prompt decoded before the first generated one
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted(set(range(0x100)) - _PRINTABLE))
}
"""By character of a token's name in byte-level vocabularies (GPT-2's): the byte that it stands for."""


class Tokenizer:
    """The tokenizer of one model directory; safe to use from several threads.

    Attributes:
        eos_token_ids: tokens that end a text, by generation_config.json (else config.json) and by the tokenizer.
        special_texts: text of each special token, by id.
        chat_settings: settings of chats; may be set before the first chat.

    Raises:
        ModelError: tokenizer.json cannot be read.
    """

    def __init__(self, directory: ModelDirectory, chat: ChatSettings | None = None) -> None:
        file = directory.path / TOKENIZER
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file} is not a tokenizer ({error}): copy the file again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_file = directory.path / TOKENIZER_CONFIG
        config = read_json(config_file) if config_file.is_file() else {}
        self._special_tokens = _special_tokens(directory.path, config)
        rows = directory.text_config.get("vocab_size")
        add_tokens(self._tokenizer, {**config, **self._special_tokens}, rows if isinstance(rows, int) else None)
        self._own_templates = _chat_templates(directory.path, config)
        self._compiled: dict[str, ChatTemplate] = {}
        self.chat_settings = chat or ChatSettings()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_texts = {token_id: token.content for token_id, token in added.items() if token.special}
        self._bytes = self._fallback_bytes()
        self._texts: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._fixed: dict[int, str | None] = {}
        self._encoded: dict[int, bytes] = {token_id: token.content.encode() for token_id, token in added.items()}
        own_eos = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        self.eos_token_ids = directory.eos_token_ids | ({own_eos} if own_eos is not None else set())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``. A prompt made by ``apply_chat_template`` already has its special tokens.

        Releases the GIL. It takes about a second and 100 MB per megabyte of text.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        check_unicode(text)
        # A batch of one: only batches are encoded without the GIL, and "fast" omits offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids beyond the vocabulary have none.

        Raises:
            RequestError: an id is negative or not an integer.
        """
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be integers of at least 0 ({error})") from error
        return text

    def token(self, token_id: int) -> str | None:
        """Return the token with this id as tokenizer.json spells it; None if it has none."""
        found: str | None = self._tokenizer.id_to_token(token_id) if 0 <= token_id < _IDS else None
        return found

    def has_text(self, token_id: int) -> bool:
        """Return False for special tokens and for ids that the tokenizer does not know: ``decode`` skips both."""
        return token_id not in self.special_texts and self.token(token_id) is not None

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte that a byte-fallback token such as ``<0xE2>`` represents; None for any other token."""
        return self._bytes.get(token_id)

    def fixed_text(self, token_id: int) -> str | None:
        """Return what a token adds to every text without an incomplete character at its end; None if that depends on
        the text. Cached."""
        if token_id not in self._fixed:
            text, rest = complete_text(self._bytes_of(token_id)) if self._concatenates else ("", b"")
            is_fixed = text and not rest and REPLACEMENT not in text and token_id not in self.special_texts
            self._fixed[token_id] = text if is_fixed else None
        return self._fixed[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 of a token inside a text, which may be a part of a character. Cached."""
        encoded = self._encoded.get(token_id)
        if encoded is None:
            encoded = self._encoded[token_id] = self._bytes_of(token_id)
        return encoded

    def token_text(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """Return text and bytes of a token inside a text; the text has no incomplete character. Cached."""
        found = self._texts.get(token_id)
        if found is None:
            encoded = self.token_bytes(token_id)
            found = self._texts[token_id] = complete_text(encoded)[0], tuple(encoded)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if (byte := self._bytes.get(token_id)) is not None:
            return bytes([byte])
        name = self._tokenizer.id_to_token(token_id)
        if name is not None and self._byte_level and all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        # Decoders strip spaces at the beginning of a text, so the token is decoded after itself.
        return self.decode([token_id, token_id])[len(self.decode([token_id])) :].encode()

    @cached_property
    def _concatenates(self) -> bool:
        """Whether a text is the bytes of its tokens, one after another."""
        decoder = self._tokenizer.decoder
        return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"

    @cached_property
    def _byte_level(self) -> bool:
        """Whether the decoder reads each character of a token's name as a byte."""
        decoder = self._tokenizer.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of ``prompt`` that have text: all that the text of the following tokens can depend
        on."""
        found: list[int] = []
        for token in reversed(prompt):
            if self.has_text(token):
                found.append(token)
                if len(found) == _PROMPT_CONTEXT:
                    break
        return found[::-1]

    def _fallback_bytes(self) -> dict[int, int]:
        """Return the byte of each byte-fallback token; empty if the decoder takes ``<0x41>`` for ordinary text."""
        letter = self._tokenizer.token_to_id("<0x41>")
        if letter is None or self._tokenizer.decode([letter]) != "A":
            return {}
        ids = {byte: self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        return {token: byte for byte, token in ids.items() if token is not None}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt for a conversation, by the model's template or else ``chat_template.DEFAULT_TEMPLATE``.

        If a model has several templates, the one for tools is used with tools, else the default, as in transformers.

        Args:
            variables: Further variables of the template.
            continue_final_message: End with the last message's content, which the answer continues.

        Raises:
            RequestError: the template is invalid or uses no tools, a message is malformed, or the template rejects it;
                or the model has several templates and none of them is the default.
        """
        name = _TOOL_USE if tools and _TOOL_USE in self._templates else _DEFAULT
        template = self._compiled.get(name)
        if template is None:
            template = self._compiled[name] = self._compile(name)
        return template.render(messages, add_generation_prompt, tools, variables, continue_final_message)

    @cached_property
    def chat_format(self) -> "ChatFormat":
        """How the model writes tool calls and reasoning."""
        from lamina.text.chat_format import ChatFormat

        return ChatFormat.choose(self.chat_settings, "\n".join(self._templates.values()))

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        from lamina.text.chat_template import DEFAULT_TEMPLATE

        if self.chat_settings.template:
            return {_DEFAULT: self.chat_settings.template}
        if not self._own_templates:
            log.warning(
                'the model has no chat template: messages become lines of "role: content", which few models were '
                "trained on; give a template as --chat-template FILE"
            )
        return self._own_templates or {_DEFAULT: DEFAULT_TEMPLATE}

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """Result of the function ``most_bytes_per_token`` for this tokenizer."""
        return most_bytes_per_token(self._tokenizer)

    def _compile(self, name: str) -> "ChatTemplate":
        from lamina.text.chat_template import ChatTemplate  # saves 20% of the time to import the SDK

        source = self._templates.get(name)
        if source is None:
            raise RequestError(
                f"the model has chat templates named {', '.join(sorted(self._templates))}, but none named {name}; give "
                "one with --chat-template"
            )
        return ChatTemplate(source, self._special_tokens)


def complete_text(encoded: bytes) -> tuple[str, bytes]:
    """Return the text of ``encoded``, and the bytes of an incomplete character at its end."""
    try:
        return encoded.decode(), b""
    except UnicodeDecodeError:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(encoded), decoder.getstate()[0]


def check_unicode(text: str) -> int:
    """Return the length of ``text`` in UTF-8 bytes. Raises RequestError for a lone surrogate, which cannot be
    encoded."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: character {error.start} is {text[error.start]!r}, half of a surrogate "
            f"pair; remove it or send the whole pair"
        ) from None


def _special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token, ... of tokenizer_config.json, given as strings or objects with ``content``.

    Older checkpoints name them in special_tokens_map.json instead, which transformers reads under the same condition.
    """
    file = path / SPECIAL_TOKENS_MAP
    if "added_tokens_decoder" not in config and file.is_file():
        config = {**config, **read_json(file)}
    more = config.get("extra_special_tokens")
    tokens = {}
    for key, value in {**config, **(more if isinstance(more, dict) else {})}.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's templates by name: those in files of their own, or else those in tokenizer_config.json."""
    files = {file.name.removesuffix(".jinja"): file for file in (path / NAMED_TEMPLATES).glob("*.jinja")}
    if (path / CHAT_TEMPLATE).is_file():
        files[_DEFAULT] = path / CHAT_TEMPLATE
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {_DEFAULT: template} if isinstance(template, str) else {}


_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], most: int | None) -> None:
    """Add the tokens of ``config`` that ``tokenizer`` lacks, or does not know to be special.

    Checkpoints whose tokenizer_config.json was edited, or written by another program than tokenizer.json, have them.

    Args:
        config: tokenizer_config.json.
        most: Rows of the model's embedding. Tokens without a row are not added, so that their texts stay texts. None:
            not known.
    """
    known = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    for token in _tokens(config):
        missing = tokenizer.token_to_id(token.content) is None
        if known.get(token.content) in (token.special, True) or (missing and _is_full(tokenizer, most)):
            continue
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        known[token.content] = token.special


def _is_full(tokenizer: tokenizers.Tokenizer, most: int | None) -> bool:
    return most is not None and tokenizer.get_vocab_size() >= most


def _tokens(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens of a config in the order of their ids, then those that are special by their names."""
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, Mapping):
        ids = sorted((token_id for token_id in entries if token_id.isdecimal()), key=int)
        for entry in map(entries.__getitem__, ids):
            if text := _text(entry):
                yield tokenizers.AddedToken(text, **{name: bool(entry[name]) for name in _FLAGS if name in entry})
    for name in _NAMES:
        yield from _special(config.get(name))
    for name in _LISTS:
        more = config.get(name)
        for value in more.values() if isinstance(more, Mapping) else more if isinstance(more, list) else ():
            yield from _special(value)


def _special(value: Any) -> Iterator[tokenizers.AddedToken]:
    if text := _text(value):
        yield tokenizers.AddedToken(text, special=True, normalized=False)


def _text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
