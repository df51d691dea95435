"""Finds tool calls in the text of an answer, as it grows, in the forms that model families write them.

A parser gets the text in pieces of any size, and says what is new: content, the name of a call, or a part of its
arguments, which are JSON text. Text that may be the beginning of a call is held back until that is decided.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """New text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """New text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The call with this index, counted from 0, calls the function ``name``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """New text of the arguments of the call with this index."""

    index: int
    text: str


Event = Content | Reasoning | CallBegins | CallArguments


class AnswerParser(Protocol):
    """Divides the text of one answer into events."""

    def append(self, text: str) -> list[Event]:
        """Return what further text adds."""
        ...

    def flush(self) -> list[Event]:
        """Return what was held back: no text follows."""
        ...


class PlainText:
    """All text is content."""

    def append(self, text: str) -> list[Event]:
        """Return the text."""
        return [Content(text)] if text else []

    def flush(self) -> list[Event]:
        """Return nothing."""
        return []


class _Value:
    """Follows one JSON value to its end, without checking it."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._begun = self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """Return how many characters of ``text`` belong to the value."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                    self.done = self._depth == 0
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if self._depth == 0:
                    self.done = True
                    return at
                self._depth -= 1
                self.done = self._depth == 0
            elif self._depth == 0 and self._begun and (character == "," or character.isspace()):
                self.done = True
                return at
            self._begun = self._begun or not character.isspace()
            if self.done:
                return at + 1
        return len(text)


class _CallObject:
    """Follows one JSON object with the name of a function and its arguments.

    Attributes:
        raw: What has been read.
        name: The function, once it is known.
        done: The object has ended.
        failed: This is no such object.
    """

    def __init__(self, name: str | None = None) -> None:
        """``name``: known already; the value that follows is the arguments."""
        self.raw = ""
        self.name = name
        self.done = self.failed = False
        self._bare = name is not None
        self._state: Literal["open", "key", "colon", "value"] = "value" if self._bare else "open"
        self._key = "arguments" if self._bare else ""
        self._value: _Value | None = None
        self._text = ""
        self._arguments = ""  # not returned yet
        self._had_arguments = False

    def feed(self, text: str) -> int:
        """Read ``text`` to the end of the object. Returns how many characters were read."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            if self._value is not None:
                size = self._value.feed(text[at:])
                self._add(text[at : at + size])
                at += size
                if self._value.done:
                    self._end_value()
                continue
            character = text[at]
            if self._state == "value" and not character.isspace():
                self._value, self._text = _Value(), ""
                continue
            at += 1
            if not character.isspace():
                self._step(character)
        self.raw += text[:at]
        return at

    def pop_arguments(self) -> str:
        """Return the text of arguments that is new, once the name is known."""
        if self.name is None:
            return ""
        text, self._arguments = self._arguments, ""
        return text

    def _step(self, character: str) -> None:
        if self._state == "open":
            self.failed = character != "{"
            self._state = "key"
        elif self._state == "colon":
            self.failed = character != ":"
            self._state = "value"
        elif character == '"':
            self._key = ""
            self._value, self._text = _Value(), ""
            self._value.feed('"')
            self._text = '"'
        elif character == "}":
            self._end()
        else:
            self.failed = character != ","

    def _add(self, text: str) -> None:
        self._text += text
        if self._state == "value" and self._is_arguments and not self._text.startswith('"'):
            self._arguments += text
            self._had_arguments = True

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters", "args")

    def _end_value(self) -> None:
        self._value = None
        if self._state == "key":
            self._key = str(_loaded(self._text))
            self._state = "colon"
            return
        if self._key == "name":
            name = _loaded(self._text)
            self.name = name if isinstance(name, str) else None
            self.failed = self.name is None
        elif self._is_arguments and self._text.startswith('"'):  # JSON within JSON
            self._arguments += str(_loaded(self._text))
            self._had_arguments = True
        self._state = "key"
        if self._bare:
            self._end()

    def _end(self) -> None:
        self.done = True
        self.failed = self.name is None
        if not self._had_arguments:
            self._arguments = "{}"


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def held_back(text: str, *markers: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(marker.startswith(text[-size:]) for marker in markers)), 0)


class _Calls:
    """A parser as a machine: each state reads from ``self._rest`` and returns whether it can go on."""

    begin = ""
    """The marker before a call."""

    noise: tuple[str, ...] = ()
    """Markers around calls that are left out."""

    def __init__(self) -> None:
        self._rest = ""
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._in_content
        self._index = -1
        self._call = _CallObject()
        self._announced = False

    def append(self, text: str) -> list[Event]:
        """Return what further text adds."""
        self._rest += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """Return what was held back as content, but for a call that was cut off."""
        if self._state == self._in_content:
            self._add_content(self._rest)
        elif self._call.raw and not self._announced and not self._call.done:
            self._events.append(Content(self._call.raw))
        self._rest = ""
        events, self._events = self._events, []
        return events

    def _add_content(self, text: str) -> None:
        for marker in self.noise:
            text = text.replace(marker, "")
        if self._index >= 0 and not text.strip():
            return  # white space between calls
        if text:
            self._events.append(Content(text))

    def _in_content(self) -> bool:
        before, found, after = self._rest.partition(self.begin) if self.begin else (self._rest, "", "")
        if found:
            self._add_content(before)
            self._rest = after
            self._begin_call()
            return True
        held = held_back(self._rest, self.begin, *self.noise)
        self._add_content(self._rest[: len(self._rest) - held])
        self._rest = self._rest[len(self._rest) - held :]
        return False

    def _begin_call(self, name: str | None = None) -> None:
        self._call, self._announced = _CallObject(name), False
        self._state = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        self._rest = self._rest[call.feed(self._rest) :]
        if call.failed:
            self._on_failure()
            return bool(self._rest)
        if call.name is not None and not self._announced:
            self._announced = True
            self._index += 1
            self._events.append(CallBegins(self._index, call.name))
        if text := call.pop_arguments():
            self._events.append(CallArguments(self._index, text))
        if call.done:
            self._after_call()
            return bool(self._rest)
        return False

    def _on_failure(self) -> None:
        """Return text that began like a tool call, and is not one, as content."""
        self._state = self._in_content
        if not self._announced:
            self._events.append(Content(self.begin + self._call.raw))

    def _after_call(self) -> None:
        self._state = self._in_content


class HermesCalls(_Calls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen and many others."""

    begin = "<tool_call>"
    noise = ("</tool_call>",)


