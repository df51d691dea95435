"""Reads JSON that a model has written."""

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
