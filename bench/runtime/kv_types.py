"""Accuracy cost of narrow KV: perplexity and logit error of a model by the element type of its KV cache.

    python -m bench.runtime.kv_types [--windows 16] [--threads 1]

Runs the bundled model in float32 over windows of held-out text: files of Python's standard library that it was not
trained on. It uses the attention of memory workers: K and V of every token are appended to a slab of the given type,
and every token attends to the slab, itself included, as if the text had been decoded token by token. (Prompts lose
less: the tokens of a chunk attend to each other's K and V before these are rounded.) Errors are relative to a float32
slab.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from bench.runtime.accuracy import AccuracyTable, read_arguments, read_windows, run
from lamina.core.types import AttentionSpec, KvElement
from lamina.memory.device import make
from lamina.memory.device.base import Pairs
from lamina.models.directory import BUNDLED

ELEMENTS = (KvElement.FLOAT32, KvElement.BFLOAT16, KvElement.INT8, KvElement.FP8)


def slab_attention(element: KvElement, threads: int) -> Callable[..., tuple[torch.Tensor, None]]:
    """Causal attention of one sequence as Hugging Face calls it, over a slab of ``element``."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (each[0].transpose(0, 1).contiguous().numpy() for each in (query, key, value))  # [T, heads, size]
        count = len(q)
        spec = AttentionSpec(0, q.shape[1], k.shape[1], q.shape[2], v.shape[2], scaling)
        device, slots = make("cpu", [spec], element, count, threads), np.arange(count, dtype=np.int32)
        device.keep(0, k, v, slots)
        table = device.table(Pairs([count], [0], [0], [0], [0], [count]), lambda key: slots)
        out, lse = np.empty((count, spec.query_heads, spec.v_dim), np.float32), np.empty(q.shape[:2], np.float32)
        for _part in table.attend(0, q, out, lse):
            pass
        return torch.from_numpy(out)[None], None

    return attend


def load(element: KvElement, threads: int) -> Any:
    """Return the bundled model in float32 with attention over slabs of ``element``."""
    AttentionInterface.register(f"slab_{element.value}", slab_attention(element, threads))
    return AutoModelForCausalLM.from_pretrained(
        BUNDLED, dtype=torch.float32, attn_implementation=f"slab_{element.value}"
    )


def bytes_per_token(config: PretrainedConfig, element: KvElement) -> int:
    """Return the bytes of KV of one token in all layers."""
    heads, size = config.num_key_value_heads, config.head_dim
    spec = AttentionSpec(0, config.num_attention_heads, heads, size, size, 1)
    layers: int = config.num_hidden_layers
    return layers * spec.slab_bytes_per_token(element)


@torch.inference_mode()
def main() -> None:
    args = read_arguments(__doc__)
    ids = read_windows(args.windows)
    models = {element: load(element, args.threads) for element in ELEMENTS}
    exact = run(models[KvElement.FLOAT32], ids)
    accuracy = AccuracyTable(("KV", "bytes per token"), ids, exact)
    for element, model in models.items():
        logits = exact if element is KvElement.FLOAT32 else run(model, ids)
        accuracy.add((element.value, str(bytes_per_token(model.config, element))), logits)
    Console().print(accuracy.table)


if __name__ == "__main__":
    main()
