"""Answers that must match a JSON schema, a regular expression, choices or a grammar, from the SDK and over HTTP."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from lamina import FinishReason, Lamina, RequestError, SamplingParams, StructuredOutputs
from tests.support.http_server import openai_client

PROMPT = "The answer is"


@pytest.fixture(scope="module")
def lamina() -> Iterator[Lamina]:
    with Lamina(compute="cpu:1", memory="cpu:2", dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def client(lamina: Lamina) -> Iterator[openai.OpenAI]:
    with openai_client(lamina.engine) as made:
        yield made


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of any of the kinds that applications use, with answers of bounded length."""
    scalars: list[dict[str, Any]] = [
        {"type": "integer", "minimum": draw.randint(-99, 0), "maximum": draw.randint(1, 99)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": draw.randint(1, 9)},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "minLength": 2, "maxLength": draw.randint(2, 9)},
        {"type": "string", "pattern": "^[a-c]{2}-[0-9]{1,3}$"},
        {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])},
        {"enum": ["x", 1, None, {"a": [1]}]},
        {"const": "\u00e9\n"},
        {"type": ["integer", "null"], "maximum": 5},
    ]
    if depth == 2 or draw.random() < 0.4:
        return draw.choice(scalars)
    kind = draw.choice(["object", "array", "tuple", "anyOf", "allOf", "ref"])
    parts = [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    if kind == "array":
        return {"type": "array", "items": parts[0], "minItems": 1, "maxItems": 3}
    if kind == "tuple":
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "items": False}
    if kind in ("anyOf", "allOf"):
        bounds = [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]
        return {kind: parts if kind == "anyOf" else bounds}
    names = ["a", "b c", '"\\'][: len(parts)]
    whole: dict[str, Any] = {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "additionalProperties": False,
    }
    whole["required"] = draw.sample(names, draw.randint(0, len(names)))
    if kind == "ref" and depth == 0:
        return whole | {"properties": whole["properties"] | {"r": {"$ref": "#/$defs/t"}}, "$defs": {"t": parts[0]}}
    return whole


