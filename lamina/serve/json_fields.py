"""Cuts a JSON body into its fields, and decodes each within a limit of its own.

A body may have megabytes. Decoding all of it at once would need tens of times its size, and would block other threads.
The fields that may be large are the prompts of a completion, and the messages and tools of a chat.
"""

import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from lamina.core.errors import RequestError
from lamina.schedule.limits import MAX_WAITING
from lamina.serve.http_errors import APIError
from lamina.text.chat_template import text_of
from lamina.text.prompts import Prompt, as_prompts
from lamina.text.tools import Tools, plain_tools

logger = logging.getLogger(__name__)

IGNORED_HEADER = "X-Lamina-Ignored-Fields"
MOST_NAMED = 16
"""Most fields that one header names."""

MOST_LOGGED = 256
"""Most different fields that one process logs."""

T = TypeVar("T")

NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"


@functools.cache
def _cutter(names: tuple[str, ...], strict: bool) -> msgspec.json.Decoder[Any]:
    fields = [(name, msgspec.Raw, None) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Body", fields, forbid_unknown_fields=strict))


def cut_fields(
    body: bytes, names: tuple[str, ...], require_small: Callable[[int], None], large: Sequence[str]
) -> tuple[dict[str, bytes], list[str]]:
    """Return the undecoded value of every field of ``names`` that ``body`` has, and the names of its other fields.

    Args:
        require_small: Called with the bytes of all fields but the ``large`` ones; raises if they are too many.

    Raises:
        APIError: 400 if ``body`` is not a JSON object.
    """
    if not body:
        raise APIError(400, NO_OBJECT)
    unknown: list[str] = []
    try:
        try:
            cut = _cutter(names, strict=True).decode(body)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise APIError(400, NO_OBJECT) from None
            cut = _cutter(names, strict=False).decode(body)
            require_small(len(body) - sum(len(bytes(getattr(cut, name) or b"")) for name in large))
            unknown = [*msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - set(names)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not JSON: {_why(error)}{_surrogates(body)}") from None
    values = {name: bytes(raw) for name in names if (raw := getattr(cut, name)) is not None}
    require_small(sum(len(raw) for name, raw in values.items() if name not in large))
    return values, unknown


def decode_field(name: str, decode: Callable[[Any], T], raw: Any) -> T:
    """Return ``decode(raw)``. Raises APIError 400, which names the field, for what ``decode`` rejects.

    ``name``: the field that ``raw`` is the value of; empty if it is the body.
    """
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        text, _, path = str(error).replace(" | null`", "`").partition(" - at `$")
        if not path and (missing := re.fullmatch(r"Object missing required field `(\w+)`", text)):
            text, path = "Field required", f".{missing[1]}"
        place = f"{name}{path.rstrip('`')}".removeprefix(".")
        raise APIError(400, f"{place or 'the body'}: {text}", param=re.split(r"[.\[]", place)[0] or None) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        place = f"{name}: " if name else ""
        raise APIError(400, f"the body is not JSON: {place}{_why(error)}", param=name or None) from None
    except RequestError as error:
        raise APIError(400, str(error), param=name or None) from None


S = TypeVar("S", bound=msgspec.Struct)


def decode_body(kind: type[S], raw: bytes, without_effect: Collection[str]) -> tuple[S, list[str]]:
    """Return a body, and the names of its fields that are ignored, but for those that never have an effect.

    Raises:
        APIError: 400 for what is not such a body.
    """
    body = decode_field("", msgspec.json.Decoder(kind).decode, raw)
    names = decode_field("", msgspec.json.Decoder(dict[str, msgspec.Raw]).decode, raw)
    return body, ignored_names(names, {*kind.__struct_fields__, *without_effect})


def decode_plain(raw: bytes) -> Any:
    """Decode a small value; floats such as 1.0 become integers."""
    return _whole_numbers(msgspec.json.decode(raw))


def _whole_numbers(value: Any) -> Any:
    """Return ``value`` with integers for floats such as 1.0, also in lists: JSON has one kind of numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_whole_numbers(each) for each in value] if isinstance(value, list) else value


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).removeprefix("JSON is malformed: ")


def _surrogates(body: bytes) -> str:
    """Return a hint at half a surrogate pair, which JSON can express but Unicode text cannot; msgspec does not name
    it."""
    found = re.search(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", body)
    return f"; is {found[0].decode()} half of a surrogate pair?" if found else ""


def text_content(place: str, content: Any, kinds: Collection[str], param: str) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message for a string, or for a list of parts of these ``kinds``.

    Raises:
        APIError: 400 for anything else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise APIError(400, f"{place} is not a text or a list of parts", param=param)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds:
            raise APIError(400, f"{place} has a part of type {kind!r}, which is not supported; give text", param=param)
    try:
        texts = [text_of(part) for part in content]
    except RequestError as error:
        raise APIError(400, f"{place}: {error}", param=param) from None
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def ignored_names(names: Iterable[str], known: Collection[str], prefix: str = "") -> list[str]:
    """Return those ``names`` that are not ``known``, with ``prefix``.

    Raises:
        APIError: 400 for a name that differs from a known one only in case or underscores.
    """
    meant = {_folded(name): name for name in known}
    unknown = sorted(set(names).difference(known))
    for name in unknown:
        if right := meant.get(_folded(name)):
            shown = prefix + _shown(name)
            raise APIError(400, f"{shown} is not a field of this request; did you mean {prefix}{right}?", param=shown)
    return [prefix + name for name in unknown]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names the ignored fields of a request; empty if no field is ignored."""
    if not names:
        return {}
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return {IGNORED_HEADER: ", ".join([*map(_shown, names[:MOST_NAMED]), *more])}


class IgnoredLog:
    """Logs each ignored field once."""

    def __init__(self) -> None:
        self._logged = set[str]()

    def report(self, names: Sequence[str]) -> None:
        """Log those ``names`` that no earlier call had, in one line."""
        new = [name for name in map(_shown, names[:MOST_NAMED]) if name not in self._logged]
        if new and len(self._logged) < MOST_LOGGED:
            self._logged.update(new)
            logger.warning("requests have fields that are ignored: %s", ", ".join(new))


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


def _shown(name: str) -> str:
    """Return a name from a client, fit for a header or a log line."""
    name = re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)
    return name if len(name) <= 64 else f"{name[:64]}..."


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
        return msgspec.convert(_whole_numbers(numbers.decode(raw)), tokens.type)


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
    refusal: str | None = None


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
    if (count := raw.count(b'"role"')) > MOST_MESSAGES:  # before they are decoded
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


MOST_TOOL_NBYTES = 1024 * 1024
"""Limit on the JSON of all tools together."""

_TOOLS = msgspec.json.Decoder(Tools)


def decode_tools(raw: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools as chat templates take them. Raises RequestError or what msgspec raises."""
    if raw.strip() == b"null":
        return [], []
    if len(raw) > MOST_TOOL_NBYTES:
        raise RequestError(f"tools has {len(raw)} bytes; give at most {MOST_TOOL_NBYTES}")
    return plain_tools(_TOOLS.decode(raw)), []
