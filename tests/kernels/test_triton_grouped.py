"""The product of experts in Triton against its definition in float64."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.kernels.gpu.specialize import GroupedTile, GroupedWeights, grouped_program, grouped_tile
from lamina.lowering import expert_operators
from lamina.lowering.expert_operators import experts_stacked, linear_stacked
from lamina.models.quantisation.codes import Codes, StackedCodes, quantise
from tests.support.gpu_device import BACKEND, give, take

NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}  # of the largest result: a rounding of each


def bits_of(tensor):
    """As arrays hold it."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def multiply(element, x, weight, scales, zeros, ends, weights, tile, capability=90):
    rows = len(x)
    program = grouped_program(NUMPY[element], weights, tile, capability)
    out = BACKEND.empty((rows, weights.outputs), NUMPY[element])
    given_ends = give(ends.numpy())
    numbers = [given_ends if each is None else give(each.numpy()) for each in (scales, zeros)]
    arguments = [give(bits_of(x)), give(bits_of(weight)), *numbers, given_ends, out, len(ends)]
    BACKEND.launch(program, tile.grid(rows, weights), arguments)
    return torch.from_numpy(take(out)).view(TORCH[element]).double()


def expected(x, weight, ends):
    """``weight`` [experts, inputs, outputs]."""
    expert = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    return torch.einsum("ri,rio->ro", x.double(), weight.double()[expert])


counts = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    element=st.sampled_from(["fp32", "fp16", "bf16"]),
    counts=counts,
    inputs=st.sampled_from([16, 40, 96]),
    outputs=st.sampled_from([24, 80]),
    inner=st.booleans(),
)
def test_each_row_is_multiplied_by_its_experts_weight(element, counts, inputs, outputs, inner):
    draw = torch.Generator().manual_seed(sum(counts))
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(sum(counts), inputs, generator=draw).to(TORCH[element])
    stored = torch.randn(len(counts), *((outputs, inputs) if inner else (inputs, outputs)), generator=draw)
    stored = stored.to(TORCH[element])
    tile = GroupedTile(16, 32, 32)
    weights = GroupedWeights(len(counts), inputs, outputs, inner)
    found = multiply(element, x, stored, None, None, ends, weights, tile)
    wanted = expected(x, stored.mT if inner else stored, ends)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[element] * float(wanted.abs().max()))


