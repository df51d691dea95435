"""Accuracy cost of int8 activations: perplexity and logit error of a model by the types of weights and activations.

    python -m bench.runtime.activation_types [--windows 16] [--threads 1]

Runs the bundled model over windows of held-out text: files of Python's standard library that it was not trained on.
Linear layers but the head are Lamina's own products; everything else is in float32. Errors are relative to the same
model in float32.
"""

from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.runtime.accuracy import AccuracyTable, read_arguments, read_windows, run
from lamina.core.types import ActivationDType, Quantization
from lamina.lowering.cpu_codes import linear_codes, pack_codes
from lamina.lowering.native_operators import NATIVE
from lamina.models.directory import BUNDLED
from lamina.models.quantisation.codes import quantise

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
    args = read_arguments(__doc__)
    ids = read_windows(args.windows)
    exact = run(load(), ids)
    accuracy = AccuracyTable(("weights", "activations"), ids, exact)
    accuracy.add(("float32", "float32"), exact)
    for weights, activations in KINDS:
        names = "bfloat16" if weights == "none" else weights, "bfloat16" if activations == "auto" else activations
        accuracy.add(names, run(replace_layers(load(), weights, activations), ids))
    Console().print(accuracy.table)


if __name__ == "__main__":
    main()
