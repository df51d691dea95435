"""Compiles what an answer must match, a JSON schema, a regular expression, choices or a grammar, for llguidance."""

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lamina.core.errors import RequestError
from lamina.core.types import SamplingParams, StructuredOutputs

JSON_SPACE = r"(\n[ \t]{0,32}| )?"
"""White space between the parts of a JSON text: a bounded number, or a model that likes it would never end."""


@functools.lru_cache(maxsize=256)
def compile_grammar(wanted: StructuredOutputs) -> str:
    """Return the grammar for ``llguidance.LLMatcher``.

    Raises:
        RequestError: it cannot be compiled; names the field and the place.
    """
    if wanted.json is not None:
        grammar, fault = _of_schema(wanted.json)
        if fault:
            raise RequestError(f"json cannot be compiled at {_place(json.loads(wanted.json))}: {fault}")
        return grammar
    name = "regex" if wanted.regex is not None else "choice" if wanted.choice is not None else "grammar"
    grammar, fault = _of_text(wanted)
    if fault:
        raise RequestError(f"{name} cannot be compiled: {fault}")
    return grammar


def after_reasoning(wanted: StructuredOutputs, end: str) -> StructuredOutputs:
    """Return what an answer must match that begins within reasoning, which ``end`` ends. ``wanted``: a JSON schema."""
    options = {"whitespace_flexible": True, "whitespace_pattern": JSON_SPACE}
    schema = json.dumps({**json.loads(wanted.json), "x-guidance": options})
    reasoning = f"reasoning[suffix={json.dumps(end)}]: /(.|\\n)*/"
    return StructuredOutputs(grammar=f"start: reasoning answer\n{reasoning}\nanswer: %json {schema}\n")


def require_grammar(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """Raise RequestError if what the answer must match cannot be compiled, or the model's answers have no end."""
    if params.structured_outputs is None:
        return
    compile_grammar(params.structured_outputs)
    if not eos_token_ids:
        raise RequestError("structured_outputs need a model with an end-of-sequence token; name it in its config.json")


def _of_schema(schema: str) -> tuple[str, str]:
    """Return the grammar of a JSON schema, and why it cannot be compiled; empty if it can."""
    from llguidance import LLMatcher  # saves 30 ms of the time to import the SDK

    parsed = json.loads(schema)
    if parsed is True:
        schema = "{}"
    elif not isinstance(parsed, dict):
        return "", "a schema is an object, or true"
    options: Any = {"whitespace_flexible": True, "whitespace_pattern": JSON_SPACE}
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        return "", str(error)
    return grammar, _fault(grammar)


def _of_text(wanted: StructuredOutputs) -> tuple[str, str]:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    if wanted.regex is not None:
        grammar = LLMatcher.grammar_from_regex(wanted.regex)
    elif wanted.choice is not None:
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
    else:
        text = wanted.grammar or ""
        try:
            grammar = LLMatcher.grammar_from_lark(gbnf_to_lark(text) if "::=" in text else text)
        except GbnfToLarkError as error:
            return "", str(error)
    return grammar, _fault(grammar)


def _fault(grammar: str) -> str:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0].strip() if failed else ""


def _place(schema: Any) -> str:
    """Return the JSON pointer of the smallest part of a schema that cannot be compiled by itself."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    place = "#"
    while True:
        for name, part in _parts(schema):
            whole = {**part, **shared} if isinstance(part, dict) else part
            if _of_schema(json.dumps(whole))[1]:
                place, schema = f"{place}/{name}", part
                break
        else:
            return place


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that a schema is made of, by their pointers."""
    if not isinstance(schema, Mapping):
        return
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield key, schema[key]
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(key), Mapping):
            for name, part in schema[key].items():
                yield f"{key}/{str(name).replace('~', '~0').replace('/', '~1')}", part
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                yield f"{key}/{index}", part
