"""Operators that mix tokens are found; others are not reported."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lamina.splitter.operators import write_operators
from lamina.splitter.rows import mixing

Function = Callable[[Tensor], Tensor]


def mixed(function: Function) -> bool:
    """Whether ``function`` of [1, T, 8] is found to mix its rows."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 8)

        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            return function(self.embed(ids)[None])

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with torch.no_grad(), mode:
        module = Module()
    with torch.no_grad():
        return bool(mixing(write_operators(module, mode, writes_in_place=False).graph))


def depends_on_other_rows(function: Function) -> bool:
    """The ground truth: change each row in turn and see whether another row changes, on several random inputs.

    With a single input, one case in fifty would hide what a comparison or a maximum carries from row to row."""
    generator = torch.Generator().manual_seed(0)
    return any(_changes_other_rows(function, torch.randn(1, 5, 8, generator=generator)) for _ in range(8))


def _changes_other_rows(function: Function, rows: Tensor) -> bool:
    for row in range(5):
        changed = rows.clone()
        changed[0, row] += 1.0
        difference = (function(rows) - function(changed)).abs().reshape(5, -1).sum(1)
        difference[row] = 0
        if difference.max() > 0:
            return True
    return False


def attended(x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)


CASES: list[Function] = [
    lambda x: x.cumsum(1),
    lambda x: x + x.mean(1, keepdim=True),
    lambda x: x + x.amax(-2, keepdim=True),
    lambda x: x.softmax(1),
    lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    lambda x: x.roll(1, 1),
    lambda x: x.flip(1),
    lambda x: x @ (x.transpose(1, 2) @ x),
    lambda x: F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), torch.ones(8, 1, 3), groups=8).transpose(1, 2),
    lambda x: torch.cat([torch.zeros(1, 1, 8), x[:, : x.shape[1] - 1]], 1),
    lambda x: x + x[:, 0][:, None],
    lambda x: x + x[:, -1][:, None],
    lambda x: x / x.norm(dim=1, keepdim=True),
    lambda x: x - x.logsumexp(1, keepdim=True),
    lambda x: x * (x > 1).any(1, keepdim=True),
    lambda x: x + x.median(1, keepdim=True).values,
    lambda x: x - torch.var_mean(x, 1, keepdim=True)[1],
    lambda x: F.layer_norm(x.transpose(1, 2), [x.shape[1]]).transpose(1, 2),
    lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    lambda x: x + F.linear(x.transpose(1, 2), torch.ones(1, 1).expand(1, x.shape[1])).transpose(1, 2),
    lambda x: torch.fft.fft(x, dim=1).real,
    attended,
    lambda x: x[:, : x.shape[1]],
    lambda x: torch.cat([x, x], 1)[:, : 2 * x.shape[1]].unflatten(1, (2, -1))[:, 0],
    lambda x: x / x.norm(dim=-1, keepdim=True),
    lambda x: F.layer_norm(x, [8]),
    lambda x: x.select(2, 3)[..., None] + x,
    lambda x: x.cumsum(2),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.softmax(-1),
    lambda x: F.pad(x, (1, 0))[..., 1:] * 2,
    lambda x: torch.maximum(x, -x),
    lambda x: x.roll(1, 2),
    lambda x: x @ torch.ones(8, 4),
    lambda x: x[:, :, 2:].sum(-1),
]


@pytest.mark.parametrize("function", CASES)
def test_agrees_with_what_changes(function: Function) -> None:
    assert mixed(function) == depends_on_other_rows(function)
