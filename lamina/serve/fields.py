"""Fields of OpenAI's and vLLM's requests that this server does not implement, and their accepted default values.

Clients send such fields with default values, so those are accepted. Any other value is rejected, and so is a field
unknown to both APIs, whatever its value. Every known field may be null.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
"""Bookkeeping of the client or the provider: any value is accepted, and none changes the answer."""

_EITHER: dict[str, Sequence[Any]] = {
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION: Mapping[str, Sequence[Any]] = _EITHER | {"add_special_tokens": (True,)}
CHAT: Mapping[str, Sequence[Any]] = _EITHER | {"add_special_tokens": (False,), "echo": (False,)}

STREAM_OPTIONS: Mapping[str, Sequence[Any]] = {
    "include_obfuscation": (
        True,
        False,
    ),  # padding that hides token lengths: optional even if true, which is the default
    "continuous_usage_stats": (False,),
}


def has_no_effect(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether ``value`` is null or equals one of ``neutral``. 1 equals 1.0 here, but not true."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
