"""The channels of gpt-oss: answers whole and in pieces of every size, and what grammars of such answers allow."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from lamina.compute.constraints import Grammars
from lamina.core.errors import RequestError
from lamina.core.sampling import StructuredOutputs
from lamina.core.types import ChatSettings
from lamina.text.channels import MARKERS, ChannelAnswer
from lamina.text.chat_format import TOOL_PARSERS, ChatFormat
from lamina.text.chats import prepare_chat
from lamina.text.tools import NamedFunction, NamedTool, forced_calls
from tests.text.test_tool_calls import CALLS, FORMS, read

PROMPT = "<|start|>system<|message|>You are.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>We < must.<|end|>"
NEXT = "<|start|>assistant"
ANSWERS: dict[str, tuple[str, tuple[str, str, list[tuple[str, str]]]]] = {
    # As OpenAI's description of the format has them: https://cookbook.openai.com/articles/openai-harmony
    "final": (THOUGHT + NEXT + "<|channel|>final<|message|>2 + 2 = 4.<|return|>", ("2 + 2 = 4.", "We < must.", [])),
    "no reasoning": ("<|channel|>final<|message|>Hi <|x|>", ("Hi <|x|>", "", [])),
    "call": (
        THOUGHT + NEXT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": "<"}<|call|>',
        ("", "We < must.", [("look", '{"a": "<"}')]),
    ),
    "recipient in the role": (
        THOUGHT + NEXT + " to=functions.look<|channel|>commentary json<|message|>{}",
        ("", "We < must.", [("look", "{}")]),
    ),
    "preamble": (
        "<|channel|>commentary<|message|>I look.<|end|>"
        + NEXT
        + "<|channel|>commentary to=functions.look<|message|><|call|>",
        ("I look.", "", [("look", "{}")]),
    ),
    "several": (
        "<|channel|>commentary to=functions.a<|message|>1<|call|>" + NEXT + "<|channel|>commentary to=b<|message|>2",
        ("", "", [("a", "1"), ("b", "2")]),
    ),
    "no end": (THOUGHT.removesuffix("<|end|>") + "<|channel|>final<|message|>Yes", ("Yes", "We < must.", [])),
    "cut in a header": (THOUGHT + NEXT + "<|channel|>fin", ("", "We < must.", [])),
    "headers without a message": (
        "<|channel|>analysis<|end|>" + NEXT + "<|channel|>final<|message|>Hi",
        ("Hi", "", []),
    ),
    "a marker as text, which nothing follows": (
        "<|channel|>final<|message|>I like <|channel|> markers, and more",
        ("I like <|channel|> markers, and more", "", []),
    ),
    "a header that never ends": (
        "<|channel|>analysis " + 300 * "z",
        ("<|channel|>analysis " + 300 * "z", "", []),
    ),
    "a marker as text, which much follows": (
        "<|channel|>final<|message|>So <|channel|>" + 300 * "z" + "<|channel|>final<|message|>!",
        ("So <|channel|>" + 300 * "z" + "!", "", []),
    ),
    "no format": ("Hello <|you", ("Hello <|you", "", [])),
    "empty": ("", ("", "", [])),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("seed", [None, *range(20)])
def test_answers_are_divided_however_the_text_is_cut(answer: str, seed: int | None) -> None:
    text, expected = ANSWERS[answer]
    assert read(ChannelAnswer(PROMPT), text, None if seed is None else random.Random(seed)) == expected


def test_an_answer_may_continue_a_message() -> None:
    for prompt in (PROMPT + "<|channel|>final<|message|>So", "no format: So"):
        assert read(ChannelAnswer(prompt), " it is.", None) == (" it is.", "", [])
    assert read(ChannelAnswer(PROMPT + "<|channel|>analysis<|message|>So"), " it is.", None) == ("", " it is.", [])
    assert read(ChannelAnswer(PROMPT + "<|channel|>final<|message|>if a <"), " b", None) == (" b", "", [])
    call = PROMPT + "<|channel|>commentary to=functions.look<|message|>"
    assert read(ChannelAnswer(call), "{}", None) == ("{}", "", [])
    assert read(ChannelAnswer(PROMPT + "<|channel|>" + 300 * "z"), "!", None) == ("!", "", [])


def test_text_without_the_format_is_content_although_it_is_long() -> None:
    text = "plain " * 100
    assert read(ChannelAnswer(PROMPT), text, random.Random(1)) == (text, "", [])


def test_arguments_stream_before_they_are_complete() -> None:
    parser = ChannelAnswer(PROMPT)
    assert parser.append("<|channel|>commentary to=functions.look<|mess") == []
    assert [len(parser.append(text)) for text in ('age|>{"a', '": 1', "}<|ca", "ll|>")] == [2, 1, 1, 0]


@pytest.mark.parametrize(
    ("settings", "template", "channels"),
    [
        (ChatSettings(), "<|start|>assistant<|channel|>final<tool_call>", True),
        (ChatSettings(tool_call_parser="openai"), "", True),
        (ChatSettings(reasoning_parser="openai_gptoss"), "", True),
        (ChatSettings(tool_call_parser="hermes"), "<|channel|>", False),
        (ChatSettings(), "<tool_call>", False),
    ],
)
def test_the_template_or_the_settings_say_that_a_model_writes_channels(
    settings: ChatSettings, template: str, channels: bool
) -> None:
    form = ChatFormat.choose(settings, template)
    assert form.channels is channels
    assert form.needs_special(MARKERS, with_tools=False) is channels


class Tokens:
    """One token per character of ASCII, and special tokens."""

    def __init__(self, special: Sequence[str] = MARKERS) -> None:
        self.special_texts = {128 + place: text for place, text in enumerate(special)}

    def token(self, token_id: int) -> str | None:
        return self.special_texts.get(token_id, chr(token_id)) if token_id < 128 + len(self.special_texts) else None

    def token_bytes(self, token_id: int) -> bytes:
        return (self.token(token_id) or "").encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            found = next(
                (token for token, marker in self.special_texts.items() if text.startswith(marker)), ord(text[0])
            )
            ids.append(found)
            text = text[len(self.special_texts.get(found, " ")) :]
        return ids


EOS = {128 + MARKERS.index("<|call|>"), 128 + MARKERS.index("<|return|>")}


def allows(wanted: StructuredOutputs, answer: str, special: Sequence[str] = MARKERS) -> bool:
    """Whether ``answer`` may be drawn, and may end there."""
    tokens = Tokens(special)
    grammars: Any = Grammars(lambda: tokens, sorted(EOS))  # type: ignore[arg-type, return-value]
    matcher = grammars.begin(wanted, 256).matcher
    ids = tokens.encode(answer)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


LOOK: Mapping[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": {"city": {"enum": ["x"]}}}}
TOOLS: Any = [{"type": "function", "function": LOOK}, {"type": "function", "function": {"name": "stop"}}]
FORM = ChatFormat("openai", None, channels=True)


def call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


@pytest.mark.parametrize("before", ["", THOUGHT + NEXT])
def test_calls_that_are_required_come_in_their_channel(before: str) -> None:
    wanted = forced_calls(TOOLS, "required", True, FORM, PROMPT)
    assert wanted is not None
    assert allows(wanted, before + call("look", '{"city": "x"}')) and allows(wanted, before + call("stop", "{}"))
    assert not allows(wanted, before + call("look", '{"city": "y"}'))
    assert not allows(wanted, before + call("jump", "{}"))
    assert not allows(wanted, before + "<|channel|>final<|message|>No.")
    named = forced_calls(TOOLS, NamedTool(NamedFunction("stop")), True, FORM, PROMPT)
    assert named is not None
    assert allows(named, before + call("stop", "{}")) and not allows(named, before + call("look", "{}"))


@pytest.mark.parametrize(
    ("wanted", "fits", "fails"),
    [
        (StructuredOutputs(json={"type": "integer"}), "12", "x"),
        (StructuredOutputs(regex="a/[0-9]+"), "a/1", "a1"),
        (StructuredOutputs(choice=("yes", "no")), "no", "maybe"),
        (StructuredOutputs(grammar='start: "<" digit ">"\ndigit: /[0-9]/'), "<1>", "<>"),
        (StructuredOutputs(grammar='root ::= "<" [0-9] ">"'), "<1>", "<>"),
    ],
    ids=["json", "regex", "choice", "lark", "gbnf"],
)
def test_structured_outputs_hold_for_the_final_message(wanted: StructuredOutputs, fits: str, fails: str) -> None:
    form = FORM.constrain(wanted, PROMPT)
    final = "<|channel|>final<|message|>"
    for before in (final, THOUGHT + NEXT + final):
        assert allows(form, before + fits) and not allows(form, before + fails)
    assert not allows(form, fits)
    assert allows(FORM.constrain(wanted, PROMPT + final), fits)
    thinks = FORM.constrain(wanted, PROMPT + "<|channel|>analysis<|message|>Hm")
    assert allows(thinks, ", so.<|end|>" + NEXT + final + fits)
    assert not allows(thinks, fits) and not allows(thinks, "<|end|>" + NEXT + final + fails)
    think = ChatFormat("hermes", ("<think>", "</think>"))
    inside = think.constrain(wanted, "<think>\n")
    assert allows(inside, "hm 7</think>" + fits) and not allows(inside, fits)
    assert think.constrain(wanted, "") == wanted


ANSWER = StructuredOutputs(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [True, False])
def test_a_call_may_take_the_place_of_an_answer_that_must_match(form: str, special: bool) -> None:
    """Calls begin with a special token, or with its text, as the model has it."""
    family, text = FORMS[form]
    marker = TOOL_PARSERS[family].first or TOOL_PARSERS[family].begin
    if not (special or marker.isascii()):
        pytest.skip("these models have special tokens for calls")
    text, markers = text.replace("｜", "|").replace("▁", "_"), [*MARKERS, marker] if special else MARKERS
    text = text.replace(marker.replace("｜", "|").replace("▁", "_"), marker)
    text = text.partition("; ")[0] if form == "llama" else text
    tools: Any = [{"type": "function", "function": {"name": name}} for name, _ in CALLS]
    for prompt, thought in (("", ""), ("<think>", "So.</think>")):
        chat = ChatFormat(family, ("<think>", "</think>"))
        wanted = chat.constrain(ANSWER, prompt, tools, Tokens(markers).special_texts)
        for answer in (text, '{"n": 1}'):
            assert allows(wanted, thought + answer, markers), answer
        for answer in ("Hm. " + text, '{"m": 1}', ""):
            assert not allows(wanted, thought + answer, markers), answer
        assert not allows(chat.constrain(ANSWER, prompt), thought + text, markers)


def test_a_call_may_take_the_place_of_a_final_message_that_must_match() -> None:
    wanted = FORM.constrain(ANSWER, PROMPT, TOOLS)
    for before in ("", THOUGHT + NEXT):
        assert allows(wanted, before + call("stop", "{}")) and allows(
            wanted, before + '<|channel|>final<|message|>{"n": 1}'
        )
        assert not allows(wanted, before + "<|channel|>final<|message|>No.")
    assert not allows(FORM.constrain(ANSWER, PROMPT), call("stop", "{}"))


def test_the_answer_of_a_required_call_is_read_as_a_call() -> None:
    text = THOUGHT + NEXT + call("look", '{"city": "x"}')
    (found,) = read(FORM.parser(PROMPT, None)(), text, None)[2]
    assert found[0] == "look" and json.loads(found[1]) == {"city": "x"}


def test_a_schema_that_leads_to_itself_is_rejected_within_channels_too() -> None:
    tokenizer = Mock(chat_format=FORM)
    tokenizer.apply_chat_template.return_value = PROMPT
    with pytest.raises(RequestError, match="json cannot be compiled"):
        prepare_chat(tokenizer, [], 100, response_format={"$ref": "#"})
