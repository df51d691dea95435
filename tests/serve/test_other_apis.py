"""The APIs of OpenAI's responses and Anthropic's messages: what the engine gets, whole answers, and events."""

import json
from typing import Any

import openai
import pytest

from tests.support.scripted_engine import Running, script, script_template

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


def test_a_response_of_a_schema(client: openai.OpenAI, server: Running) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    client.responses.create(model="fake", input="a", text=text)
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None and json.loads(params.structured_outputs.json) == SCHEMA
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model="fake", input="a", previous_response_id="resp_1")
