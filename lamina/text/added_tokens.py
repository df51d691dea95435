"""Adds to a tokenizer the tokens that tokenizer_config.json has beyond tokenizer.json, as transformers does."""

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

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
