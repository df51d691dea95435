"""How many tokens of an answer are reasoning, whole and in streams, and what requests leave out."""

from collections.abc import Callable

import pytest

from lamina.text.answer_reader import AnswerReader
from lamina.text.channels import ChannelAnswer
from lamina.text.chat_format import TAGS, ReasoningParser
from lamina.text.tool_calls import AnswerParser, Content, HermesCalls, PlainText, Reasoning

THINK = TAGS["deepseek_r1"]
ANSWERS: dict[str, tuple[Callable[[], AnswerParser], list[str], int]] = {
    "tags": (lambda: ReasoningParser(THINK, False, PlainText()), ["<think>", "\n", "a", "", "b", "</think>", "c"], 4),
    "opened by the prompt": (
        lambda: ReasoningParser(THINK, True, HermesCalls()),
        ["a", "b", "</think>", "\n\n", "c"],
        2,
    ),
    "none": (lambda: ReasoningParser(THINK, False, HermesCalls()), ["a", "b"], 0),
    "cut off": (lambda: ReasoningParser(THINK, True, PlainText()), ["a", "b"], 2),
    "channels": (
        lambda: ChannelAnswer("<|start|>assistant"),
        [
            *("<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "final", "<|message|>", "c", "<|return|>"),
        ],
        2,
    ),
    "no reasoning": (HermesCalls, ["a", "b"], 0),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_tokens_within_reasoning_are_counted(name: str, size: int) -> None:
    make_parser, texts, expected = ANSWERS[name]
    readers = [AnswerReader(make_parser()), AnswerReader(make_parser(), with_reasoning=False)]
    events = []
    for at in range(0, len(texts), size):
        for reader in readers:
            events = reader.read_tokens(texts[at : at + size], "", last=at + size >= len(texts))
    assert [reader.reasoning_tokens for reader in readers] == [expected, expected]
    assert readers[0].reasons == (name != "no reasoning")
    assert not any(isinstance(event, Reasoning) for event in events)


def test_text_after_the_last_token_is_read() -> None:
    reader = AnswerReader(ReasoningParser(THINK, True, PlainText()))
    assert reader.read_tokens(["a", "</think>", "b"], "\ufffd", last=True) == [Reasoning("a"), Content("b\ufffd")]
