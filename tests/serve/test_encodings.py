"""How bodies may be encoded, and how chunks are numbered and dated."""

import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scripted_engine import Running, refusal

ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_byte_order_mark_before_json_is_left_out(server: Running, path: str) -> None:
    body = json.dumps(BODIES[path]).encode("utf-8-sig")
    answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ROUTES)
def test_a_compressed_body_is_refused_as_such(server: Running, path: str) -> None:
    body = gzip.compress(json.dumps(BODIES[path]).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = server.http.post(path, content=body, headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]
    plain = server.http.post(path, json=BODIES[path], headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("path", ROUTES[:2])
def test_all_chunks_of_a_stream_have_its_id_and_time(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    clock = iter(range(1_000_000_000))
    monkeypatch.setattr("lamina.serve.openai_answers.time", SimpleNamespace(time=lambda: float(next(clock))))
    lines = server.post(path, **BODIES[path], stream=True, stream_options={"include_usage": True}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(chunks) >= 2
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_a_schema_may_stand_beside_the_type_as_for_llama_cpp(server: Running, form: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    server.completion(prompt="a", response_format={"type": form, "schema": schema})
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs is not None and json.loads(params.structured_outputs.json) == schema


def test_a_schema_that_is_text_and_nested_too_deeply_is_refused(server: Running) -> None:
    error = refusal(server.post("/v1/completions", prompt="a", guided_json='{"a":' * 9000), 400)
    assert error["param"] == "guided_json" and "not JSON" in error["message"]


def test_an_empty_model_is_the_one_served(server: Running) -> None:
    server.completion(prompt="a", model="")
