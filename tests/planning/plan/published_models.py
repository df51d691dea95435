"""Configs of public models, reduced to the entries that give their sizes, with the parameters published for each.

The parameters are those of the checkpoint's text model, in billions: the sum over its safetensors files, or the model
card's where embeddings are stored twice.
"""

from typing import Any

BILLION = 1e9


def config(
    model_type: str, layers: int, hidden: int, width: int, heads: int, kv: int, vocab: int, **others: Any
) -> Any:
    """Return the entries of a config.json."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **others,
    }


TIED = {"tie_word_embeddings": True}
OPEN = {"tie_word_embeddings": False}

PUBLISHED: dict[str, tuple[float, Any]] = {
    "Llama-2-7B": (6.738, config("llama", 32, 4096, 11008, 32, 32, 32000)),
    "Llama-2-13B": (13.016, config("llama", 40, 5120, 13824, 40, 40, 32000)),
    "Llama-2-70B": (68.977, config("llama", 80, 8192, 28672, 64, 8, 32000)),
    "Llama-3.1-8B": (8.030, config("llama", 32, 4096, 14336, 32, 8, 128256)),
    "Llama-3.1-70B": (70.554, config("llama", 80, 8192, 28672, 64, 8, 128256)),
    "Llama-3.1-405B": (405.85, config("llama", 126, 16384, 53248, 128, 8, 128256)),
    "Llama-3.2-1B": (1.236, config("llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, **TIED)),
    "Llama-3.2-3B": (3.213, config("llama", 28, 3072, 8192, 24, 8, 128256, head_dim=128, **TIED)),
    "Yi-34B": (34.389, config("llama", 60, 7168, 20480, 56, 8, 64000)),
    "Mistral-7B-v0.1": (7.242, config("mistral", 32, 4096, 14336, 32, 8, 32000)),
    "Mistral-Nemo-12B": (12.248, config("mistral", 40, 5120, 14336, 32, 8, 131072, head_dim=128)),
    "Mistral-Small-24B": (23.572, config("mistral", 40, 5120, 32768, 32, 8, 131072, head_dim=128)),
    "Mixtral-8x7B": (
        46.703,
        config("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    ),
    "Mixtral-8x22B": (
        140.63,
        config("mixtral", 56, 6144, 16384, 48, 8, 32768, num_local_experts=8, num_experts_per_tok=2),
    ),
    "Qwen2.5-0.5B": (0.494, config("qwen2", 24, 896, 4864, 14, 2, 151936, **TIED)),
    "Qwen2.5-7B": (7.616, config("qwen2", 28, 3584, 18944, 28, 4, 152064)),
    "Qwen2.5-32B": (32.764, config("qwen2", 64, 5120, 27648, 40, 8, 152064)),
    "Qwen2.5-72B": (72.706, config("qwen2", 80, 8192, 29568, 64, 8, 152064)),
    "Qwen3-0.6B": (0.596, config("qwen3", 28, 1024, 3072, 16, 8, 151936, head_dim=128, **TIED)),
    "Qwen3-8B": (8.191, config("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128)),
    "Qwen3-14B": (14.768, config("qwen3", 40, 5120, 17408, 40, 8, 151936, head_dim=128)),
    "Qwen3-32B": (32.762, config("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128)),
    "Qwen3-30B-A3B": (
        30.532,
        config(
            "qwen3_moe",
            48,
            2048,
            6144,
            32,
            4,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            decoder_sparse_step=1,
        ),
    ),
    "Qwen3-235B-A22B": (
        235.094,
        config(
            "qwen3_moe",
            94,
            4096,
            12288,
            64,
            4,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
            decoder_sparse_step=1,
        ),
    ),
    "Qwen3-Coder-480B": (
        480.155,
        config(
            "qwen3_moe",
            62,
            6144,
            8192,
            96,
            8,
            151936,
            head_dim=128,
            num_experts=160,
            num_experts_per_tok=8,
            moe_intermediate_size=2560,
            decoder_sparse_step=1,
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        14.316,
        config(
            "qwen2_moe",
            24,
            2048,
            5632,
            16,
            16,
            151936,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        ),
    ),
    "OLMoE-1B-7B": (
        6.919,
        config("olmoe", 16, 2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
    ),
    "Gemma-7B": (8.538, config("gemma", 28, 3072, 24576, 16, 16, 256000, head_dim=256)),
    "Gemma-2-9B": (9.242, config("gemma2", 42, 3584, 14336, 16, 8, 256000, head_dim=256)),
    "Gemma-2-27B": (27.227, config("gemma2", 46, 4608, 36864, 32, 16, 256000, head_dim=128)),
    "Phi-3-mini": (3.821, config("phi3", 32, 3072, 8192, 32, 32, 32064)),
    "Phi-4": (14.660, config("phi3", 40, 5120, 17920, 40, 10, 100352)),
    "Command-R": (34.981, config("cohere", 40, 8192, 22528, 64, 64, 256000)),
    "MiMo-7B": (7.62, config("mimo", 36, 4096, 11008, 32, 8, 151680)),
    "gpt-oss-20b": (
        20.91,
        config(
            "gpt_oss",
            24,
            2880,
            2880,
            64,
            8,
            201088,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            **OPEN,
        ),
    ),
    "MiniMax-M2": (
        228.69,
        config(
            "minimax_m2",
            62,
            3072,
            1536,
            48,
            8,
            200064,
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            attn_type_list=[1] * 62,
            shared_intermediate_size=0,
            quantization_config={
                "activation_scheme": "dynamic",
                "fmt": "float8_e4m3fn",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            **OPEN,
        ),
    ),
    "Llama-4-Scout": (
        107.77,
        config(
            "llama4_text",
            48,
            5120,
            8192,
            40,
            8,
            202048,
            head_dim=128,
            intermediate_size_mlp=16384,
            num_local_experts=16,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
        ),
    ),
    "Llama-4-Maverick": (
        400.7,
        config(
            "llama4_text",
            48,
            5120,
            8192,
            40,
            8,
            202048,
            head_dim=128,
            intermediate_size_mlp=16384,
            num_local_experts=128,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
        ),
    ),
}
"""Models by name: billions of parameters, and the config."""

_DEEPSEEK = config("deepseek_v3", 61, 7168, 18432, 128, 128, 129280, kv_lora_rank=512, n_routed_experts=256)

REFUSED: dict[str, Any] = {
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-R1": _DEEPSEEK,
    "DeepSeek-V4-Flash": config(
        "deepseek_v4", 43, 4096, 2048, 64, 1, 129280, head_dim=512, o_lora_rank=1024, compress_ratios=[0, 0, 4, 128]
    ),
    "Kimi-K2": config("kimi_k2", 61, 7168, 18432, 64, 64, 163840, kv_lora_rank=512, n_routed_experts=384),
    "GLM-5": config("glm_moe_dsa", 78, 6144, 12288, 64, 64, 154880, kv_lora_rank=512, index_topk=2048),
    "Qwen3.5-27B": config("qwen3_5", 64, 5120, 17408, 24, 4, 248320, linear_num_value_heads=48),
    "MiniMax-Text-01": config("minimax", 80, 6144, 9216, 64, 8, 200064, attn_type_list=[0, 0, 1]),
    "MiniMax-M3": config("minimax_m3", 60, 6144, 3072, 64, 4, 200064, sparse_attention_config={"sparse_topk": 16}),
    "Nemotron-3-Nano-30B-A3B": config("nemotron_h", 52, 2688, 1856, 32, 2, 131072, hybrid_override_pattern="MEM*E"),
    "Nemotron-3-Ultra-550B": config("nemotron_h", 108, 8192, 5120, 64, 2, 131072, layers_block_type=["mamba", "moe"]),
    "Nemotron-Super-49B": config("nemotron-nas", 80, 8192, 28672, 64, 8, 128256, block_configs=[{"ffn": {}}]),
    "MiMo-V2-Flash": config("mimo_v2_flash", 48, 4096, 16384, 64, 4, 152576, head_dim=192, v_head_dim=128),
    "Gemma-3n-E4B": config(
        "gemma3n_text", 35, 2048, 0, 8, 2, 262400, intermediate_size=[16384] * 35, hidden_size_per_layer_input=256
    ),
    "OpenELM": config("openelm", 2, 64, 128, 4, 2, 100, num_attention_heads=[4, 8]),
    "RecurrentGemma-2B": config("recurrent_gemma", 26, 2560, 15360, 10, 1, 256000, lru_width=2560),
    "Grok-2": config("git", 64, 8192, 32768, 64, 8, 131072, num_local_experts=8, residual_moe=True),
    "Arctic": config("arctic", 35, 7168, 4864, 56, 8, 32000, num_local_experts=128, parallel_attn_mlp_res=True),
    "Gemma-4-26B": config("gemma4_text", 30, 2816, 2112, 16, 8, 262144, head_dim=256, global_head_dim=512),
}
"""Models whose layers the cost model has no formulas for."""
