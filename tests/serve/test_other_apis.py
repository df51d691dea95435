"""The APIs of OpenAI's responses and Anthropic's messages: what the engine gets, whole answers, and events."""

import json
from typing import Any

import openai
import pytest

from lamina.core.outputs import FinishReason
from tests.support.scripted_engine import CHAT, Running, refusal, script, script_template

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
TEXT = '<think>So.</think>Hm.<tool_call>{"name": "look", "arguments": {"city": "x"}}</tool_call>'
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    script_template(monkeypatch, TEMPLATE)
    script(monkeypatch, TEXT)


def events(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = server.post(path, **body, stream=True).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in found]
    return found


ASKED: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 10**6,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "look", "input_schema": SCHEMA}],
    "stop_sequences": ["x"],
    "top_k": 5,
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"city": "y"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "c"}]},
    ],
}


def test_several_texts_reach_templates_that_read_parts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
    script_template(monkeypatch, "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}"
                    + shown + "{% endif %}{% endfor %}")  # fmt: skip
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    body: Any = {"max_tokens": 5, "system": texts, "messages": [{"role": "user", "content": texts}]}
    assert server.post(MESSAGES, **body).status_code == 200
    assert server.last_prompt() == "<a><b><a><b>"
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert server.post(RESPONSES, input=[item]).status_code == 200
    assert server.last_prompt() == "<a><b>"


def test_items_of_one_turn_are_one_message(server: Running) -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
    user = {"role": "user", "content": "a"}
    for items, turn in (
        ([reasoning, said], "(t)b"),
        ([reasoning, said, call], "(t)blook={}"),
        ([call, said], "blook={}"),
        ([said], "b"),
    ):
        assert server.post(RESPONSES, input=[user, *items, user]).status_code == 200
        assert server.last_prompt() == f"<user>a<assistant>{turn}<user>a"


def test_a_message(server: Running) -> None:
    answer = server.post(MESSAGES, **ASKED).json()
    assert server.last_prompt() == '[look]<system>s<user>a<assistant>(t)blook={"city": "y"}<tool>c'
    ((_, params),) = server.engine.submitted
    assert (params.stop, params.top_k) == (["x"], 5)
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "So.", "signature": ""}
    assert text == {"type": "text", "text": "Hm."}
    assert call["id"].startswith("call_") and (call["name"], call["input"]) == ("look", {"city": "x"})
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "tool_use")
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == len(server.last_prompt())
    count = server.post(MESSAGES + "/count_tokens", **{k: v for k, v in ASKED.items() if k != "max_tokens"}).json()
    assert count == {"input_tokens": len(server.last_prompt())}


