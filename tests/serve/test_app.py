"""The HTTP interface over a scripted engine: every byte a client sees, and what reaches the engine."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from lamina.cli import status
from lamina.engine.engine import EngineStats, MemoryStats
from lamina.errors import ConfigError, EngineDeadError, OverloadedError, RequestError
from lamina.serve.app import create_app
from lamina.transport.choice import Choice, Transport
from lamina.types import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams

TIMEOUT_S = 60.0
WORDS = [" one", " two", " three"]


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


class FakeEngine:
    """Answers every prompt with WORDS, one word per update; what a prompt contains makes it do otherwise."""

    model_name = "fake"
    max_model_len = 100
    tokenizer = FakeTokenizer()

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.forget()

    def forget(self) -> None:
        """Be as new for the next test."""
        self.dead: str | None = None
        self.submitted: list[tuple[str | list[int], SamplingParams]] = []
        self.running: set[str] = set()
        self.aborted: set[str] = set()

    def submit(
        self, request_id: str, prompt: Any, params: SamplingParams, on_output: Callable[[RequestOutput], None]
    ) -> None:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}")
        if "crowd" in text:
            raise OverloadedError("16384 requests are in the engine")
        if not text or "too long" in text:
            raise RequestError(f"the prompt has {len(text)} tokens")
        self.submitted.append((prompt, params))
        with self.changed:
            self.running.add(request_id)
            self.changed.notify_all()
        threading.Thread(target=self._answer, args=(request_id, prompt, text, params, on_output), daemon=True).start()

    def _answer(
        self, request_id: str, prompt: Any, text: str, params: SamplingParams, on_output: Callable[..., None]
    ) -> None:
        for count in range(1, len(WORDS) + 1):
            last = count == len(WORDS)
            outputs = [
                CompletionOutput(
                    index=i,
                    text="".join(WORDS[:count]),
                    token_ids=list(range(count)),
                    logprobs=None
                    if params.logprobs is None
                    else [_position(w, params.logprobs) for w in WORDS[:count]],
                    finish_reason=FinishReason.LENGTH if last else None,
                )
                for i in range(params.n)
            ]
            out = RequestOutput(
                request_id, prompt if isinstance(prompt, str) else None, self.tokenizer.encode(text), outputs, last
            )
            if count == 2 and "hang" in text:
                return
            if count == 2 and "break" in text:
                for completion in outputs:
                    completion.finish_reason = FinishReason.ERROR
                on_output(replace(out, finished=True, error="worker memory0 is gone"))
                return
            on_output(out)

    def abort(self, request_id: str) -> None:
        with self.changed:
            self.aborted.add(request_id)
            self.changed.notify_all()

    @property
    def cluster(self) -> SimpleNamespace:
        near, far = Choice(Transport.SHM, "same host"), Choice(Transport.TCP, 'different hosts; no rdma: "none"')
        return SimpleNamespace(links={("compute0", "memory0"): near, ("a", "b"): far, ("a", "c"): far})

    def stats(self) -> EngineStats:
        memory = {"memory0": MemoryStats(used=5, capacity=9, sequences=1)}
        return EngineStats(running=1, waiting=2, steps=3, moved=4, memory=memory, dead=self.dead)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(condition, TIMEOUT_S)


def _position(word: str, count: int) -> list[Logprob]:
    likely = [Logprob(1, -0.5, 1, word), Logprob(2, float("-inf"), 2, "\N{REPLACEMENT CHARACTER}")]
    return [likely[0], *likely[:count]]


@dataclass
class Running:
    engine: FakeEngine
    url: str
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def completion(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    engine = FakeEngine()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(engine), log_config=None, lifespan="off")  # type: ignore[arg-type]
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        yield Running(engine, url, http)
    uvicorn_server.should_exit = uvicorn_server.force_exit = True
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.fixture
def server(shared_server: Running) -> Running:
    shared_server.engine.forget()
    return shared_server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


# -- completions ---------------------------------------------------------------------------------------------------


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc")
    assert answer.object == "text_completion" and answer.model == "fake" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text == " one two three"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["a", [98]], ["a", [98]]),
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
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "logprobs": 1,
    }
    server.completion(prompt="a", **fields)
    assert server.engine.submitted[0][1] == SamplingParams(**fields)


def test_choices_are_numbered_prompt_by_prompt(server: Running) -> None:
    answer = server.completion(prompt=["a", "b"], n=2, echo=True)
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(i, f"{prompt} one two three") for i, prompt in enumerate("aabb")]


def test_echo_of_token_ids_is_their_text(server: Running) -> None:
    assert server.completion(prompt=[104, 105], echo=True)["choices"][0]["text"] == "hi one two three"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="fake", prompt="a", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == WORDS
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 4, 8]
    assert logprobs.top_logprobs == [{word: -0.5, "\N{REPLACEMENT CHARACTER}": -9999.0} for word in WORDS]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == WORDS
    assert logprobs.content[0].bytes == list(b" one")
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -9999.0]
    assert logprobs.content[0].top_logprobs[1].bytes is None  # part of a character: its bytes are not known


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


def test_streamed_logprobs_are_the_whole_ones_in_pieces(server: Running) -> None:
    whole = server.completion(prompt="a", logprobs=1)["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for event in _events(server, prompt="a", logprobs=1, stream=True):
        for key, values in event["choices"][0]["logprobs"].items():
            joined[key] += values
    assert joined == whole


def _events(server: Running, **body: Any) -> list[dict[str, Any]]:
    lines = server.post("/v1/completions", **body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


# -- chat ----------------------------------------------------------------------------------------------------------


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


# -- errors --------------------------------------------------------------------------------------------------------

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        (COMPLETION, {}, 400, "prompt", "prompt: Field required"),
        (COMPLETION, {"prompt": None}, 400, "prompt", "prompt must be a text, a list of texts"),
        (COMPLETION, {"prompt": {"a": 1}}, 400, "prompt", "prompt must be a text"),
        (COMPLETION, {"prompt": [True]}, 400, "prompt", "prompt must be a text"),
        (COMPLETION, {"prompt": []}, 400, "prompt", "prompt is an empty list"),
        (COMPLETION, {"prompt": ""}, 400, None, "the prompt has 0 tokens"),
        (COMPLETION, {"prompt": "too long"}, 400, None, "the prompt has 8 tokens"),
        (COMPLETION, {"prompt": ["a", "too long"], "stream": True}, 400, None, "the prompt has 8 tokens"),
        (COMPLETION, {"prompt": "a", "model": "gpt-4"}, 404, "model", "the model 'gpt-4' does not exist; this server"),
        (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature", "temperature is -1.0; give a number from"),
        (COMPLETION, {"prompt": "a", "temperature": "hot"}, 400, "temperature", "valid number"),
        (COMPLETION, {"prompt": "a", "top_p": 0}, 400, "top_p", "top_p is 0"),
        (COMPLETION, {"prompt": "a", "n": 0}, 400, "n", "n is 0; give an integer from 1 to 128"),
        (COMPLETION, {"prompt": "a", "n": 1.5}, 400, "n", "valid integer"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
        (COMPLETION, {"prompt": "a", "logprobs": 21}, 400, "logprobs", "logprobs is 21; give an integer from 0 to 20"),
        (COMPLETION, {"prompt": "a", "logprobs": 1, "echo": True}, 400, "echo", "leave out echo or logprobs"),
        (COMPLETION, {"prompt": "a", "stop": [""]}, 400, "stop", "must be a non-empty string"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias", "logit_bias is not supported"),
        (COMPLETION, {"prompt": "a", "stream_options": {}}, 400, "stream_options", "needs stream to be true"),
        (COMPLETION, {"prompt": "crowd"}, 429, None, "16384 requests"),
        (COMPLETION, {"prompt": "break"}, 503, None, "worker memory0 is gone"),
        (CHAT, {}, 400, "messages", "Field required"),
        (CHAT, {"messages": []}, 400, "messages", "at least 1 item"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "'image_url' is not"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools", "tools is not supported"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs to be true"),
    ],
)
def test_a_bad_request_is_answered_in_openai_s_form(
    server: Running, path: str, body: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    response = server.post(path, **body)
    error = _error(response, status)
    assert said in error["message"]
    assert param is None or error["param"] == param
    assert server.completion(prompt="a")["choices"]  # and it goes on serving


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == {429: "rate_limit_error", 503: "server_error"}.get(status, "invalid_request_error")
    return error


def test_a_bad_prompt_among_several_leaves_none_running(server: Running) -> None:
    server.post(COMPLETION, prompt=["hang", "hang", "too long"])
    assert len(server.engine.running) == 2
    assert server.engine.aborted == server.engine.running


def test_what_asks_for_nothing_is_not_refused(server: Running) -> None:
    server.completion(prompt="a", logit_bias=None, tools=[], response_format={"type": "text"}, best_of=None)


def test_bodies_that_are_no_json_objects(server: Running) -> None:
    kind = {"Content-Type": "application/json"}
    assert "not JSON" in _error(server.http.post(COMPLETION, content=b"{'prompt'", headers=kind), 400)["message"]
    for content in (b"[1]", b"null", b'"text"', b""):
        assert "JSON object" in _error(server.http.post(COMPLETION, content=content, headers=kind), 400)["message"]
    assert (
        "Content-Type: application/json"
        in _error(server.http.post(COMPLETION, content=b'{"prompt": "a"}'), 400)["message"]
    )
    nan = server.http.post(COMPLETION, content=b'{"prompt": "a", "temperature": NaN}', headers=kind)
    assert "temperature is nan" in _error(nan, 400)["message"]


def test_unknown_routes_and_methods(server: Running) -> None:
    assert "GET /v2/completions does not exist" in _error(server.http.get("/v2/completions"), 404)["message"]
    response = server.http.get(COMPLETION)
    assert "use POST" in _error(response, 405)["message"]
    assert response.headers["Allow"] == "POST"


def test_overload_says_when_to_try_again(server: Running) -> None:
    response = server.post(COMPLETION, prompt="crowd")
    assert int(response.headers["Retry-After"]) > 0


def test_a_dead_engine_answers_503_everywhere(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok", "running": 1, "waiting": 2}
    server.engine.dead = "memory0 was killed\nTraceback: its own business"
    for response in (server.http.get("/health"), server.post(COMPLETION, prompt="a")):
        message = _error(response, 503)["message"]
        assert "memory0 was killed" in message and "its own business" not in message


def test_the_interface_describes_itself(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    assert {COMPLETION, CHAT, "/v1/models", "/health"} <= set(schema["paths"])
    assert "min_p" in schema["components"]["schemas"]["CompletionRequest"]["properties"]


def test_metrics_say_what_runs_and_how_workers_are_linked(server: Running) -> None:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert values == {
        ("lamina_requests_running",): 1,
        ("lamina_requests_waiting",): 2,
        ("lamina_steps_total",): 3,
        ("lamina_sequences_moved_total",): 4,
        ("lamina_kv_slots_used", "memory0"): 5,
        ("lamina_kv_slots", "memory0"): 9,
        ("lamina_links", "same host", "shm"): 1,
        ("lamina_links", 'different hosts; no rdma: "none"', "tcp"): 2,
    }


def test_status_shows_what_a_server_s_metrics_say(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.lines(server.http.get("/metrics").text) == [
        "requests  1 running, 2 waiting, 3 steps so far",
        "memory0   5 of 9 token slots in use",
        "network   shm between 1 pair of workers (same host)",
        'network   tcp between 2 pairs of workers (different hosts; no rdma: "none")',
    ]
    status.status(server.url)
    assert "1 running" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no server of Lamina answers at"):
        status.status("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="is this a server of Lamina"):
        status.lines("python_info 1\n")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_failure_in_mid_stream_reaches_the_client(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="break", stream=True)
    with pytest.raises(openai.APIError, match="worker memory0 is gone"):
        list(stream)


# -- disconnects ---------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_a_stream_cancels_its_requests(server: Running) -> None:
    body = {"prompt": ["hang", "hang"], "stream": True}
    with httpx.stream("POST", f"{server.url}{COMPLETION}", json=body, timeout=TIMEOUT_S) as response:
        next(response.iter_lines())
    assert server.engine.wait_until(lambda: len(server.engine.aborted) == 2)
    assert server.engine.aborted == server.engine.running


def test_a_client_that_leaves_before_its_answer_cancels_its_requests(server: Running) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            asking = asyncio.ensure_future(client.post(f"{server.url}{COMPLETION}", json={"prompt": ["hang", "hang"]}))
            both = asyncio.to_thread(server.engine.wait_until, lambda: len(server.engine.running) == 2)
            assert await both
            asking.cancel()

    asyncio.run(leave())
    assert server.engine.wait_until(lambda: server.engine.aborted == server.engine.running)


def test_answers_of_many_clients_do_not_mix(server: Running) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> str:
        response = await client.post(f"{server.url}{COMPLETION}", json={"prompt": f"{number}", "echo": True})
        text: str = response.json()["choices"][0]["text"]
        return text

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(ask_all()) == [f"{number} one two three" for number in range(64)]
