"""Which layers count as equal, on toy models whose layers differ in one respect only."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from lamina.splitter.attention import attention
from lamina.splitter.operators import LayerRecorder, representatives, shortest_prefix

Step = Callable[["Toy", int, Tensor, Tensor, list[Tensor]], Tensor]
LAYERS = 8


class Toy(PreTrainedModel):  # type: ignore[misc]  # mypy reads no transformers: pyproject.toml
    """Layers of one square weight and one attention each; ``step`` is what a layer does before its attention."""

    def __init__(self, step: Step, odd: tuple[int, ...]) -> None:
        super().__init__(PretrainedConfig())
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.embedding = nn.Embedding(8, 4)
        self.step, self.odd = step, odd

    def weight(self, index: int) -> Tensor:
        return self.layers[index].get_parameter("weight")

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embedding(ids)
        angles = [ids.cos()[:, None], ids.sin()[:, None]]
        for index, layer in enumerate(self.layers):
            hidden = self.step(self, index, layer(rows), rows, angles)
            heads = hidden[None, None]
            rows = rows + attention(heads, heads, heads, scale=0.5)[0, :, 0]
        return rows


STEPS: dict[str, Step] = {
    "alike": lambda toy, index, hidden, rows, angles: hidden,
    "factor": lambda toy, index, hidden, rows, angles: hidden * (2.0 if index in toy.odd else 3.0),
    "operator": lambda toy, index, hidden, rows, angles: hidden.relu() if index in toy.odd else hidden.tanh(),
    "weight": lambda toy, index, hidden, rows, angles: hidden @ toy.weight(index - (index in toy.odd)),
    "input": lambda toy, index, hidden, rows, angles: hidden + (rows if index in toy.odd else hidden),
    "angle": lambda toy, index, hidden, rows, angles: hidden * angles[index in toy.odd],
}


def records(step: str, odd: tuple[int, ...]) -> tuple[object, ...]:
    with torch.no_grad(), FakeTensorMode():
        toy = Toy(STEPS[step], odd)
        with LayerRecorder(toy) as recorder:
            toy(torch.arange(3))
    assert recorder.attentions == LAYERS
    return recorder.records()


def test_equal_layers_have_equal_records() -> None:
    found = records("alike", ())
    assert len(found) == LAYERS + 1
    # The first, the second (its residual is the embedding, not a sum), the inner ones, what follows the last attention.
    assert len(set(found)) == 4
    assert shortest_prefix(found) == 5
    assert representatives(found, 5) == (0, 1, 2, 3, 3, 3, 3, 4, 5)


@pytest.mark.parametrize("step", [name for name in STEPS if name != "alike"])
def test_one_other_layer_is_noticed(step: str) -> None:
    found = records(step, (4,))
    assert found[4] != found[5]
    assert found[3] == found[5] == found[6]
    assert shortest_prefix(found) == LAYERS  # slices before, around and after it, and the last


@pytest.mark.parametrize("step", list(STEPS))
def test_representatives_have_the_same_surroundings(step: str) -> None:
    found = records(step, (2, 5))
    prefix = shortest_prefix(found)
    reduced = [None, *found[:prefix], found[-1], None]
    whole = [None, *found, None]
    for index, source in enumerate(representatives(found, prefix)):
        assert reduced[source : source + 3] == whole[index : index + 3]
