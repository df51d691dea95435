"""What an answer must match: each field that says it reaches the engine, and faults are 400s that name the place."""

import json
from typing import Any

import pytest

from lamina.core.sampling import StructuredOutputs
from tests.support.scripted_engine import CHAT, COMPLETION, Running, refusal

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def asked(path: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json={"type": "object"})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            StructuredOutputs(json=SCHEMA),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"regex": "[0-9]+"}}, StructuredOutputs(regex="[0-9]+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"')),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
    ],
)
def test_what_an_answer_must_match_reaches_the_engine(
    server: Running, path: str, given: dict[str, Any], wanted: StructuredOutputs | None
) -> None:
    assert server.post(path, **asked(path), **given).status_code == 200
    ((_, params),) = server.engine.submitted
    assert params.structured_outputs == wanted


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type: Invalid enum value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema: Field required"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"a": {"type": "array", "items": {"not": {}}}}}},
                }
            },
            "response_format",
            'schema cannot be compiled at #/properties/a/items: Unimplemented keys: ["not"]',
        ),
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs", "outputs.regex cannot be compiled"),
        (
            {"structured_outputs": {"grammar": "root ::= = "}},
            "structured_outputs",
            "grammar cannot be compiled: ",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs has none of json, regex, choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "structured_outputs.json is not JSON"),
        (
            {"structured_outputs": {"x": 1}},
            "structured_outputs",
            "structured_outputs has the fields x; give one of",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "give 1 to 1024 texts"),
        ({"guided_regex": "(", "min_tokens": 0}, "guided_regex", "guided_regex cannot be compiled: "),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_regex and guided_choice both say"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "leave it out beside structured_outputs"),
    ],
)
def test_what_cannot_be_matched_is_refused(server: Running, given: dict[str, Any], param: str, said: str) -> None:
    error = refusal(server.post(CHAT, **asked(CHAT), **given), 400)
    assert said in error["message"] and error["param"] == param
    assert not server.engine.submitted


def test_a_request_that_leaves_no_token_is_its_own_fault(server: Running) -> None:
    error = refusal(server.post(COMPLETION, prompt="no token"), 400)
    assert "rule out every token" in error["message"] and error["type"] == "invalid_request_error"
