"""Decodes the fields that may be large: the prompts of a completion, the messages and the tools of a chat."""

from typing import Any, Literal

import msgspec

from lamina.core.errors import RequestError
from lamina.schedule.waiting import MAX_WAITING
from lamina.serve.json_fields import ignored_names, whole_numbers
from lamina.text.prompts import Prompt, as_prompts

_TEXT = msgspec.json.Decoder(str)
_TOKENS = msgspec.json.Decoder(list[int])
_NUMBERS = msgspec.json.Decoder(list[int | float])
_NUMBER_LISTS = msgspec.json.Decoder(list[list[int | float]])
_TEXTS = msgspec.json.Decoder(list[str])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]])


def decode_prompts(raw: bytes) -> tuple[list[Prompt], list[str]]:
    """Return the prompts, and no names: nothing in them is ignored. Raises RequestError or what msgspec raises."""
    prompts = as_prompts(_decode_prompts(raw))
    if len(prompts) > MAX_WAITING:  # more would never fit: trying again later would not help
        raise RequestError(f"prompt holds {len(prompts)} prompts; give at most {MAX_WAITING} at once")
    return prompts, []


def _decode_prompts(raw: bytes) -> Any:
    """Decode prompts as the type that the first characters indicate."""
    first, second = raw[:1], raw[1:].lstrip()[:1]
    if first == b'"':
        return _TEXT.decode(raw)
    if first != b"[":
        return None  # not a valid prompt: as_prompts raises the error
    if second == b"[" and (lists := raw.count(b"[") - 1) > MAX_WAITING:
        raise RequestError(f"prompt holds {lists} prompts; give at most {MAX_WAITING} at once")
    if second == b'"':
        return _TEXTS.decode(raw)
    tokens, numbers = (_TOKEN_LISTS, _NUMBER_LISTS) if second == b"[" else (_TOKENS, _NUMBERS)
    try:
        return tokens.decode(raw)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return msgspec.convert(whole_numbers(numbers.decode(raw)), tokens.type)


MOST_MESSAGES = 16_384
"""Messages per conversation."""

MOST_BYTES_OF_FIELDS = 1024 * 1024
"""Limit on all parts of the messages but their content, together: tool calls and reasoning."""

MESSAGE_NBYTES = 64
"""Bytes of a message's JSON that are not counted as its contents: braces, the names of role and content."""

_NULL = msgspec.Raw(b"null")


class _Part(msgspec.Struct, gc=False, omit_defaults=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message. The fields that are not decoded here have any form, and are passed to the chat template."""

    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    reasoning_content: msgspec.Raw = _NULL
    thinking: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    annotations: msgspec.Raw = _NULL


class _LenientMessage(_Message, forbid_unknown_fields=False):
    pass


class _Content(msgspec.Struct):
    content: msgspec.Raw = _NULL


_MESSAGES = msgspec.json.Decoder(list[_Message])
_LENIENT_MESSAGES = msgspec.json.Decoder(list[_LenientMessage])


def decode_messages(raw: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages without their null fields, and the names of keys in them that are ignored.

    Raises RequestError or what msgspec raises.
    """
    if (count := raw.count(b'"role"')) > MOST_MESSAGES:  # before they are decoded: see ``json_fields``
        raise RequestError(f"messages holds about {count} messages; give at most {MOST_MESSAGES}")
    ignored: list[str] = []
    try:
        messages = _MESSAGES.decode(raw)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise
        messages = list(_LENIENT_MESSAGES.decode(raw))
        contents = msgspec.json.decode(raw, type=list[_Content])
        besides = len(raw) - sum(len(bytes(message.content)) for message in contents)
        _require_few(besides - MESSAGE_NBYTES * len(messages))
        names = set[str]().union(*msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]]))
        ignored = ignored_names(names, _Message.__struct_fields__, "messages.")
    _require_few(sum(len(bytes(raw)) for message in messages for raw in _undecoded(message).values()))
    return [_plain(message) for message in messages], ignored


def _undecoded(message: _Message) -> dict[str, msgspec.Raw]:
    given = {name: getattr(message, name) for name in message.__struct_fields__}
    return {name: value for name, value in given.items() if isinstance(value, msgspec.Raw) and value is not _NULL}


def _plain(message: _Message) -> dict[str, Any]:
    values = {name: msgspec.json.decode(raw) for name, raw in _undecoded(message).items()}
    values |= {name: getattr(message, name) for name in ("role", "content", "name", "tool_call_id")}
    if isinstance(message.content, list):
        values["content"] = msgspec.to_builtins(message.content)
    return {name: value for name, value in values.items() if value is not None}


def _require_few(size: int) -> None:
    if size > MOST_BYTES_OF_FIELDS:
        raise RequestError(f"messages hold, besides their content, {size} bytes; give at most {MOST_BYTES_OF_FIELDS}")


MOST_TOOLS = 1024
MOST_TOOL_NBYTES = 1024 * 1024
"""Limit on the JSON of all tools together."""


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the model may call. ``strict`` has no effect."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag="function", tag_field="type"):
    """A tool; functions are the only kind."""

    function: Function


class NamedFunction(msgspec.Struct):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, tag="function", tag_field="type"):
    """The tool that the model must call."""

    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool

_TOOLS = msgspec.json.Decoder(list[Tool])


def decode_tools(raw: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools as chat templates take them. Raises RequestError or what msgspec raises."""
    if raw.strip() == b"null":
        return [], []
    if len(raw) > MOST_TOOL_NBYTES:
        raise RequestError(f"tools has {len(raw)} bytes; give at most {MOST_TOOL_NBYTES}")
    tools = _TOOLS.decode(raw)
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools; give at most {MOST_TOOLS}")
    names = [tool.function.name for tool in tools]
    for name in names:
        if not name or names.count(name) > 1:
            raise RequestError(f"tools has {names.count(name)} functions named {name!r}; give each a name of its own")
    return msgspec.to_builtins(tools), []
