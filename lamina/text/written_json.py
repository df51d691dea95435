"""Reads JSON that a model has written, whole, or the object of a tool call as it grows."""

import ast
import contextlib
import json
import re
from collections.abc import Generator
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_written(text: str) -> Any:
    """Return the value of JSON that a model has written. Halves of surrogate pairs become replacement characters.

    Raises:
        ValueError: ``text`` is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):  # JSON can express half a pair, which no encoding can
            whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(whole.decode("utf-16", "replace"))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return value


def read_literal(text: str, python: bool = True) -> Any:
    """Return the value of JSON that a model has written, or, if ``python``, of Python's form of it, such as ``True``.

    Raises:
        ValueError: ``text`` is neither, or is nested too deeply.
    """
    try:
        return read_written(text)
    except ValueError:
        if not python or text.lstrip()[:1] not in ("[", "{", "T", "F", "N"):
            raise
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no literal: {error}") from None


_Reader = Generator[None, str, None]
"""Gets the characters of a text one by one."""

ARGUMENTS = ("arguments", "parameters", "args")


class CallObject:
    """Follows one JSON object with the name of a function and its arguments.

    Attributes:
        raw: Text read so far.
        name: Name of the function, once it has been read.
        keys: Keys of the members read so far, that of a value still being read included.
        done: True once the object has ended.
        failed: True if the text is not such an object.
    """

    def __init__(self, name: str | None = None) -> None:
        """``name``: the function, if only its arguments follow."""
        self.raw = ""
        self.name = name
        self.keys = set[str]()
        self.done = self.failed = False
        self._arguments = ""  # text of the arguments that was not returned yet
        self._had_arguments = False
        self._unread = 0  # characters after the end
        self._reader = self._read_object() if name is None else self._read_arguments()
        next(self._reader)

    def feed(self, text: str) -> int:
        """Read ``text`` to the end of the object. Returns how many characters were read."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            with contextlib.suppress(StopIteration):
                self._reader.send(text[at])
            at += 1
        at -= self._unread
        self._unread = 0
        self.raw += text[:at]
        return at

    def pop_arguments(self) -> str:
        """Return and forget new text of the arguments; empty until the name is known."""
        if self.name is None:
            return ""
        text, self._arguments = self._arguments, ""
        return text

    def _read_object(self) -> _Reader:
        self.failed = (yield from _next()) != "{"
        char = ""
        while not self.failed:
            if not char or char.isspace():
                char = yield from _next()
            if char == '"':
                text, _ = yield from self._read_value(char)
                key = str(_read_or_none(text))
                self.keys.add(key)
                self.failed = (yield from _next()) != ":"
                text, char = yield from self._read_value((yield from _next()), stream=key in ARGUMENTS)
                self._add_member(key, text)
            elif char == "}":
                self._end()
                return
            else:
                self.failed = char != ","
                char = ""

    def _read_arguments(self) -> _Reader:
        text, after = yield from self._read_value((yield from _next()), stream=True)
        self._add_member("arguments", text)
        self._unread = len(after)
        self._end()

    def _read_value(self, char: str, stream: bool = False) -> Generator[None, str, tuple[str, str]]:
        """Return a value that begins with ``char``, and the character after it if that has been read.

        The value is not checked. ``stream``: it is the arguments, which are returned as they grow, if they are
        no text.
        """
        text, depth = "", 0
        in_string = escaped = False
        while True:
            if in_string:
                in_string = escaped or char != '"'
                escaped = char == "\\" and not escaped
            elif depth == 0 and (char in "}]" or (text and (char == "," or char.isspace()))):
                return text, char
            else:
                in_string = char == '"'
                depth += (char in "{[") - (char in "}]")
            text += char
            if stream and text[0] in "{[":  # a text is JSON within JSON, which has to be complete
                self._arguments += char
                self._had_arguments = True
            if depth == 0 and not in_string and char in '"}]':
                return text, ""
            char = yield

    def _add_member(self, key: str, text: str) -> None:
        if key == "name":
            name = _read_or_none(text)
            self.name = name if isinstance(name, str) else None
            self.failed = self.failed or self.name is None
        elif key in ARGUMENTS and text[:1] not in "{[":
            value = _read_or_none(text)
            text = value if isinstance(value, str) else text
            if text.strip() and value is not None:  # an empty text and null are no arguments
                self._arguments += text
                self._had_arguments = True

    def _end(self) -> None:
        self.done = True
        self.failed = self.name is None
        if not self._had_arguments:
            self._arguments = "{}"


def _next() -> Generator[None, str, str]:
    while (char := (yield)).isspace():
        pass
    return char


def _read_or_none(text: str) -> object:
    try:
        return read_written(text)
    except ValueError:
        return None
