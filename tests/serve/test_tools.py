"""Tools and reasoning in chats: what the model is shown, what it must match, and the answers clients get."""

import json
from typing import Any

import openai
import pytest

from lamina.core.sampling import StructuredOutputs
from lamina.text.chat_format import ChatFormat
from tests.support.scripted_engine import CHAT, FakeTokenizer, Running, refusal, script, script_template
from tests.text.test_channels import allows

USER: Any = [{"role": "user", "content": "a"}]
PARAMETERS = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"enum": ["x"]}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if effort %}({{ effort }}{{ reasoning_effort }}){% endif %}{% if add_generation_prompt %}<go>{% endif %}"
)


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    script_template(monkeypatch, TEMPLATE)


TEXT = 'Hm.<tool_call>{"name": "look", "arguments": {"city": "x"}}</tool_call><tool_call>{"name": "stop"}</tool_call>'


def test_calls_are_found_in_an_answer(client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "<think>\nSo.</think>\n" + TEXT)
    answer = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, n=2)
    assert server.last_prompt() == "[look][stop]<user>a<go>"
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
        assert choice.message.model_extra == {"reasoning_content": "So."}
        assert choice.message.tool_calls is not None
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [("look", '{"city": "x"}'), ("stop", "{}")]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len({*ids}) == 4


