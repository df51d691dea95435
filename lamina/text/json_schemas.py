"""Reads JSON schemas before llguidance compiles them."""

import graphlib
from collections.abc import Iterator, Mapping
from typing import Any

FORMATS = frozenset(
    "date-time date time duration email hostname ipv4 ipv6 uri uuid unknown".split()  # noqa: SIM905
)
"""The formats that llguidance enforces."""

_VALUES = ("const", "enum", "default", "examples", "example")
"""Keys whose values are no schemas."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keys whose values are objects with a schema by name."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": ({}, {"type": "string"}, True),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
}
"""Values by which keys that llguidance does not know ask for nothing."""

_DRAFTS = "json-schema.org/draft"


def without_annotations(schema: Any) -> Any:
    """Return a schema without parts that every value matches, but that llguidance would refuse.

    Formats that are not among ``FORMATS`` are annotations by the standard. pydantic writes them for passwords.
    """
    if isinstance(schema, list):
        return [without_annotations(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {}
    for key, value in schema.items():
        if key in _VALUES:
            plain[key] = value
        elif key in _MAPS and isinstance(value, Mapping):
            plain[key] = {name: without_annotations(part) for name, part in value.items()}
        elif not _asks_nothing(key, value):
            plain[key] = without_annotations(value)
    return plain


def _asks_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key == "$schema":
        return isinstance(value, str) and _DRAFTS not in value
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _NEUTRAL.get(key, ()))


def find_self_reference(schema: Mapping[str, Any]) -> str | None:
    """Return a ``$ref`` that leads back to itself without a step into an object or an array; None if no reference does.

    llguidance compiles such a schema, and then allows only the end of the answer.
    """
    graph = dict[str, list[str]]()
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.values()
            graph |= {reference: _references(resolve(reference, schema)) for reference in _references(part)}
        elif isinstance(part, list):
            parts += part
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found: str = error.args[1][0]
        return found
    return None


def _references(schema: Any) -> list[str]:
    """Return the references of which an answer must match the targets."""
    if not isinstance(schema, Mapping):
        return []
    both = schema.get("allOf")
    parts = [schema, *(both if isinstance(both, list) else ())]
    return [part["$ref"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("$ref"), str)]


def resolve(reference: str, schema: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a JSON pointer names; None for other references."""
    root, *names = reference.split("/")
    target: Any = schema if root == "#" else None
    for name in names:
        target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each direct subschema with its JSON pointer relative to ``schema``."""
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
