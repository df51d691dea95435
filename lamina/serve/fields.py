"""Fields of OpenAI's and vLLM's requests that this server does not act on, and the values that ask it for nothing.

Clients send defaults they know of, so those are taken; any other value of such a field is refused, and so is a field
that neither knows, whatever its value. null is a value that every known field may have.
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
"""For the client's own bookkeeping or the provider's: the answer is the same with any value."""

_EITHER: dict[str, Sequence[Any]] = {
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "skip_special_tokens": (True,),
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
    "cache_salt": (),
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
    "include_obfuscation": (True, False),  # padding that hides the lengths of tokens: true is a default, and optional
    "continuous_usage_stats": (False,),
}


def asks_for_nothing(value: Any, neutral: Sequence[Any]) -> bool:
    """True for null and for what equals one of ``neutral``; true is not 1 here, but 1 is 1.0."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
