"""Conversations whose messages come from other servers and from models: roles, ids of calls and JSON of any kind."""

from typing import Any

import pytest

from lamina.text.chat_template import ChatTemplate
from lamina.text.written_json import read_written

MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.tool_calls is defined %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{% set out = call.function | tojson %}{{ out[:-1] }}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    """{{ ', "id": "' + call.id + '"}' }}{% endfor %}]{% elif message.role == 'tool' %}"""
    "{% if message.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    """[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]"""
    "{% else %}{{ message.content + '</s>' }}{% endif %}{% endfor %}"
)
"""What the templates of Mistral 7B v0.3, Nemo and Small do with tool calls."""


def history(first: str, second: str) -> list[dict[str, Any]]:
    def call(call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call(first), call(second)]},
        {"role": "tool", "tool_call_id": first, "content": "2"},
        {"role": "tool", "tool_call_id": second, "content": "3"},
    ]


def rendered(first: str, second: str) -> str:
    def call(call_id: str) -> str:
        return f'{{"name": "add", "arguments": {{"a": 1}}, "id": "{call_id}"}}'

    def result(call_id: str, content: str) -> str:
        return f'[TOOL_RESULTS] {{"content": {content}, "call_id": "{call_id}"}}[/TOOL_RESULTS]'

    return f"[INST] a[/INST][TOOL_CALLS] [{call(first)}{call(second)}]{result(first, '2')}{result(second, '3')}"


def test_ids_of_calls_that_a_template_accepts_stay() -> None:
    assert ChatTemplate(MISTRAL, {}).render(history("VvvODy9mT", "0123456ab"), False) == rendered(
        "VvvODy9mT", "0123456ab"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [("call_1f3870be274f6c49b3e31a0c", "call_0000000000000000000000ff"), ("toolu_01AbC", "VvvODy9mT"), ("é", "1")],
)
def test_ids_of_other_servers_become_ids_that_mistral_s_templates_accept(first: str, second: str) -> None:
    prompt = ChatTemplate(MISTRAL, {}).render(history(first, second), False)
    ids = [part[:9] for part in prompt.split('"id": "')[1:]]
    assert prompt == rendered(*ids)
    assert len(set(ids)) == 2
    assert all(each.isascii() and each.isalnum() for each in ids)
    assert ids[1] == second or len(second) != 9


def test_a_result_whose_call_is_not_in_the_history_gets_an_id_of_this_form_too() -> None:
    prompt = ChatTemplate(MISTRAL, {}).render(history("call_1", "call_2")[2:], False)
    assert prompt.count("[TOOL_RESULTS]") == 2


QWEN = (
    "{% for message in messages %}{% if message.role in ['user', 'system', 'assistant'] %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
GENERIC = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
NEEDS_A_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no user') }}{% endif %}" + GENERIC
)
PARTS = (
    "{% for message in messages %}{% if message.role != 'developer' %}<{{ message.role }}>"
    "{% for part in message.content if part is mapping %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role"), [(QWEN, "system"), (GENERIC, "developer"), (NEEDS_A_USER, "developer"), (PARTS, "system")]
)
def test_no_template_leaves_out_what_developers_say(template: str, role: str) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}]
    made = ChatTemplate(template, {})
    as_given = [messages[0] | {"role": role}, messages[1]]
    assert made.render(messages, False) == made.render(as_given, False)
    assert "Be brief." in made.render(messages, False)


def test_half_a_surrogate_pair_in_arguments_costs_no_conversation_its_life() -> None:
    made = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "\\ud83d", "b": "\\ud83d\\ude00"}'},
    }
    prompt = made.render([{"role": "assistant", "content": None, "tool_calls": [call]}], False)
    assert prompt == '{"a": "\ufffd", "b": "\U0001f600"}'


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[" * 100_000 + "]" * 100_000, "1" * 100_000, "{'a': 1}"])
def test_what_is_no_json_or_too_deep_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        read_written(text)
