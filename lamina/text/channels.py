"""The channels of gpt-oss ("harmony"): the parser of its answers, and the grammar of answers that must match a form.

An answer is a list of messages ``<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>``. The channel analysis has
reasoning, final the answer, and commentary calls, whose header names the function (``to=functions.NAME``), or text for
the user. The prompt ends with ``<|start|>assistant``. ``<|call|>`` and ``<|return|>`` end the answer.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lamina.core.sampling import StructuredOutputs
from lamina.text.grammars import as_rule
from lamina.text.tool_calls import CallArguments, CallBegins, Content, Event, Reasoning, held_back

MARKER = "<|channel|>"
"""What the template of a model that writes channels contains."""

MARKERS = ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", MARKER, "<|constrain|>")
"""Special tokens of the format."""

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", MARKER)
"""Markers that end a message. A model may leave out ``<|end|>``, and go on with the next header."""

_MOST_HEADER = 256
"""Characters of the longest header; a longer text without ``<|message|>`` is content."""

_TO = r"(\s*to=\S*)?"
_CUT_HEADER = re.compile(
    rf"(<\|start\|>\w*|assistant)?{_TO}\s*(<\|channel\|>\s*\w*{_TO}\s*(<\|constrain\|>)?\s*\w*)?(<[|\w]*)?"
)
"""A header that is not complete."""


class ChannelAnswer:
    """Divides an answer in channels into reasoning, content and tool calls."""

    may_reason = True

    def __init__(self, prompt: str) -> None:
        """``prompt``: its end says where the answer begins: in a header, in a message, or outside of the format."""
        tail = prompt.rpartition("<|start|>")[2]
        self._rest = ""
        self._in_header = "<|start|>" in prompt
        self._kind: type[Content] | type[Reasoning] | None = Content  # None: a call
        self._index = -1
        self._had_arguments = True
        if self._in_header and tail != "assistant":
            self.append(tail)
            self._index = -1
            if not self._in_header:  # the prompt ends within a message, of which the answer repeats nothing
                self._rest = ""
                self._kind = self._kind or Content

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within a message of the channel analysis."""
        return not self._in_header and self._kind is Reasoning

    def append(self, text: str) -> list[Event]:
        """Return what further text adds."""
        self._rest += text
        events: list[Event] = []
        while self._read_header(events) if self._in_header else self._read_message(events):
            pass
        return events

    def flush(self) -> list[Event]:
        """Return what was held back. A header that the answer's end cuts off is left out; other text is content."""
        rest, self._rest = self._rest, ""
        events: list[Event] = []
        if not self._in_header:
            self._add(rest, events)
            self._end_message(events)
        elif _CUT_HEADER.fullmatch(rest) is None:
            events.append(Content(rest))
        return events

    def _read_header(self, events: list[Event]) -> bool:
        header, found, rest = self._rest.partition(_MESSAGE)
        if not found and len(header) <= _MOST_HEADER:
            return False
        self._in_header = False
        self._kind = Content
        if len(header) > _MOST_HEADER:  # no header: its marker is text too, since another header would begin with it
            marker = next((len(one) for one in _ENDS if header.startswith(one)), 0)
            self._add(header[:marker], events)
            self._rest = self._rest[marker:]
            return True
        self._rest = rest
        header = header.rpartition("<|start|>")[2]
        to = re.search(r"\bto=([^\s<]+)", header)
        if to is not None and to[1] not in ("assistant", "all"):
            self._kind, self._had_arguments = None, False
            self._index += 1
            events.append(CallBegins(self._index, to[1].removeprefix("functions.")))
        elif _channel_of(header) == "analysis":
            self._kind = Reasoning
        return True

    def _read_message(self, events: list[Event]) -> bool:
        places = [(place, end) for end in _ENDS if (place := self._rest.find(end)) >= 0]
        if not places:
            held = held_back(self._rest, *_ENDS)
            self._add(self._rest[: len(self._rest) - held], events)
            self._rest = self._rest[len(self._rest) - held :]
            return False
        place, end = min(places)
        self._add(self._rest[:place], events)
        self._end_message(events)
        self._rest = self._rest[place:] if end == MARKER else self._rest[place + len(end) :]
        self._in_header = True
        return True

    def _add(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        self._had_arguments = True
        events.append(CallArguments(self._index, text) if self._kind is None else self._kind(text))

    def _end_message(self, events: list[Event]) -> None:
        if self._kind is None and not self._had_arguments:
            events.append(CallArguments(self._index, "{}"))
        self._kind = Content


def _channel_of(header: str) -> str | None:
    """Return the channel that a header ends with, if it has one."""
    channels: list[str] = re.findall(r"<\|channel\|>\s*(\w+)", header)
    return channels[-1] if channels else None


_REASONING = """reasoning: <|channel|> "analysis" <|message|> thought
thought: FREE <|end|> <|start|> "assistant"
FREE: /(.|\\n)*/
"""


def answer_grammar(rule: str, prompt: str, functions: Mapping[str, str]) -> str:
    """Return the grammar, in Lark's syntax, of an answer with reasoning whose message in ``final`` matches ``rule``.

    Args:
        rule: The right side of a Lark rule.
        prompt: If it ends within a message, the answer goes on with that message: with reasoning, or else with
            ``rule`` alone.
        functions: Functions that the answer may call instead, see ``call_rules``.
    """
    header, message, _ = prompt.rpartition("<|start|>")[2].partition(_MESSAGE)
    thinks = bool(message) and _channel_of(header) == "analysis"
    if "<|start|>" not in prompt or (message and not thinks):
        return f"start: {rule}\n"
    begin = "thought" if thinks else "reasoning?"
    calls, rules = _calls(functions)
    final = '<|channel|> "final" <|message|> answer'
    return f"start: {begin} ({' | '.join([final, *calls])})\n{_REASONING}answer: {rule}\n{rules}"


def calls_grammar(functions: Mapping[str, str]) -> str:
    """Return the grammar, in Lark's syntax, of an answer with reasoning that calls one of ``functions``.

    A message of a call ends the answer, so that there is always one call. ``functions``: see ``call_rules``.
    """
    calls, rules = _calls(functions)
    return f"start: reasoning? ({' | '.join(calls)})\n{_REASONING}{rules}"


def call_rules(tools: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return by name of each function the right side of the Lark rule of its arguments."""
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}
    return {name: as_rule(StructuredOutputs(json=schema)) for name, schema in schemas.items()}


def _calls(functions: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the names of rules for calls of ``functions``, and the rules."""
    rules = []
    for number, (name, rule) in enumerate(functions.items()):
        to = json.dumps(f"commentary to=functions.{name} ", ensure_ascii=False)
        rules.append(f'call{number}: <|channel|> {to} <|constrain|> "json" <|message|> arguments{number}\n')
        rules.append(f"arguments{number}: {rule}\n")
    return [f"call{number}" for number in range(len(functions))], "".join(rules)
