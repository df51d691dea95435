"""Parses request bodies: OpenAI's fields, plus further sampling fields under vLLM's names."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import msgspec

from lamina.core.sampling import SamplingParams
from lamina.serve.http_errors import APIError
from lamina.serve.json_fields import (
    cut_fields,
    decode_field,
    decode_messages,
    decode_plain,
    decode_prompts,
    decode_tools,
    ignored_names,
)
from lamina.text.prompts import Prompt
from lamina.text.tools import GivenChoice

SAMPLING: dict[str, Any] = {
    name: kind | None
    for name, kind in get_type_hints(SamplingParams).items()
    if name not in ("max_tokens", "logprobs", "forced_token_ids", "bad_token_ids")  # the endpoints differ, or have none
}
"""Type of each sampling field in JSON."""

WITHOUT_EFFECT = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "session_id",  # earlier requests of a session are found by their tokens
        "stream_interval",
        "return_token_offsets",  # of vLLM's routes that render, like the next
        "return_mm_kwargs",
        "routed_experts_prompt_start",
    )
)

_EITHER: dict[str, Sequence[Any]] = {
    "spaces_between_special_tokens": (True,),
    "truncation_side": (),
    "logits_processors": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": (),  # llama.cpp's
    "json_schema": (),  # llama.cpp's and SGLang's
    "regex": (),  # SGLang's, like the next
    "ebnf": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "watermarking": (False,),
    "logprob_token_ids": (),
    "return_prompt_text": (False,),
    "vllm_xargs": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_CHAT: dict[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "include_reasoning": (True,),
}
"""Fields of chats, as completions may have them."""

UNSUPPORTED_COMPLETION: Mapping[str, Sequence[Any]] = _EITHER | _CHAT | {"add_special_tokens": (True,)}
UNSUPPORTED_CHAT: Mapping[str, Sequence[Any]] = _EITHER | {
    "add_special_tokens": (False,),
    "echo": (False,),
}


def _has_no_effect(value: Any, neutral: Sequence[Any]) -> bool:
    """Return whether ``value`` is null or equals one of ``neutral``. 1 equals 1.0 here, but not true."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


MOST_BYTES_BESIDES = 64 * 1024
"""Limit on all fields but the prompt or the messages, together."""


class StreamOptions(msgspec.Struct):
    """Optional contents of a stream's chunks.

    Attributes:
        include_usage: One more chunk at the end has the token counts.
        continuous_usage_stats: With ``include_usage``, every chunk has the token counts so far.
        include_obfuscation: Padding that hides the lengths of tokens. It is optional, and never sent.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct):
    """A JSON schema that an answer must match. ``name`` and ``strict`` have no effect: every answer matches."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """Form of an answer: any text, any JSON object, or JSON that matches a schema.

    Attributes:
        schema: Where llama.cpp and others have the schema, for both kinds of JSON.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """Fields of all endpoints. A missing or null field has its default.

    Attributes:
        sampling: The fields of ``SAMPLING`` that the body has, with values that ``SamplingParams`` has not checked yet.
        ignored: Names of fields that have no meaning here.
    """

    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}
    required: ClassVar[str]
    large: ClassVar[Mapping[str, Callable[[bytes], tuple[Any, list[str]]]]] = {}
    """The fields that may hold more than ``MOST_BYTES_BESIDES``, each with a function that returns its value and the
    names that are ignored in it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    sampling: dict[str, Any] = {}
    ignored: list[str] = []


class CompletionBody(Body, kw_only=True):
    """Body of ``POST /v1/completions``."""

    unsupported = UNSUPPORTED_COMPLETION
    required = "prompt"
    large: ClassVar = {"prompt": decode_prompts}

    prompt: list[Prompt]
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(Body, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    unsupported = UNSUPPORTED_CHAT
    required = "messages"
    large: ClassVar = {"messages": decode_messages, "tools": decode_tools}

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: GivenChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct):
    """Body of ``POST /tokenize``: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = msgspec.Raw(b"null")
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


B = TypeVar("B", bound=Body)


@functools.cache
def field_types(kind: type[Body]) -> Mapping[str, Any]:
    """Return the type in JSON of each supported field of a body, but for its large ones."""
    own = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {name: own[name] for name in own if name not in (*kind.large, "sampling", "ignored")} | SAMPLING


@functools.cache
def _known(kind: type[Body]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*kind.large, *field_types(kind), *kind.unsupported, *sorted(WITHOUT_EFFECT))))


def parse(kind: type[B], body: bytes) -> B:
    """Parse ``body``. Raises APIError 400."""

    def require_small(size: int) -> None:
        if size > MOST_BYTES_BESIDES:
            names = " and ".join(kind.large)
            raise APIError(400, f"the fields besides {names} have {size} bytes; give at most {MOST_BYTES_BESIDES}")

    known = _known(kind)
    values, unknown = cut_fields(body, known, require_small, [*kind.large])
    given: dict[str, Any] = {"sampling": {}, "ignored": ignored_names(unknown, known)}
    if kind.required not in values:
        raise APIError(400, f"{kind.required}: Field required", param=kind.required)
    for name, raw in values.items():
        if name in kind.large:
            continue
        value = decode_field(name, decode_plain, raw)
        if name in SAMPLING:
            if value is not None:
                given["sampling"][name] = value
        elif name in kind.unsupported:
            if not _has_no_effect(value, kind.unsupported[name]):
                raise APIError(400, f"{name} is not supported; leave it out", param=name)
        elif name not in WITHOUT_EFFECT:
            given[name] = decode_field(name, functools.partial(msgspec.convert, type=field_types(kind)[name]), value)
    if (options := given.get("stream_options")) is not None:
        if not given.get("stream"):
            raise APIError(400, "stream_options needs stream to be true", param="stream_options")
        names = msgspec.json.decode(values["stream_options"], type=dict[str, msgspec.Raw])
        given["ignored"] += ignored_names(names, options.__struct_fields__, "stream_options.")
    for name, decode in kind.large.items():
        if name in values:
            given[name], ignored = decode_field(name, decode, values[name])
            given["ignored"] += ignored
    return kind(**given)
