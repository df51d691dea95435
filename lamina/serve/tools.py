"""The tools of a chat request: what the model may call, what it must call, and the grammar that enforces it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from lamina.core.errors import RequestError
from lamina.text.tool_calls import TOOL_PARSERS, AnswerParser, JsonCalls, NamedCall

MOST_TOOLS = 1024
MOST_TOOL_NBYTES = 1024 * 1024
"""Limit on the JSON of all tools together."""

Schema = dict[str, Any]


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the model may call. ``strict`` has no effect."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag="function", tag_field="type"):
    """A tool; functions are the only kind."""

    function: Function


class NamedFunction(msgspec.Struct):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, tag="function", tag_field="type"):
    """The tool that the model must call."""

    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool

_TOOLS = msgspec.json.Decoder(list[Tool])


def decode_tools(raw: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools as chat templates take them. Raises RequestError or what msgspec raises."""
    if raw.strip() == b"null":
        return [], []
    if len(raw) > MOST_TOOL_NBYTES:
        raise RequestError(f"tools has {len(raw)} bytes; give at most {MOST_TOOL_NBYTES}")
    tools = _TOOLS.decode(raw)
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools; give at most {MOST_TOOLS}")
    names = [tool.function.name for tool in tools]
    for name in names:
        if not name or names.count(name) > 1:
            raise RequestError(f"tools has {names.count(name)} functions named {name!r}; give each a name of its own")
    return msgspec.to_builtins(tools), []


def forced_schema(tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> Schema | None:
    """Return the JSON schema of calls that the model must make; None if it need not call anything.

    A named tool has the schema of its arguments; "required" one of a list of calls, or of one if not ``parallel``.

    Raises:
        RequestError: there is no such tool.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            raise RequestError(f"tool_choice names {choice.function.name!r}, which is not among the tools")
        return functions[choice.function.name].get("parameters") or {"type": "object"}
    if choice != "required":
        return None
    if not functions:
        raise RequestError("tool_choice is required, but there are no tools")
    shared: Schema = {}
    calls = []
    for number, (name, function) in enumerate(functions.items()):
        parameters = _hoisted(function.get("parameters") or {"type": "object"}, f"{number}.", shared)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: Schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": shared} if shared else {})


def _hoisted(schema: Schema, prefix: str, shared: Schema) -> Schema:
    """Return a schema whose definitions are in ``shared`` instead, under names with ``prefix``."""

    def renamed(part: Any) -> Any:
        if isinstance(part, list):
            return [renamed(each) for each in part]
        if not isinstance(part, dict):
            return part
        changed = {key: renamed(value) for key, value in part.items()}
        reference = part.get("$ref")
        if isinstance(reference, str):
            for key in ("$defs", "definitions"):
                if reference.startswith(f"#/{key}/"):
                    changed["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(f'#/{key}/')}"
        return changed

    own = dict(schema)
    for key in ("$defs", "definitions"):
        for name, part in (own.pop(key, None) or {}).items():
            shared[prefix + name] = renamed(part)
    moved: Schema = renamed(own)
    return moved


def calls_parser(choice: ToolChoice, family: str) -> Callable[[], AnswerParser]:
    """Return what makes a parser of calls. ``family``: the form of calls that no grammar enforces."""
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return lambda: NamedCall(name)
    return JsonCalls if choice == "required" else TOOL_PARSERS[family]
