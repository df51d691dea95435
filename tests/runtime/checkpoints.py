"""Small random checkpoints on disk, written by transformers as a user's would be."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from transformers import (  # isort: skip
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
)

VOCABULARY = 160
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "intermediate_size": 96}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=32),
    "gemma2": Gemma2Config(
        **GROUPED, head_dim=32, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=9.0
    ),
    "opt": OPTConfig(**COMMON, ffn_dim=96, word_embed_proj_dim=64),
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=3, n_head=4, seq_length=128),
    "gpt_oss": GptOssConfig(**GROUPED, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "deepseek_v3": DeepseekV3Config(
        **(GROUPED | {"num_key_value_heads": 4}),
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


def make_checkpoint(config: PretrainedConfig, place: Path, seed: int = 0) -> PreTrainedModel:
    """Write a random float32 model with lively logits and a one-character tokenizer; the model that was written."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            elif "sink" in name:
                parameter.normal_(0.0, 1.0)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(place)
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2} | {chr(0x4E00 + token): token for token in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>").save_pretrained(place)
    return model


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """Hugging Face's greedy continuation of ``prompt``, never stopping early."""
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=2
    )
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation
