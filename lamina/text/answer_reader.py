"""Reads one answer token by token: divides it, leaves out what a request does not want, and counts its reasoning."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from lamina.text.tool_calls import AnswerParser, CallArguments, CallBegins, Content, Event, Reasoning


class AnswerReader:
    """Divides the text of one answer into events.

    Attributes:
        reasons: Whether the model may write reasoning.
        reasoning_tokens: Number of tokens of reasoning so far, without the tags around it.
    """

    def __init__(self, parser: AnswerParser, with_reasoning: bool = True, parallel: bool = True) -> None:
        """
        Args:
            with_reasoning: Return reasoning, which is counted in any case.
            parallel: Return all tool calls, not only the first.
        """
        self._parser = parser
        self._with_reasoning, self._parallel = with_reasoning, parallel
        self.reasons = parser.may_reason
        self.reasoning_tokens = 0

    def read_tokens(self, texts: Sequence[str], rest: str, last: bool) -> list[Event]:
        """Return what new tokens add.

        Args:
            texts: Text that each token has completed.
            rest: Text after that of the last token.
            last: Whether the answer ends here.
        """
        parser, events, read = self._parser, list[Event](), 0
        while read < len(texts) and parser.may_reason:
            reasoned = parser.in_reasoning
            events += parser.append(texts[read])
            self.reasoning_tokens += reasoned and parser.in_reasoning
            read += 1
        events += parser.append("".join(texts[read:]) + rest)
        if last:
            events += parser.flush()
        return [*_joined(filter(self._is_wanted, events))]

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._with_reasoning
        return self._parallel or not isinstance(event, CallBegins | CallArguments) or event.index == 0


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events, those of the same text joined."""
    for kind, several in itertools.groupby(events, type):
        if kind is Content:
            yield Content("".join([event.text for event in several if isinstance(event, Content)]))
        elif kind is Reasoning:
            yield Reasoning("".join([event.text for event in several if isinstance(event, Reasoning)]))
        else:
            yield from several
