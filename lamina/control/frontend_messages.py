"""What the engine and its frontends say to each other: requests one way, token ids the other.

A frontend speaks HTTP, tokenises, detokenises and applies stop strings; the engine deals in token ids only. It answers
once a turn, with one message per frontend that has everything new of all its requests.

An engine that is started again welcomes the frontends that it finds, and each sends it the requests that have not
ended, with what they have drawn. What a frontend had sent before counts for nothing.
"""

import array
from collections.abc import Sequence

import msgspec

from lamina.core.types import ChatSettings, Client, FinishReason, SamplingParams

READY, ALIVE = b"!", b"."  # what a frontend says to the supervisor, in a pipe
ALIVE_S = 1.0
ENGINE_STOPPED = 3  # exit status of a frontend that the engine has told that it stops for good


class CompletionTokens(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one completion.

    Attributes:
        logprobs: packed, one entry per token; empty if not requested.
        finish_reason: if the last of the tokens, or the end of the request, ends the completion.
        stop_token: the stop token that ended it.
    """

    index: int
    token_ids: list[int]
    logprobs: list[bytes] = []
    finish_reason: FinishReason | None = None
    stop_token: int | None = None


class FrontendBootstrap(msgspec.Struct, frozen=True):
    """What a frontend process reads from its standard input.

    Attributes:
        name: of this process; one that takes the place of another has a new name.
        requests, answers: addresses of the engine's sockets.
        supervisor_pid: the process to end with.
        sampling_defaults: parameters of requests that give none.
        chat: what the settings say about chats.
        seed: from which those of requests without one are drawn.
        server: settings of ``ServerConfig``, as plain values.
    """

    name: str
    requests: str
    answers: str
    supervisor_pid: int
    model_name: str
    max_model_len: int
    sampling_defaults: dict[str, int | float]
    vocab_size: int
    seed: int = 0
    model_aliases: tuple[str, ...] = ()
    chat: ChatSettings = ChatSettings()
    server: dict[str, str | int | bool | None] = {}


class FrontendHello(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine, again and again until ``Welcome`` comes: it is connected."""


class Resumed(msgspec.Struct, array_like=True, frozen=True):
    """A request that an earlier engine had, or may have had.

    Attributes:
        drawn: packed tokens of each completion that has not ended.
    """

    request: int
    prompt: bytes
    params: SamplingParams
    client: Client
    seed: int
    drawn: dict[int, bytes]


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine, the answer to ``Welcome``: it begins with these requests, and what it sent before is void.

    Attributes:
        incarnation: of the engine that this is for.
    """

    incarnation: int
    requests: list[Resumed]


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: queue all of these requests or none. The answer is ``Submitted``.

    Attributes:
        first: the frontend's number for the first; the others follow.
        params: of all, or one for each.
        seeds: of requests without one in their parameters.
    """

    first: int
    prompts: list[bytes]
    params: list[SamplingParams]
    client: Client
    seeds: list[int]


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: a stop string has ended this completion."""

    request: int
    index: int


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: end these requests."""

    requests: list[int]


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: send ``StatsOf``, with this number."""

    number: int


class GetTimeline(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: send ``TimelineOf``, with this number."""

    number: int


class Scale(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: let workers join, or leave where a number is negative; see ``Runtime.scale``. The answer is
    ``Scaled``."""

    number: int
    compute: int | str
    memory: int | str


FromFrontend = FrontendHello | Resume | Submit | Finish | Abort | GetStats | GetTimeline | Scale


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: its answers arrive. ``incarnation``: of the engine. Answered by ``Resume``."""

    incarnation: int = 0


class Submitted(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: the requests from number ``first`` on are queued, or were refused with this error."""

    first: int
    error: str = ""
    message: str = ""


class Scaled(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: these workers have joined or left, or one has not, with this error."""

    number: int
    workers: list[str] = []
    error: str = ""
    message: str = ""


class RequestTokens(msgspec.Struct, array_like=True, gc=False):
    """What is new of one request. ``cached_tokens`` of its prompt were found in the prefix cache."""

    request: int
    completions: list[CompletionTokens]
    finished: bool = False
    error: str | None = None
    cached_tokens: int = 0


class AnswerBatch(msgspec.Struct, tag=True):
    """Engine to frontend: what one turn has brought."""

    news: list[RequestTokens]


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: the engine has stopped, and none will take its place."""

    reason: str


def packed(tokens: Sequence[int]) -> bytes:
    """Return a prompt on the wire: int32, copied rather than decoded number by number. Raises OverflowError beyond
    int32."""
    return array.array("i", tokens).tobytes()


def unpacked(prompt: bytes) -> list[int]:
    """Return the token ids of a packed prompt."""
    return array.array("i", prompt).tolist()
