"""Finds tool calls whose arguments are between tags, as Qwen3-Coder and GLM-4.5 write them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lamina.text.tool_calls import CallArguments, CallBegins, Calls, Content, Event
from lamina.text.written_json import read_written


class TaggedCalls(Calls):
    """Calls between ``<tool_call>`` and ``</tool_call>``. A call is returned once it is complete.

    Values are written without quotes where they are texts, and as JSON otherwise: the tools say which they are.
    """

    begin = "<tool_call>"
    end = "</tool_call>"
    last: ClassVar[str]
    """The end of a call whose last marker is missing."""

    name: ClassVar[re.Pattern[str]]
    """The name of the function, in the first group, at the beginning of a call."""

    argument: ClassVar[re.Pattern[str]]
    """An argument: its name and its value. It matches, or fails, in time that is linear in the text if every value
    ends."""

    after_value: ClassVar[str]
    """The end of a value."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """``tools``: the functions that may be called, as chat templates take them."""
        super().__init__()
        self._parameters = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}

    def flush(self) -> list[Event]:
        if self._state == self._in_tags:
            if self._rest.rstrip().endswith(self.last):
                self._end_call(self._rest, "")
            else:
                self._events.append(Content(self.begin + self._rest))
            self._rest = ""
        return super().flush()

    def _begin_call(self, name: str | None = None) -> None:
        self._state = self._in_tags

    def _in_tags(self) -> bool:
        text, found, rest = self._rest.partition(self.end)
        if not found:
            return False
        self._rest = rest
        self._end_call(text, found)
        return True

    def _end_call(self, text: str, end: str) -> None:
        """Add the call that ``text`` is; text that is no call is content. ``end``: the marker after it."""
        self._state = self._in_content
        found = self.name.match(text)
        if found is None:
            self._events.append(Content(self.begin + text + end))
            return
        parameters = self._parameters.get(found[1].strip(), {})
        last = text.rfind(self.after_value) + len(self.after_value)  # a search for a missing end begins at every name
        pairs = self.argument.findall(text, found.end(), max(found.end(), last))
        arguments = {key.strip(): _value(value, parameters.get(key.strip())) for key, value in pairs}
        self._index += 1
        self._after_a_call = True
        self._events.append(CallBegins(self._index, found[1].strip()))
        self._events.append(CallArguments(self._index, json.dumps(arguments, ensure_ascii=False)))


class CoderCalls(TaggedCalls):
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``: Qwen3-Coder."""

    last = "</function>"
    name = re.compile(r"\s*<function=([^>\n]+)>")
    argument = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    after_value = "</parameter>"


class KeyCalls(TaggedCalls):
    """``NAME`` and ``<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``: GLM-4.5."""

    last = "</arg_value>"
    name = re.compile(r"\s*([^\s<>{}\[\]]+)\s*(?=<arg_key>|$)")
    argument = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    after_value = "</arg_value>"


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters by name."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: Any) -> Any:
    """Return the value that a model has written without quotes, if ``schema`` describes a text, or as JSON."""
    if _allows_text(schema) and not (text == "null" and _allows(schema, "null")):
        return text
    try:
        value = read_written(text)
        json.dumps(value, allow_nan=False)  # Python reads numbers that JSON does not have
    except ValueError:
        return text
    return value


def _allows_text(schema: Any) -> bool:
    enum = schema.get("enum") if isinstance(schema, Mapping) else None
    return _allows(schema, "string") or (isinstance(enum, list) and all(isinstance(each, str) for each in enum))


def _allows(schema: Any, kind: str) -> bool:
    """Return whether a schema names the type ``kind``, alone or among others."""
    if not isinstance(schema, Mapping):
        return False
    named = schema.get("type")
    if named == kind or (isinstance(named, list) and kind in named):
        return True
    parts = [part for key in ("anyOf", "oneOf") for part in schema.get(key) or ()]
    return any(_allows(part, kind) for part in parts)