@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}])
def test_usage_has_the_tokens_of_reasoning(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Tokens have seven characters here: one is the opening tag, the last one the end of the closing tag and more."""
    script(monkeypatch, "<think>1234567" + "1234567" + "</think" + ">Hm.")
    asked: Any = {"model": "fake", "messages": USER, "n": 2, "extra_body": more}
    whole = client.chat.completions.create(**asked).usage
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for usage in (whole, chunks[-1].usage):
        assert usage is not None and usage.completion_tokens_details is not None
        assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (10, 6)
    answer = client.responses.create(model="fake", input="a")
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == 3
    monkeypatch.setattr(FakeTokenizer, "chat_format", ChatFormat("hermes", None))
    plain = client.chat.completions.create(**asked).usage
    assert plain is not None and plain.completion_tokens_details is None


def test_calls_stream_as_deltas(client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, TEXT)
    with client.chat.completions.stream(model="fake", messages=USER, tools=TOOLS) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or ()] == [
        ("look", '{"city": "x"}'),
        ("stop", "{}"),
    ]
    assert message.content == "Hm."
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) >= 2


def test_without_parallel_calls_only_the_first_is_answered(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, TEXT)
    given: Any = {"model": "fake", "messages": USER, "tools": TOOLS, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(**given).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
    with client.chat.completions.stream(**given) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (choice.message, streamed):
        calls: Any = message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [("look", '{"city": "x"}')]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_enforced(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    script(monkeypatch, '[{"name": "look", "parameters": {"city": "x"}}]')
    answer = client.chat.completions.create(
        model="fake", messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel
    )
    call: Any
    (call,) = answer.choices[0].message.tool_calls or [None]
    assert (call.function.name, call.function.arguments) == ("look", '{"city": "x"}')
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None
    schema = json.loads(params.structured_outputs.json)
    assert schema["minItems"] == 1 and schema.get("maxItems") == (None if parallel else 1)
    assert [part["properties"]["name"]["const"] for part in schema["items"]["anyOf"]] == ["look", "stop"]
    reference = schema["items"]["anyOf"][0]["properties"]["parameters"]["properties"]["city"]["$ref"]
    assert schema["$defs"] == {reference.removeprefix("#/$defs/"): {"enum": ["x"]}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"city": {"enum": ["x"]}, "other": {"$ref": "#/properties/city"}}},
        {
            "properties": {"city": {"$ref": "#/$defs/a/properties/b"}},
            "$defs": {"a": {"properties": {"b": {"enum": ["x"]}}}},
        },
        {"properties": {"city": {"enum": ["x"]}, "next": {"$ref": "#"}}},
        {"$id": "https://a.example/b", "properties": {"city": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"enum": ["x"]}}},
    ],
    ids=["a property", "within a definition", "itself", "with an id"],
)
def test_parameters_of_required_calls_may_refer_to_parts_of_themselves(server: Running, parameters: Any) -> None:
    tools = [
        TOOLS[1],
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object", **parameters}}},
    ]
    assert server.post(CHAT, messages=USER, tools=tools, tool_choice="required").status_code == 200
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None
    for city, fits in (("x", True), ("y", False)):
        for arguments in (
            {"city": city},
            {"next": {"city": city}} if "next" in parameters["properties"] else {"city": city},
        ):
            assert allows(params.structured_outputs, json.dumps([{"name": "look", "parameters": arguments}])) is fits


def test_tools_may_be_called_instead_of_an_answer_with_a_form(server: Running) -> None:
    asked: Any = {"messages": USER, "tools": TOOLS, "response_format": {"type": "json_object"}}
    for choice in ("auto", "none"):
        assert server.post(CHAT, **asked, tool_choice=choice).status_code == 200
        wanted = server.engine.submitted[-1][1].structured_outputs
        assert wanted is not None and allows(wanted, "{}") and not allows(wanted, "Hm.")
        assert allows(wanted, TEXT.removeprefix("Hm.")) is (choice == "auto")
    assert server.post(CHAT, messages=USER, tools=TOOLS, guided_regex="[a-z]").status_code == 200
    assert server.engine.submitted[-1][1].structured_outputs == StructuredOutputs(regex="[a-z]")


def test_a_named_call_is_enforced(client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, '{"city": "x"}')
    choice: Any = {"type": "function", "function": {"name": "look"}}
    answer = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, tool_choice=choice)
    call: Any
    (call,) = answer.choices[0].message.tool_calls or [None]
    assert (call.function.name, call.function.arguments) == ("look", '{"city": "x"}')
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None and json.loads(params.structured_outputs.json) == PARAMETERS


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("responses", [False, True])
def test_only_allowed_tools_are_shown(server: Running, mode: str, responses: bool) -> None:
    if responses:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "stop"}]}
        assert server.post("/v1/responses", input="a", tools=tools, tool_choice=choice).status_code == 200
    else:
        named = [{"type": "function", "function": {"name": "stop"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        assert server.post(CHAT, messages=USER, tools=TOOLS, tool_choice=choice).status_code == 200
    assert server.last_prompt() == "[stop]<user>a<go>"
    ((_, params),) = server.engine.submitted
    assert (params.structured_outputs is not None) is (mode == "required")
    if params.structured_outputs is not None:
        for name in ("stop", "look"):
            call = json.dumps([{"name": name, "parameters": {}}])
            assert allows(params.structured_outputs, call) is (name == "stop")


@pytest.mark.parametrize(
    "given",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "bad"}}},
        {"response_format": {"type": "json_object"}},
    ],
)
@pytest.mark.parametrize("channels", [False, True])
def test_errors_of_parameters_name_the_function(
    server: Running, monkeypatch: pytest.MonkeyPatch, given: Any, channels: bool
) -> None:
    if channels:
        monkeypatch.setattr(FakeTokenizer, "chat_format", ChatFormat("openai", None, channels=True))
        script_template(monkeypatch, "{{ tools }}<|start|>assistant")
    elif "response_format" in given:
        pytest.skip("only answers in channels match the parameters of calls that the model chooses")
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": parameters}}]
    error = refusal(server.post(CHAT, messages=USER, tools=tools, **given), 400)
    assert error["message"].startswith("tools: the parameters of 'bad': cannot be compiled at #/properties/a: ")
    assert error["param"] == "tools"


def test_an_answer_may_continue_reasoning(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "So.</think>{}")
    given: Any = {"continue_final_message": True, "response_format": {"type": "json_object"}}
    for text, reasoning in (("<think>I s", "So."), ("<think>I see</think>It", None), ("It", None)):
        messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": text}]
        message = server.post(CHAT, messages=messages, **given).json()["choices"][0]["message"]
        assert server.last_prompt() == f"<user><think><assistant>{text}"
        assert message.get("reasoning_content") == reasoning, text
        assert message["content"] == ("{}" if reasoning else "So.</think>{}")
        wanted = server.engine.submitted[-1][1].structured_outputs
        assert wanted is not None and allows(wanted, "So.</think>{}") is (reasoning is not None)


def test_a_forced_call_may_follow_reasoning(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script_template(monkeypatch, "{{ tools[0] }}<think>\n")
    script(monkeypatch, 'So.</think>[{"name": "stop", "parameters": {}}]')
    message = server.post(CHAT, messages=USER, tools=TOOLS, tool_choice="required").json()["choices"][0]["message"]
    assert message["reasoning_content"] == "So." and message["tool_calls"][0]["function"]["name"] == "stop"
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None and params.structured_outputs.grammar is not None


def test_a_schema_holds_for_what_follows_reasoning(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script_template(monkeypatch, "<think>\n")
    script(monkeypatch, "So.</think>{}")
    message = server.post(CHAT, messages=USER, response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "So." and message["content"] == "{}"
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None and "</think>" in (params.structured_outputs.grammar or "")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_channels_of_gpt_oss(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_format", ChatFormat("openai", None, channels=True))
    script_template(monkeypatch, "{{ tools }}<|start|>assistant")
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    script(monkeypatch, thought + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "x"}')
    with client.chat.completions.stream(model="fake", messages=USER, tools=TOOLS, tool_choice=choice) as stream:
        message = stream.get_final_completion().choices[0].message
    call: Any
    (call,) = message.tool_calls or [None]
    assert (call.function.name, call.function.arguments) == ("look", '{"city": "x"}') and not message.content
    ((_, params),) = server.engine.submitted
    assert (params.structured_outputs is not None) is (choice == "required")
    script(monkeypatch, thought + "<|channel|>final<|message|>Yes.")
    answer = client.responses.create(model="fake", input="a")
    assert answer.output_text == "Yes." and [item.type for item in answer.output] == ["reasoning", "message"]


def test_without_a_choice_tools_are_not_shown(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, TEXT)
    message = server.post(CHAT, messages=USER, tools=TOOLS, tool_choice="none").json()["choices"][0]["message"]
    assert server.last_prompt() == "<user>a<go>" and message["content"] == TEXT


def test_markers_that_are_special_tokens_stay_in_the_text(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "special_texts", {7: "<tool_call>"})
    given: Any
    for given in (TOOLS, []):
        server.post(CHAT, messages=USER, tools=given, skip_special_tokens=True)
    assert [params.skip_special_tokens for _, params in server.engine.submitted] == [False, True]


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_may_be_left_out(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    script(monkeypatch, "<think>So.</think>Yes.")
    extra = {"include_reasoning": False}
    if stream:
        chunks = client.chat.completions.create(model="fake", messages=USER, stream=True, extra_body=extra)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        assert not any((delta.model_extra or {}).get("reasoning_content") for delta in deltas)
    else:
        message = client.chat.completions.create(model="fake", messages=USER, extra_body=extra).choices[0].message
        assert message.content == "Yes." and not (message.model_extra or {}).get("reasoning_content")


@pytest.mark.parametrize(("effort", "thinks"), [("none", "False"), ("low", "True"), (None, "")])
def test_an_effort_of_none_turns_thinking_off(
    server: Running, monkeypatch: pytest.MonkeyPatch, effort: str | None, thinks: str
) -> None:
    script_template(monkeypatch, "{{ enable_thinking }}<go>")
    assert server.post(CHAT, messages=USER, reasoning_effort=effort).status_code == 200
    assert server.last_prompt() == thinks + "<go>"


def test_variables_and_the_end_of_the_prompt(server: Running) -> None:
    server.post(CHAT, messages=USER, chat_template_kwargs={"effort": "e"}, reasoning_effort="low")
    assert server.last_prompt() == "<user>a(elow)<go>"
    server.post(CHAT, messages=USER, add_generation_prompt=False)
    assert server.last_prompt() == "<user>a"
    last = {"role": "assistant", "content": "So it"}
    server.post(CHAT, messages=[*USER, last], continue_final_message=True, chat_template_kwargs={"effort": "e"})
    assert server.last_prompt() == "<user>a<assistant>So it"


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"tools": [{"type": "web"}]}, "tools", "tools[0].type: Invalid value 'web'"),
        ({"tools": [TOOLS[1]] * 2}, "tools", "2 functions named 'stop'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice names 'x', which is not among the tools",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
                },
            },
            "tool_choice",
            "tool_choice allows 'x', which is not among the tools",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
            "tool_choice",
            "tool_choice allows no tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "tool_choice and response_format both say",
        ),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "to be false"),
    ],
)
def test_what_contradicts_itself_is_refused(server: Running, given: dict[str, Any], param: str, said: str) -> None:
    error = refusal(server.post(CHAT, messages=USER, **given), 400)
    assert said in error["message"] and error["param"] == param


def test_a_model_of_unknown_form_needs_a_parser(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_format", ChatFormat(None, None))
    error = refusal(server.post(CHAT, messages=USER, tools=TOOLS), 400)
    assert "--tool-call-parser" in error["message"]
    assert server.post(CHAT, messages=USER, tools=TOOLS, tool_choice="required").status_code == 200
