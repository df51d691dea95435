"""Finds out how a model writes reasoning and tool calls, from settings and chat template; the parser of reasoning."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from lamina.core.sampling import StructuredOutputs
from lamina.core.types import ChatSettings
from lamina.text.channels import MARKER, MARKERS, ChannelAnswer, answer_grammar, call_rules
from lamina.text.grammars import after_reasoning, as_rule
from lamina.text.tagged_calls import CoderCalls, KeyCalls
from lamina.text.tool_calls import (
    AnswerParser,
    CallBegins,
    Calls,
    Content,
    DeepseekCalls,
    Event,
    HermesCalls,
    LlamaCalls,
    MistralCalls,
    PlainText,
    Reasoning,
    held_back,
)

TOOL_PARSERS: Mapping[str, type[Calls]] = {
    "hermes": HermesCalls,
    "qwen3_coder": CoderCalls,
    "glm45": KeyCalls,
    "mistral": MistralCalls,
    "llama3_json": LlamaCalls,
    "deepseek_v3": DeepseekCalls,
}
"""Parsers by the names that vLLM has for them."""

_TOOL_MARKERS = {
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": "tool\u2581call\u2581begin",
    "llama3_json": '"parameters":',
}
"""By parser of tool calls: text by which the family's chat templates are recognised."""

_IN_TAGS = {"<function=": "qwen3_coder", "<arg_key>": "glm45", "<tool_sep>": None}
"""Parser of a chat template that has ``<tool_call>`` and this text too; None: the form is not known. Without any of
these texts, the parser is ``hermes``."""

