"""Finds tool calls whose arguments are between tags, as Qwen3-Coder and GLM-4.5 write them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from lamina.text.json_schemas import resolve
from lamina.text.tool_calls import CallArguments, CallBegins, Calls, Content, Event
from lamina.text.written_json import read_literal

_NEAR = 256
"""Characters around a marker that decide whether it ends a call or is part of a value."""


class TaggedCalls(Calls):
    """Calls between ``<tool_call>`` and ``</tool_call>``. A call is returned once it is complete.

    Values are written without quotes where they are texts, and as JSON otherwise: the tools say which they are. A text
    may contain the markers: one ends a call only where a call may end.
    """

    begin = "<tool_call>"
    end = "</tool_call>"

    name: ClassVar[re.Pattern[str]]
    """The beginning of a call, with the name of the function in the first group."""

    may_be_name: ClassVar[re.Pattern[str]]
    """A text that may become the beginning of a call."""

    ends: ClassVar[re.Pattern[str]]
    """The markers that may end a call."""

    last: ClassVar[str]
    """The end of a call whose last marker is missing."""

    after_value: ClassVar[str]
    """The end of a value."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """``tools``: the functions that may be called, as chat templates take them."""
        super().__init__()
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._header: re.Match[str] | None = None
        self._checked = 0  # characters of ``_rest`` in which no end has been found

    def flush(self) -> list[Event]:
        if self._state == self._in_tags:
            found = None if self._header is None else self.ends.search(self._rest, self._header.end())
            if found is not None:  # the only one left
                self._end_call(found)
            elif self._header is not None and self._rest.rstrip().endswith(self.last):
                self._add_call(self._rest[self._header.end() :])
                self._rest = ""
            else:
                self._events.append(Content(self._opened + self._rest))
                self._rest = ""
            self._state = self._in_content
            while self._state():
                pass
        return super().flush()

    def _begin_call(self, name: str | None = None) -> None:
        self._state = self._in_tags
        self._header, self._checked = None, 0

    def _in_tags(self) -> bool:
        if self._header is None:
            self._header = self.name.match(self._rest)
            if self._header is None and self.may_be_name.fullmatch(self._rest):
                return False
            if self._header is None or not (self._opened or self._header[1] in self._parameters):
                self._state = self._in_content
                marker = self._opened or self.also[0]
                self._rest = self._rest[len(marker) - len(self._opened) :]
                self._events.append(Content(marker))
                return True
        for found in self.ends.finditer(self._rest, max(self._checked, self._header.end())):
            ends = self._is_end(found, self._header.end())
            if ends is None:
                self._checked = found.start()
                return False
            if ends:
                self._end_call(found)
                return True
        self._checked = max(0, len(self._rest) - len(self.end))
        return False

    def _is_end(self, found: re.Match[str], start: int) -> bool | None:
        """Return whether a marker ends the call whose arguments begin at ``start``; None if later text decides that."""
        near = max(start, found.start() - _NEAR)
        before = self._rest[near : found.start()].rstrip()
        return before.endswith(self.after_value) or (not before and near == start)

    def _end_call(self, found: re.Match[str]) -> None:
        """Add the call that ends with a marker."""
        if self._header is not None:
            self._add_call(self._rest[self._header.end() : found.start()])
        self._rest = self._rest[found.start() if found[0] == self.begin else found.end() :]
        self._state = self._in_content if found[0] == self.end else self._before_end

    def _add_call(self, body: str) -> None:
        """Add a call with the arguments that are written in ``body``."""
        name = "" if self._header is None else self._header[1]
        schema = self._parameters.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        known = properties if isinstance(properties, Mapping) else {}
        arguments = {key: _value(value, known.get(key), schema) for key, value in self._pairs(body, known)}
        self._index += 1
        self._after_a_call = True
        self._events.append(CallBegins(self._index, name))
        self._events.append(CallArguments(self._index, json.dumps(arguments, ensure_ascii=False)))

    def _pairs(self, body: str, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the names and values in ``body``, in time that is linear in it. ``known``: names of parameters."""
        raise NotImplementedError


