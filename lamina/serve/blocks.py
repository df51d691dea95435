"""An answer as a sequence of blocks, text, reasoning and calls, for APIs whose answers are lists of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from lamina.text.tool_calls import CallArguments, CallBegins, Content, Event, Reasoning


@dataclass(eq=False)
class Block:
    """One part of an answer.

    Attributes:
        index: Its place among the blocks.
        kind: What it is.
        name: The function of a call.
        text: The text so far; of a call, its arguments.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    text: str = ""


Change = tuple[Literal["open", "add", "close"], Block, str]
"""What happens to a block: it opens, text is added to it, or it is complete."""


class Blocks:
    """Makes blocks of the events of one answer. Each is complete before the next one opens."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def append(self, events: Iterable[Event]) -> Iterator[Change]:
        """Yield what further events change."""
        for event in events:
            match event:
                case CallBegins(_, name):
                    yield from self._begin("call", name)
                case Content(text):
                    yield from self._add("text", text)
                case Reasoning(text):
                    yield from self._add("reasoning", text)
                case CallArguments(_, text):
                    yield from self._add("call", text)

    def close(self) -> Iterator[Change]:
        """Yield what the end of the answer changes."""
        if self._open is not None:
            block, self._open = self._open, None
            yield "close", block, ""

    def _begin(self, kind: Literal["text", "reasoning", "call"], name: str = "") -> Iterator[Change]:
        yield from self.close()
        self._open = Block(len(self.blocks), kind, name)
        self.blocks.append(self._open)
        yield "open", self._open, ""

    def _add(self, kind: Literal["text", "reasoning", "call"], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        if self._open is not None:
            self._open.text += text
            yield "add", self._open, text
