"""Implements OpenAI's responses API without storage: translates bodies to those of chats, writes output items."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from lamina.engine.streams import Runtime
from lamina.serve.answers import Block, BlockWriter, Change, Json, Usage, event, new_call_id
from lamina.serve.bodies import ChatBody, JsonSchema, ResponseFormat
from lamina.serve.http_errors import APIError
from lamina.serve.json_fields import decode_body, decode_field, text_content
from lamina.serve.requests import GenerationRequest, chat_generation
from lamina.text.tools import (
    AllowedChoice,
    AllowedTools,
    Function,
    GivenChoice,
    NamedFunction,
    NamedTool,
    Tool,
    plain_tools,
)

RESPONSES_PATH = "/v1/responses"

_TEXTS = ("input_text", "output_text", "text", "refusal")

_UNSUPPORTED = ("previous_response_id", "conversation", "background", "prompt")
_WITHOUT_EFFECT = (
    *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("include", "truncation", "stream_options", "max_tool_calls", "context_management"),
)

_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "cache_salt", "priority")

_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}
_NAMES |= {"response_format.json_schema.schema": "text.format.schema"}
"""Names of the fields of chats in this API."""


class _Format(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None


class _TextOptions(msgspec.Struct):
    format: _Format | None = None
    verbosity: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class ResponsesBody(msgspec.Struct):
    """Body of ``POST /v1/responses``. Other fields have no effect."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    reasoning: _Reasoning | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class _Repeated(msgspec.Struct, omit_defaults=True):
    """The fields that answers repeat as they were given."""

    instructions: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    text: Any = None
    tool_choice: Any = None
    tools: Any = None
    user: Any = None


def read_response(engine: Runtime, raw: bytes) -> GenerationRequest:
    """Translate a body. Raises APIError, RequestError."""
    body, ignored = decode_body(ResponsesBody, raw, _WITHOUT_EFFECT)
    for name in _UNSUPPORTED:
        if getattr(body, name):
            raise APIError(
                400, f"{name} is not supported: responses and prompts are not stored; send the whole input", param=name
            )
    messages: list[Json] = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _add_item(messages, f"input[{index}]", item)
    others = {str(tool.get("type")) for tool in body.tools or () if tool.get("type") != "function"}
    sampling = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=_functions(body.tools or ()),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        max_tokens=body.max_output_tokens,
        stream=body.stream,
        response_format=_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        sampling=sampling,
        ignored=ignored + sorted(f"tools.{kind}" for kind in others),
    )
    repeated: Json = msgspec.to_builtins(decode_field("", msgspec.json.Decoder(_Repeated).decode, raw))
    return replace(chat_generation(engine, chat, clamped=True, names=_NAMES), repeated=repeated)


def _functions(tools: Sequence[Json]) -> list[Json]:
    """Return the functions among ``tools`` in the form of chats. Raises APIError 400."""
    as_function = partial(msgspec.convert, type=Function)
    found = [
        Tool(msgspec.structs.replace(decode_field(f"tools[{index}]", as_function, tool), strict=None))
        for index, tool in enumerate(tools)
        if tool.get("type") == "function"
    ]
    return decode_field("tools", plain_tools, found)


def _choice(choice: str | dict[str, Any] | None) -> GivenChoice | None:
    if choice is None or choice in ("none", "auto", "required"):
        return choice  # type: ignore[return-value]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode, tools = choice.get("mode"), choice.get("tools")
        if mode in ("auto", "required") and isinstance(tools, list):
            return AllowedChoice(AllowedTools(mode, [_named_tool(tool) for tool in tools]))
        raise APIError(400, 'tool_choice needs the mode "auto" or "required", and a list of tools', param="tool_choice")
    return _named_tool(choice)


def _named_tool(tool: Any) -> NamedTool:
    if isinstance(tool, dict) and isinstance(tool.get("name"), str) and tool.get("type", "function") == "function":
        return NamedTool(NamedFunction(tool["name"]))
    message = 'tool_choice must be "none", "auto", "required", a function, or allowed_tools with functions'
    raise APIError(400, message, param="tool_choice")


def _format(text: _TextOptions | None) -> ResponseFormat | None:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat("json_object")
    if wanted.type != "json_schema" or wanted.schema is None:
        raise APIError(400, "text.format must be text, json_object, or json_schema with a schema", param="text")
    return ResponseFormat("json_schema", JsonSchema(wanted.schema, wanted.name))