def test_answers_match_random_schemas(lamina: Lamina) -> None:
    draw = random.Random(1)
    schemas = [random_schema(draw) for _ in range(60)]
    params = [
        SamplingParams(max_tokens=300, seed=seed, temperature=1.2, structured_outputs=StructuredOutputs(json=schema))
        for seed, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, output in zip(schemas, lamina.generate([PROMPT] * len(schemas), params, use_tqdm=False), strict=True):
        assert output.error is None
        (answer,) = output.outputs
        if answer.finish_reason is FinishReason.STOP:  # else the answer was cut at max_tokens
            jsonschema.validate(json.loads(answer.text), schema, format_checker=jsonschema.FormatChecker())
            ended += 1
    assert ended > 50


KEYWORDS: list[Callable[[random.Random, Callable[[], Any]], dict[str, Any]]] = [
    lambda draw, part: {"type": draw.choice(["string", "integer", "number", "object", "array", "boolean", "null"])},
    lambda draw, part: {"type": draw.sample(["string", "integer", "object", "array", "null"], 2)},
    lambda draw, part: {"enum": draw.sample(["a", 1, 2.5, None, True, [1], {"b": 2}], 2)},
    lambda draw, part: {"const": draw.choice(["a", 0, False, [], {"a": 1}])},
    lambda draw, part: {"multipleOf": draw.choice([1, 3, 0.5])},
    lambda draw, part: {"minimum": draw.randint(-9, 9)},
    lambda draw, part: {"exclusiveMinimum": draw.randint(-9, 9)},
    lambda draw, part: {"maximum": draw.randint(-9, 9)},
    lambda draw, part: {"exclusiveMaximum": draw.randint(-9, 9)},
    lambda draw, part: {"minLength": draw.randint(0, 4)},
    lambda draw, part: {"maxLength": draw.randint(0, 6)},
    lambda draw, part: {"pattern": draw.choice(["^a*$", "a+", "^[0-9]{1,3}", "^\\S$"])},
    lambda draw, part: {"format": draw.choice(["date", "time", "ipv4", "ipv6", "uuid", "email", "unknown"])},
    lambda draw, part: {"items": part()},
    lambda draw, part: {"prefixItems": [part(), part()], "items": draw.random() < 0.3},
    lambda draw, part: {"minItems": draw.randint(0, 2)},
    lambda draw, part: {"maxItems": draw.randint(0, 3)},
    lambda draw, part: {"contains": part()},
    lambda draw, part: {"uniqueItems": draw.random() < 0.5},
    lambda draw, part: {"unevaluatedItems": False},
    lambda draw, part: {"properties": {"a": part(), "b": part()}},
    lambda draw, part: {"required": draw.sample(["a", "b", "c"], draw.randint(0, 2))},
    lambda draw, part: {"patternProperties": {"^x": part()}},
    lambda draw, part: {"additionalProperties": draw.choice([False, part()])},
    lambda draw, part: {"propertyNames": {"maxLength": 3}},
    lambda draw, part: {"minProperties": draw.randint(0, 2)},
    lambda draw, part: {"maxProperties": draw.randint(0, 2)},
    lambda draw, part: {"dependentRequired": {"a": ["b"]}},
    lambda draw, part: {"dependentSchemas": {"a": part()}},
    lambda draw, part: {"unevaluatedProperties": False},
    lambda draw, part: {"allOf": [part(), part()]},
    lambda draw, part: {"anyOf": [part(), part()]},
    lambda draw, part: {"oneOf": [part(), part()]},
    lambda draw, part: {"not": part()},
    lambda draw, part: {"if": part(), "then": part(), "else": part()},
    lambda draw, part: {"$ref": draw.choice(["#", "#/$defs/t"])},
    lambda draw, part: {"default": 1, "title": "t", "$comment": "c", "unknown": 5},
]
"""A rule for each keyword of the JSON Schema Test Suite (draft 2020-12), with values as its tests have them."""


def any_schema(draw: random.Random, depth: int = 0) -> Any:
    """A schema of any keywords, which may contradict each other or have no meaning together."""
    if depth and draw.random() < 0.1:
        return draw.random() < 0.8
    made: dict[str, Any] = {}
    for keyword in draw.sample(KEYWORDS, draw.randint(1, 3)):
        made |= keyword(draw, lambda: any_schema(draw, depth + 1) if depth < 2 else {"type": "integer"})
    return made if depth else {"$defs": {"t": {"type": "boolean"}}, **made}


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_answers_match_schemas_of_any_keywords_or_these_are_refused(client: openai.OpenAI, count: int) -> None:
    draw = random.Random(count)
    name = client.models.list().data[0].id

    def answered(schema: Any) -> str:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        asked = {"max_tokens": 120, "seed": 2, "temperature": 1.2, "extra_body": {"response_format": wanted}}
        try:
            (choice,) = client.completions.create(model=name, prompt=PROMPT, **asked).choices
        except openai.BadRequestError as error:
            assert "response_format.json_schema.schema cannot be compiled at #" in error.message, error
            return "refused"
        if choice.finish_reason == "length":
            return "cut off"
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        assert checker.is_valid(json.loads(choice.text)), (schema, choice.text)
        return "valid"

    with ThreadPoolExecutor(16) as pool:
        found = Counter(pool.map(answered, [any_schema(draw) for _ in range(count)]))
    assert found["valid"] > count / 4 and found["refused"] > count / 10, found


def test_each_completion_matches_what_it_must(lamina: Lamina) -> None:
    wanted = {
        "regex": (StructuredOutputs(regex="[0-9]{3}-[a-f]{2,9}"), re.compile("[0-9]{3}-[a-f]{2,9}")),
        "choice": (StructuredOutputs(choice=["yes", 'no"', "\u00fc"]), re.compile('yes|no"|\u00fc')),
        "lark": (StructuredOutputs(grammar='start: ("a" | "b"){1,5} "c"'), re.compile("[ab]{1,5}c")),
        "gbnf": (StructuredOutputs(grammar='root ::= "<" [0-9] [0-9]? ">"'), re.compile("<[0-9]{1,2}>")),
    }
    params = [SamplingParams(n=4, seed=3, max_tokens=200, structured_outputs=given) for given, _ in wanted.values()]
    for (_, form), output in zip(wanted.values(), lamina.generate([PROMPT] * 4, params, use_tqdm=False), strict=True):
        for answer in output.outputs:
            assert answer.finish_reason is FinishReason.STOP and form.fullmatch(answer.text), answer
    assert len({answer.text for answer in output.outputs}) > 1


def test_what_cannot_be_compiled_is_refused_with_its_place(lamina: Lamina) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"not": {}}]}}}
    with pytest.raises(RequestError, match=r"json cannot be compiled at #/properties/a/anyOf/1: .*not"):
        lamina.generate(PROMPT, {"structured_outputs": {"json": schema}})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#"),
        (
            {"properties": {"a/": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"allOf": [{"$ref": "#/$defs/t"}]}}},
            "#/properties",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/.defs/a"),
    ],
)
def test_a_schema_that_only_refers_to_itself_is_refused(lamina: Lamina, schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match=f"json cannot be compiled at {place}.* leads to itself"):
        lamina.generate(PROMPT, {"structured_outputs": {"json": schema}})


def test_schemas_may_refer_to_themselves_within_a_part(lamina: Lamina) -> None:
    tree = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        n=16, max_tokens=100, seed=1, temperature=2.0, structured_outputs=StructuredOutputs(json=tree)
    )
    (output,) = lamina.generate(PROMPT, params)
    ended = [answer.text for answer in output.outputs if answer.finish_reason is FinishReason.STOP]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), tree)


def test_a_grammar_in_which_nothing_may_follow_ends_in_an_error(lamina: Lamina) -> None:
    wanted = StructuredOutputs(grammar='start: "a" x\nx: x')
    output, beside = lamina.generate(
        [PROMPT] * 2, [SamplingParams(structured_outputs=wanted), SamplingParams(max_tokens=4, ignore_eos=True)]
    )
    assert output.error is not None and "rule out every token" in output.error
    assert output.outputs[0].finish_reason is FinishReason.ERROR and output.outputs[0].text == "a"
    assert len(beside.outputs[0].token_ids) == 4


class Step(BaseModel, extra="forbid"):  # else keys of any length may follow
    explanation: str = Field(max_length=12)
    value: int = Field(ge=0, le=99)


class Answer(BaseModel, extra="forbid"):
    kind: Literal["sum", "product"]
    steps: list[Step] = Field(min_length=1, max_length=2)
    total: int | None = Field(ge=0, le=99)


def test_openai_s_client_parses_answers_into_pydantic(client: openai.OpenAI, lamina: Lamina) -> None:
    parsed = client.chat.completions.parse(
        model=lamina.engine.model_name,
        messages=[{"role": "user", "content": "1 + 2?"}],
        response_format=Answer,
        max_tokens=400,
        seed=1,
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    (output,) = lamina.generate(
        PROMPT, SamplingParams(max_tokens=400, structured_outputs=StructuredOutputs(json=Answer))
    )
    Answer.model_validate_json(output.outputs[0].text)
