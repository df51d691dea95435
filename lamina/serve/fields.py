"""Names the fields of request bodies: those of sampling, those without effect, those not supported, unknown ones."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from lamina.core.types import SamplingParams
from lamina.serve.http_errors import APIError

logger = logging.getLogger(__name__)

IGNORED_HEADER = "X-Lamina-Ignored-Fields"
MOST_NAMED = 16
"""Most fields that one header names."""

MOST_LOGGED = 256
"""Most different fields that one process logs."""

SAMPLING: dict[str, Any] = {
    name: kind | None
    for name, kind in get_type_hints(SamplingParams).items()
    if name not in ("max_tokens", "logprobs", "forced_token_ids")  # the endpoints differ in them
}
"""Type of each sampling field in JSON."""

WITHOUT_EFFECT = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
    )
)

_EITHER: dict[str, Sequence[Any]] = {
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "truncation_side": (),
    "prompt_logprobs": (),
    "logits_processors": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": (),  # llama.cpp's
    "json_schema": (),  # llama.cpp's and SGLang's
    "regex": (),  # SGLang's, like the next
    "ebnf": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_CHAT: dict[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "include_reasoning": (True,),
}
"""Fields of chats, as completions may have them."""

UNSUPPORTED_COMPLETION: Mapping[str, Sequence[Any]] = _EITHER | _CHAT | {"add_special_tokens": (True,)}
UNSUPPORTED_CHAT: Mapping[str, Sequence[Any]] = _EITHER | {
    "add_special_tokens": (False,),
    "echo": (False,),
    "truncate_prompt_tokens": (),
}


def has_no_effect(value: Any, neutral: Sequence[Any]) -> bool:
    """Return whether ``value`` is null or equals one of ``neutral``. 1 equals 1.0 here, but not true."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


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
