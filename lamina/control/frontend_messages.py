"""Messages between the engine and its frontends: requests one way, token ids the other.

A frontend serves HTTP, tokenises, detokenises and applies stop strings; the engine deals in token ids only. Once a
turn, it sends each frontend one message with the new tokens of all its requests.

A restarted engine sends ``Welcome`` to the running frontends. Each answers with ``Resume``: its requests that have not
ended, with the tokens drawn so far. The engine ignores what a frontend sent before ``Resume``.
"""

import array
from collections.abc import Sequence

import msgspec

from lamina.core.outputs import FinishReason
from lamina.core.sampling import SamplingParams
from lamina.core.types import ChatSettings, Client

READY, ALIVE = b"!", b"."  # what a frontend writes into its pipe to the supervisor
ALIVE_S = 1.0
ENGINE_STOPPED = 3  # exit status of a frontend after ``Stopped``


class CompletionTokens(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one completion.

    Attributes:
        logprobs: packed logprobs (``control.packed_logprobs``), one entry per token; empty if not requested.
        finish_reason: why the completion ends; None: it continues.
        stop_token: the stop token that ended the completion.
    """

    index: int
    token_ids: list[int]
    logprobs: list[bytes] = []
    finish_reason: FinishReason | None = None
    stop_token: int | None = None


class FrontendBootstrap(msgspec.Struct, frozen=True):
    """What a frontend process reads from its standard input.

    Attributes:
        name: name of this process, never used again for another.
        requests: address of the engine's socket for requests.
        answers: address of the engine's socket for answers.
        supervisor_pid: the process to end with.
        sampling_defaults: values of sampling parameters that a request leaves out.
        chat: settings of chats.
        seed: seed from which the seeds of requests without one are drawn.
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
    """Frontend to engine, repeated until ``Welcome`` arrives: the frontend is connected."""


class Resumed(msgspec.Struct, array_like=True, frozen=True):
    """A request that was sent to an earlier engine and has not ended.

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
    """Frontend to engine, the answer to ``Welcome``: the frontend's requests. The engine ignores all that came before.

    Attributes:
        incarnation: incarnation of the engine that the message is for.
    """

    incarnation: int
    requests: list[Resumed]


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: queue all of these requests or none. The answer is ``Submitted``.

    Attributes:
        first: the frontend's number of the first request; the others have the next numbers.
        params: one for all requests, or one for each.
        seeds: seeds for the requests whose parameters give none.
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


class GetLives(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: send ``LivesOf``, with this number."""

    number: int


class Scale(msgspec.Struct, tag=True, frozen=True):
    """Frontend to engine: add workers, or remove them where a number is negative. The answer is ``Scaled``."""

    number: int
    compute: int | str
    memory: int | str
    prefill: int | str = 0


FromFrontend = FrontendHello | Resume | Submit | Finish | Abort | GetStats | GetTimeline | GetLives | Scale


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend, the answer to ``FrontendHello``: send ``Resume`` for this ``incarnation`` of the engine."""

    incarnation: int = 0


class Submitted(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: the requests from number ``first`` on are queued, or were rejected with this error."""

    first: int
    error: str = ""
    message: str = ""


class Scaled(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: these workers have joined or left, or ``Scale`` has failed with this error."""

    number: int
    workers: list[str] = []
    error: str = ""
    message: str = ""


class RequestTokens(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one request. ``cached_tokens`` of its prompt were found in the prefix cache."""

    request: int
    completions: list[CompletionTokens]
    finished: bool = False
    error: str | None = None
    cached_tokens: int = 0


class AnswerBatch(msgspec.Struct, tag=True):
    """Engine to frontend: the new tokens of one turn.

    Attributes:
        news: New tokens of requests.
        plain: Tokens of completions that continue, without logprobs: three integers for each, the number of the
            request, the index of the completion and the token. They precede ``news``.
    """

    news: list[RequestTokens]
    plain: list[int] = []


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: the engine has stopped, and is not restarted."""

    reason: str


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes. Raises OverflowError for an id beyond int32."""
    return array.array("i", tokens).tobytes()


def unpack_tokens(prompt: bytes) -> list[int]:
    return array.array("i", prompt).tolist()
