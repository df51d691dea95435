"""Decodes the prompts of a completion: one or several texts or lists of token ids."""

from typing import Any

import msgspec

from lamina.core.errors import RequestError
from lamina.schedule.limits import MAX_WAITING
from lamina.serve.json_fields import whole_numbers
from lamina.text.prompts import Prompt, as_prompts

_TEXT = msgspec.json.Decoder(str)
_TOKENS = msgspec.json.Decoder(list[int])
_NUMBERS = msgspec.json.Decoder(list[int | float])
_NUMBER_LISTS = msgspec.json.Decoder(list[list[int | float]])
_TEXTS = msgspec.json.Decoder(list[str])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]])


def decode_prompts(raw: bytes) -> tuple[list[Prompt], list[str]]:
    """Return the prompts, and no names: nothing in them is ignored. Raises RequestError or what msgspec raises."""
    prompts = as_prompts(_decode(raw))
    if len(prompts) > MAX_WAITING:  # more would never fit: trying again later would not help
        raise RequestError(f"prompt holds {len(prompts)} prompts; give at most {MAX_WAITING} at once")
    return prompts, []


def _decode(raw: bytes) -> Any:
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
