"""Accepted request fields: every one that OpenAI's own client knows is listed, and unknown ones are rejected."""

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from lamina.serve import fields
from lamina.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from tests.serve.scripted import CHAT, COMPLETION, Running, refusal

USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openai_s_client_is_known(kind: type[GenerationRequest], params: Any) -> None:
    assert params.__annotations__.keys() <= kind.model_fields.keys() | kind.unused.keys() | fields.WITHOUT_EFFECT
    assert not kind.model_fields.keys() & kind.unused.keys()


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 1])
@pytest.mark.parametrize("name", ["Temperature", "temprature", "max_new_tokens", "x"])
def test_an_unknown_field_is_refused_whatever_its_value(server: Running, name: str, value: Any) -> None:
    error = refusal(server.post(COMPLETION, prompt="a", **{name: value}), 400)
    assert error["param"] == name and f"{name} is not a field of this request" in error["message"]
    assert ("did you mean temperature?" in error["message"]) == (name == "Temperature")


def test_values_without_effect_are_accepted(server: Running) -> None:
    for path, given, neutral in (
        (COMPLETION, {"prompt": "a"}, fields.COMPLETION),
        (CHAT, {"messages": USER}, fields.CHAT),
    ):
        values = {name: (None, *several) for name, several in neutral.items()} | dict.fromkeys(
            fields.WITHOUT_EFFECT, "x"
        )
        for number in range(max(map(len, values.values()))):  # every field at once, with its next value
            body = {name: several[number % len(several)] for name, several in values.items()}
            response = server.post(path, **given, **body)
            assert response.status_code == 200, (body, response.text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("best_of", True),
        ("best_of", 0),
        ("tool_choice", "required"),
        ("modalities", ["text", "audio"]),
        ("modalities", []),
        ("logit_bias", {"5": 0}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {}),
        ("suffix", " "),
        ("truncate_prompt_tokens", 0),
        ("echo", True),
    ],
)
def test_any_other_value_is_refused(server: Running, name: str, value: Any) -> None:
    error = refusal(server.post(CHAT, messages=USER, **{name: value}), 400)
    assert error["param"] == name and error["message"] == f"{name} is not supported; leave it out"


def test_stream_options(server: Running) -> None:
    neutral = {"include_usage": None, "include_obfuscation": True, "continuous_usage_stats": False}
    assert server.post(COMPLETION, prompt="a", stream=True, stream_options=neutral).status_code == 200
    for wrong in ({"continuous_usage_stats": True}, {"Include_usage": True}, {"user": "me"}):
        error = refusal(server.post(COMPLETION, prompt="a", stream=True, stream_options=wrong), 400)
        assert f"stream_options.{next(iter(wrong))} is not" in error["message"]


def test_errors_call_a_field_what_the_client_calls_it(server: Running) -> None:
    for path, given, said in (
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens is 0; give"),
        (CHAT, {"max_tokens": 0}, "max_tokens is 0; give"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; give"),
        (COMPLETION, {"logprobs": 21}, "logprobs is 21; give"),
        (COMPLETION, {"cache_salt": "x" * 257}, "cache_salt is 'xxx"),
    ):
        asked: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "a"}
        error = refusal(server.post(path, **asked, **given), 400)
        assert error["message"].startswith(said) and error["param"] == said.split()[0]
