"""What lowering adds beside the graphs: values of positions looked up are those computed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from lamina.lowering.lowered import PositionTable

KNOWN = 10_000


class Rotary(torch.nn.Module):
    """As models make them: one value by position along dimension 1, one along 0, one that no position changes."""

    def forward(self, frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = positions[None, :, None].float() * frequencies
        return angles.cos().bfloat16(), angles[0].sin(), frequencies * 2


FREQUENCIES = torch.tensor([1.0, 0.1, 0.003])
PRELUDE = fx.symbolic_trace(Rotary())


@given(st.lists(st.lists(st.integers(0, 2 * KNOWN), min_size=1, max_size=9), min_size=1, max_size=4))
def test_positions_looked_up_are_those_computed(steps: list[list[int]]) -> None:
    table = PositionTable(PRELUDE, [FREQUENCIES], KNOWN)
    for step in steps:
        positions = torch.tensor(step)
        for found, computed in zip(table.at(positions), PRELUDE(FREQUENCIES, positions), strict=True):
            assert torch.equal(found, computed)


def test_no_position_beyond_the_known_ones_is_computed_unasked() -> None:
    class Limited(torch.nn.Module):
        def forward(self, values: Tensor, positions: Tensor) -> tuple[Tensor]:
            return (values[positions],)

    table = PositionTable(fx.symbolic_trace(Limited()), [torch.arange(50.0)], 50)
    assert table.at(torch.tensor([49, 3]))[0].tolist() == [49, 3]
    with pytest.raises(IndexError):
        table.at(torch.tensor([50]))
