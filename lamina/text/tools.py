"""Tools that a model may call: their form in requests, the grammar of calls it must make, and the calls it made."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from lamina.core.errors import RequestError
from lamina.core.sampling import StructuredOutputs
from lamina.text.channels import call_rules, calls_grammar
from lamina.text.chat_format import TOOL_PARSERS, ChatFormat
from lamina.text.grammars import compile_grammar
from lamina.text.tagged_calls import TaggedCalls
from lamina.text.tool_calls import AnswerParser, JsonCalls, NamedCall, PlainText

MOST_TOOLS = 1024


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the model may call. ``strict`` has no effect."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag="function", tag_field="type"):
    """A tool; functions are the only kind."""

    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, tag="function", tag_field="type"):
    """The tool that the model must call."""

    function: NamedFunction


class AllowedTools(msgspec.Struct):
    """Tools that the model may call, of those of the request. ``mode`` "required": it must call one or several."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedChoice(msgspec.Struct, tag="allowed_tools", tag_field="type"):
    """The choice among a part of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool
GivenChoice = ToolChoice | AllowedChoice
"""A request's ``tool_choice``; see ``usable_tools``."""

Tools = Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)]


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as chat templates take them. Raises RequestError for two functions of one name."""
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"tools has {names.count(name)} functions named {name!r}; give each a name of its own")
    plain: list[dict[str, Any]] = msgspec.to_builtins(tools)
    return plain


def usable_tools(
    tools: Sequence[Mapping[str, Any]], choice: GivenChoice | None
) -> tuple[Sequence[Mapping[str, Any]], ToolChoice]:
    """Return the tools that the model is shown, and the choice among them.

    ``tools`` are as chat templates take them. Raises RequestError if an allowed tool is not among them.
    """
    if isinstance(choice, AllowedChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        known = {tool["function"]["name"] for tool in tools}
        if unknown := [name for name in allowed if name not in known]:
            raise RequestError(f"tool_choice allows {unknown[0]!r}, which is not among the tools")
        if not allowed:
            raise RequestError('tool_choice allows no tools; name some, or give "none"')
        return [tool for tool in tools if tool["function"]["name"] in allowed], choice.allowed_tools.mode
    choice = choice or ("auto" if tools else "none")
    return (tools if choice != "none" else []), choice


def forced_calls(
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    parallel: bool,
    form: ChatFormat,
    prompt: str,
    continued: str = "",
) -> StructuredOutputs | None:
    """Return the constraint on an answer to ``prompt`` that must call tools; None if it need not call any.

    ``continued``: see ``ChatFormat.inside``.

    Raises:
        RequestError: there is no such tool.
    """
    schema = _forced_schema(tools, choice, parallel)
    if schema is None:
        return None
    if form.channels:
        named = choice.function.name if isinstance(choice, NamedTool) else None
        callable_tools = [tool for tool in tools if named in (None, tool["function"]["name"])]
        return StructuredOutputs(grammar=calls_grammar(call_rules(callable_tools)))
    return form.constrain(StructuredOutputs(json=schema), prompt, continued=continued)


def require_calls(wanted: StructuredOutputs, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, which names the function at fault, if a constraint on calls cannot be compiled."""
    try:
        compile_grammar(wanted)
    except RequestError as error:
        for tool in tools:
            _require_parameters(tool["function"])
        raise RequestError(f"tools: {error}") from error


def _require_parameters(function: Mapping[str, Any]) -> None:
    try:
        compile_grammar(StructuredOutputs(json=function.get("parameters") or {"type": "object"}))
    except RequestError as error:
        fault = str(error).removeprefix("json ")
        raise RequestError(f"tools: the parameters of {function['name']!r}: {fault}") from error


def _forced_schema(tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> dict[str, Any] | None:
    """Return the JSON schema of calls that the model must make; None if it need not call anything.

    For a named tool, that is the schema of its arguments; for "required", a list of calls, of one if not ``parallel``.

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
    shared: dict[str, Any] = {}
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
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": shared} if shared else {})


def _hoisted(schema: dict[str, Any], prefix: str, shared: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that may be a part of another one.

    Its definitions are in ``shared``, under names with ``prefix``. If it refers to other parts of itself, it is there
    too, under ``prefix``.
    """
    refers = False

    def renamed(part: Any) -> Any:
        nonlocal refers
        if isinstance(part, list):
            return [renamed(each) for each in part]
        if not isinstance(part, dict):
            return part
        changed = {key: renamed(value) for key, value in part.items()}
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return changed
        for key in ("$defs", "definitions"):
            if reference.startswith(f"#/{key}/"):
                changed["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(f'#/{key}/')}"
                return changed
        if reference == "#" or reference.startswith("#/"):
            refers = True
            changed["$ref"] = f"#/$defs/{prefix}{reference[1:]}"
        return changed

    own = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}  # which begin a new root
    for key in ("$defs", "definitions"):
        for name, part in (own.pop(key, None) or {}).items():
            shared[prefix + name] = renamed(part)
    moved: dict[str, Any] = renamed(own)
    if refers:
        shared[prefix] = moved
    return moved


def calls_parser(
    choice: ToolChoice, family: str | None, tools: Sequence[Mapping[str, Any]]
) -> Callable[[], AnswerParser]:
    """Return a factory of parsers of tool calls.

    Args:
        choice: the request's choice. Unless it is "auto", a grammar enforces the form of calls.
        family: key of ``TOOL_PARSERS`` for "auto"; None: no calls are found.
        tools: the functions that may be called, as chat templates take them.
    """
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return lambda: NamedCall(name)
    if choice == "required":
        return JsonCalls
    parser = TOOL_PARSERS.get(family or "")
    if parser is None:
        return PlainText
    if issubclass(parser, TaggedCalls):
        tagged: type[TaggedCalls] = parser
        return lambda: tagged(tools)
    return parser