class CoderCalls(TaggedCalls):
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``: Qwen3-Coder.

    The model often leaves out ``<tool_call>``, or the end of a value.
    """

    also = ("<function=",)
    name = re.compile(r"\s{0,256}<function=([^>\n]{1,256})>")
    may_be_name = re.compile(r"\s{0,256}(<(f(u(n(c(t(i(o(n(=[^>\n]{0,256})?)?)?)?)?)?)?)?)?)?")
    ends = re.compile("</function>|</tool_call>")
    last = "</function>"
    after_value = "</parameter>"
    _marker = re.compile(r"<parameter=([^<>\n]+)>|</parameter>\s*+(?=<parameter=|\Z)")

    def _is_end(self, found: re.Match[str], start: int) -> bool | None:
        if super()._is_end(found, start):
            return True
        after = self._rest[found.end() : found.end() + _NEAR].lstrip()
        if found[0] == self.end or not (after.startswith(self.end) or self.end.startswith(after)):
            return False
        return after.startswith(self.end) or None

    def _pairs(self, body: str, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        body = body.rstrip().removesuffix(self.last)  # at the end of an answer
        key, start, whole = "", 0, True
        for found in self._marker.finditer(body):
            begins = found[1] is not None
            if key and begins and not (found[1].strip() in known and body[: found.start()].endswith("\n")):
                whole = False  # a part of the value, unless that has no end
                continue
            if key:
                yield key, body[start : found.start()].removeprefix("\n").removesuffix("\n")
            key, start, whole = found[1].strip() if begins else "", found.end(), True
        if key and whole:
            yield key, body[start:].removeprefix("\n").rstrip()


class KeyCalls(TaggedCalls):
    """``NAME`` and ``<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``: GLM-4.5."""

    name = re.compile(r"\s{0,256}([^\s<>{}\[\]]{1,256})\s{0,256}(?=<arg_key>|</?tool_call>)")
    may_be_name = re.compile(r"\s{0,256}[^\s<>{}\[\]]{0,256}\s{0,256}(</?[a-z_]{0,9})?")
    ends = re.compile("</?tool_call>")
    last = after_value = "</arg_value>"
    _argument = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def _pairs(self, body: str, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        end = body.rfind(self.after_value) + len(self.after_value)  # a search for a missing end begins at every name
        for key, value in self._argument.findall(body, 0, end):
            yield key.strip(), value


def _value(text: str, schema: Any, root: Any) -> Any:
    """Return the value that a model has written without quotes, if ``schema`` describes a text, or as JSON.

    Args:
        root: What the references in ``schema`` refer to.
    """
    if _allows(schema, "string", root) and not (text in ("null", "None") and _allows(schema, "null", root)):
        return text
    try:
        value = read_literal(text) if isinstance(schema, Mapping) else read_literal(text, python=False)
        json.dumps(value, allow_nan=False)  # Python reads numbers that JSON does not have
    except (ValueError, TypeError):
        return text
    return value


def _allows(schema: Any, kind: str, root: Any) -> bool:
    """Return whether a schema allows values of the type ``kind``, as far as it says so: alone or among others."""
    parts, followed = [schema], set[str]()
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        named, values = part.get("type"), part.get("enum", [part["const"]] if "const" in part else None)
        if named == kind or (isinstance(named, list) and kind in named):
            return True
        if isinstance(values, list) and values and kind == "string" and all(isinstance(each, str) for each in values):
            return True
        for key in ("anyOf", "oneOf", "allOf"):
            parts += several if isinstance(several := part.get(key), list) else []
        reference = part.get("$ref")
        if isinstance(reference, str) and isinstance(root, Mapping) and reference not in followed:
            followed.add(reference)
            parts.append(resolve(reference, root))
    return False
