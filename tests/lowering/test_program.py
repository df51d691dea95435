"""A slice run as a native program computes, bit for bit, what it computes as a graph."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamina import _native
from lamina.core.types import DType
from lamina.lowering import LoweredModel, LoweredSlice, Workspace, lower, native_operators
from lamina.splitter import SliceOutput, SplitModel, split
from tests.support.random_models import variant
from tests.support.sweep import sweep

pytestmark = [
    pytest.mark.skipif(not _native.linear_available(), reason="this processor has no AVX2"),
]

PROGRAMS = sweep(
    ["llama-tied", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "seed_oss"],
    ["llama3-rope", "gemma2", "phi3"],
)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@functools.cache
def lowered(name: str) -> tuple[SplitModel, LoweredModel]:
    model = split(variant(name), DType.BFLOAT16)
    return model, lower(model)


def loaded(name: str) -> tuple[SplitModel, list[LoweredSlice]]:
    model, slices = lowered(name)
    tensors = {weight: random(seed, *like.shape) / 4 for seed, (weight, like) in enumerate(model.weights.items())}
    return model, slices.with_weights(tensors)


class Inner:
    """Slice 1 of a model on random rows."""

    def __init__(self, name: str, rows: int) -> None:
        model, slices = loaded(name)
        self.slice, spec = slices[1], model.attentions[0]
        self.ids, self.positions = torch.zeros(rows, dtype=torch.int64), torch.arange(rows) * 3 % 50
        self.attention = random(7, rows, spec.query_heads, spec.v_dim)
        self.context = tuple(random(8, rows, *crossing.shape) for crossing in model.cuts[0].context)

    def run(self, workspace: Workspace | None = None) -> SliceOutput:
        prepared = self.slice.prepare(self.positions)
        return self.slice.run(self.ids, self.positions, self.attention, self.context, prepared, workspace)


def tensors(output: SliceOutput) -> list[Tensor]:
    assert len(output.results) >= 3
    return list(output.results)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("rows", [1, 9])
def test_results_are_those_of_the_graph(name: str, rows: int) -> None:
    inner = Inner(name, rows)
    assert inner.slice.program is not None
    by_program = inner.run()
    inner.slice.program = None
    by_graph = inner.run()
    for expected, other in zip(tensors(by_graph), tensors(by_program), strict=True):
        assert torch.equal(expected, other) and other.shape == expected.shape


@pytest.mark.parametrize("name", PROGRAMS)
def test_logits_are_those_of_the_graph(name: str) -> None:
    model, slices = loaded(name)
    last, spec = slices[-1], model.attentions[-1]
    attention = random(1, 5, spec.query_heads, spec.v_dim)
    context = tuple(random(2, 5, *crossing.shape) for crossing in model.cuts[-1].context)
    ids = torch.arange(5)
    by_program = last.run(ids, ids, attention, context, last.prepare(ids)).logits
    last.program = None
    by_graph = last.run(ids, ids, attention, context, last.prepare(ids)).logits
    assert by_program is not None and by_graph is not None and torch.equal(by_program, by_graph)


class Computing(TorchDispatchMode):
    """Notes operations of torch that compute so many elements that torch starts threads, which then spin."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = {one.data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(result, Tensor) and result.numel() > 1 << 15 and result.data_ptr() not in views:
            self.noted.append(func.__name__)
        return result


def test_a_program_of_many_rows_computes_nothing_with_threads_of_torch() -> None:
    rows = 4000
    _, slices = loaded("llama")
    ids = torch.arange(rows) % 90
    prepared = slices[0].prepare(ids)
    with Computing() as computing:
        slices[0].run(ids, ids, None, (), prepared, Workspace(rows))
    assert {name.split(".")[0] for name in computing.noted} <= {"empty"}


@pytest.mark.parametrize("name", sweep(["llama", "qwen3", "phi3"], ["phi3"]))
def test_the_first_slice_is_that_of_the_graph(name: str) -> None:
    _, slices = loaded(name)
    first, ids, positions = slices[0], torch.tensor([5, 0, 5, 91]), torch.arange(4)
    assert first.program is not None
    by_program = first.run(ids, positions, None, (), first.prepare(positions))
    first.program = None
    by_graph = first.run(ids, positions, None, (), first.prepare(positions))
    assert all(map(torch.equal, tensors(by_program), tensors(by_graph)))


@pytest.mark.parametrize("name", sweep(["gpt2", "phi", "mixtral", "olmo2", "gptj"], ["gptj"]))
def test_what_a_program_cannot_express_stays_a_graph(name: str) -> None:
    """Other norms and activations, routed experts, norms of all heads together, interleaved rotations."""
    assert Inner(name, 2).slice.program is None


def test_other_element_types_stay_graphs() -> None:
    model = split(variant("llama"), DType.FLOAT32)
    zeros = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in model.weights.items()}
    assert all(piece.program is None for piece in lower(model).with_weights(zeros))


def test_a_slice_reads_in_its_room_what_the_one_before_wrote() -> None:
    """Results of a slice stay while the next one runs: its context is one of them."""
    inner, workspace = Inner("llama", 6), Workspace(6)
    alone = inner.run()
    first = inner.run(workspace=workspace)
    before = [tensor.clone() for tensor in tensors(first)]
    inner.context = first.context
    second = [tensor.clone() for tensor in tensors(inner.run(workspace=workspace))]
    assert all(map(torch.equal, before, tensors(first)))
    assert all(map(torch.equal, before, tensors(alone)))
    inner.slice.program = None
    assert all(map(torch.equal, second, tensors(inner.run())))


def test_no_rows() -> None:
    assert all(len(tensor) == 0 for tensor in tensors(Inner("qwen3", 0).run()))


@pytest.mark.parametrize("change", ["rows", "dtype", "order"])
def test_inputs_are_checked(change: str) -> None:
    inner = Inner("llama", 4)
    inner.attention = {
        "rows": inner.attention[:3],
        "dtype": inner.attention.float(),
        "order": inner.attention.transpose(1, 2),
    }[change]
    with pytest.raises(ValueError, match="a slice got"):
        inner.run()


def test_steps_outside_their_matrices_are_refused() -> None:
    program = _native.Program([8, 8, 16], 2, native_operators.PATH)
    for place in [(3, 0), (-1, 0), (0, 1)]:
        with pytest.raises(ValueError, match="does not exist"):
            program.add_gate(_native.Activation.SILU, place, (1, 0), (1, 0), 8)
    with pytest.raises(ValueError, match="not the whole matrix"):
        program.add_gate(_native.Activation.SILU, (0, 0), (1, 0), (2, 8), 8)
    with pytest.raises(ValueError, match="residual or a sum"):
        program.add_norm((0, 0), (1, 0), 0, (-1, 0), (1, 0), 1, 8, 1e-5, 0.0, True)
    with pytest.raises(ValueError, match="other steps or matrices"):
        program.run(0, 1, 1, [0, 0], 0, 1)
