"""What lowering adds beside the graphs: values of positions looked up are those computed."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from lamina.lowering.cpu_slices import PositionTable, _hoist
from lamina.splitter import Slice

aten = torch.ops.aten
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
        for found, computed in zip(table.lookup(positions), PRELUDE(FREQUENCIES, positions), strict=True):
            assert torch.equal(found, computed)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=4))
@settings(max_examples=20)
def test_each_position_is_computed_once_and_no_step_computes_many_more_than_its_own(reached: list[int]) -> None:
    computed: list[int] = []
    table, most = PositionTable(PRELUDE, [FREQUENCIES], 10_000), 0
    compute = table._compute

    def note(positions: Tensor) -> tuple[Tensor, ...]:
        computed.extend(positions.tolist())
        return compute(positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_compute", note)
        for stop in reached:
            computed.clear()
            table.lookup(torch.tensor([0, stop - 1]))
            assert computed == list(range(most, most + len(computed))) and len(computed) < max(0, stop - most) + 256
            most += len(computed)
            for found, expected in zip(table.lookup(torch.arange(stop)), compute(torch.arange(stop)), strict=True):
                assert torch.equal(found, expected)


def test_no_position_beyond_the_known_ones_is_computed_unasked() -> None:
    class Limited(torch.nn.Module):
        def forward(self, values: Tensor, positions: Tensor) -> tuple[Tensor]:
            return (values[positions],)

    table = PositionTable(fx.symbolic_trace(Limited()), [torch.arange(50.0)], 50)
    assert table.lookup(torch.tensor([49, 3]))[0].tolist() == [49, 3]
    with pytest.raises(IndexError):
        table.lookup(torch.tensor([50]))


def test_one_thread_computes_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    table, threads = PositionTable(PRELUDE, [FREQUENCIES], 10_000), torch.get_num_threads()
    compute, found = table._compute, list[int]()

    def note(positions: Tensor) -> tuple[Tensor, ...]:
        found.append(torch.get_num_threads())
        return compute(positions)

    monkeypatch.setattr(table, "_compute", note)
    torch.set_num_threads(3)
    try:
        table.lookup(torch.tensor([700]))
        assert found == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_what_depends_on_positions_and_their_number_is_hoisted() -> None:
    """As in rotary embeddings that multiply expanded frequencies by positions."""
    graph = fx.Graph()
    weight, constant, ids, positions = map(graph.placeholder, ("weight_0", "constant_0", "ids", "positions"))
    rows = graph.call_function(aten.sym_size.int, (ids, 0))
    wide = graph.call_function(aten.expand.default, (constant, [rows, 3]))
    angles = graph.call_function(aten.mul.Tensor, (wide, graph.call_function(aten.unsqueeze.default, (positions, 1))))
    taken = graph.call_function(aten.index.Tensor, (weight, [ids]))
    counted = graph.call_function(aten.view.default, (taken, [rows, 3]))
    graph.output((graph.call_function(aten.add.Tensor, (counted, angles)),))
    main = fx.GraphModule(torch.nn.Module(), graph)
    part = SimpleNamespace(weights=("weight",), constants=("constant",))
    weights, numbers = torch.randn(5, 3), torch.tensor([2.0, 3.0, 5.0])
    given = torch.tensor([4, 0, 2, 2]), torch.tensor([7, 8, 0, 1])

    found = _hoist(cast(Slice, part), main, frozenset())

    assert found.prelude is not None
    assert [node.target for node in found.main.graph.nodes if node.op == "call_function"].count(aten.mul.Tensor) == 0
    (hoisted,) = found.prelude(numbers, given[1])
    torch.testing.assert_close(found.main(weights, hoisted, *given), main(weights, numbers, *given))
