"""Implements Anthropic's messages API: translates bodies to those of chats, and writes answers as blocks."""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from starlette.requests import ClientDisconnect

from lamina.engine.streams import Runtime
from lamina.serve.answers import Block, BlockWriter, Change, Json, Usage, event, new_call_id
from lamina.serve.bodies import ChatBody, ResponseFormat
from lamina.serve.http_errors import APIError, as_api_error
from lamina.serve.json_fields import decode_body, decode_field, text_content
from lamina.serve.requests import GenerationRequest, chat_generation
from lamina.text.tools import Function, NamedFunction, NamedTool, Tool, ToolChoice, plain_tools
from lamina.text.written_json import read_written

MESSAGES_PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"

_TEXTS = ("text",)

_BILLING = "x-anthropic-billing-header"

_SAMPLING = ("temperature", "top_p", "top_k", "cache_salt", "priority")

_WITHOUT_EFFECT = ("metadata", "service_tier", "cache_control", "inference_geo")

_NAMES = {"stop": "stop_sequences", "response_format": "output_config"}
_NAMES |= {"response_format.json_schema.schema": "output_config.format.schema"}
"""Names of the fields of chats in this API."""


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] = {}
    description: str | None = None
    type: str | None = None

    @property
    def is_function(self) -> bool:
        """Whether the tool is the client's own; the others are Anthropic's."""
        return self.type in (None, "custom")

    def as_function(self) -> Tool:
        return Tool(Function(self.name, self.description or "", self.input_schema))


class _Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None
    effort: str | None = None


class MessagesBody(msgspec.Struct):
    """Body of ``POST /v1/messages``. Other fields have no effect.

    Attributes:
        output_format: An older name of ``output_config.format``.
    """

    messages: list[_Message]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: dict[str, Any] | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None


def read_messages(engine: Runtime, raw: bytes, counting: bool = False) -> GenerationRequest:
    """Translate a body. Raises APIError, RequestError. ``counting``: only its tokens are counted."""
    body, ignored = decode_body(MessagesBody, raw, _WITHOUT_EFFECT)
    if body.max_tokens is None and not counting:
        raise APIError(400, "max_tokens: Field required", param="max_tokens")
    messages: list[Json] = []
    if system := _without_billing(body.system or []):
        messages.append({"role": "system", "content": text_content("system", system, _TEXTS, "system")})
    for index, message in enumerate(body.messages):
        messages += _translated(f"messages[{index}].content", message)
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last
    sampling: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.stop_sequences:
        sampling["stop"] = body.stop_sequences
    others = {str(tool.type) for tool in body.tools or () if not tool.is_function}
    wanted = body.output_format if body.output_config is None else body.output_config.format
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=decode_field("tools", plain_tools, [tool.as_function() for tool in body.tools or () if tool.is_function]),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
        continue_final_message=continues,
        max_tokens=body.max_tokens,
        stream=body.stream,
        chat_template_kwargs=None
        if body.thinking is None
        else {"enable_thinking": body.thinking.get("type") != "disabled"},
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        response_format=None if wanted is None else ResponseFormat("json_schema", schema=wanted.schema),
        sampling=sampling,
        ignored=ignored + sorted(f"tools.{kind}" for kind in others),
    )
    return chat_generation(engine, chat, clamped=True, names=_NAMES)


def _without_billing(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the texts of a system message without Claude Code's first one.

    It differs in every request, so that no prefix of the prompt would be found in the cache.
    """
    if isinstance(content, str):
        return "" if content.startswith(_BILLING) else content
    return [block for block in content if not str(block.get("text", "")).startswith(_BILLING)]


def _choice(choice: _Choice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return NamedTool(NamedFunction(choice.name or ""))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]  # type: ignore[return-value]


def _translated(place: str, message: _Message) -> list[Json]:
    """Return the messages of a chat that say what one message says: results of tools have messages of their own."""
    if message.role == "system" and not _without_billing(message.content):
        return []
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, texts, thoughts = [], [], [], []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = text_content(place, block.get("content") or [], _TEXTS, place)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind in ("thinking", "redacted_thinking"):
            thoughts.append(str(block.get("thinking", "")))
        else:
            texts.append(block)
    own: Json = {"role": message.role, "content": text_content(place, texts, _TEXTS, place)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    return [*results, *([own] if texts or calls or not results else [])]


class AnthropicError(APIError):
    """An error in Anthropic's form."""

    def body(self) -> Json:
        """Return the error's JSON."""
        return _error_body(self)


@contextlib.contextmanager
def as_anthropic_errors() -> Iterator[None]:
    """Raise every failure within as ``AnthropicError``, but for clients that leave."""
    try:
        yield
    except ClientDisconnect:
        raise
    except Exception as failure:
        raise in_form_of(MESSAGES_PATH, as_api_error(failure)) from failure


def in_form_of(path: str, error: APIError) -> APIError:
    """Return an error in the form of the API that has ``path``."""
    if not path.startswith(MESSAGES_PATH):
        return error
    return AnthropicError(error.status, str(error), code=error.code, headers=error.headers)


def _error_body(error: APIError) -> Json:
    """Return an error in Anthropic's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
    return {"type": "error", "error": {"type": kinds.get(error.status, "invalid_request_error"), "message": str(error)}}


class MessagesWriter(BlockWriter):
    """The form of ``/v1/messages``."""

    def __init__(self, wanted: GenerationRequest, model: str) -> None:
        super().__init__(wanted.make_reader())
        self._ids: dict[int, str] = {}
        self._message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin_stream(self, usage: Usage) -> bytes:
        return _named({"type": "message_start", "message": self._message | {"usage": _counts(usage)}})

    def end_stream(self, usage: Usage) -> bytes:
        last = _named({"type": "message_delta", "delta": self._stop(), "usage": _counts(usage)})
        return last + _named({"type": "message_stop"})

    def fail_stream(self, error: APIError) -> bytes:
        return _named(_error_body(error))

    def whole(self, usage: Usage) -> Json:
        content = [self._content(block) for block in self.blocks]
        return self._message | {"content": content} | self._stop() | {"usage": _counts(usage)}

    def _stop(self) -> Json:
        reason, sequence = "end_turn", None
        if self.last is not None and isinstance(self.last.stop_reason, str):
            reason, sequence = "stop_sequence", self.last.stop_reason
        elif self.last is not None and self.last.finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind == "call" for block in self.blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def write_change(self, change: Change) -> bytes:
        what, block, text = change
        if what == "open":
            empty = self._content(Block(block.index, block.kind, block.name))
            return _named({"type": "content_block_start", "index": block.index, "content_block": empty})
        if what == "close":
            return _named({"type": "content_block_stop", "index": block.index})
        names = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
        kind, key = names.get(block.kind, ("input_json_delta", "partial_json"))
        return _named({"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: text}})

    def _content(self, block: Block) -> Json:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        call_id = self._ids.setdefault(block.index, new_call_id())
        return {"type": "tool_use", "id": call_id, "name": block.name, "input": arguments(block.text)}


def arguments(text: str) -> Any:
    """Return the arguments of a call; empty if the call was cut off."""
    try:
        return read_written(text) if text else {}
    except ValueError:
        return {}


def _named(data: Json) -> bytes:
    return event(data, data["type"])


def _counts(usage: Usage) -> Json:
    cached = usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.drawn,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
