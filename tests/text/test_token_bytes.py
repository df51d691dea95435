"""No text has more bytes than its tokens times the bound; tokenizers that drop text have no bound."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from lamina.models.directory import find
from lamina.text.tokenizer import most_bytes_per_token

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*tokens: str, normalizer: Any = None, **kwargs: Any) -> tokenizers.Tokenizer:
    """A byte-level BPE of 256 bytes and merges that make ``tokens`` of pairs."""
    vocabulary = {token: index for index, token in enumerate([*ALPHABET, *tokens])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [(token[:-1], token[-1]) for token in tokens], **kwargs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def with_fallback(pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    tokens = [*BYTE_TOKENS, "▁", "a", "▁a", "é"]
    made = tokenizers.Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [("▁", "a")], byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    return made


BOUNDED = {
    "bundled": tokenizers.Tokenizer.from_file(str(find(None).path / "tokenizer.json")),
    "byte_level": byte_level("ab", "abc"),
    "nfc": byte_level(normalizer=normalizers.NFC()),
    "fallback": with_fallback(),
    "unigram": tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("ab", -1.0), *((t, -9.0) for t in BYTE_TOKENS)], 0, True)
    ),
}

TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab \n-é\u212a\u1fef\u0301\u2126")), max_size=60)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXT)
def test_no_text_has_more_bytes_than_the_bound_says(name: str, text: str) -> None:
    made = BOUNDED[name]
    bound = most_bytes_per_token(made)
    assert bound is not None
    assert len(text.encode()) <= bound * len(made.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_reached() -> None:
    made = BOUNDED["bundled"]
    longest = max(made.get_vocab(), key=len)
    assert most_bytes_per_token(made) == len(longest)
    assert len(made.encode(made.decode(made.encode("-" * 32).ids)).ids) == 1


def added(token: AddedToken) -> tokenizers.Tokenizer:
    made = byte_level()
    made.add_tokens([token])
    return made


UNBOUNDED = {
    "drops unknown characters": tokenizers.Tokenizer(models.BPE({"a": 0}, [])),
    "one token for any word": tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]")),
    "drops whitespace": with_fallback(pre_tokenizers.Whitespace()),
    "drops what splits": with_fallback(pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed")])),
    "lacks a byte": byte_level(normalizer=normalizers.StripAccents()),
    "joins spaces": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "shortens": byte_level(normalizer=normalizers.Replace("long", "s")),
    "takes blanks along": added(AddedToken("<mask>", lstrip=True)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_drops_text_has_no_bound(name: str) -> None:
    assert most_bytes_per_token(UNBOUNDED[name]) is None


def test_a_long_added_token_counts() -> None:
    assert most_bytes_per_token(added(AddedToken("<" + "x" * 50 + ">"))) == 52
