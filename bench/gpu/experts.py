"""The product of experts on a GPU: Lamina's kernel, with weights in bfloat16, int8, int4 and fp8, and torch's.

Experts as in Qwen3-30B-A3B: 8 of 128 to a token, gate and up of 2048 x 1536. Weights of all that some token has chosen
are read once: ``share`` is how much of the device's copy bandwidth that takes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lamina.compute.device.cuda import Cuda
from lamina.core.types import Quantization
from lamina.lowering.expert_operators import TORCHS, experts_stacked, multiply
from lamina.models.quantisation.codes import StackedCodes, quantise_experts

EXPERTS, CHOSEN, INPUTS, OUTPUTS = 128, 8, 2048, 1536
TOKENS = (1, 16, 64, 256, 1024)
COPY_BYTES = 2 << 30
QUANTISED: tuple[Quantization, ...] = ("int8", "int4", "fp8")

Product = Callable[[Tensor, Tensor], Tensor]


def products(weights: Tensor) -> dict[str, tuple[Product, float]]:
    """By name: the product of rows with their experts' weights, given ends, and its bytes for each weight."""
    turned = weights.mT

    def stacked(codes: StackedCodes) -> Product:
        return lambda x, ends: experts_stacked(x, codes, ends)

    int8, int4, fp8 = (StackedCodes.stack(quantise_experts("experts", weights, to, {}), EXPERTS) for to in QUANTISED)
    found: dict[str, tuple[Product, float]] = {
        "bfloat16": (lambda x, ends: multiply(x, turned, ends), 2.0),
        "int8": (stacked(int8), 1.0),
        "fp8": (stacked(fp8), 1.0),
        "int4": (stacked(int4), 0.5 + 8 / int4.group),
    }
    if torch.cuda.get_device_capability(weights.device)[0] in (9, 10):
        found["torch, bfloat16"] = (lambda x, ends: TORCHS(x, turned, ends), 2.0)
    return found


def recorded_s(kit: Cuda, call: Callable[[], object]) -> float:
    """Seconds of a call, recorded."""
    return kit.time_replay(kit.capture(call))


def experts(index: int) -> list[dict[str, Any]]:
    """A row for each number of tokens and product."""
    kit = Cuda(index)
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=kit.place) for _ in range(2))
    copy_rate = 2 * COPY_BYTES / recorded_s(kit, lambda: target.copy_(source))
    draw = torch.Generator(kit.place).manual_seed(0)
    weights = torch.randn(EXPERTS, OUTPUTS, INPUTS, generator=draw, device=kit.place).mul_(0.02).bfloat16()
    rows, every = [], products(weights)
    for tokens in TOKENS:
        x = torch.randn(tokens * CHOSEN, INPUTS, generator=draw, device=kit.place).bfloat16()
        ranks = torch.rand(tokens, EXPERTS, generator=draw, device=kit.place)
        counts = torch.bincount(ranks.topk(CHOSEN).indices.flatten(), minlength=EXPERTS)
        ends, touched = counts.cumsum(0).int(), int((counts > 0).sum())
        for name, (product, nbytes) in every.items():
            seconds = recorded_s(kit, functools.partial(product, x, ends))
            share = touched * OUTPUTS * INPUTS * nbytes / seconds / copy_rate
            rows.append({"tokens": tokens, "experts": touched, "product": name, "us": 1e6 * seconds, "share": share})
    return rows