def _add_item(messages: list[Json], place: str, item: Json) -> None:
    """Add to the messages of a chat what one item of the input says."""
    kind = item.get("type", "message")
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        content = text_content(f"{place}.content", item.get("content"), _TEXTS, "input")
        if role == "assistant" and messages and messages[-1].get("content", "") is None:
            messages[-1]["content"] = content  # of the turn that reasoning or calls have begun
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call_output":
        content = text_content(f"{place}.output", item.get("output"), _TEXTS, "input")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind in ("function_call", "reasoning"):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        last = messages[-1]
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if not isinstance(parts, list):
                raise APIError(400, f"{place} has reasoning that is not a list of parts", param="input")
            thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            last["reasoning_content"] = "\n".join(filter(None, (last.get("reasoning_content"), thought)))
        else:
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            last.setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": function}
            )
    else:
        raise APIError(400, f"{place} has the type {kind!r}, which is not supported", param="input")


_PARTS = {"text": ("output_text", "response.output_text"), "reasoning": ("reasoning_text", "response.reasoning_text")}


class ResponsesWriter(BlockWriter):
    """The form of ``/v1/responses``."""

    def __init__(self, wanted: GenerationRequest, model: str) -> None:
        super().__init__(wanted.make_reader())
        self._ids: dict[int, tuple[str, str]] = {}  # by block: ids of its item and of its call
        self._number = 0
        params = wanted.params
        self._response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "frequency_penalty": params.frequency_penalty,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": None,
            "metadata": {},
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": None,
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **wanted.repeated,
        }

    @property
    def _cut(self) -> bool:
        return self.last is not None and self.last.finish_reason == "length"

    def begin_stream(self, usage: Usage) -> bytes:
        created = self._named("response.created", response=self._response)
        return created + self._named("response.in_progress", response=self._response)

    def end_stream(self, usage: Usage) -> bytes:
        return self._named("response.incomplete" if self._cut else "response.completed", response=self.whole(usage))

    def fail_stream(self, error: APIError) -> bytes:
        failed = {"status": "failed", "error": {"code": error.code or "server_error", "message": str(error)}}
        return self._named("response.failed", response=self._response | failed)

    def whole(self, usage: Usage) -> Json:
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.drawn,
            "output_tokens_details": {"reasoning_tokens": self.reader.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.drawn,
        }
        whole = {
            "status": "incomplete" if self._cut else "completed",
            "completed_at": None if self._cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": [self._item(block, self._status(block)) for block in self.blocks],
            "usage": counts,
        }
        return self._response | whole

    def _status(self, block: Block) -> str:
        """Return the status of a block that is complete, or cut off by the end of the answer."""
        return "incomplete" if self._cut and block is self.blocks[-1] else "completed"

    def _item(self, block: Block, status: str) -> Json:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        item_id, call_id = self._ids.setdefault(block.index, (f"{prefix}_{uuid.uuid4().hex}", new_call_id()))
        if block.kind == "call":
            call = {"call_id": call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": item_id, "status": status} | call
        content = [self._part(block)] if status != "in_progress" else []
        if block.kind == "reasoning":
            return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}

    def _part(self, block: Block) -> Json:
        part: Json = {"type": _PARTS[block.kind][0], "text": block.text}
        return part if block.kind == "reasoning" else part | {"annotations": [], "logprobs": []}

    def write_change(self, change: Change) -> bytes:
        what, block, text = change
        item = self._item(block, self._status(block) if what == "close" else "in_progress")
        place: Json = {"output_index": block.index, "item_id": item["id"]}
        if block.kind == "call":
            return self._call_events(what, block, text, place, item)
        place["content_index"] = 0
        name = _PARTS[block.kind][1]
        texts: Json = {"logprobs": []} if block.kind == "text" else {}
        if what == "add":
            return self._named(f"{name}.delta", **place, **texts, delta=text)
        if what == "open":
            opened = self._named("response.output_item.added", output_index=block.index, item=item)
            empty = self._part(Block(block.index, block.kind))
            return opened + self._named("response.content_part.added", **place, part=empty)
        closed = self._named(f"{name}.done", **place, **texts, text=block.text)
        closed += self._named("response.content_part.done", **place, part=self._part(block))
        return closed + self._named("response.output_item.done", output_index=block.index, item=item)

    def _call_events(self, what: str, block: Block, text: str, place: Json, item: Json) -> bytes:
        name = "response.function_call_arguments"
        if what == "add":
            return self._named(f"{name}.delta", **place, delta=text)
        if what == "open":
            return self._named("response.output_item.added", output_index=block.index, item=item)
        closed = self._named(f"{name}.done", **place, arguments=block.text, name=block.name)
        return closed + self._named("response.output_item.done", output_index=block.index, item=item)

    def _named(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)
