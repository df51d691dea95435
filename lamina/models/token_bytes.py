"""Bounds the bytes of text that one token can represent, so that long texts can be rejected before tokenization.

Tokenizing takes a second and 100 MB per megabyte of text.
"""

import json
from collections.abc import Iterable
from typing import Any

import tokenizers

_NFC_SHRINKS = 9
"""A text has at most 9 times the bytes of its NFC: its NFD has at most 3 times those of the NFC (Unicode's FAQ on
normalization, UTF-8), and a character at most 3 times those of its NFD (U+212A, 3 bytes, becomes K)."""

_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
_BYTES = 256


def most_bytes_per_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The most UTF-8 bytes of text that become a single token; None if they are unbounded.

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
    """A normalizer or pre-tokenizer as in tokenizer.json; one implemented in Python cannot be serialized."""
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
    """The factor by which normalization may at most reduce a text's bytes; None if it is unbounded."""
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
