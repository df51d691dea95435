"""What /openapi.json says is what happens: bodies that fit it are answered, and others are rejected."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.support.http_server import serve
from tests.support.scripted_engine import CHAT, COMPLETION, Running

BASE: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    1.0,
    0.5,
    2.5,
    33,
    129,
    2**31,
    2**63,
    1e300,
    "",
    "a",
    "never",
    "x" * 129,
]
ODD += [{"type": "text"}, {"type": "json_object"}, {"json": {}}, {"regex": "["}]
ODD += [[], [1], ["a"], [""], ["a"] * 33, [[1]], [[]], {}, {"a": 1}, {"include_usage": True}, "alias"]
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "", 5])},
    optional={
        "content": st.sampled_from([None, "", "a", 5, [], [{"type": "text", "text": "a"}], [{"type": "image_url"}]]),
        "tool_calls": st.sampled_from([None, [], [CALL], [{}], 5, [{"function": {"name": "f", "arguments": 5}}]]),
        "name": st.sampled_from([None, "a", 5]),
        "reasoning": st.sampled_from(ODD),
        "unknown": st.sampled_from(ODD),
    },
)
GRAMMARS = {"structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
UNDESCRIBED = {*GRAMMARS, "best_of"}
"""Fields of which the schema does not say all: whether a grammar compiles, and that best_of is at least n."""
PROMPT = st.sampled_from(ODD) | st.lists(st.sampled_from([0, 1.0, 0x10FFFF, 0x110000, -1, "a", "", 0.5]), max_size=3)


class Described:
    """The schema of one endpoint's bodies."""

    def __init__(self, server: Running, path: str) -> None:
        document = server.http.get("/openapi.json").json()
        content = document["paths"][path]["post"]["requestBody"]["content"]
        reference = content["application/json"]["schema"]["$ref"]
        schema = {**document, "$ref": reference}
        Draft202012Validator.check_schema(schema)
        self.fits = Draft202012Validator(schema).is_valid
        properties = document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
        self.fields = sorted(properties.keys() - {"prompt", "messages"})


@pytest.fixture(scope="module")
def roomy_server() -> Iterator[Running]:
    """A server whose context has room for every prompt and limit of ODD: the schema does not say what is too large."""
    with serve(max_model_len=1000) as running:
        yield running


@pytest.fixture(scope="module")
def described(roomy_server: Running) -> dict[str, Described]:
    return {path: Described(roomy_server, path) for path in BASE}


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@given(data=st.data())
def test_bodies_are_answered_if_they_fit_and_rejected_if_not(
    roomy_server: Running, described: dict[str, Described], path: str, data: st.DataObject
) -> None:
    roomy_server.engine.forget()
    fields = described[path].fields
    few = st.dictionaries(st.sampled_from([*fields, "unknown"]), st.sampled_from(ODD), max_size=3)
    body = BASE[path] | data.draw(few, label="fields")
    if data.draw(st.integers(0, 3)) == 0:
        large = PROMPT if path == COMPLETION else st.lists(MESSAGE, max_size=2)
        body["prompt" if path == COMPLETION else "messages"] = data.draw(large)
    assume(body.get("model") is None or isinstance(body["model"], str))  # unknown names get 404
    response = roomy_server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    if described[path].fits(body) and not UNDESCRIBED.isdisjoint(body):
        assert response.status_code in (200, 400), response.text
    elif described[path].fits(body):
        assert response.status_code == 200, response.text
    else:
        assert response.status_code in (400, 404), response.text


def test_answers_have_the_media_types_that_are_described(shared_server: Running) -> None:
    document = shared_server.http.get("/openapi.json").json()
    for path in ("/metrics", "/health", "/v1/models", "/placement"):
        (kind,) = document["paths"][path]["get"]["responses"]["200"]["content"]
        assert shared_server.http.get(path).headers["content-type"] == kind
    for path, asked in BASE.items():
        kinds = [shared_server.post(path, **asked, stream=stream).headers["content-type"] for stream in (False, True)]
        described = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert [kind.partition(";")[0] for kind in kinds] == [*described]
