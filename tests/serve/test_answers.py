"""Completions and chat answers with a scripted engine: every byte the client receives, and what the engine gets."""

import json
from typing import Any

import openai
import pytest

from lamina.core.sampling import SamplingParams
from tests.support.scripted_engine import COMPLETION, WORDS, Running, refusal, script


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc")
    assert answer.object == "text_completion" and answer.model == "fake" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text == " one two three"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 2


def test_the_salt_of_the_prefix_cache_reaches_the_engine(server: Running) -> None:
    server.completion(prompt="a", cache_salt="tenant")
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], cache_salt="other")
    assert [params.cache_salt for _, params in server.engine.submitted] == ["tenant", "other"]


def test_priorities_reach_the_engine(server: Running) -> None:
    server.completion(prompt="a", priority=-3)
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], priority=7)
    assert [params.priority for _, params in server.engine.submitted] == [-3, 7]


def test_beam_search_reaches_the_engine(server: Running) -> None:
    beams = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "early_stopping": "never"}
    server.completion(prompt="a", **beams)
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **beams, max_tokens=16)
    expected = SamplingParams(n=3, use_beam_search=True, length_penalty=0.5, early_stopping="never")
    assert [params for _, params in server.engine.submitted] == [expected, expected]


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ("a", [[97]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ([97.0, 98], [[97, 98]]),
        ([[97], [98e0, 99]], [[97], [98, 99]]),
    ],
)
def test_every_form_of_prompt_reaches_the_engine(server: Running, prompt: Any, submitted: list[Any]) -> None:
    answer = server.completion(prompt=prompt)
    assert [given for given, _ in server.engine.submitted] == submitted
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(submitted)))


def test_defaults_are_openai_s(server: Running) -> None:
    server.completion(prompt="a", temperature=None, n=None, stop=None)
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    (_, completion), (_, chat) = server.engine.submitted
    assert completion == SamplingParams()
    assert completion.max_tokens == 16
    assert chat == SamplingParams(max_tokens=None)


def test_the_model_s_defaults_apply_where_a_request_gives_none(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.1, "max_tokens": 40}
    monkeypatch.setattr(server.engine, "sampling_defaults", defaults)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    server.post("/v1/chat/completions", **chat)
    server.post("/v1/chat/completions", **chat, temperature=0, top_k=0, max_tokens=50)
    server.post("/v1/chat/completions", **chat, temperature=None, max_completion_tokens=60)
    server.post("/v1/chat/completions", **chat, min_tokens=70)
    server.completion(prompt="a", repetition_penalty=1.0)
    server.completion(prompt="a", use_beam_search=True, n=2)
    assert [params for _, params in server.engine.submitted] == [
        SamplingParams(**defaults),
        SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=50),
        SamplingParams(**defaults | {"max_tokens": 60}),
        SamplingParams(**defaults | {"max_tokens": 70, "min_tokens": 70}),
        SamplingParams(temperature=0.5, top_k=3, max_tokens=16),
        SamplingParams(use_beam_search=True, n=2),
    ]


@pytest.mark.parametrize(
    ("path", "field"),
    [("completions", "max_tokens"), ("chat/completions", "max_tokens"), ("chat/completions", "max_completion_tokens")],
)
def test_an_answer_may_ask_for_the_rest_of_the_context_and_no_more(server: Running, path: str, field: str) -> None:
    prompt = {"prompt": "abcdefgh"} if path == "completions" else {"messages": [{"role": "u", "content": "abcde"}]}
    assert server.post(f"/v1/{path}", **prompt, **{field: 92}).status_code == 200
    error = refusal(server.post(f"/v1/{path}", **prompt, **{field: 93}), 400)
    assert error["param"] == field
    assert f"{field} is 93, but the prompt has 8 tokens, which leave room for 92" in error["message"]
    assert [params.max_tokens for _, params in server.engine.submitted] == [92]
    if path == "completions":
        error = refusal(server.post(f"/v1/{path}", prompt=["a", "a" * 50], max_tokens=60), 400)
        assert "the prompt has 50 tokens" in error["message"]
        server.completion(prompt="a" * 95)  # a limit that the client has not given is lowered


