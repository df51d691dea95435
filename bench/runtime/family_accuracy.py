"""Error of logits by the types of weights and activations, for every family of models that Lamina supports.

    python -m bench.runtime.family_accuracy [--families llama gpt_oss ...] [--tokens 256] [--threads 1] [--json FILE]

Each family is a random model of four layers and 256 hidden values, whose matrices keep the size of what they multiply.
A token's logits come from Lamina's own slices, products and attention, in one process. Errors are mean differences to
Hugging Face's model in float32, over the standard deviation of its logits: an error of 1% is a hundredth of what
distinguishes tokens. Random models have no outliers, and their experts are chosen by chance, so that rounding changes
the choice more often than in trained models; `bench.runtime.activation_types` runs a trained one.
"""

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import logging

from bench.peers.unsplit import Chunk, Kv, LocalAttention
from bench.runtime.activation_types import KINDS
from lamina.compute.device.base import Rows, pad
from lamina.compute.device.cpu import Cpu, SliceRunner
from lamina.core.errors import ConfigError
from lamina.core.types import DType, Quantization
from lamina.lowering import LoweredModel, lower
from lamina.models.pretrained import meta_model
from lamina.models.quantisation.codes import Weight
from lamina.splitter import split
from tests.support.random_models import FIRST, FURTHER, NAMES, random_model, variant, variant_values

Errors = Sequence[float | None]
"""By the number of each of ``KINDS``."""

LAYERS = 4
VOCABULARY = 1024
HEADINGS = ("bfloat16", "int8 x bfloat16", "int8 x int8", "int4 x bfloat16", "int4 x int8")
"""Weights x activations of each of ``KINDS``."""

SIZES = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "attention_types": [[["global", "local"], LAYERS // 2]],
    "attention_chunk_size": 64,
    "sliding_window": 64,
    "window_size": 64,
    "local_attention": 64,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 256),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "intermediate_size_mlp"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 256),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 1024),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_nope_head_dim", "v_head_dim"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "word_embed_proj_dim", "hidden_size_per_layer_input"), 128),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 32),
}
BY_LAYER = {"no_rope_layers", "num_attention_heads_per_layer"}


def configuration(name: str) -> PretrainedConfig:
    """Return a variant of ``tests.support.random_models`` with the sizes of this benchmark."""
    given = variant_values(name)
    sizes = {key: size for key, size in SIZES.items() if given.get(key) is not None}
    by_layer = {key: list(itertools.islice(itertools.cycle(given[key]), LAYERS)) for key in BY_LAYER & given.keys()}
    return variant(name, LAYERS, **sizes, **by_layer)


@torch.no_grad()
def exact_model(config: PretrainedConfig) -> Any:
    """Return Hugging Face's model in float32, whose matrices have values of about one over the root of their inputs."""
    model: Any = random_model(config)
    embeddings = {id(model.get_input_embeddings().weight)}
    for tensor in model.parameters():
        if tensor.dim() > 1 and id(tensor) not in embeddings:
            tensor.normal_(0.0, 1 / math.sqrt(min(tensor.shape[-2:]) if tensor.dim() == 3 else tensor.shape[-1]))
        tensor.copy_(tensor.bfloat16())  # as checkpoints hold it
    return model


def held(
    model: LoweredModel, config: PretrainedConfig, state: Mapping[str, Tensor], to: Quantization
) -> dict[str, Weight]:
    """Return the model's weights as a compute worker on a CPU holds them."""
    form, expected = Cpu().form(model, to), meta_model(config, DType.BFLOAT16).state_dict()
    weights: dict[str, Weight] = {}
    for name in model.weights:
        tensor = state[name].to(expected[name].dtype)
        weights[name] = form.quantise(name, tensor, {}) if name in form.names else tensor
    return weights


def logits(model: LoweredModel, runner: SliceRunner, ids: Tensor, threads: int) -> Tensor:
    """Return the logits [T, vocabulary] of a prompt, with keys and values in bfloat16."""
    count = len(ids)
    kv = Kv(model.attentions, count, threads)
    kv.slab.open(0)
    local = LocalAttention(kv, [Chunk(0, 0, ids.tolist())])
    rows = Rows(pad(ids, local.rows), pad(torch.arange(count), local.rows))
    attention: Tensor | None = None
    context: tuple[Tensor, ...] = ()
    for index, (spec, sinks) in enumerate(zip(runner.attentions, runner.sinks, strict=True)):
        output = runner.run(index, rows, attention, context)
        assert output.q is not None and output.k is not None and output.v is not None
        attention, context = local.attend(spec, output.q, output.k, output.v, sinks), output.context
    assert attention is not None
    return runner.logits(rows, attention, context, torch.arange(count)).float()


@torch.inference_mode()
def errors(name: str, tokens: int, threads: int) -> Errors:
    """Return the mean error of each of ``KINDS`` over the standard deviation of the exact logits.

    That is None where Lamina refuses to quantise the family.
    """
    config = configuration(name)
    exact = exact_model(config)
    ids = torch.randint(FIRST, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1))
    wanted = exact(input_ids=ids[None], use_cache=False).logits[0].float()
    model, state = lower(split(config, DType.BFLOAT16)), exact.state_dict()
    found: list[float | None] = []
    for to, activations in KINDS:
        try:
            weights = held(model, config, state, to)
        except ConfigError:
            found.append(None)
            continue
        runner = SliceRunner(model, weights, activations=activations)
        found.append(float((logits(model, runner, ids, threads) - wanted).abs().mean() / wanted.std()))
    return found


def families() -> list[str]:
    """Return one variant of each type of model."""
    by_type = {variant(name).model_type: name for name in reversed((*NAMES, *FURTHER))}
    return list(reversed(by_type.values()))


def table(rows: Mapping[str, Errors]) -> Table:
    made = Table("family", *HEADINGS, title="mean error of logits")
    for name, found in rows.items():
        made.add_row(name, *("refused" if value is None else f"{value:.2%}" for value in found))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=(*NAMES, *FURTHER), help="default: one of each type")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    names = args.families or families()
    rows = {name: errors(name, args.tokens, args.threads) for name in track(names, transient=True)}
    Console().print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"kinds": HEADINGS, "errors": rows}, indent=1))


if __name__ == "__main__":
    main()
