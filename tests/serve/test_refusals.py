"""Rejected requests, with their status and message, and failures after a request has started."""

from typing import Any

import openai
import pytest

from tests.support.scripted_engine import CHAT, COMPLETION, Running, refusal

USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        (COMPLETION, {}, 400, "prompt", "prompt: Field required"),
        (COMPLETION, {"prompt": None}, 400, "prompt", "prompt must be a text, a list of texts"),
        (COMPLETION, {"prompt": {"a": 1}}, 400, "prompt", "prompt must be a text"),
        (COMPLETION, {"prompt": [True]}, 400, "prompt", "prompt[0]: Expected `int`, got `bool`"),
        (COMPLETION, {"prompt": []}, 400, "prompt", "prompt is an empty list"),
        (COMPLETION, {"prompt": ""}, 400, None, "the prompt has 0 tokens"),
        (COMPLETION, {"prompt": "too long"}, 400, None, "the prompt has 8 tokens"),
        (COMPLETION, {"prompt": ["a", "too long"], "stream": True}, 400, None, "the prompt has 8 tokens"),
        (
            COMPLETION,
            {"prompt": ["a"] * 16385},
            400,
            "prompt",
            "prompt holds 16385 prompts; give at most 16384",
        ),
        (COMPLETION, {"prompt": "a", "model": "gpt-4"}, 404, "model", "the model 'gpt-4' does not exist; this server"),
        (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature", "temperature is -1; give a number from"),
        (
            COMPLETION,
            {"prompt": "a", "temperature": "hot"},
            400,
            "temperature",
            "temperature is 'hot'; give a number from",
        ),
        (COMPLETION, {"prompt": "a", "top_p": 0}, 400, "top_p", "top_p is 0"),
        (COMPLETION, {"prompt": "a", "n": 0}, 400, "n", "n is 0; give an integer from 1 to 128"),
        (COMPLETION, {"prompt": "a", "n": 1.5}, 400, "n", "n is 1.5; give an integer from 1"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
        (COMPLETION, {"prompt": "a", "logprobs": 21}, 400, "logprobs", "logprobs is 21; give an integer from 0 to 20"),
        (
            COMPLETION,
            {"prompt": "a", "logprobs": 1, "echo": True, "guided_regex": "a"},
            400,
            "echo",
            "not supported with structured outputs",
        ),
        (COMPLETION, {"prompt": "a", "stop": [""]}, 400, "stop", "must be valid Unicode of 1 to 128 characters"),
        (COMPLETION, {"prompt": "a", "stop": [5] * 1000}, 400, "stop", "stop has 1000 strings; give at most 32"),
        (COMPLETION, {"prompt": "a", "stop": [5] * 10**6}, 400, None, "fields besides prompt have 2000001 bytes"),
        (COMPLETION, {"prompt": "a", "stop": "x" * 129}, 400, "stop", "of 129 characters; every stop string must be"),
        (
            COMPLETION,
            {"prompt": "a", "stop_token_ids": [""] * 257},
            400,
            "stop_token_ids",
            "257 token ids; give at most",
        ),
        (
            COMPLETION,
            {"prompt": "a", "logit_bias": {"5": 101}},
            400,
            "logit_bias",
            "logit_bias is 101; give",
        ),
        (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "logit_bias is 'x'; give"),
        (COMPLETION, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids", "is empty; give"),
        (COMPLETION, {"prompt": "a", "stream_options": {}}, 400, "stream_options", "needs stream to be true"),
        (
            COMPLETION,
            {"prompt": "a", "use_beam_search": True},
            400,
            "n",
            "n is 1, the number of beams; give at least 2",
        ),
        (
            COMPLETION,
            {"prompt": "a", "use_beam_search": 0},
            400,
            "use_beam_search",
            "use_beam_search is 0; give true or false",
        ),
        (COMPLETION, {"prompt": "a", "early_stopping": "soon"}, 400, "early_stopping", "give true, false or"),
        (CHAT, {"messages": USER, "length_penalty": 2}, 400, "length_penalty", "but use_beam_search is false"),
        (COMPLETION, {"prompt": "crowd"}, 429, None, "16384 requests"),
        (COMPLETION, {"prompt": "break"}, 503, None, "worker memory0 is gone"),
        (CHAT, {}, 400, "messages", "Field required"),
        (CHAT, {"messages": []}, 400, "messages", "messages is empty"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "messages[0] has no content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "'image_url' is not"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools", "missing required field `function`"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs to be true"),
    ],
)
def test_a_bad_request_is_answered_in_openai_s_form(
    server: Running, path: str, body: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    response = server.post(path, **body)
    error = refusal(response, status)
    assert said in error["message"]
    assert param is None or error["param"] == param
    assert server.completion(prompt="a")["choices"]  # and it goes on serving


def test_a_refusal_in_the_history_is_text(server: Running) -> None:
    history = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *USER]
    assert server.post(CHAT, messages=history).status_code == 200


def test_no_top_logprobs_need_no_logprobs(server: Running) -> None:
    assert server.post(CHAT, messages=USER, top_logprobs=0, logprobs=False).status_code == 200


def test_a_bad_prompt_among_several_leaves_none_running(server: Running) -> None:
    server.post(COMPLETION, prompt=["hang", "hang", "too long"])
    assert len(server.engine.running) == 2
    assert server.engine.aborted == server.engine.running


def test_values_without_effect_are_not_rejected(server: Running) -> None:
    server.completion(prompt="a", logit_bias=None, tools=[], response_format={"type": "text"}, best_of=None)


def test_bodies_that_are_no_json_objects(server: Running) -> None:
    kind = {"Content-Type": "application/json"}
    assert "not JSON" in refusal(server.http.post(COMPLETION, content=b"{'prompt'", headers=kind), 400)["message"]
    for content in (b"[1]", b"null", b'"text"', b""):
        assert "JSON object" in refusal(server.http.post(COMPLETION, content=content, headers=kind), 400)["message"]
    assert (
        "Content-Type: application/json"
        in refusal(server.http.post(COMPLETION, content=b'{"prompt": "a"}'), 400)["message"]
    )
    nan = server.http.post(COMPLETION, content=b'{"prompt": "a", "temperature": NaN}', headers=kind)
    assert "not JSON: invalid character (byte 31)" in refusal(nan, 400)["message"]


def test_unknown_routes_and_methods(server: Running) -> None:
    assert "GET /v2/completions does not exist" in refusal(server.http.get("/v2/completions"), 404)["message"]
    response = server.http.get(COMPLETION)
    assert "use POST" in refusal(response, 405)["message"]
    assert response.headers["Allow"] == "POST"


def test_overload_says_when_to_try_again(server: Running) -> None:
    response = server.post(COMPLETION, prompt="crowd")
    assert int(response.headers["Retry-After"]) > 0


def test_a_failure_in_mid_stream_reaches_the_client(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="break", stream=True)
    with pytest.raises(openai.APIError, match="worker memory0 is gone"):
        list(stream)
