"""The product of experts in Triton against its definition in float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.kernels.gpu.specialize import GroupedTile, grouped_program, grouped_tile
from lamina.lowering.grouped import experts_stacked
from lamina.models.codes import Codes, StackedCodes, quantise_experts
from tests.kernels.device import BACKEND, give, take

NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}  # of the largest result: a rounding of each


def bits_of(tensor):
    """As arrays hold it."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def multiply(element, x, weight, scales, zeros, ends, outputs, inner, bits, group, tile):
    rows, inputs = x.shape
    program = grouped_program(NUMPY[element], len(ends), inputs, outputs, inner, bits, group, tile)
    out = BACKEND.empty((rows, outputs), NUMPY[element])
    given_ends = give(ends.numpy())
    numbers = [given_ends if each is None else give(each.numpy()) for each in (scales, zeros)]
    arguments = [give(bits_of(x)), give(bits_of(weight)), *numbers, given_ends, out, len(ends)]
    BACKEND.launch(program, tile.grid(rows, len(ends), outputs), arguments)
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
    found = multiply(element, x, stored, None, None, ends, outputs, inner, 0, inputs, tile)
    wanted = expected(x, stored.mT if inner else stored, ends)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[element] * float(wanted.abs().max()))


@pytest.mark.parametrize("inputs", [160, 256])  # of int4, groups of 32 and of 128
@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("element", ["fp32", "bf16"])
def test_codes_are_multiplied_as_the_weights_that_they_are(to, element, inputs):
    draw = torch.Generator().manual_seed(5)
    counts, outputs = [3, 0, 18, 1], 48
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(sum(counts), inputs, generator=draw).to(TORCH[element])
    weights = torch.randn(len(counts), outputs, inputs, generator=draw)
    codes = list(quantise_experts("experts", weights, to, {}))
    stacked = StackedCodes.of(codes, len(counts))
    bits = 8 if to == "int8" else 4
    tile = grouped_tile(len(x), len(counts), x.element_size(), bits)
    given = stacked.values, stacked.scales, stacked.zeros, ends, outputs, True, bits, stacked.group
    found = multiply(element, x, *given, tile)
    wanted = expected(x, dense(codes).mT, ends)
    tolerance = TOLERANCE[element] * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    torch.testing.assert_close(experts_stacked(x, stacked, ends).double(), wanted, rtol=0, atol=tolerance)


def dense(codes: Sequence[Codes]) -> torch.Tensor:
    return torch.stack([one.dense(torch.float32) for one in codes]).double()


@pytest.mark.parametrize("rows", [1, 16, 17, 4096])
@pytest.mark.parametrize("counts", [[1], [0, 5, 0, 200], [64] * 8, [1] * 100])
def test_no_tile_lacks_a_program(rows: int, counts: list[int]) -> None:
    tile = grouped_tile(rows, len(counts), 2, 0)
    tiles, _ = tile.grid(sum(counts), len(counts), 128)
    assert tiles >= sum(-(-count // tile.rows) for count in counts)