TAGS: Mapping[str, tuple[str, str]] = {"deepseek_r1": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""Opening and closing tags of reasoning, by vLLM's names of parsers."""


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes tool calls and reasoning.

    Attributes:
        tools: Name of the parser of tool calls; None if the form is not known.
        tags: Opening and closing tag of reasoning; None if the model writes none.
        channels: Answers are in the channels of gpt-oss, which hold reasoning, calls and content.
    """

    tools: str | None
    tags: tuple[str, str] | None
    channels: bool = False

    @classmethod
    def choose(cls, settings: ChatSettings, template: str) -> "ChatFormat":
        """Return the format that ``settings`` name; for "auto", the one whose markers are in the chat template."""
        named = {settings.tool_call_parser, settings.reasoning_parser}
        if named & {"openai", "openai_gptoss"} or (named == {"auto"} and MARKER in template):
            return cls("openai", None, channels=True)
        tools: str | None = settings.tool_call_parser
        if tools == "auto":
            tools = _parser_by_template(template)
        reasoning: str | None = settings.reasoning_parser
        if reasoning == "auto":
            reasoning = next((name for name, tags in TAGS.items() if tags[1] in template), None)
        return cls(None if tools == "none" else tools, None if reasoning in (None, "none") else TAGS[reasoning])

    def inside(self, prompt: str, continued: str = "") -> bool:
        """Return whether the answer begins within reasoning.

        The prompt ends with the opening tag then, or the message that it continues has an opening tag that no closing
        one follows. ``continued``: Text of that message; empty if the answer is a message of its own.
        """
        if self.tags is None:
            return False
        begin, end = self.tags
        return prompt.rstrip().endswith(begin) or continued.rfind(begin) > continued.rfind(end)

    def constrain(
        self,
        wanted: StructuredOutputs,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        special_texts: Mapping[int, str] = MappingProxyType({}),
        continued: str = "",
    ) -> StructuredOutputs:
        """Return what the answer to ``prompt`` must match as a whole so that its content matches ``wanted``.

        Args:
            continued: See ``inside``.
            tools: Functions that the answer may call instead, as chat templates take them.
            special_texts: Texts of the model's special tokens, by id.
        """
        if self.channels:
            return StructuredOutputs(grammar=answer_grammar(as_rule(wanted), prompt, call_rules(tools)))
        parser = TOOL_PARSERS.get(self.tools or "")
        if tools and parser is not None:
            call = _call_rule(parser, tools, special_texts)
            wanted = StructuredOutputs(grammar=f"start: answer | {call}\nanswer: {as_rule(wanted)}\n")
        if self.tags is not None and self.inside(prompt, continued):
            return after_reasoning(wanted, self.tags[1])
        return wanted

    def needs_special(self, special_texts: Collection[str], with_tools: bool) -> bool:
        """Return whether special tokens must be in the text, because parsers look for some of them."""
        markers = list(MARKERS if self.channels else self.tags or ())
        if with_tools and self.tools is not None and self.tools in TOOL_PARSERS:
            parser = TOOL_PARSERS[self.tools]
            markers += [parser.begin, *parser.noise]
        return any(marker in special_texts for marker in markers)

    def parser(
        self, prompt: str, calls: Callable[[], AnswerParser] | None, continued: str = ""
    ) -> Callable[[], AnswerParser]:
        """Return a factory of parsers, one for each completion.

        Args:
            calls: Makes parsers of the text after reasoning.
            continued: See ``inside``.
        """
        if self.channels:
            return lambda: ChannelAnswer(prompt)
        rest = calls or PlainText
        tags, inside = self.tags, self.inside(prompt, continued)
        return rest if tags is None else lambda: ReasoningParser(tags, inside, rest(), calls)


def _call_rule(parser: type[Calls], tools: Sequence[Mapping[str, Any]], special_texts: Mapping[int, str]) -> str:
    """Return the right side of a rule in Lark's syntax that allows what begins like a call of ``tools``."""
    marker = parser.first or parser.begin
    token = next((token for token, text in special_texts.items() if text == marker), None)
    rule = f"{json.dumps(marker, ensure_ascii=False) if token is None else f'<[{token}]>'} <[*]>*"
    if parser is not LlamaCalls:
        return rule
    names = {"enum": [tool["function"]["name"] for tool in tools]}
    call: dict[str, Any] = {"type": "object", "properties": {"name": names, "parameters": {"type": "object"}}}
    call |= {"required": ["name", "parameters"], "additionalProperties": False}
    return f"{rule} | {as_rule(StructuredOutputs(json=call))}"


def _parser_by_template(template: str) -> str | None:
    """Return the parser of the form in which a chat template writes tool calls; None if that is not known."""
    if HermesCalls.begin in template:
        return next((name for marker, name in _IN_TAGS.items() if marker in template), "hermes")
    return next((name for name, marker in _TOOL_MARKERS.items() if marker in template), None)


_MOST_TRIED = 8
"""Places in reasoning, counted from its end, at which a call may begin."""

_NAME = re.compile(r"[\w.:/-]{1,128}")
"""The name of a function."""


class ReasoningParser:
    """Divides reasoning at the beginning of an answer from the rest, which another parser reads.

    Reasoning models may end an answer with calls without ending their reasoning: these are found too.
    """

    def __init__(
        self,
        tags: tuple[str, str],
        inside: bool,
        rest: AnswerParser,
        calls: Callable[[], AnswerParser] | None = None,
    ) -> None:
        """
        Args:
            inside: The prompt ends with the opening tag.
            calls: Makes parsers of tool calls, of the same kind as ``rest``; None: the answer may call nothing.
        """
        self._begin, self._end = tags
        self._state: Literal["start", "opened", "inside", "after", "rest"] = "opened" if inside else "start"
        self._held = ""
        self._rest = rest
        self._calls = calls
        self._thought: list[str] = []

    @property
    def may_reason(self) -> bool:
        return self._state != "rest"

    @property
    def in_reasoning(self) -> bool:
        return self._state in ("opened", "inside")

    def append(self, text: str) -> list[Event]:
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
                self._thought.append(before)
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
        held, self._held = self._held, ""
        if self._state == "inside":
            return ([Reasoning(held)] if held else []) + self._calls_at_end("".join([*self._thought, held]))
        return (self._rest.append(held) if held else []) + self._rest.flush()

    def _calls_at_end(self, thought: str) -> list[Event]:
        """Return the calls with which reasoning ends: nothing else follows the marker of the first."""
        if self._calls is None or not isinstance(self._rest, Calls) or not (marker := self._rest.begin):
            return []
        pieces = thought.rsplit(marker, _MOST_TRIED)
        for place in range(1, len(pieces)):
            parser = self._calls()
            events = parser.append(marker + marker.join(pieces[place:])) + parser.flush()
            names = [event.name for event in events if isinstance(event, CallBegins)]
            text = "".join(event.text for event in events if isinstance(event, Content))
            if names and not text.strip() and all(map(_NAME.fullmatch, names)):
                return [event for event in events if not isinstance(event, Content)]
        return []
