"""Lowered slices of real families consist of matrix products and fused calls; what does not match stays as it is."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from lamina.core.types import DType
from lamina.lowering import fuse, lower, native_operators
from lamina.splitter import split
from tests.support.random_models import variant

aten = torch.ops.aten
ADD_NORM, NORM, ROTATE, GATE = (
    native_operators.add_rms_norm.__name__,
    native_operators.rms_norm.__name__,
    native_operators.rotate.__name__,
    native_operators.gate.__name__,
)
FUSED = {ADD_NORM, NORM, ROTATE, GATE}


def operators(graph: fx.Graph) -> Counter[str]:
    """Calls by name, without views and unpacking, which touch no elements."""
    names = Counter(
        node.target.__name__ if callable(node.target) else str(node.target)
        for node in graph.nodes
        if node.op.startswith("call")
    )
    for free in ("getitem", "reshape", "view", "size", "transpose"):
        del names[free]
    return names


@pytest.mark.parametrize("dtype", [pytest.param(DType.FLOAT32, marks=pytest.mark.slow), DType.BFLOAT16])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {ADD_NORM: 2, ROTATE: 2, GATE: 1}),
        ("qwen3", {ADD_NORM: 2, NORM: 2, ROTATE: 2, GATE: 1}),
        ("gemma2", {ADD_NORM: 2, NORM: 2, ROTATE: 2, GATE: 1}),
    ],
)
def test_everything_between_products_is_fused(name: str, dtype: DType, expected: dict[str, int]) -> None:
    model = split(variant(name), dtype)
    tensors = {weight: torch.zeros(like.shape, dtype=like.dtype) for weight, like in model.weights.items()}
    inner = lower(model).with_weights(tensors)[1]
    found = operators(inner._main.graph)
    assert sum(found.pop(name, 0) for name in ("linear_native", "linear_onednn", "linear.default")) == 7
    assert found == expected


def test_partly_rotated_heads_are_fused() -> None:
    model = split(variant("phi"), DType.BFLOAT16)
    tensors = {weight: torch.zeros(like.shape, dtype=like.dtype) for weight, like in model.weights.items()}
    found = operators(lower(model).with_weights(tensors)[1]._main.graph)
    assert found[ROTATE] == 2 and not found["cat.default"]


def traced(function: torch.nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """``function`` as operators with their values, as in a captured model; all inputs placeholders."""
    module = torch.export.export(function, inputs).run_decompositions({}).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


class Norm(torch.nn.Module):
    """RMSNorm with one thing about it changed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        power = 3 if self.change == "power" else 2
        dim = 1 if self.change == "dimension" else -1
        mean = x.pow(power).mean(dim, keepdim=True)
        scale = torch.rsqrt(mean + 1e-6)
        normed = (mean if self.change == "other value" else x) * scale
        return normed * (1 + weight if self.change == "offset" else weight)


@pytest.mark.parametrize("change", ["power", "dimension", "other value", "weight's shape", "offset", ""])
def test_what_only_looks_like_a_norm_is_left(change: str) -> None:
    x, weight = torch.rand(2, 6, 6), torch.rand(6, 1) if change == "weight's shape" else torch.rand(6)
    module = traced(Norm(change), x, weight)
    before = module(x, weight)
    fuse.fuse(module)
    assert operators(module.graph)[NORM] == (1 if change in ("", "offset") else 0)
    torch.testing.assert_close(module(x, weight), before)


class Rotation(torch.nn.Module):
    """HF's rotary embedding with one thing about it changed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        half = 3 if self.change == "unequal halves" else 4
        lower, upper = x[..., :half], x[..., half:]
        turned = torch.cat([-lower, upper] if self.change == "other half" else [-upper, lower], -1)
        return (x.neg() if self.change == "other value" else x) * cosines + turned * sines


@pytest.mark.parametrize("change", ["unequal halves", "other half", "other value", "angles by head", ""])
def test_what_only_looks_like_a_rotation_is_left(change: str) -> None:
    heads = 3 if change == "angles by head" else 1
    inputs = torch.rand(1, 5, 3, 8), torch.rand(1, heads, 5, 8), torch.rand(1, heads, 5, 8)
    module = traced(Rotation(change), *inputs)
    before = module(*inputs)
    fuse.fuse(module)
    assert operators(module.graph)[ROTATE] == (0 if change else 1)
    torch.testing.assert_close(module(*inputs), before)


class Gate(torch.nn.Module):
    """A gated activation with one thing about it changed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, up: Tensor) -> Tensor:
        if self.change == "exact gelu":
            return torch.nn.functional.gelu(x) * up
        return torch.nn.functional.silu(x) * up


@pytest.mark.parametrize("change", ["exact gelu", "broadcast", ""])
def test_what_only_looks_like_a_gate_is_left(change: str) -> None:
    x, up = torch.rand(1, 5, 8), torch.rand(1, 1 if change == "broadcast" else 5, 8)
    module = traced(Gate(change), x, up)
    before = module(x, up)
    fuse.fuse(module)
    assert operators(module.graph)[GATE] == (0 if change else 1)
    torch.testing.assert_close(module(x, up), before)


def test_views_that_undo_each_other_vanish() -> None:
    class Views(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.view(1, 5, -1, 4).transpose(1, 2)
            return heads.squeeze(0).transpose(0, 1)

    x = torch.rand(1, 5, 12)
    module = traced(Views(), x)
    before = copy.deepcopy(module)(x)
    fuse.fuse(module)
    assert [node.target for node in module.graph.nodes if node.op.startswith("call")] == ["view"]
    assert torch.equal(module(x), before)
