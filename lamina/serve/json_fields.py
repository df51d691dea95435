"""Cuts a JSON body into its fields, so that each is decoded within a limit of its own.

A body may have megabytes. Decoding all of it at once would need tens of times its size, and would block other threads.
"""

import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from lamina.core.errors import RequestError
from lamina.serve.http_errors import APIError

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


def plain_text(place: str, content: Any, kinds: Collection[str], param: str) -> str:
    """Return the text of a string, or of a list of parts of these ``kinds``. Raises APIError 400 for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise APIError(400, f"{place} is not a text or a list of parts", param=param)
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise APIError(400, f"{place} has a part of type {kind!r}, which is not supported; give text", param=param)
    return "\n".join(part["text"] for part in content)


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
    """Return the header that names the ignored fields of a request; empty if there are none."""
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
