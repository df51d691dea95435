"""Texts and bytes of logprobs against the text of the completion, with tokenizers of several kinds."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.control.frontend_messages import CompletionTokens
from lamina.control.packed_logprobs import pack
from lamina.core.outputs import FinishReason, Logprob
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.engine.updates import RequestText, RequestUpdate, TokenUpdate, UpdateSum
from lamina.models.directory import find
from lamina.serve.answers import Sent
from lamina.serve.openai_answers import ChatWriter, completion_choice
from lamina.serve.requests import GenerationRequest
from lamina.text.tokenizer import Tokenizer
from tests.models.small_tokenizers import KINDS, save

TEXTS = [" the cat sat", "the cat  sat", "naïve 你好 😀", "👩‍👩‍👧", "a\n\n  b\tc", "Привет", "日本 語"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {kind: Tokenizer(save(tmp_path_factory.mktemp(kind), make())) for kind, make in KINDS.items()}
    return made | {"bundled": Tokenizer(find(None))}


def count(tokenizer: Tokenizer) -> int:
    """Number of tokens, which have the ids from 0."""
    return 1 + next(one for one in range(100_000, -1, -1) if tokenizer.token(one) is not None)


def read(
    tokenizer: Tokenizer, prompt: list[int], drawn: list[int], likely: list[int], sizes: list[int], **params: Any
) -> list[RequestUpdate]:
    """The updates of a request that draws these tokens, which come in parts of ``sizes`` in turn, up to its limit."""
    updates: list[RequestUpdate] = []
    request = Request("r", None, prompt, SamplingParams(max_tokens=None, logprobs=len(likely), **params))
    reading = RequestText(request, tokenizer, updates.append, lambda name, index: None)
    at, turn = 0, 0
    while at < len(drawn):
        part = drawn[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(part), turn + 1
        packed = [
            pack([Logprob(token, -1.0, 9), *(Logprob(other, -2.0 - place, 0) for place, other in enumerate(likely))])
            for token in part
        ]
        ended = at >= len(drawn)
        tokens = CompletionTokens(0, part, packed, FinishReason.LENGTH if ended else None)
        reading.on_update(TokenUpdate([tokens], ended))
    return updates


def joined(tokenizer: Tokenizer, updates: list[RequestUpdate]) -> tuple[str, dict[str, list[Any]], list[Any]]:
    """(text, completion logprobs, chat logprobs) of all pieces together."""
    text, completion, chat = "", dict[str, list[Any]](), list[Any]()
    sent = Sent(tokenizer, GenerationRequest([], SamplingParams()))
    writer = ChatWriter(GenerationRequest([[]], SamplingParams()), "")
    for update in updates:
        for piece in sent.advance(0, update, most=3):
            text += piece.text
            for key, values in (completion_choice(piece)["logprobs"] or {}).items():
                completion.setdefault(key, []).extend(values)
            chat += ((writer.delta(piece) or {})["logprobs"] or {"content": []})["content"]
    return text, completion, chat


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
@pytest.mark.parametrize("prompt", ["", "say", "x 日"])
@pytest.mark.parametrize("sizes", [[1], [2, 1, 3]])
def test_tokens_and_bytes_join_to_the_text(
    kind: str, prompt: str, sizes: list[int], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    before = tokenizer.encode(prompt)
    for whole in TEXTS:
        drawn = tokenizer.encode(whole, add_special_tokens=False)
        drawn = [token for token in drawn if token not in tokenizer.special_texts]  # unknown characters, for unigram
        start = len(tokenizer.decode(before))
        expected = tokenizer.decode(before + drawn)[start:]
        text, completion, chat = joined(tokenizer, read(tokenizer, before, drawn, [3, 4], sizes))
        assert text == "".join(completion["tokens"]) == "".join(entry["token"] for entry in chat) == expected
        assert bytes(byte for entry in chat for byte in entry["bytes"]) == expected.encode()
        offset = 0
        for token, begins in zip(completion["tokens"], completion["text_offset"], strict=True):
            assert begins == offset
            offset += len(token)


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
@given(data=st.data())
def test_any_tokens_join_to_the_text_without_special_ones(
    kind: str, data: st.DataObject, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    token = st.integers(0, count(tokenizer) + 3)
    prompt, drawn = data.draw(st.lists(token, max_size=5)), data.draw(st.lists(token, max_size=20))
    drawn.append(tokenizer.encode("xa")[-1])  # has the text of a character that stays incomplete at the end
    updates = read(tokenizer, prompt, drawn, [], data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    text, completion, _ = joined(tokenizer, updates)
    ordinary = [
        name for token, name in zip(drawn, completion["tokens"], strict=True) if token not in tokenizer.special_texts
    ]
    assert "".join(ordinary) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "bundled"])
def test_every_candidate_keeps_its_entry(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    """The bytes of one character have no text each, and a byte token the text of an ordinary one."""
    tokenizer = tokenizers[kind]
    *parts, _ = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    letter = tokenizer.encode("xa", add_special_tokens=False)[-1]
    same = [token for token in range(count(tokenizer)) if tokenizer.token_bytes(token) == b"a" and token != letter]
    likely = [*dict.fromkeys([*parts, *same[:1], count(tokenizer) + 1]), letter]
    text, completion, chat = joined(tokenizer, read(tokenizer, tokenizer.encode("x"), [letter], likely, [1]))
    assert (text, completion["tokens"]) == ("a", ["a"])
    (top,) = completion["top_logprobs"]
    assert len(top) == len(likely), top
    assert sorted(top.values()) == [-2.0 - place for place in range(len(likely) - 1, -1, -1)]
    assert top["a"] == -2.0 - (len(likely) - 1), "the drawn token's own entry"
    assert [entry["bytes"] for entry in chat[0]["top_logprobs"]] == [
        list(tokenizer.token_bytes(token)) for token in likely
    ]


def test_candidates_for_the_rest_of_a_character_have_its_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    first, second, third = tokenizer.encode("x好", add_special_tokens=False)[-3:]
    _, completion, _ = joined(tokenizer, read(tokenizer, [], [first, second, third], [third], [1]))
    assert completion["tokens"] == ["", "", "好"]
    assert completion["top_logprobs"][2] == {"好": -2.0}


@example("ab", "c")
@given(st.text("ab", min_size=1, max_size=4), st.text("abc", min_size=1, max_size=4))
def test_tokens_of_a_stop_string_have_their_texts(tokenizers: dict[str, Tokenizer], text: str, stop: str) -> None:
    tokenizer = tokenizers["bundled"]
    drawn = [tokenizer.encode(letter)[0] for letter in text + stop]
    updates = read(tokenizer, tokenizer.encode("x"), drawn, [], [1], stop=[stop])
    whole = UpdateSum(tokenizer)
    for update in updates:
        whole.append_update(update)
    (output,) = whole.output().outputs
    assert output.logprobs is not None and output.text == (text + stop).partition(stop)[0]
    assert "".join(at[0].text for at in output.logprobs) == output.text + stop


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_written_out_and_have_no_place_in_a_text_without_them(
    skip: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers["byte_level"]
    (end,) = (token for token, text in tokenizer.special_texts.items() if text == "</s>")
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    updates = read(tokenizer, [a], [a, end, b], [end], [1], skip_special_tokens=skip)
    text, completion, chat = joined(tokenizer, updates)
    assert text == ("ab" if skip else "a</s>b")
    assert completion["tokens"] == ["a", "</s>", "b"]
    assert completion["text_offset"] == ([0, 1, 1] if skip else [0, 1, 5])
    assert bytes(chat[1]["bytes"]) == b"</s>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("at_once", [1, 9])
@pytest.mark.parametrize(
    ("stop", "include", "text", "found"),
    [
        (["</s>"], False, "a", "</s>"),
        (["a</s>"], False, "", "a</s>"),
        (["zz", "a</s>b"], False, "", "a</s>b"),
        (["a</s>b", "</s>"], False, "a", "</s>"),
        (["</s>b"], True, "a</s>b", "</s>b"),
        (["<unk>"], False, None, None),
    ],
)
def test_a_stop_string_may_be_the_text_of_a_special_token(
    stop: list[str],
    include: bool,
    text: str | None,
    found: str | None,
    at_once: int,
    skip: bool,
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    (end,) = (token for token, written in tokenizer.special_texts.items() if written == "</s>")
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    given: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include, "skip_special_tokens": skip}
    updates = read(tokenizer, [a], [a, end, b, b], [], [at_once], **given)
    whole = UpdateSum(tokenizer)
    for update in updates:
        whole.append_update(update)
    (output,) = whole.output().outputs
    assert output.text == (text if text is not None else "abb" if skip else "a</s>bb")
    assert output.stop_reason == found
    assert output.finish_reason is (FinishReason.LENGTH if found is None else FinishReason.STOP)