def test_every_sampling_field_arrives(server: Running) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": 42,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "logprobs": 1,
    }
    server.completion(prompt="a", **fields)
    server.completion(prompt="a", **{k: float(v) if type(v) is int else v for k, v in fields.items()})
    assert [params for _, params in server.engine.submitted] == [SamplingParams(**fields)] * 2
    assert all(type(server.engine.submitted[1][1].__dict__[name]) is int for name in ("n", "top_k", "max_tokens"))


def test_choices_are_numbered_prompt_by_prompt(server: Running) -> None:
    answer = server.completion(prompt=["a", "b"], n=2, echo=True)
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(i, f"{prompt} one two three") for i, prompt in enumerate("aabb")]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_an_echo_without_tokens_is_the_prompt_alone(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    script(monkeypatch, "xyz")
    body: Any = {"prompt": ["a", "b"], "echo": True, limit: 0}
    answer = server.completion(**body)
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 0
    assert [params.max_tokens for _, params in server.engine.submitted] == [1, 1]
    streamed = ["", ""]
    for chunk in client.completions.create(model="fake", prompt=["a", "b"], echo=True, max_tokens=0, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == ["a", "b"]
    assert server.post(COMPLETION, prompt="a", **{limit: 0}).status_code == 400


def test_echo_of_token_ids_is_their_text(server: Running) -> None:
    assert server.completion(prompt=[104, 105], echo=True)["choices"][0]["text"] == "hi one two three"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="fake", prompt="a", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == WORDS
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 4, 8]
    assert logprobs.top_logprobs == [{word: -0.5, "": -9999.0} for word in WORDS]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == WORDS
    assert logprobs.content[0].bytes == list(b" one")
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -9999.0]
    assert (logprobs.content[0].top_logprobs[1].token, logprobs.content[0].top_logprobs[1].bytes) == ("", [0xE2, 0x82])


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt=["a", "b"], n=2, echo=True)
    chunks = list(
        client.completions.create(
            model="fake", prompt=["a", "b"], n=2, echo=True, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [""] * 4
    ends: list[str | None] = [None] * 4
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == ["length"] * 4
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("chat", [False, True])
def test_every_chunk_counts_tokens_if_asked(server: Running, chat: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "bc"}]} if chat else {"prompt": "abc"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    events = _events(server, path, **asked, max_completion_tokens=9, stream=True, stream_options=options)
    prompt = len("<user>bc") if chat else 3
    text = ""
    for event in events:  # of one or more words each
        for choice in event["choices"]:
            text += choice["delta"].get("content", "") if chat else choice["text"]
        usage = event["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, len(text.split()))
    assert text == "".join(WORDS)
    assert events[-1]["choices"] == []
    assert server.engine.submitted[0][1].max_tokens == 9
    without = _events(server, path, **asked, stream=True, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in event for event in without)


def test_min_tokens_are_bounded_by_what_an_answer_may_have(server: Running) -> None:
    server.completion(prompt="a", min_tokens=50)
    server.completion(prompt=["a" * 90, "a"], min_tokens=50)
    assert [params.min_tokens for _, params in server.engine.submitted] == [16, 10, 16]


def test_streamed_logprobs_are_the_whole_ones_in_pieces(server: Running) -> None:
    whole = server.completion(prompt="a", logprobs=1)["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for event in _events(server, "/v1/completions", prompt="a", logprobs=1, stream=True):
        for key, values in event["choices"][0]["logprobs"].items():
            joined[key] += values
    assert joined == whole


def _events(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = server.post(path, **body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_chat_answer(server: Running, client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "system", "content": "a"}, {"role": "user", "content": parts}],
        max_completion_tokens=5,
        user="me",
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == " one two three"
    prompt, params = server.engine.submitted[0]
    assert isinstance(prompt, list) and server.engine.tokenizer.decode(prompt) == "<system>a<user>b\nc"
    assert params.max_tokens == 5


def test_a_streamed_chat_answer(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "a"}]
    chunks = list(client.chat.completions.create(model="fake", messages=messages, n=2, stream=True))
    assert [choice.delta.role for choice in chunks[0].choices] == ["assistant"] * 2
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == " one two three"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
