"""Accuracy cost of int8 activations: perplexity and logit error of a model by the types of weights and activations.

    python -m bench.runtime.activation_types [--windows 16] [--threads 1]

Runs the bundled model over windows of held-out text: files of Python's standard library that it was not trained on.
Linear layers but the head are Lamina's own products; everything else is in float32. Errors are relative to the same
model in float32.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from lamina.core.types import ActivationDType, Quantization
from lamina.lowering.cpu_codes import linear_codes, pack_codes
from lamina.lowering.native_operators import NATIVE
from lamina.models.directory import BUNDLED, find
from lamina.models.quantisation.codes import quantise
from lamina.text.tokenizer import Tokenizer
from tools.train_bundled import CONTEXT, read_sources

KINDS: tuple[tuple[Quantization, ActivationDType], ...] = (
    ("none", "auto"),
    ("int8", "auto"),
    ("int8", "int8"),
    ("int4", "auto"),
    ("int4", "int8"),
)


class Product(torch.nn.Module):
    """A linear layer as a compute worker runs it, between layers in float32."""

    def __init__(self, layer: torch.nn.Linear, weights: Quantization, activations: ActivationDType) -> None:
        super().__init__()
        weight = layer.weight.detach().to(torch.bfloat16)
        self._outputs = len(weight)
        self._bias = None if layer.bias is None else layer.bias.detach().to(torch.bfloat16)
        self._pairs = NATIVE.pack(weight) if weights == "none" else None
        self._codes = None if weights == "none" else pack_codes(quantise("w", weight, weights, {}), activations)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        if self._codes is not None:
            return linear_codes(x, self._codes, self._bias).float()
        assert self._pairs is not None
        return NATIVE.linear(x, self._pairs, self._bias, self._outputs).float()


def replace_layers(model: Any, weights: Quantization, activations: ActivationDType) -> Any:
    """Replace all linear layers of a model but its head, and return the model."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Product(layer, weights, activations))
    return model


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16, help=f"number of windows of {CONTEXT} tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    _, texts = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    ids = torch.tensor(Tokenizer(find(None)).encode("\n".join(texts))[: args.windows * CONTEXT]).view(-1, CONTEXT)
    exact = [load()(window[None], use_cache=False).logits[0] for window in ids]
    deviation = float(torch.stack([each.std() for each in exact]).mean())
    tokens = len(ids) * (CONTEXT - 1)
    table = Table(title=f"{tokens} held-out tokens; standard deviation of the logits {deviation:.2f}")
    for heading in ("weights", "activations"):
        table.add_column(heading)
    for heading in ("perplexity", "mean logit error", "max logit error", "top-1 agreement"):
        table.add_column(heading, justify="right")
    table.add_row("float32", "float32", f"{perplexity(exact, ids):.4f}", "0", "0", "100%")
    for weights, activations in KINDS:
        model = replace_layers(load(), weights, activations)
        found = [model(window[None], use_cache=False).logits[0] for window in ids]
        errors = [(got - right).abs() for got, right in zip(found, exact, strict=True)]
        agree = [(got.argmax(-1) == right.argmax(-1)).double() for got, right in zip(found, exact, strict=True)]
        table.add_row(
            "bfloat16" if weights == "none" else weights,
            "bfloat16" if activations == "auto" else activations,
            f"{perplexity(found, ids):.4f}",
            f"{float(torch.stack([each.mean() for each in errors]).mean()):.5f}",
            f"{max(float(each.max()) for each in errors):.3f}",
            f"{float(torch.stack([each.mean() for each in agree]).mean()):.2%}",
        )
    Console().print(table)


def perplexity(logits: list[Tensor], ids: Tensor) -> float:
    """Perplexity of windows of ids [windows, tokens], given the logits [tokens, vocabulary] of each."""
    pairs = zip(logits, ids, strict=True)
    nats = [torch.nn.functional.cross_entropy(each[:-1], window[1:]) for each, window in pairs]
    return math.exp(float(torch.stack(nats).double().mean()))


if __name__ == "__main__":
    main()
