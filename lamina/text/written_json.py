"""Reads JSON that a model has written."""

import ast
import json
import re
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
