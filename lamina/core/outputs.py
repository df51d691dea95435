"""What a request gets: its completions, their tokens and how they ended."""

import enum
from dataclasses import dataclass, field
from typing import Any

from lamina.core.types import Segment


class FinishReason(enum.StrEnum):
    """The one terminal state of a completion."""

    STOP = "stop"  # a stop string, a stop token or end of sequence
    LENGTH = "length"  # max_tokens or the model's context is reached
    ABORT = "abort"  # cancelled by its caller
    ERROR = "error"  # the runtime could not finish it; RequestOutput.error says why


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of one token at one position.

    Attributes:
        rank: 1 for the most likely token.
        text: Text that the token adds; empty if the token leaves a character incomplete.
        bytes: Bytes of the token in UTF-8, which may be a part of a character.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""
    bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A function call in an answer. ``arguments`` is None if their JSON is cut off or not an object."""

    name: str
    arguments: dict[str, Any] | None


@dataclass
class CompletionOutput:
    """One completion of a request.

    Attributes:
        text: All of its text.
        logprobs: Per position, the drawn token first, then the most likely ones; None if not requested.
        stop_reason: The stop string or the stop token that ended it.
        reasoning: In chats, the reasoning in ``text``, without its tags.
        content: In chats, ``text`` without reasoning and tool calls.
        tool_calls: In chats, the function calls in ``text``, in order.
        parsed: In chats, the object that ``response_format`` asked for; None if the answer is cut off, or
            if validators of its pydantic model refuse it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    parsed: Any = None


@dataclass
class RequestOutput:
    """The result of a request.

    Attributes:
        placement: Segments that held the request's KV when the output was made.
        cached_tokens: Tokens of the prompt that were not computed but found in the prefix cache.
        prompt_logprobs: Per position, the prompt's token first, then the most likely tokens. None for the first
            position, which has no probabilities.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    placement: tuple[Segment, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: list[list[Logprob] | None] | None = None
