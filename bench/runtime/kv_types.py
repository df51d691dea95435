"""Accuracy cost of narrow KV: perplexity and logit error of a model by the element type of its KV cache.

    python -m bench.runtime.kv_types [--windows 16] [--threads 1]

Runs the bundled model in float32 over windows of held-out text: files of Python's standard library that it was not
trained on. It uses the attention of memory workers: K and V of every token are appended to a slab of the given type,
and every token attends to the slab, itself included, as if the text had been decoded token by token. (Prompts lose
less: the tokens of a chunk attend to each other's K and V before these are rounded.) Errors are relative to a float32
slab.
"""

import argparse
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, AutoModelForCausalLM

from lamina.core.types import AttentionSpec, KvElement
from lamina.memory.device import make
from lamina.memory.device.base import Pairs
from lamina.models.directory import BUNDLED, find
from lamina.text.tokenizer import Tokenizer
from tools.train_bundled import CONTEXT, read_sources

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


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16, help=f"number of windows of {CONTEXT} tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    _, texts = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    ids = torch.tensor(Tokenizer(find(None)).encode("\n".join(texts))[: args.windows * CONTEXT]).view(-1, CONTEXT)
    models: dict[KvElement, Any] = {}
    for element in ELEMENTS:
        AttentionInterface.register(f"slab_{element.value}", slab_attention(element, args.threads))
        models[element] = AutoModelForCausalLM.from_pretrained(
            BUNDLED, dtype=torch.float32, attn_implementation=f"slab_{element.value}"
        )

    nats, errors, largest, agree = (dict.fromkeys(ELEMENTS, 0.0) for _ in range(4))
    deviation = 0.0
    for window in ids:
        exact = models[KvElement.FLOAT32](window[None], use_cache=False).logits[0]
        deviation += float(exact.std()) / len(ids)
        for element, model in models.items():
            logits = model(window[None], use_cache=False).logits[0]
            nats[element] += float(torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum"))
            difference = (logits - exact).abs()
            errors[element] += float(difference.mean()) / len(ids)
            largest[element] = max(largest[element], float(difference.max()))
            agree[element] += float((logits.argmax(-1) == exact.argmax(-1)).double().mean()) / len(ids)

    config = models[KvElement.FLOAT32].config
    spec = AttentionSpec(0, config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim, 1)
    tokens = len(ids) * (CONTEXT - 1)
    table = Table(title=f"{tokens} held-out tokens; standard deviation of the logits {deviation:.2f}")
    for heading in ("KV", "bytes per token", "perplexity", "mean logit error", "max logit error", "top-1 agreement"):
        table.add_column(heading, justify="left" if heading == "KV" else "right")
    for element in ELEMENTS:
        nbytes = config.num_hidden_layers * spec.slab_bytes_per_token(element)
        figures = (f"{math.exp(nats[element] / tokens):.4f}", f"{errors[element]:.5f}", f"{largest[element]:.3f}")
        table.add_row(element.value, str(nbytes), *figures, f"{agree[element]:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
