"""Random models: small configurations of every decoder family by name, and checkpoints made of them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lamina.core.sampling import SamplingParams

VOCABULARY = 96
LAYERS = 2
BOS, EOS, PAD = 0, 1, 2
FIRST = 3
"""The first token that means nothing special."""

STD = 0.2
"""Of weights: logits are far apart, and no part of a model is without effect."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 16}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_DEEPSEEK = _COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "llama-tied": ("llama", _GROUPED | {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3-rope": (
        "llama",
        _GROUPED
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", _GROUPED | {"sliding_window": 4}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen2-window": ("qwen2", _GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", _WIDE),
    "gemma": ("gemma", _WIDE),
    "gemma2": ("gemma2", _WIDE | _SLIDING | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("gemma3_text", _WIDE | _SLIDING | {"query_pre_attn_scalar": 8}),
    "phi": ("phi", _GROUPED | {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", _GROUPED | {"sliding_window": 4}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-layer-scale": ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", _COMMON | {"rotary_pct": 0.5}),
    "gpt_neox-sequential": ("gpt_neox", _COMMON | {"use_parallel_residual": False}),
    "gptj": ("gptj", _GPT2 | {"rotary_dim": 4}),
    "gpt_neo": (
        "gpt_neo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
            "intermediate_size": 48,
        },
    ),
    "opt": ("opt", _COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-projected": ("opt", _COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4}),
    "bloom-6-heads": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": LAYERS, "n_head": 6}),
    "mpt": ("mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": 64}),
    "falcon": ("falcon", _COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-mqa": ("falcon", _COMMON | {"multi_query": True, "parallel_attn": True}),
    "falcon-alibi": ("falcon", _COMMON | {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
    "olmo": ("olmo", _GROUPED | {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", _GROUPED),
    "olmo3": ("olmo3", _GROUPED | _SLIDING),
    "stablelm": ("stablelm", _GROUPED | {"use_qkv_bias": True, "qk_layernorm": True}),
    "granite": ("granite", _GROUPED | {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "cohere": ("cohere", _GROUPED | {"use_qk_norm": True}),
    "cohere2": ("cohere2", _WIDE | _SLIDING),
    "glm": ("glm", _WIDE),
    "glm4": ("glm4", _WIDE),
    "smollm3": ("smollm3", _GROUPED | {"no_rope_layers": [1, 0]}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2 | {"multi_query": True}),
    "nemotron": ("nemotron", _WIDE | {"partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", _GROUPED | {"sliding_window": 4}),
    "exaone4": ("exaone4", _WIDE | _SLIDING),
    "seed_oss": ("seed_oss", _WIDE),
    "ernie4_5": ("ernie4_5", _WIDE),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _WIDE),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", _WIDE | {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1}),
    "llama4_text": (
        "llama4_text",
        _WIDE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 4,
            "floor_scale": 3,
            "attn_scale": 0.5,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        _WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2} | _SLIDING,
    ),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2-lite": ("deepseek_v2", _DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "mixtral": ("mixtral", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": (
        "qwen2_moe",
        _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    ),
    "qwen3_moe": ("qwen3_moe", _WIDE | _EXPERTS | {"norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", {**_DEEPSEEK, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True}),
    "phimoe": ("phimoe", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "granitemoe": ("granitemoe", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
}

_MIXED = _EXPERTS | {"num_shared_experts": 1}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_FURTHER: dict[str, dict[str, Any]] = {
    "afmoe": _WIDE | _MIXED | _SLIDING | {"num_dense_layers": 1},
    "apertus": _GROUPED,
    "arcee": _WIDE,
    "biogpt": _COMMON,
    "bitnet": _GROUPED,
    "cohere2_moe": _WIDE | _MIXED | _SLIDING,
    "cwm": _WIDE | _SLIDING,
    "dots1": _DEEPSEEK | _SLIDING,
    "exaone_moe": _WIDE | _MIXED | _SLIDING | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "flex_olmo": _GROUPED | _EXPERTS,
    "flint": _WIDE | _EXPERTS | _SLIDING | {"shared_expert_intermediate_size": 24},
    "gemma4_text": _WIDE
    | _SLIDING
    | {"global_head_dim": 24, "num_global_key_value_heads": 1}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0},
    "glm4_moe_lite": _DEEPSEEK,
    "granite_swa": _GROUPED | _SLIDING,
    "granitemoe_swa": _GROUPED | _LOCAL_EXPERTS | _SLIDING | {"shared_intermediate_size": 24},
    "granitemoeshared": _GROUPED | _LOCAL_EXPERTS | {"shared_intermediate_size": 24},
    "helium": _GROUPED | {"head_dim": 8},
    "hy_v3": _WIDE | _MIXED,
    "hyperclovax": _WIDE,
    "jais2": _WIDE,
    "kolibri1": _WIDE | _EXPERTS | _SLIDING | {"shared_expert_intermediate_size": 24},
    "laguna": _WIDE
    | _EXPERTS
    | _SLIDING
    | {"shared_expert_intermediate_size": 24, "num_attention_heads_per_layer": [4, 2]},
    "mellum": _WIDE | _EXPERTS | _SLIDING,
    "mimo_v2_flash": _WIDE | _SLIDING | {"n_routed_experts": 4, "num_experts_per_tok": 2, "v_head_dim": 8},
    "minicpm3": _DEEPSEEK | {"dim_model_base": 16},
    "minimax_m2": _WIDE | _LOCAL_EXPERTS,
    "ministral": _WIDE | _SLIDING,
    "ministral3": _WIDE | {"sliding_window": 4},
    "modernbert-decoder": _COMMON | {"local_attention": 8, "layer_types": _SLIDING["layer_types"]},
    "nanochat": _GROUPED,
    "persimmon": _COMMON,
    "solar_open": {**_DEEPSEEK, "num_key_value_heads": 2, "head_dim": 16},
    "vaultgemma": _WIDE | _SLIDING | {"query_pre_attn_scalar": 8},
    "youtu": _DEEPSEEK,
}
"""By the type of the model."""

NAMES = tuple(_VARIANTS)
FURTHER = tuple(_FURTHER)
REPRESENTATIVES = (
    *("llama", "gemma2", "gptj", "gpt2", "bloom", "cohere2", "llama4_text", "gpt_oss", "deepseek_v3", "qwen2_moe"),
)
"""Between them every kind of position, window, cut, norm and expert; the other variants combine the same parts."""


SERVED_VOCABULARY = 160
_SERVED_SIZES = {
    "vocab_size": SERVED_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "head_dim": 32,
}
_SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 9.0},
    "opt": {},
    "bloom": {"seq_length": 128},
    "gpt_oss": {"sliding_window": 8},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "moe_intermediate_size": 32,
    },
    "mixtral": {},
}
SERVED = tuple(_SERVED)
"""Families that the whole runtime is tested with."""

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def variant_values(name: str) -> Mapping[str, Any]:
    """Return what the named variant sets of its configuration."""
    return _VARIANTS[name][1] if name in _VARIANTS else _FURTHER[name]


def variant(name: str, layers: int = LAYERS, **changes: Any) -> PretrainedConfig:
    """A new configuration of the named variant; kinds of layers repeat as far as ``layers`` needs them."""
    model_type = _VARIANTS[name][0] if name in _VARIANTS else name
    values = {**variant_values(name), **changes}
    if layers != LAYERS:
        values |= {next(key for key in _LAYER_COUNTS if key in values): layers}
        if kinds := values.get("layer_types"):
            values["layer_types"] = [kinds[layer % 3 // 2] for layer in range(layers)]
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**values)
    return config


def served(name: str, layers: int = 3, **changes: Any) -> PretrainedConfig:
    """A variant with longer heads and contexts, for the whole runtime."""
    sizes = {key: size for key, size in _SERVED_SIZES.items() if key in _VARIANTS[name][1]}
    return variant(name, layers, **(sizes | _SERVED[name] | changes))


def with_experts(name: str, count: int, **changes: Any) -> PretrainedConfig:
    """A variant with ``count`` experts where it has any."""
    counts = dict.fromkeys((key for key in _EXPERT_COUNTS if key in _VARIANTS[name][1]), count)
    return variant(name, **counts, **changes)


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Hugging Face's float32 model with random values in every tensor that a checkpoint has, biases and norms too."""
    torch.manual_seed(seed)
    # Falcon's eager attention adds alibi twice.
    implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, STD)
    return model


def write_checkpoint(
    config: PretrainedConfig, place: Path, seed: int = 0, max_shard_size: str = "50GB"
) -> PreTrainedModel:
    """Write a random model as its users do, with a tokenizer of one-character tokens; the model that was written."""
    model = random_model(config, seed)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(place, max_shard_size=max_shard_size)
    characters = {chr(0x4E00 + token): token for token in range(FIRST, config.vocab_size)}
    vocabulary = {"<s>": BOS, "</s>": EOS, "<pad>": PAD} | characters
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>").save_pretrained(place)
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Hugging Face's greedy continuation of ``prompt``, never stopping early."""
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=PAD
    )
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation


def best_beams(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """Return the ``n`` best continuations by Hugging Face's beam search, without padding, and their scores."""
    more: dict[str, Any] = {"min_new_tokens": params.min_tokens} if params.min_tokens else {}
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=params.n,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=ends or None,
        pad_token_id=PAD,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    answers = []
    for tokens, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append((tokens[:stop], score))
    return answers
