"""Which parser reads a model's answers: chosen by its chat template, unless the settings name one."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from lamina.core.types import ChatSettings
from lamina.text.tool_calls import TAGS, TOOL_PARSERS, AnswerParser, PlainText, ReasoningParser

_TOOL_MARKERS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": "tool\u2581call\u2581begin",
    "llama3_json": '"parameters":',
}
"""What the template of each family contains."""


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes tool calls and reasoning.

    Attributes:
        tools: Name of the parser of tool calls; None if the form is not known.
        tags: What is around reasoning; None if the model writes none.
    """

    tools: str | None
    tags: tuple[str, str] | None

    @classmethod
    def choose(cls, settings: ChatSettings, template: str) -> "ChatFormat":
        """Return the format of a model with this chat template."""
        tools: str | None = settings.tool_call_parser
        if tools == "auto":
            tools = next((name for name, marker in _TOOL_MARKERS.items() if marker in template), None)
        reasoning: str | None = settings.reasoning_parser
        if reasoning == "auto":
            reasoning = next((name for name, tags in TAGS.items() if tags[1] in template), None)
        return cls(None if tools == "none" else tools, None if reasoning in (None, "none") else TAGS[reasoning])

    def inside(self, prompt: str) -> bool:
        """Return whether the answer begins within reasoning, because the prompt ends with the opening tag."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags[0])

    def needs_special(self, special_texts: Collection[str], with_tools: bool) -> bool:
        """Return whether special tokens must be in the text, because some are marks that the parsers look for."""
        markers = list(self.tags or ())
        if with_tools and self.tools is not None:
            parser = TOOL_PARSERS[self.tools]
            markers += [parser.begin, *parser.noise]
        return any(marker in special_texts for marker in markers)

    def parser(self, prompt: str, calls: Callable[[], AnswerParser] | None) -> Callable[[], AnswerParser]:
        """Return what makes a parser for each choice. ``calls`` makes the parser of what follows reasoning."""
        rest = calls or PlainText
        tags, inside = self.tags, self.inside(prompt)
        return rest if tags is None else lambda: ReasoningParser(tags, inside, rest())
