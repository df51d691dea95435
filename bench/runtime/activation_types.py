"""Accuracy cost of int8 activations: perplexity and logit error of a model by the types of weights and activations.

    python -m bench.runtime.activation_types [--windows 16] [--threads 1]

Runs the bundled model over windows of held-out text: files of Python's standard library that it was not trained on.
Linear layers but the head are Lamina's own products; everything else is in float32. Errors are relative to the same
model in float32.

Activations of large models have outliers: a few channels that are tens of times larger than the others. The bundled
model has none, so its norms get some: 1% of their outputs are multiplied by a factor, and the weights that follow are
divided by it, which leaves the model in float32 as it was.
"""

import itertools
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
    ("none", "dtype"),
    ("int8", "dtype"),
    ("int8", "int8"),
    ("int4", "dtype"),
    ("int4", "int8"),
)

FACTORS = (1, 10, 30, 100)
CHANNELS = 0.01


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


def add_outliers(model: Any, factor: float) -> Any:
    """Multiply ``CHANNELS`` of the outputs of a Llama's norms by a factor, undo it in the weights, return the model."""
    draw = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, products in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            count = len(norm.weight)
            channels = torch.randperm(count, generator=draw)[: max(1, round(count * CHANNELS))]
            norm.weight[channels] *= factor
            for product in products:
                product.weight[:, channels] /= factor
    return model


@torch.inference_mode()
def main() -> None:
    args = read_arguments(__doc__)
    ids = read_windows(args.windows)
    exact = run(load(), ids)
    accuracy = AccuracyTable(("outliers", "weights", "activations"), ids, exact)
    for factor, (weights, activations) in itertools.product(FACTORS, KINDS):
        names = "bfloat16" if weights == "none" else weights, "bfloat16" if activations == "dtype" else activations
        model = replace_layers(add_outliers(load(), factor), weights, activations)
        accuracy.add((str(factor), *names), run(model, ids))
    Console().print(accuracy.table)


if __name__ == "__main__":
    main()
