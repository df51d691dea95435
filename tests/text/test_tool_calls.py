"""Tool calls and reasoning in answers, whole and in pieces of every size."""

import json
import random
from typing import Any

import pytest

from lamina.core.types import ChatSettings
from lamina.text.chat_format import TAGS, TOOL_PARSERS, ChatFormat, ReasoningParser
from lamina.text.tool_calls import (
    AnswerParser,
    CallArguments,
    CallBegins,
    Content,
    JsonCalls,
    NamedCall,
    PlainText,
    Reasoning,
)
from lamina.text.tools import calls_parser

A = {"city": 'a "b" {c}\n', "n": [1, {"x": None}]}
CALLS = [("get", A), ("put", {})]


def one(key: str, name: str, arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments})


def tagged(function: str, argument: str) -> str:
    """All calls between tags; texts are written without quotes."""
    written = [
        (name, [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()])
        for name, arguments in CALLS
    ]
    calls = [function.format(name, "".join(argument.format(*pair) for pair in pairs)) for name, pairs in written]
    return "".join(f"<tool_call>{call}</tool_call>\n" for call in calls)


DEEP = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
FORMS: dict[str, tuple[str, str]] = {
    "hermes": ("hermes", "".join(f"<tool_call>\n{one('arguments', n, a)}\n</tool_call>\n" for n, a in CALLS)),
    "qwen3_coder": (
        "qwen3_coder",
        tagged("\n<function={}>\n{}</function>\n", "<parameter={}>\n{}\n</parameter>\n"),
    ),
    "glm45": ("glm45", tagged("{}\n{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")),
    "mistral list": ("mistral", "[TOOL_CALLS][" + ", ".join(one("arguments", n, a) for n, a in CALLS) + "]"),
    "mistral names": ("mistral", "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in CALLS)),
    "llama": ("llama3_json", "; ".join(one("parameters", n, a) for n, a in CALLS)),
    "llama tag": ("llama3_json", "<|python_tag|>" + "; ".join(one("parameters", n, a) for n, a in CALLS)),
    "deepseek v3": (
        "deepseek_v3",
        DEEP.format(
            "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
                for n, a in CALLS
            )
        ),
    ),
    "deepseek v3.1": (
        "deepseek_v3",
        DEEP.format(
            "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>" for n, a in CALLS)
        ),
    ),
}