def stored(kind, bits, group, has_zeros, outputs, inputs, draw):
    """Codes of one weight as a checkpoint may hold them."""
    least = 0 if kind == torch.uint8 else -(1 << bits - 1)
    values, zeros = (
        torch.randint(least, least + (1 << bits), shape, generator=draw).to(kind)
        for shape in ((outputs, inputs), (outputs, inputs // group))
    )
    scales = torch.rand(outputs, inputs // group, generator=draw) / (1 << bits)
    columns = torch.arange(inputs) // group
    return Codes(bits, values, scales, zeros if has_zeros else None, torch.arange(outputs), columns)


def fp8_blocks(outputs, inputs, draw):
    """Of 32 outputs and 64 inputs that share a scale; values of all sizes, subnormal ones too."""
    values = torch.randn(outputs, inputs, generator=draw) * 2.0 ** torch.randint(
        -9, 7, (outputs, inputs), generator=draw
    )
    values[0, :2] = torch.tensor([448.0, -(2.0**-9)])
    scales = torch.rand(-(-outputs // 32), -(-inputs // 64), generator=draw) / 64
    rows, columns = torch.arange(outputs) // 32, torch.arange(inputs) // 64
    return Codes(8, values.clamp(-448, 448).to(torch.float8_e4m3fn), scales, None, rows, columns)


def rounded(to, outputs, inputs, draw):
    return quantise("weight", torch.randn(outputs, inputs, generator=draw), to, {})


CODES: dict[str, tuple[int, Callable[..., Codes]]] = {
    "int8": (160, functools.partial(rounded, "int8")),
    "int4 in 32s": (160, functools.partial(rounded, "int4")),
    "int4 in 128s": (256, functools.partial(rounded, "int4")),
    "int8 in 32s": (160, functools.partial(stored, torch.int8, 8, 32, False)),
    "int8 in 64s with zeros": (192, functools.partial(stored, torch.int8, 8, 64, True)),
    "unsigned int8 in 128s": (256, functools.partial(stored, torch.uint8, 8, 128, True)),
    "fp8": (160, functools.partial(rounded, "fp8")),
    "fp8 in blocks": (192, fp8_blocks),
    "unsigned int8 in one group with zeros": (128, functools.partial(stored, torch.uint8, 8, 128, True)),
    "int8 in one group with zeros": (32, functools.partial(stored, torch.int8, 8, 32, True)),
    "int8 with a zero for each output": (160, functools.partial(stored, torch.uint8, 8, 160, True)),
}


@pytest.mark.parametrize(
    ("form", "capability"), [*((form, 90) for form in CODES), *((form, 80) for form in CODES if "fp8" in form)]
)
@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16"])
def test_codes_are_multiplied_as_the_weights_that_they_are(form, element, capability):
    """fp8 is converted by an instruction, or in software."""
    inputs, make = CODES[form]
    draw = torch.Generator().manual_seed(5)
    counts, outputs = [3, 0, 18, 1], 48
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(sum(counts), inputs, generator=draw).to(TORCH[element])
    codes = [make(outputs, inputs, draw) for _ in counts]
    stacked = StackedCodes.stack(codes, len(counts))
    held, has_zeros = expert_operators.CODES[stacked.values.dtype], stacked.zeros is not None
    weights = GroupedWeights(len(counts), inputs, outputs, True, held, stacked.group, has_zeros)
    tile = grouped_tile(len(x), x.element_size(), weights)
    values = stacked.values.view(torch.uint8) if held == "fp8" else stacked.values
    found = multiply(element, x, values, stacked.scales, stacked.zeros, ends, weights, tile, capability)
    wanted = expected(x, dense(codes).mT, ends)
    tolerance = TOLERANCE[element] * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    torch.testing.assert_close(experts_stacked(x, stacked, ends).double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_of_scattered_groups_are_gathered(bits, shared):
    draw = torch.Generator().manual_seed(6)
    counts, outputs, inputs = [3, 0, 18, 1], 24, 96
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(sum(counts), inputs, generator=draw)
    codes = [stored(torch.uint8, bits, 32, True, outputs, inputs, draw) for _ in counts]
    orders = [torch.randperm(inputs, generator=draw) for _ in counts]
    codes = [replace(one, columns=one.columns[orders[0 if shared else n]]) for n, one in enumerate(codes)]
    found = experts_stacked(x, StackedCodes.stack(codes, len(counts)), ends)
    wanted = expected(x, dense(codes).mT, ends)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4)
    alone = linear_stacked(x, StackedCodes.stack(codes[1:2], 1))
    torch.testing.assert_close(alone.double(), x.double() @ dense(codes[1:2])[0].mT, rtol=0, atol=1e-4)


def dense(codes: Sequence[Codes]) -> torch.Tensor:
    """By the definition, in float64."""
    weights = []
    for one in codes:
        zeros = torch.zeros_like(one.scales) if one.zeros is None else one.zeros
        shift, scale = (each.double()[one.rows][:, one.columns] for each in (zeros, one.scales))
        weights.append((one.values.double() - shift) * scale)
    return torch.stack(weights)


@pytest.mark.parametrize("rows", [1, 16, 17, 4096])
@pytest.mark.parametrize("counts", [[1], [0, 5, 0, 200], [64] * 8, [1] * 100])
def test_no_tile_lacks_a_program(rows: int, counts: list[int]) -> None:
    weights = GroupedWeights(len(counts), 64, 128)
    tile = grouped_tile(rows, 2, weights)
    tiles, _ = tile.grid(sum(counts), weights)
    assert tiles >= sum(-(-count // tile.rows) for count in counts)
