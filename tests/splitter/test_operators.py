"""Recorded graphs compute what the model computes, for any number of tokens; other models are rejected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lamina.splitter.operators import Operators, OperatorsError, write_operators

Function = Callable[["Model", Tensor, Tensor], Tensor]
WIDTH = 6


class Model(torch.nn.Module):
    """A model that calls ``function`` with itself, hidden states [1, T, WIDTH] and positions [T]."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, WIDTH)
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.function = function

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.function(self, self.embed(ids)[None], positions)


def written(function: Function, writes_in_place: bool = False) -> Operators:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        model = Model(function)
    with torch.no_grad():
        return write_operators(model, mode, writes_in_place)


def replay(operators: Operators, model: Model, ids: Tensor, positions: Tensor) -> Tensor:
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = {name: known[target] for name, target in operators.tensors.items()} | dict(operators.literals)
    given |= {operators.ids.name: ids, operators.positions.name: positions}
    inputs = [given[node.name] for node in operators.graph.nodes if node.op == "placeholder"]
    result: Tensor = fx.GraphModule(torch.nn.Module(), operators.graph)(*inputs)
    return result


def sizes(model: Model, x: Tensor, positions: Tensor) -> Tensor:
    rows = x.shape[1]
    return model.mix(x).reshape(rows * 2, WIDTH // 2).view(1, rows, WIDTH) + positions[None, :, None] * (rows + 1)


def literals(model: Model, x: Tensor, positions: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.arange(x.shape[1])[None, :, None]


def parts(model: Model, x: Tensor, positions: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b.max(-1, keepdim=True).values, a, x[..., 1:3]], dim=-1)


def products(model: Model, x: Tensor, positions: Tensor) -> Tensor:
    return torch.nn.functional.linear(x @ torch.ones(WIDTH, 4), weight=model.mix.weight[:, :4])


def overwritten(model: Model, x: Tensor, positions: Tensor) -> Tensor:
    y = x.clone()
    y[..., 0] = 7.0
    y[..., 1:3].mul_(2.0)
    return y.add_(x).masked_fill_(positions[None, :, None] == 1, 0.0)


@pytest.mark.parametrize("function", [sizes, literals, parts, products, overwritten])
def test_the_graph_computes_what_the_model_does(function: Function) -> None:
    operators, model = written(function, writes_in_place=function is overwritten), Model(function)
    assert not any(node.op == "call_function" and "inplace" in str(node.target) for node in operators.graph.nodes)
    for rows in (1, 2, 5, 9):
        ids, positions = torch.arange(rows) % 10, torch.arange(rows) + 3
        with torch.no_grad():
            torch.testing.assert_close(replay(operators, model, ids, positions), model(ids, positions))


def test_linear_layers_stay_whole() -> None:
    linears = [node for node in written(sizes).graph.nodes if node.target is torch.ops.aten.linear.default]
    assert len(linears) == 1 and linears[0].meta["path"] == "mix"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda model, x, positions: x.view(1, 5, WIDTH), "5 tokens at a time"),
        (lambda model, x, positions: x * 2 if x.shape[1] == 5 else x, "5 tokens at a time"),
        (lambda model, x, positions: x * 2 if x.shape[1] < 100 else x, "tokens, which 1000 violates"),
        (lambda model, x, positions: x + model.seen.add_(1.0), "writes into a weight or buffer"),
    ],
)
def test_what_is_not_the_same_for_any_number_of_tokens_is_refused(function: Function, reason: str) -> None:
    with pytest.raises(OperatorsError, match=reason):
        written(function)
