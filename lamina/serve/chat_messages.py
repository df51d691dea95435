"""Decodes the messages of a conversation; the chat template checks what they say."""

from typing import Any

import msgspec

from lamina.core.errors import RequestError
from lamina.serve.fields import ignored_names

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
    if (count := raw.count(b'"role"')) > MOST_MESSAGES:  # before they are decoded, see the module ``json_fields``
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
