"""Finds tool calls in the text of an answer, as it grows, in the forms that model families write them.

A parser gets the text in pieces of any size, and says what is new: content, the name of a call, or a part of its
arguments, which are JSON text. Text that may be the beginning of a call is held back until that is decided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lamina.text.written_json import ARGUMENTS, CallObject


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

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may follow."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        ...

    def append(self, text: str) -> list[Event]:
        """Return the events of further text."""
        ...

    def flush(self) -> list[Event]:
        """Return the events of text that was held back, at the end of the answer."""
        ...


class PlainText:
    """All text is content."""

    may_reason = in_reasoning = False

    def append(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def flush(self) -> list[Event]:
        return []


def held_back(text: str, *markers: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(marker.startswith(text[-size:]) for marker in markers)), 0)


class Calls:
    """Finds calls by a state machine: ``_state`` is a method that reads from ``_rest``, and returns whether to call the
    next state."""

    begin = ""
    """The marker before a call."""

    first = ""
    """The marker before the first call, if that is another one."""

    also: tuple[str, ...] = ()
    """Further markers that begin a call, and are a part of it."""

    end = ""
    """The marker after a call, which is left out."""

    may_reason = in_reasoning = False

    noise: tuple[str, ...] = ()
    """Further markers around calls that are left out. They must be special tokens, which content never has."""

    def __init__(self) -> None:
        self._rest = ""
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._in_content
        self._index = -1
        self._call = CallObject()
        self._announced = False
        self._after_a_call = False
        self._opened = ""  # the marker that has begun the call; empty if that is a part of it

    def append(self, text: str) -> list[Event]:
        self._rest += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """Return text that was held back as content; the beginning of an announced call is dropped."""
        if self._state != self._in_call:
            self._add_content(self._rest)
        elif self._call.raw and not self._announced:
            self._events.append(Content(self._call.raw))
        self._rest = ""
        events, self._events = self._events, []
        return events

    def _add_content(self, text: str) -> None:
        for marker in self.noise:
            text = text.replace(marker, "")
        if self._after_a_call:  # white space between calls is no content
            text = text.lstrip()
        if text:
            self._after_a_call = False
            self._events.append(Content(text))

    def _in_content(self) -> bool:
        markers = [marker for marker in (self.begin, *self.also) if marker]
        places = [(place, marker) for marker in markers if (place := self._rest.find(marker)) >= 0]
        if places:
            place, marker = min(places)
            self._add_content(self._rest[:place])
            self._opened = marker if marker == self.begin else ""
            self._rest = self._rest[place + len(self._opened) :]
            self._begin_call()
            return True
        held = held_back(self._rest, "", *markers, *self.noise)
        self._add_content(self._rest[: len(self._rest) - held])
        self._rest = self._rest[len(self._rest) - held :]
        return False

    def _begin_call(self, name: str | None = None) -> None:
        self._call, self._announced = CallObject(name), False
        self._state = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        self._rest = self._rest[call.feed(self._rest) :]
        is_call = self._announced or self._is_call(call)
        if call.failed or (call.done and not is_call):
            self._on_failure()
            return bool(self._rest)
        if not is_call:
            return False
        if not self._announced:
            self._announced = self._after_a_call = True
            self._index += 1
            self._events.append(CallBegins(self._index, str(call.name)))
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
            text, self._after_a_call = self._call.raw, False
            if not text.lstrip().startswith("{"):  # what follows the marker may be a marker too
                text, self._rest = "", text + self._rest
            self._events.append(Content(self.begin + text))

    def _is_call(self, call: CallObject) -> bool:
        """Return whether the text of ``call`` so far is certain to be a call."""
        return call.name is not None

    def _after_call(self) -> None:
        self._state = self._before_end if self.end else self._in_content

    def _before_end(self) -> bool:
        rest = self._rest.lstrip("} \t\r\n")  # small models write a brace too many
        if rest != self.end and self.end.startswith(rest):
            return False  # more of the marker may follow
        if rest.startswith(self.end):
            self._rest = rest.removeprefix(self.end)
        self._state = self._in_content
        return True


class HermesCalls(Calls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen and many others."""

    begin = "<tool_call>"
    end = "</tool_call>"


class MistralCalls(Calls):
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
        head, found, rest = self._rest.partition("{")  # a search for white space before it begins at every space
        if not found:
            return False
        head = head.rstrip().removesuffix("[ARGS]")
        name, found_id, call_id = head.rpartition("[CALL_ID]")
        self._rest = "{" + rest
        super()._begin_call((name if found_id and "[" not in call_id else head).strip())
        return True

    def _after_call(self) -> None:
        self._state = self._before_call if self._listed else self._in_content


class LlamaCalls(Calls):
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

    def _is_call(self, call: CallObject) -> bool:
        """An answer in JSON may have a name too: a call has arguments, or nothing but a name."""
        return call.name is not None and (
            not call.keys.isdisjoint(ARGUMENTS) or (call.done and call.keys <= {"name", "type", "id"})
        )

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


class DeepseekCalls(Calls):
    """Calls between special tokens: DeepSeek V3, R1 and later."""

    begin = "<｜tool▁call▁begin｜>"
    end = "```"
    first = "<｜tool▁calls▁begin｜>"
    noise = (first, "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
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


class JsonCalls(Calls):
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


class NamedCall(Calls):
    """The arguments of one function, which a grammar has enforced."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._begin_call(name)

    def _after_call(self) -> None:
        self._state = self._at_end

    def _at_end(self) -> bool:
        return False
