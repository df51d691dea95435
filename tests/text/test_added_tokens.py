"""Tokens that tokenizer_config.json has beyond tokenizer.json, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from lamina.models.directory import ModelDirectory
from lamina.text.tokenizer import Tokenizer
from tests.models.small_tokenizers import byte_level

TEXTS = ["a<x>b <y> c</s>", "<x><x>", "<y>é", "plain"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}


def entry(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


def directory(path: Path, stored: list[AddedToken], config: dict[str, Any], rows: int | None = None) -> ModelDirectory:
    tokenizer = byte_level()
    tokenizer.add_tokens(stored)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(NAMES | config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return ModelDirectory(path, "m", {} if rows is None else {"vocab_size": rows})


FIRST = byte_level().get_vocab_size()
CASES: dict[str, tuple[list[AddedToken], dict[str, Any]]] = {
    "as stored": ([AddedToken("<x>"), AddedToken("<y>", special=True)], {}),
    "only in the config": (
        [],
        {"added_tokens_decoder": {str(FIRST + 1): entry("<y>", special=True), str(FIRST): entry("<x>")}},
    ),
    "special in the config": (
        [AddedToken("<x>")],
        {"added_tokens_decoder": {str(FIRST): entry("<x>", special=True)}},
    ),
    "special where it is stored": (
        [AddedToken("<x>", special=True)],
        {"added_tokens_decoder": {str(FIRST): entry("<x>")}},
    ),
    "strips": ([], {"added_tokens_decoder": {str(FIRST): entry("<y>", special=True, lstrip=True, rstrip=True)}}),
    "by an old list": ([], {"additional_special_tokens": ["<x>", "<y>"]}),
    "by a list": ([AddedToken("<x>")], {"extra_special_tokens": ["<y>"]}),
    "by a name": ([], {"extra_special_tokens": {"x_token": "<x>"}}),
    "end of sequence": ([], {"eos_token": "<x>"}),
    "end of sequence that is stored as a plain token": ([AddedToken("<x>")], {"eos_token": "<x>"}),
    "end of sequence of the vocabulary": ([], {"eos_token": "a"}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    stored, config = CASES[case]
    ours = Tokenizer(directory(tmp_path, stored, config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_ids == {theirs.eos_token_id}


def test_a_token_without_a_row_in_the_embedding_stays_text(tmp_path: Path) -> None:
    config = {"pad_token": "<y>", "added_tokens_decoder": {str(FIRST): entry("<x>", special=True)}}
    ours = Tokenizer(directory(tmp_path, [], config, rows=FIRST + 1))
    assert ours.encode("<x>") == [FIRST]
    assert max(ours.encode("<y>")) < FIRST and ours.decode(ours.encode("<y>")) == "<y>"