def test_a_message_may_continue_the_assistant_s(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's API continues an assistant's last message too, unless it has calls or is empty."""
    user, text = {"role": "user", "content": "a"}, {"type": "text", "text": "{"}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    script_template(monkeypatch, TEMPLATE + "{% if add_generation_prompt %}<go>{% endif %}")
    for content, shown in (
        ("{", "{"),
        ([text, text], "{\n{"),
        ("", "<go>"),
        ([], "<go>"),
        ([text, call], "{look={}<go>"),
    ):
        messages = [user, {"role": "assistant", "content": content}]
        assert server.post(MESSAGES, max_tokens=5, messages=messages).status_code == 200
        assert server.last_prompt() == f"<user>a<assistant>{shown}"


def test_a_message_as_a_stream(server: Running) -> None:
    found = events(server, MESSAGES, **ASKED)
    assert found[0]["type"] == "message_start" and found[-1] == {"type": "message_stop"}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    texts = {"thinking": "", "text": "", "partial_json": ""}
    for event in found:
        if event["type"] == "content_block_delta":
            for key in texts.keys() & event["delta"].keys():
                texts[key] += event["delta"][key]
    assert texts == {"thinking": "So.", "text": "Hm.", "partial_json": '{"city": "x"}'}
    for kind in ("content_block_start", "content_block_stop"):
        assert [event["index"] for event in found if event["type"] == kind] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "status", "kind", "said"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Field required"),
        ({"model": "x"}, 404, "not_found_error", "does not exist"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "not among the tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "a part of type 'image'",
        ),
        ({"messages": 5}, 400, "invalid_request_error", "messages: Expected `array`"),
        ({"tools": ASKED["tools"] * 2}, 400, "invalid_request_error", "2 functions named 'look'"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences has ''"),
        ({"maxTokens": 5}, 400, "invalid_request_error", "did you mean max_tokens?"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}, "tools": []},
            400,
            "invalid_request_error",
            "output_config.format.schema cannot be compiled at #",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content: a content part of type 'text' has no text",
        ),
    ],
)
def test_a_bad_message_gets_anthropic_s_error(
    server: Running, change: dict[str, Any], status: int, kind: str, said: str
) -> None:
    response = server.post(MESSAGES, **ASKED | change)
    assert response.status_code == status
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind and said in body["error"]["message"]


INPUT: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"city": "y"}'},
    {"type": "function_call_output", "call_id": "1", "output": "c"},
]
TOOLS: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}, {"type": "web_search"}]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", MESSAGES, 405), ("POST", MESSAGES + "/batches", 404)])
def test_routes_that_do_not_exist_have_anthropic_s_errors_too(
    server: Running, method: str, path: str, status: int
) -> None:
    response = server.http.request(method, path, json={})
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert response.status_code == status and response.json()["type"] == "error"
    assert response.json()["error"]["type"] == kind and path in response.json()["error"]["message"]


def test_a_response(client: openai.OpenAI, server: Running) -> None:
    answer = client.responses.create(model="fake", input=INPUT, instructions="s", tools=TOOLS, max_output_tokens=10**6)
    assert server.last_prompt() == '[look]<system>s<user>a<assistant>(t)look={"city": "y"}<tool>c'
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == "Hm." and answer.status == "completed"
    call = answer.output[2]
    assert call.type == "function_call" and (call.name, call.arguments) == ("look", '{"city": "x"}')
    assert answer.usage is not None and answer.usage.input_tokens == len(server.last_prompt())


def test_a_response_as_a_stream(client: openai.OpenAI, server: Running) -> None:
    with client.responses.stream(model="fake", input="a", tools=TOOLS[:1]) as stream:
        found = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert final.output_text == "Hm." and [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
    ]
    texts = "".join(event.delta for event in found if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in found if event.type == "response.function_call_arguments.delta")
    assert (texts, arguments) == ("Hm.", '{"city": "x"}')


@pytest.mark.parametrize(("path", "asked"), [(RESPONSES, {"input": "a"}), (MESSAGES, ASKED)])
def test_tenants_are_kept_apart_in_the_prefix_cache(server: Running, path: str, asked: dict[str, Any]) -> None:
    response = server.post(path, **asked, cache_salt="tenant", priority=3)
    assert response.status_code == 200 and "X-Lamina-Ignored-Fields" not in response.headers
    ((_, params),) = server.engine.submitted
    assert (params.cache_salt, params.priority) == ("tenant", 3)
    assert "cache_salt is" in server.post(path, **asked, cache_salt="x" * 257).json()["error"]["message"]


def test_a_response_of_a_schema(client: openai.OpenAI, server: Running) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    client.responses.create(model="fake", input="a", text=text)
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None and json.loads(params.structured_outputs.json) == SCHEMA
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model="fake", input="a", previous_response_id="resp_1")


def test_a_response_repeats_what_it_was_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {
        "instructions": "s",
        "metadata": {"run": "7"},
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    answer = client.responses.create(model="fake", input="a", **asked).model_dump(exclude_unset=True)
    assert {name: answer[name] for name in asked} == asked


def test_a_response_has_all_fields_that_the_specification_requires(server: Running) -> None:
    """The schema ResponseResource of openresponses.org names the fields."""
    required = """id object created_at completed_at status incomplete_details model previous_response_id instructions
        output error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty
        top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier
        metadata safety_identifier prompt_cache_key"""
    answer = server.post(RESPONSES, input="a", user="u").json()
    assert not {*required.split()} - answer.keys()
    assert (answer["user"], answer["text"]) == ("u", {"format": {"type": "text"}})
    assert answer["completed_at"] >= answer["created_at"]


def test_an_answer_that_is_cut_off_is_incomplete(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.scripted_engine.END", FinishReason.LENGTH)
    answer = server.post(RESPONSES, input="a", tools=TOOLS[:1]).json()
    assert [item["status"] for item in answer["output"]] == ["completed", "completed", "incomplete"]
    found = events(server, RESPONSES, input="a", tools=TOOLS[:1])
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "completed", "incomplete"]
    assert all(item.get("content", True) for item in found[-1]["response"]["output"])


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"input": None}, "input", "input: Expected `str | array`"),
        ({"input": [5]}, "input", "input[0]: Expected `object`"),
        ({"input": [{"type": "reasoning", "content": 1}]}, "input", "input[0] has reasoning that is not a list"),
        ({"input": []}, "input", "messages is empty"),
        ({"input": "a", "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "needs the mode"),
        ({"input": "a", "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice", "must be"),
        (
            {"input": "a", "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": [[]]}]},
            "tools",
            "tools[1].parameters: Expected `object`, got `array`",
        ),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools", "tools[0].name: Field required"),
        ({"input": "a", "tools": TOOLS[:1] * 2}, "tools", "2 functions named 'look'"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not stored"),
        ({"input": "a", "maxOutputTokens": 5}, "maxOutputTokens", "did you mean max_output_tokens?"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
            "text",
            "text.format.schema cannot be compiled at #",
        ),
        ({}, "input", "input: Field required"),
    ],
)
def test_errors_name_the_fields_of_their_api(server: Running, given: dict[str, Any], param: str, said: str) -> None:
    error = refusal(server.post(RESPONSES, **given), 400)
    assert error["message"].startswith(said) or said in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (RESPONSES, b'"input": "a", "text": {"x": "\xff"}'),
        (RESPONSES, b'"input": "a", "text": {"x": 1e999}'),
        (RESPONSES, b'"input": "a", "\xff": 1'),
        (MESSAGES, b'"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "\xff": 1'),
    ],
)
def test_fields_that_are_not_read_are_json_too(server: Running, path: str, rest: bytes) -> None:
    answer = server.http.post(path, content=b"{%b}" % rest, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_fields_without_meaning_are_named(server: Running) -> None:
    given: Any = {"metadata": {}, "mcp_servers": [], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    answer = server.post(MESSAGES, **ASKED | given)
    assert answer.headers["X-Lamina-Ignored-Fields"] == "mcp_servers, tools.web_search_20250305"
    assert server.last_prompt().startswith("<system>")
    answer = server.post(RESPONSES, input="a", store=True, user="u", seed=1, truncation="auto", top_logprobs=2)
    assert answer.headers["X-Lamina-Ignored-Fields"] == "seed, top_logprobs"


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_a_message_of_a_schema(server: Running, field: str) -> None:
    wanted: Any = {"type": "json_schema", "schema": SCHEMA}
    asked = ASKED | {"tools": [], field: wanted if field == "output_format" else {"format": wanted, "effort": "low"}}
    assert server.post(MESSAGES, **asked).status_code == 200
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None and json.loads(params.structured_outputs.json) == SCHEMA


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System first.') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        ("uS", "<user>0\n\n1"),
        ("suS", "<system>0<user>1\n\n2"),
        ("ssu", "<system>0\n\n1<user>2"),
        ("suaSu", "<system>0<user>1<assistant>2<user>3\n\n4"),
        ("suaSSuau", "<system>0<user>1<assistant>2<user>3\n\n4\n\n5<assistant>6<user>7"),
        ("uaS", "<user>0<assistant>1<user>2"),
    ],
)
def test_system_messages_at_any_place_reach_templates_that_take_one(
    server: Running, monkeypatch: pytest.MonkeyPatch, roles: str, prompt: str
) -> None:
    """Claude Code and Codex send such messages. A template that takes them gets them where they are."""
    names = {"s": "system", "S": "system", "u": "user", "a": "assistant"}
    messages: Any = [{"role": names[role], "content": str(place)} for place, role in enumerate(roles)]
    for path, more in ((CHAT, {"messages": messages}), (MESSAGES, {"messages": messages, "max_tokens": 5})):
        script_template(monkeypatch, STRICT)
        assert server.post(path, **more).status_code == 200
        assert server.last_prompt() == prompt
        script_template(monkeypatch, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        assert server.post(path, **more).status_code == 200
        assert server.last_prompt() == "".join(f"<{m['role']}>{m['content']}" for m in messages)
    script_template(monkeypatch, STRICT)
    items = [{**m, "role": "developer" if m["role"] == "system" else m["role"]} for m in messages]
    assert server.post(RESPONSES, input=items).status_code == 200
    assert server.last_prompt() == prompt


def test_a_template_s_refusal_is_that_of_the_messages_as_they_are(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_template(monkeypatch, "{{ raise_exception(messages | length) }}")
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert "refuses these messages: 2" in refusal(server.post(CHAT, messages=messages), 400)["message"]


def test_a_text_that_differs_in_every_request_does_not_begin_the_prompt(server: Running) -> None:
    """Claude Code's, which leaves nothing to find in the prefix cache."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    asked: Any = {
        "max_tokens": 5,
        "messages": [{"role": "system", "content": [billing]}, {"role": "user", "content": "a"}],
    }
    for system, prompt in (([billing, {"type": "text", "text": "s"}], "<system>s<user>a"), ([billing], "<user>a")):
        assert server.post(MESSAGES, **asked, system=system).status_code == 200
        assert server.last_prompt() == prompt
    assert server.post(MESSAGES, **asked, system=billing["text"]).status_code == 200
    assert server.last_prompt() == "<user>a"


