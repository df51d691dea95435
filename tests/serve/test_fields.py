"""Accepted request fields: all of OpenAI's client are listed, unknown ones are ignored and named in a header."""

import logging
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from lamina.serve import json_fields
from lamina.serve.bodies import WITHOUT_EFFECT, Body, ChatBody, CompletionBody, field_types
from tests.support.scripted_engine import CHAT, COMPLETION, Running, refusal

USER = [{"role": "user", "content": "a"}]
HEADER = json_fields.IGNORED_HEADER


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (CompletionBody, completion_create_params.CompletionCreateParamsBase),
        (ChatBody, chat_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openai_s_client_is_known(kind: type[Body], params: Any) -> None:
    supported = {*field_types(kind), *kind.large}
    assert params.__annotations__.keys() <= supported | kind.unsupported.keys() | WITHOUT_EFFECT
    assert not supported & (kind.unsupported.keys() | WITHOUT_EFFECT)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_unknown_fields_are_ignored_and_named(server: Running, path: str) -> None:
    asked: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "a"}
    plain = server.post(path, **asked)
    assert HEADER not in plain.headers
    for stream in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": True, "x": 1}} if stream else {}
        response = server.post(
            path, **asked, **options, num_ctx=4096, keep_alive="5m", chat_id={}, enable_thinking=None
        )
        assert response.status_code == 200
        named = "chat_id, enable_thinking, keep_alive, num_ctx" + (", stream_options.x" if stream else "")
        assert response.headers[HEADER] == named
        if not stream:
            assert response.json()["choices"] == plain.json()["choices"]


def test_unknown_keys_of_messages_are_ignored_and_named(server: Running) -> None:
    keys: dict[str, Any] = {"id": "1", "prefix": True, "provider_specific_fields": {"a": [1]}}
    conversation = [{"role": "system", "content": "s"}, USER[0] | keys, {"role": "assistant", "content": "b", "x y": 1}]
    response = server.post(CHAT, messages=conversation)
    assert response.status_code == 200
    named = "messages.id, messages.prefix, messages.provider_specific_fields, messages.x?y"
    assert response.headers[HEADER] == named
    prompt, _ = server.engine.submitted[0]
    assert isinstance(prompt, list)
    assert server.engine.tokenizer.decode(prompt) == "<system>s<user>a<assistant>b"


def test_the_header_names_few_fields(server: Running) -> None:
    many = {f"x{number:03}" + "y" * 100 + "\n\u00e9": 0 for number in range(500)}
    header = server.post(COMPLETION, prompt="a", **many).headers[HEADER]
    assert header.endswith(", and 484 more") and len(header) < 16 * 80


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = json_fields.IgnoredLog()
    with caplog.at_level(logging.WARNING, "lamina.serve.json_fields"):
        for names in (["a", "messages.b"], ["a"], [], ["a", "c\nd"]):
            log.report(names)
        log.report([f"x{number}" for number in range(10)])
        for number in range(1000):
            log.report([f"y{number}"])
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "requests have fields that are ignored: a, messages.b"
    assert lines[1] == "requests have fields that are ignored: c?d"
    assert len(lines) < json_fields.MOST_LOGGED


@pytest.mark.parametrize(
    ("path", "body", "name", "right"),
    [
        (COMPLETION, {"Temperature": None}, "Temperature", "temperature"),
        (COMPLETION, {"maxTokens": 5}, "maxTokens", "max_tokens"),
        (CHAT, {"Tools": []}, "Tools", "tools"),
        (COMPLETION, {"stream": True, "stream_options": {"Include_usage": True}}, "stream_options.Include_usage", ""),
        (CHAT, {"messages": [{"role": "user", "content": "a", "toolCalls": []}]}, "messages.toolCalls", ""),
    ],
)
def test_a_known_field_in_the_wrong_case_is_refused(
    server: Running, path: str, body: dict[str, Any], name: str, right: str
) -> None:
    asked: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "a"}
    error = refusal(server.post(path, **asked | body), 400)
    assert error["param"] == name
    assert f"{name} is not a field of this request; did you mean {right}" in error["message"]


def test_values_without_effect_are_accepted(server: Running) -> None:
    for path, given, neutral in (
        (COMPLETION, {"prompt": "a"}, CompletionBody.unsupported),
        (CHAT, {"messages": USER}, ChatBody.unsupported),
    ):
        values = {name: (None, *several) for name, several in neutral.items()} | dict.fromkeys(WITHOUT_EFFECT, "x")
        for number in range(max(map(len, values.values()))):  # every field at once, with its next value
            body = {name: several[number % len(several)] for name, several in values.items()}
            response = server.post(path, **given, **body)
            assert response.status_code == 200, (body, response.text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("modalities", []),
        ("suffix", " "),
        ("echo", True),
    ],
)
def test_any_other_value_is_refused(server: Running, name: str, value: Any) -> None:
    error = refusal(server.post(CHAT, messages=USER, **{name: value}), 400)
    assert error["param"] == name and error["message"] == f"{name} is not supported; leave it out"


def test_stream_options(server: Running) -> None:
    neutral = {"include_usage": None, "include_obfuscation": True, "continuous_usage_stats": False}
    assert server.post(COMPLETION, prompt="a", stream=True, stream_options=neutral).status_code == 200
    error = refusal(server.post(COMPLETION, prompt="a", stream=True, stream_options={"include_usage": 1}), 400)
    assert error["message"] == "stream_options.include_usage: Expected `bool`, got `int`"


def test_errors_call_a_field_what_the_client_calls_it(server: Running) -> None:
    for path, given, said in (
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens is 0; give"),
        (CHAT, {"max_tokens": 0}, "max_tokens is 0; give"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; give"),
        (COMPLETION, {"logprobs": 21}, "logprobs is 21; give"),
        (COMPLETION, {"best_of": True}, "best_of is True; give"),
        (COMPLETION, {"best_of": 1, "n": 2}, "best_of is 1; give an integer from 2 to 128"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; give at least 1"),
        (CHAT, {"bad_words": ["a", ""]}, "bad_words has ''; give"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs is -1; give"),
        (COMPLETION, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs cannot be streamed"),
        (COMPLETION, {"prompt_logprobs": 1, "guided_regex": "a"}, "prompt_logprobs is 1; leave it out beside"),
        (COMPLETION, {"cache_salt": "x" * 257}, "cache_salt is 'xxx"),
    ):
        asked: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "a"}
        error = refusal(server.post(path, **asked, **given), 400)
        assert error["message"].startswith(said) and error["param"] == said.split()[0]
