"""Cuts a JSON body into its fields, so that each is decoded within a limit of its own.

A body may have megabytes. Decoding all of it at once would need tens of times its size, and would block other threads.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from lamina.core.errors import RequestError
from lamina.serve.http_errors import APIError

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
        APIError: 400 for what is no JSON object.
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
    """Return ``decode(raw)``. Raises APIError 400, which names the field, for what ``decode`` rejects."""
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        text, _, path = str(error).replace(" | null`", "`").partition(" - at `$")
        raise APIError(400, f"{name}{path.rstrip('`')}: {text}", param=name) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not JSON: {name}: {_why(error)}", param=name) from None
    except RequestError as error:
        raise APIError(400, str(error), param=name) from None


def decode_plain(raw: bytes) -> Any:
    """Decode a small value; floats such as 1.0 become integers."""
    return whole_numbers(msgspec.json.decode(raw))


def whole_numbers(value: Any) -> Any:
    """Return ``value`` with integers for floats such as 1.0, also in lists: JSON has one kind of numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [whole_numbers(each) for each in value] if isinstance(value, list) else value


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).removeprefix("JSON is malformed: ")


def _surrogates(body: bytes) -> str:
    """Return a hint at half a surrogate pair, which JSON can express but Unicode text cannot; msgspec does not name
    it."""
    found = re.search(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", body)
    return f"; is {found[0].decode()} half of a surrogate pair?" if found else ""