class MistralCalls(_Calls):
    """``[TOOL_CALLS]`` before a list of objects, or before a name, ``[ARGS]`` and the arguments."""

    begin = "[TOOL_CALLS]"
    _listed = False

    def _begin_call(self, name: str | None = None) -> None:
        self._state = self._before_call

    def _before_call(self) -> bool:
        self._rest = self._rest.lstrip()
        if not self._rest:
            return False
        if not self._listed and self._rest[0] == "[":
            self._listed, self._rest = True, self._rest[1:]
            return True
        if self._listed and self._rest[0] in ",]":
            if self._rest[0] == "]":
                self._listed, self._state = False, self._in_content
            self._rest = self._rest[1:]
            return True
        if self._listed:
            super()._begin_call()
            return True
        if (found := re.search(r"(\[CALL_ID\][^\[{]*)?(\[ARGS\])?\s*(?=\{)", self._rest)) is None:
            return False
        name, self._rest = self._rest[: found.start()].strip(), self._rest[found.end() :]
        super()._begin_call(name)
        return True

    def _after_call(self) -> None:
        self._state = self._before_call if self._listed else self._in_content


class LlamaCalls(_Calls):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several with semicolons: Llama 3."""

    begin = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._state = self._at_start

    def _at_start(self) -> bool:
        text = self._rest.lstrip()
        if text.startswith(self.begin) or text.startswith("{"):
            self._rest = text.removeprefix(self.begin)
            self._begin_call()
            return True
        if text and not self.begin.startswith(text):
            self._state = self._in_content
            return True
        return False

    def _on_failure(self) -> None:
        self._state = self._in_content
        if not self._announced:
            self._events.append(Content(self._call.raw))

    def _after_call(self) -> None:
        self._state = self._between

    def _between(self) -> bool:
        self._rest = self._rest.lstrip("; \n,")
        if not self._rest:
            return False
        if self._rest[0] == "{":
            self._begin_call()
        else:
            self._state = self._in_content
        return True


class DeepseekCalls(_Calls):
    """Calls between special tokens: DeepSeek V3, R1 and later."""

    begin = "<｜tool▁call▁begin｜>"
    noise = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "\n```")
    _separator = "<｜tool▁sep｜>"

    def _begin_call(self, name: str | None = None) -> None:
        self._state = self._before_arguments

    def _before_arguments(self) -> bool:
        head, found, rest = self._rest.partition(self._separator)
        if not found:
            return False
        if head.strip() == "function":  # V3: the name follows, and the arguments are in a block of code
            head, found, rest = rest.partition("\n```json\n")
            if not found:
                return False
        self._rest = rest
        super()._begin_call(head.strip())
        return True


class JsonCalls(_Calls):
    """``[{"name": ..., "parameters": {...}}, ...]``, which a grammar has enforced."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._between

    def _between(self) -> bool:
        self._rest = self._rest.lstrip("[], \n\t")
        if self._rest:
            self._begin_call()
        return bool(self._rest)

    def _after_call(self) -> None:
        self._state = self._between


class NamedCall(_Calls):
    """The arguments of one function, which a grammar has enforced."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._begin_call(name)

    def _after_call(self) -> None:
        self._state = self._at_end

    def _at_end(self) -> bool:
        return False


TOOL_PARSERS: Mapping[str, type[_Calls]] = {
    "hermes": HermesCalls,
    "mistral": MistralCalls,
    "llama3_json": LlamaCalls,
    "deepseek_v3": DeepseekCalls,
}
"""Parsers by the names that vLLM has for them."""

TAGS: Mapping[str, tuple[str, str]] = {"deepseek_r1": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""What is around reasoning, by vLLM's names of parsers."""


class ReasoningParser:
    """Divides reasoning at the beginning of an answer from the rest, which another parser reads."""

    def __init__(self, tags: tuple[str, str], inside: bool, rest: AnswerParser) -> None:
        """``inside``: the prompt has ended with the opening tag."""
        self._begin, self._end = tags
        self._state: Literal["start", "opened", "inside", "after", "rest"] = "opened" if inside else "start"
        self._held = ""
        self._rest = rest

    def append(self, text: str) -> list[Event]:
        """Return what further text adds."""
        events: list[Event] = []
        self._held += text
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(self._begin):
                self._state, self._held = "opened", begun[len(self._begin) :]
            elif begun and not self._begin.startswith(begun):
                self._state = "rest"
            else:
                return events
        if self._state == "opened":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return events
            self._state = "inside"
        if self._state == "inside":
            before, found, after = self._held.partition(self._end)
            if not found:
                keep = held_back(self._held, self._end)
                before, after = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            if before:
                events.append(Reasoning(before))
            self._held = after
            if not found:
                return events
            self._state = "after"
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return events
            self._state = "rest"
        held, self._held = self._held, ""
        return events + self._rest.append(held)

    def flush(self) -> list[Event]:
        """Return what was held back."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return [Reasoning(held)] if held else []
        return (self._rest.append(held) if held else []) + self._rest.flush()