def test_effort_reaches_the_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script_template(monkeypatch, "{{ reasoning_effort }} {{ enable_thinking }}")
    asked: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "output_config": {"effort": "low"}}
    for more, prompt in (({}, "low True"), ({"thinking": {"type": "disabled"}}, "low False")):
        assert server.post(MESSAGES, **asked, **more).status_code == 200
        assert server.last_prompt() == prompt


def test_all_reasoning_of_a_turn_is_kept(server: Running) -> None:
    thoughts = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": t}]} for t in "tu"]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
    user = {"role": "user", "content": "a"}
    assert server.post(RESPONSES, input=[user, thoughts[0], said, thoughts[1], user]).status_code == 200
    assert server.last_prompt() == "<user>a<assistant>(t\nu)b<user>a"


def test_a_refusal_in_the_history_of_a_response_is_a_text(server: Running) -> None:
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert server.post(RESPONSES, input=[refused, {"role": "user", "content": "a"}]).status_code == 200
    assert server.last_prompt() == "<assistant>No.<user>a"


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', "[" * 5000 + "]" * 5000, '{"a": 1' + "0" * 5000 + "}"])
def test_arguments_that_no_json_can_carry_end_no_answer(
    server: Running, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    script(monkeypatch, f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>')
    answer = server.post(MESSAGES, **ASKED)
    assert answer.status_code == 200
    (call,) = answer.json()["content"]
    assert call["input"] == ({"a": "\ufffd"} if "ud83d" in arguments else {})
