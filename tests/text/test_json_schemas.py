"""What clients' libraries write into JSON schemas without asking for anything."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field, FilePath, Json, SecretStr

from lamina.core.errors import RequestError
from lamina.core.sampling import StructuredOutputs
from lamina.text.grammars import as_rule, compile_grammar
from lamina.text.json_schemas import FORMATS, without_annotations


def compiled(schema: Any) -> str:
    return compile_grammar(StructuredOutputs(json=schema))


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_known_formats_are_enforced(form: str) -> None:
    assert compiled({"type": "string", "format": form}) != compiled({"type": "string"})


@pytest.mark.parametrize(
    "format",
    ["password", "path", "binary", "byte", "uri-reference", "regex", "iri", "idn-email", "json-pointer", "cuid", "x"],
)
def test_other_formats_are_annotations(format: str) -> None:
    within: Any = {"type": "array", "items": {"anyOf": [{"type": "string", "format": format}]}}
    assert compiled(within) == compiled({"type": "array", "items": {"anyOf": [{"type": "string"}]}})
    assert json.dumps(format) not in as_rule(StructuredOutputs(json=within))


@pytest.mark.parametrize(
    "nothing",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},  # as zod writes it for records
        {"dependentRequired": {}},
        {"unevaluatedProperties": True},
        {"$schema": "http://json-schema.org/schema#"},
        {"$schema": "urn:mine"},
    ],
)
def test_what_asks_for_nothing_is_left_out(nothing: dict[str, Any]) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "array"}}
    assert compiled(schema | nothing) == compiled(schema)


@pytest.mark.parametrize("asking", [{"uniqueItems": True}, {"propertyNames": {"pattern": "a"}}, {"not": {}}])
def test_what_asks_for_something_is_not(asking: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="Unimplemented keys"):
        compiled({"type": "object"} | asking)


def test_properties_and_values_of_these_names_stay() -> None:
    schema: Any = {
        "type": "object",
        "properties": {"format": {"type": "string"}, "uniqueItems": {"const": {"format": "password"}}},
        "required": ["format", "uniqueItems"],
        "$defs": {"format": {"enum": [{"uniqueItems": False}]}},
    }
    assert without_annotations(schema) == schema


class Login(BaseModel):
    secret: SecretStr
    file: FilePath
    raw: bytes
    data: Json[list[int]]
    tags: set[str] = Field(json_schema_extra={"uniqueItems": False})


def test_a_model_of_pydantic_with_such_fields_compiles() -> None:
    assert compiled(Login)