def read(parser: AnswerParser, text: str, sizes: random.Random | None) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and the calls as names and arguments."""
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    events = []
    at = 0
    while at < len(text):
        size = len(text) if sizes is None else sizes.randint(1, 4)
        events += parser.append(text[at : at + size])
        at += size
    for event in events + parser.flush():
        match event:
            case Content(new):
                content += new
            case Reasoning(new):
                reasoning += new
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, new):
                assert index == len(calls) - 1
                calls[-1] = calls[-1][0], calls[-1][1] + new
    return content, reasoning, calls


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [None, *range(20)])
def test_calls_are_found_however_the_text_is_cut(form: str, seed: int | None) -> None:
    family, text = FORMS[form]
    sizes = None if seed is None else random.Random(seed)
    before = "" if family == "llama3_json" else "I look.\n"
    content, _, calls = read(TOOL_PARSERS[family](), before + text, sizes)
    assert content.strip() == before.strip()
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS


@pytest.mark.parametrize("family", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text", ["plain", "a <tool_call", '{"a": 1}', "<tool_call>no", "[TOOL_CALL", "", '{"name": 5}', "{", '{"na']
)
def test_what_is_no_call_is_content(family: str, text: str) -> None:
    for seed in (None, 1, 2):
        content, _, calls = read(TOOL_PARSERS[family](), text, None if seed is None else random.Random(seed))
        assert not calls and (content == text or (family == "hermes" and text.startswith("<tool_call>")))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        *((family, "See:\n```python\nx = 1\n```\nand ```y```") for family in TOOL_PARSERS),
        ("hermes", "a </tool_call> b"),
        ("hermes", "<tool_call>{bad}</tool_call>"),
        ("llama3_json", '{"name": "Bob", "age": 5}'),
        ("llama3_json", '{"name": "Bob"'),
        ("llama3_json", '{"city": "Rome", "name": "x", "n": {"parameters": 1}} yes'),
    ],
)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_what_resembles_a_call_is_content_unchanged(family: str, text: str, seed: int | None) -> None:
    sizes = None if seed is None else random.Random(seed)
    assert read(TOOL_PARSERS[family](), text, sizes) == (text, "", [])


@pytest.mark.parametrize(
    ("family", "begin", "piece", "end"),
    [
        ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>", "</function></tool_call>"),
        ("glm45", "<tool_call>f", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
        ("glm45", "<tool_call>f<arg_key>", "<arg_key>a</arg_key>", "</tool_call>"),
        ("mistral", "[TOOL_CALLS]f", " " * 16, "{}"),
    ],
)
def test_long_faulty_calls_are_read_in_linear_time(family: str, begin: str, piece: str, end: str) -> None:
    """Shorten waits that would take longer than a test may."""
    parser = TOOL_PARSERS[family]()
    events = [event for text in (begin, *[piece] * 20_000, end) for event in parser.append(text)]
    assert events + parser.flush() == [CallBegins(0, "f"), CallArguments(0, "{}")]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "[NaN]"])
def test_numbers_that_json_does_not_have_stay_texts(text: str) -> None:
    parser = TOOL_PARSERS["qwen3_coder"]()
    call = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
    assert parser.append(call)[1:] == [CallArguments(0, json.dumps({"a": text}))]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_text_after_a_call_is_content_as_written(seed: int | None) -> None:
    for form in ("hermes", "deepseek v3", "deepseek v3.1", "mistral names"):
        family, text = FORMS[form]
        code = "So:\n```sh\nls\n```\ndone"
        content, _, calls = read(TOOL_PARSERS[family](), text + code, None if seed is None else random.Random(seed))
        assert content.strip() == code and len(calls) == len(CALLS)


@pytest.mark.parametrize(
    ("family", "marker", "rest"),
    [("mistral", "[TOOL_CALLS]", "is a marker"), ("deepseek_v3", "<｜tool▁call▁begin｜>", "is a marker")],
)
def test_text_behind_a_marker_that_begins_no_call_is_content(family: str, marker: str, rest: str) -> None:
    assert read(TOOL_PARSERS[family](), "It " + marker + rest, None) == ("It " + rest, "", [])


def test_a_bare_object_with_a_name_alone_is_a_call_without_arguments() -> None:
    assert read(TOOL_PARSERS["llama3_json"](), '{"name": "now"}', None) == ("", "", [("now", "{}")])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}}
PIECES = (
    *("a", " ", "\n", "```", "{", "}", "[", "]", ",", ";", "function", '"name"', '{"name": "f"}', '{"a": 1}', "<tool"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": "{}"}', "<tool_call>", "</tool_call>"),
    *(
        "[TOOL_CALLS]",
        "f[ARGS]{}",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    *("g\n```json\n{}", "\n```", "<｜tool▁call▁end｜>", "<think>", "</think>"),
    *("<function=f>", "<parameter=a>", "\n<parameter=b>", "</parameter>", "</function>", "</function></tool_call>"),
    *("f<arg_key>a</arg_key>", "<arg_value>1", "</arg_value>", "</arg_value></tool_call>", "<function=", "<parameter="),
)


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_answers_of_any_pieces_are_read_alike_however_they_are_cut(family: str) -> None:
    draw, calls = random.Random(family), calls_parser("auto", family, [TOOL])
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 8)))
        whole, cut = (read(ReasoningParser(TAGS["deepseek_r1"], False, calls()), text, sizes) for sizes in (None, draw))
        assert whole == cut, text


def test_arguments_stream_before_they_are_complete() -> None:
    parser = TOOL_PARSERS["hermes"]()
    assert parser.append('<tool_call>{"name": "get"') == [CallBegins(0, "get")]
    assert parser.append(', "arguments": {"a": "x') == [CallArguments(0, '{"a": "x')]
    assert parser.append('y"}}</tool_call>') == [CallArguments(0, 'y"}')]
    assert parser.flush() == []


def test_arguments_that_are_text_or_missing() -> None:
    text = '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert read(TOOL_PARSERS["hermes"](), text, None)[2] == [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize("seed", [None, *range(5)])
@pytest.mark.parametrize("arguments", ["null", '""', '" "', "{}"])
def test_a_function_without_parameters_gets_an_object(arguments: str, seed: int | None) -> None:
    calls = [f'{{"name": "f", "arguments": {arguments}}}', f'{{"arguments": {arguments}, "name": "g"}}']
    text = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    sizes = None if seed is None else random.Random(seed)
    assert read(TOOL_PARSERS["hermes"](), text, sizes) == ("", "", [("f", "{}"), ("g", "{}")])


@pytest.mark.parametrize("member", ["name", "x", "arguments"])
def test_an_answer_that_is_nested_deeply_ends_no_request(member: str) -> None:
    deep = "[" * 10_000 + "]" * 10_000
    text = f'<tool_call>{{"{member}": {deep}, "a": 1}}</tool_call>'
    assert read(TOOL_PARSERS["hermes"](), text, None)[0].startswith("<tool_call>")


@pytest.mark.parametrize("seed", [None, *range(5)])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "<tool_call>\n"),
        ('<tool_call>\n{"name": "f", "arguments": {}}}\n</tool_call>\nDone.', "Done."),
    ],
    ids=["a marker too many", "a brace too many"],
)
def test_a_call_with_a_marker_or_a_brace_too_many(text: str, content: str, seed: int | None) -> None:
    sizes = None if seed is None else random.Random(seed)
    assert read(TOOL_PARSERS["hermes"](), text, sizes) == (content, "", [("f", "{}")])


def of_coder(*arguments: tuple[str, str], end: str = "</parameter>\n") -> str:
    """One call of ``f`` as Qwen3-Coder writes it, without ``<tool_call>``."""
    return "<function=f>\n" + "".join(f"<parameter={k}>\n{v}\n{end}" for k, v in arguments) + "</function>\n"


X, Y = of_coder(("a", "x")), of_coder(("b", "y"))


@pytest.mark.parametrize("seed", [None, *range(5)])
@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("qwen3_coder", f"{X}</tool_call>", [{"a": "x"}]),
        ("qwen3_coder", X, [{"a": "x"}]),
        ("qwen3_coder", f"<tool_call>{X}{Y}</tool_call>", [{"a": "x"}, {"b": "y"}]),
        ("qwen3_coder", f"<tool_call>{of_coder(('a', 'x'), ('b', 'y'), end='')}</tool_call>", [{"a": "x", "b": "y"}]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>" * 2, [{"a": "x"}] * 2),
    ],
    ids=["no <tool_call>", "no tags around", "two in one", "no </parameter>", "no </tool_call>"],
)
def test_calls_that_lack_markers_have_all_their_arguments(
    family: str, text: str, calls: list[Any], seed: int | None
) -> None:
    sizes = None if seed is None else random.Random(seed)
    content, _, found = read(calls_parser("auto", family, [TOOL])(), "So:\n" + text, sizes)
    assert content.strip() == "So:" and [name for name, _ in found] == ["f"] * len(calls)
    assert [json.loads(arguments) for _, arguments in found] == calls


@pytest.mark.parametrize("seed", [None, *range(5)])
@pytest.mark.parametrize(
    "value", ["</tool_call> x", "a </parameter> b", "a\n</function>\nb", "<tool_call>", "<function=g>"]
)
def test_values_may_contain_the_markers_of_calls(value: str, seed: int | None) -> None:
    sizes = None if seed is None else random.Random(seed)
    text = f"<tool_call>\n{of_coder(('a', value), ('b', 'y'))}</tool_call>"
    content, _, calls = read(calls_parser("auto", "qwen3_coder", [TOOL])(), text, sizes)
    assert content == "" and [json.loads(arguments) for _, arguments in calls] == [{"a": value, "b": "y"}]
    if "</parameter>" not in value:
        text = f"<tool_call>f<arg_key>a</arg_key>\n<arg_value>{value}</arg_value></tool_call>"
        content, _, calls = read(calls_parser("auto", "glm45", [TOOL])(), text, sizes)
        assert content == "" and [json.loads(arguments) for _, arguments in calls] == [{"a": value}]


def test_a_tag_alone_that_names_no_tool_is_content() -> None:
    text = "Write <function=NAME> and </function>."
    assert read(calls_parser("auto", "qwen3_coder", [TOOL])(), text, random.Random(1)) == (text, "", [])


PARAMETERS: Any = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"enum": ["1", "2"]},
    "number": {"type": "integer"},
    "flag": {"type": ["boolean", "null"]},
    "list": {"type": "array"},
    "shared": {"$ref": "#/$defs/Kind"},
    "both": {"allOf": [{"type": "string"}, {"description": "d"}]},
    "only": {"const": "3"},
    "odd": {"anyOf": 5},
    "circle": {"$ref": "#/$defs/Circle"},
}
DEFINED = {"Kind": {"enum": ["1", "2"]}, "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}] * 50}}
WRITTEN = {"text": "3", "maybe": "null", "kind": "1", "number": "3", "flag": "true", "list": '["a"]', "other": "x y"}
WRITTEN |= {"shared": "1", "both": "3", "only": "3", "odd": "3", "circle": "3"}
READ = {"text": "3", "maybe": None, "kind": "1", "number": 3, "flag": True, "list": ["a"], "other": "x y"}
READ |= {"shared": "1", "both": "3", "only": "3", "odd": 3, "circle": 3}
PYTHON = {"text": "None", "maybe": "None", "number": "None", "flag": "True", "list": "['a', None]", "other": "None"}
READ_PYTHON = {"text": "None", "maybe": None, "number": None, "flag": True, "list": ["a", None], "other": "None"}


@pytest.mark.parametrize(
    ("family", "form", "argument"),
    [
        ("qwen3_coder", "<function=f>{}</function>", "<parameter={}>{}</parameter>"),
        ("glm45", "f{}", "<arg_key>{}</arg_key><arg_value>{}</arg_value>"),
    ],
)
@pytest.mark.parametrize(("written", "expected"), [(WRITTEN, READ), (PYTHON, READ_PYTHON)], ids=["JSON", "Python"])
def test_values_between_tags_have_the_types_of_the_tool(
    family: str, form: str, argument: str, written: dict[str, str], expected: Any
) -> None:
    """Qwen3-Coder's template shows the model Python's forms of earlier values."""
    parameters = {"properties": PARAMETERS, "$defs": DEFINED}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = form.format("".join(argument.format(*pair) for pair in written.items()))
    parser = calls_parser("auto", family, tools)()
    ((name, arguments),) = read(parser, f"<tool_call>{text}</tool_call>", None)[2]
    assert (name, json.loads(arguments)) == ("f", expected)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("qwen3_coder", "<tool_call><function=f></function>", [("f", "{}")]),  # ends without the last tag
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", []),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', []),
        ("glm45", "<tool_call>f</tool_call>", [("f", "{}")]),
        ("glm45", "<tool_call>not a call</tool_call>", []),
    ],
)
def test_calls_between_tags_that_are_cut_off_or_none_at_all(
    family: str, text: str, calls: list[tuple[str, str]]
) -> None:
    content, _, found = read(TOOL_PARSERS[family](), text, None)
    assert (content, found) == ("" if calls else text, calls)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<tool_call>\n<function=example_function_name>\n<parameter=p>", "qwen3_coder"),
        ("<tool_call>{{ call.name }}<arg_key>", "glm45"),
        ("<tool_calls><tool_call>{{ call.name }}<tool_sep>", None),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("", None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, family: str | None) -> None:
    assert ChatFormat.choose(ChatSettings(), template).tools == family


def test_calls_that_a_grammar_has_enforced() -> None:
    text = json.dumps([{"name": n, "parameters": a} for n, a in CALLS], indent=1)
    for seed in range(10):
        assert [(n, json.loads(a)) for n, a in read(JsonCalls(), text, random.Random(seed))[2]] == CALLS
        ((name, arguments),) = read(NamedCall("f"), json.dumps(A), random.Random(seed))[2]
        assert name == "f" and json.loads(arguments) == A


@pytest.mark.parametrize("seed", [None, *range(10)])
@pytest.mark.parametrize("inside", [True, False])
def test_reasoning_is_divided_from_the_answer(seed: int | None, inside: bool) -> None:
    sizes = None if seed is None else random.Random(seed)
    text = ("" if inside else "<think>\n") + "I < think\n</think>\n\nYes </think> <think>."
    parser = ReasoningParser(TAGS["deepseek_r1"], inside, PlainText())
    assert read(parser, text, sizes) == ("Yes </think> <think>.", "I < think\n", [])
    if not inside:
        plain = ReasoningParser(TAGS["deepseek_r1"], inside, PlainText())
        assert read(plain, " no <think>", sizes) == (" no <think>", "", [])


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm45", "mistral list", "deepseek v3"])
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_calls_that_end_reasoning_that_never_ends_are_found(form: str, seed: int | None) -> None:
    family, text = FORMS[form]
    sizes = None if seed is None else random.Random(seed)
    marker = TOOL_PARSERS[family].begin
    for thought in ("I call.\n", f"A {marker} would do.\n"):
        parser = ChatFormat(family, TAGS["deepseek_r1"]).parser("<think>", calls_parser("auto", family, []))()
        content, reasoning, calls = read(parser, thought + text, sizes)
        assert (content, reasoning) == ("", thought + text)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS
    for whole in (text + "Or not?", text + "</think>Yes."):
        parser = ChatFormat(family, TAGS["deepseek_r1"]).parser("<think>", calls_parser("auto", family, []))()
        assert read(parser, whole, sizes)[2] == []
    assert read(ChatFormat(family, TAGS["deepseek_r1"]).parser("<think>", None)(), text, sizes)[2] == []
