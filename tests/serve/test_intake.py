"""Limits on the size, speed and number of bodies, and prompts that are rejected before they are tokenised."""

import threading
from typing import Any

import httpx
import pytest

from lamina.serve import gate
from lamina.serve.bodies import MOST_BYTES_BESIDES, CompletionBody, parse
from lamina.serve.gate import LARGEST_AT_ONCE, LEAST_LIMIT, SMALL, BoundedBodies, body_limit
from lamina.serve.http_errors import APIError
from lamina.serve.json_fields import MOST_BYTES_OF_FIELDS
from tests.support.raw_http import answer, head, raw
from tests.support.scripted_engine import CHAT, COMPLETION, TIMEOUT_S, Running, refusal

JSON = {"Content-Type": "application/json"}


def test_the_limit_grows_with_the_longest_prompt() -> None:
    assert body_limit(1024) == LEAST_LIMIT
    assert body_limit(1 << 20) == 16 << 20


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_a_large_body_is_refused_before_it_is_sent(server: Running, path: str) -> None:
    with raw(server, head(LEAST_LIMIT + 1, path)) as connection:
        status, body = answer(connection)
    assert status == 413
    assert f"at least {LEAST_LIMIT + 1} bytes; this server accepts at most {LEAST_LIMIT}" in body["error"]["message"]
    with raw(server, head(LEAST_LIMIT + 1, path, "Expect: 100-continue\r\n")) as connection:
        assert answer(connection)[0] == 413  # and no "100 Continue" before it


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(server: Running) -> None:
    with raw(server, head(None)) as connection:
        connection.settimeout(TIMEOUT_S)
        for _ in range(LEAST_LIMIT // 65536 + 1):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert answer(connection)[0] == 413  # although the body has not ended


def test_a_connection_goes_on_after_a_body_that_was_too_large(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        big = client.post(COMPLETION, content=b" " * (3 * LEAST_LIMIT), headers=JSON)
        refusal(big, 413)
        again = client.post(COMPLETION, json={"prompt": "a"})
        assert again.status_code == 200
        ports = [response.extensions["network_stream"].get_extra_info("client_addr") for response in (big, again)]
        assert ports[0] == ports[1]


def test_a_body_that_comes_too_slowly(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_S", 0.2)
    with raw(server, head(100) + b"{") as connection:
        status, body = answer(connection)
        assert status == 408 and "only 1 bytes of the body arrived within 0 s" in body["error"]["message"]
        assert connection.recv(1) == b""


async def test_many_large_bodies_are_refused_and_small_ones_are_not() -> None:
    held: list[BoundedBodies] = []

    async def read(bounds: BoundedBodies, size: int, inside: Any = None) -> None:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            if inside is not None:
                await inside()

        async def receive() -> Any:
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        bounds._app = application
        await bounds({"type": "http", "headers": []}, receive, None)  # type: ignore[arg-type]

    bounds = BoundedBodies(None, limit=100_000)  # type: ignore[arg-type]
    most = LARGEST_AT_ONCE

    async def deeper() -> None:
        held.append(bounds)
        if len(held) < most:
            await read(bounds, 100_000, deeper)
            return
        await read(bounds, SMALL)
        with pytest.raises(APIError, match="Try again later") as refused:
            await read(bounds, SMALL + 1)
        assert refused.value.status == 429

    await read(bounds, 100_000, deeper)
    assert len(held) == most and bounds.in_progress == 0


def test_a_prompt_that_cannot_fit_is_not_tokenised(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "encode", None)
    said = "the prompt has 397 bytes, at least 100 tokens; at most 99 fit (max_model_len 100"
    assert said in refusal(server.post(COMPLETION, prompt=["x" * 397]), 400)["message"]
    messages = [{"role": "user", "content": "x" * 391}]
    assert said in refusal(server.post(CHAT, messages=messages), 400)["message"]


@pytest.mark.parametrize("text", [rb"a\ud800", rb"\ud800 and more", rb"\udc00"])
def test_a_prompt_that_is_not_unicode(server: Running, text: bytes) -> None:
    response = server.http.post(COMPLETION, content=b'{"prompt":"%b"}' % text, headers=JSON)
    assert "half of a surrogate pair?" in refusal(response, 400)["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"prompt":' + b"[" * 100_000, "not JSON: it is nested too deeply"),
        (b'{"prompt":[' + b"[1]," * 20_000 + b"[1]]}", "prompt holds 20001 prompts; give at most 16384"),
        (b'{"prompt":["a",1]}', "prompt[1]: Expected `str`, got `int`"),
        (b'{"prompt":"\xff"}', "not JSON: prompt: "),
        (b'{"prompt":"a","metadata":"' + b"x" * MOST_BYTES_BESIDES + b'"}', f"give at most {MOST_BYTES_BESIDES}"),
        (b'{"prompt":"a","stop":"' + b"x" * 1000 + b'","Stop":1}', "Stop is not a field"),
        (b'{"prompt":"a"' + b',"x":1' * 20_000 + b"}", f"give at most {MOST_BYTES_BESIDES}"),
    ],
)
def test_what_is_dear_to_decode_is_refused_first(body: bytes, said: str) -> None:
    with pytest.raises(APIError) as refused:
        parse(CompletionBody, body)
    assert refused.value.status == 400 and said in str(refused.value) and len(str(refused.value)) < 500


def test_messages_carry_little_besides_their_content(server: Running) -> None:
    message = {"role": "user", "content": "a", "reasoning": "x" * 1000}
    error = refusal(server.post(CHAT, messages=[message] * 1100), 400)
    assert f"give at most {MOST_BYTES_OF_FIELDS}" in error["message"] and error["param"] == "messages"
    many = refusal(server.post(CHAT, messages=[{"role": "user", "content": "a"}] * 16_385), 400)
    assert many["message"] == "messages holds about 16385 messages; give at most 16384"
    unknown = refusal(server.post(CHAT, messages=[message | {"x": "x" * 1000}] * 600), 400)
    assert f"give at most {MOST_BYTES_OF_FIELDS}" in unknown["message"]


def test_a_small_body_does_not_wait_for_a_large_one(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    encode = server.engine.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if "large" in text:
            begun.set()
            may_end.wait(TIMEOUT_S)
        return encode(text)

    monkeypatch.setattr(server.engine.tokenizer, "encode", slow)
    large = threading.Thread(target=server.post, args=(COMPLETION,), kwargs={"prompt": ["large"] + ["a" * 90] * 300})
    large.start()
    assert begun.wait(TIMEOUT_S)
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        assert client.post(COMPLETION, json={"prompt": "a"}).status_code == 200
    may_end.set()
    large.join(TIMEOUT_S)
