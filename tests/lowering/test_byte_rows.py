"""Products of weights held as codes with activations rounded to 8 bits, against the same arithmetic in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina import _native
from lamina.lowering.cpu_codes import linear_codes, linear_experts, pack_codes, pack_experts, x_group
from lamina.models.quantisation.codes import Codes, ExpertCodes, quantise

pytestmark = pytest.mark.skipif(
    not _native.linear_takes_byte_rows(), reason="this processor has no AVX-512 with bfloat16 and VNNI"
)
LEAST = 2.0**-100
"""A group whose largest magnitude is less is rounded to zeros."""


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The definition: codes and scales, float64 [rows, inputs], of x bfloat16 [rows, inputs]."""
    parts = x.float().unflatten(1, (-1, group))
    most = parts.abs().amax(2, keepdim=True)
    some = most >= LEAST
    inverse = torch.where(some, torch.full_like(most, 127) / torch.where(some, most, 1), 0)
    scales = torch.where(some, most / 127, 0).expand_as(parts)
    return (parts * inverse).round().flatten(1).double(), scales.flatten(1).double()


def weight_of(codes: Codes) -> Tensor:
    zeros = 0 if codes.zeros is None else codes.zeros[:, codes.columns].double()
    return (codes.values.double() - zeros) * codes.scales[:, codes.columns].double()


def draw_codes(
    seed: int, outputs: int, group: int, groups: int, bits: int, signed: bool, zeros: bool, fractions: bool = False
) -> Codes:
    draw = torch.Generator().manual_seed(seed)
    least = -(1 << (bits - 1)) if signed else 0
    values = torch.randint(least, least + (1 << bits), (outputs, group * groups), generator=draw)
    points: Tensor = torch.randint(least, least + (1 << bits), (outputs, groups), generator=draw)
    if fractions:
        points = points + torch.rand(outputs, groups, generator=draw)
    elif not signed and not zeros:
        points[:] = 1 << (bits - 1)  # unsigned codes always have zero points
    return Codes(
        bits,
        values.to(torch.int8 if signed else torch.uint8),
        torch.rand(outputs, groups, generator=draw) / 16,
        points if zeros or not signed else None,
        torch.arange(outputs),
        torch.arange(group * groups) // group,
    )


kinds = {
    "bits": st.sampled_from([4, 8]),
    "signed": st.booleans(),
    "zeros": st.booleans(),
    "outputs": st.integers(1, 80),
    "seed": st.integers(0, 1 << 30),
}


@given(
    rows=st.integers(0, 45),
    group=st.sampled_from([16, 20, 32, 64, 100, 128, 132, 256, 384]),
    groups=st.integers(1, 4),
    fractions=st.booleans(),
    biased=st.booleans(),
    wide=st.booleans(),
    threads=st.integers(1, 3),
    **kinds,
)
def test_equals_the_rounded_product(
    rows: int, groups: int, outputs: int, biased: bool, wide: bool, threads: int, seed: int, **kind: Any
) -> None:
    """And the exact product within what rounding x can change: half a step of each element."""
    codes = draw_codes(seed, outputs, groups=groups, **kind)
    packed, weight = pack_codes(codes, "int8"), weight_of(codes)
    size = codes.values.shape[1]
    assert packed.x_group == x_group(codes) and codes.group % packed.x_group == 0
    x = random(seed + 1, 1, rows, size + 32)[..., 32:] if wide else random(seed + 1, 1, rows, size)
    bias = random(seed + 2, outputs) if biased else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = linear_codes(x, packed, bias)[0]
    finally:
        torch.set_num_threads(before)
    assert actual.shape == (rows, outputs) and actual.dtype == torch.bfloat16
    whole, scales = rounded(x[0], packed.x_group)
    added = 0 if bias is None else bias.double()
    wanted = (whole * scales) @ weight.T + added
    terms = x[0].double().abs() @ (weight.abs() + 256 * codes.scales.double()[:, codes.columns]).T
    lost = wanted.abs() * 2**-8 + terms * 2**-20 + 1e-30
    assert ((actual.double() - wanted).abs() <= lost).all()
    exact = x[0].double() @ weight.T + added
    assert ((actual.double() - exact).abs() <= (scales * 0.5001) @ weight.abs().T + 2 * lost).all()


@given(rows=st.integers(1, 30), group=st.sampled_from([32, 64, 128, 256]), exponent=st.integers(-20, 20), **kinds)
def test_is_exact_where_float32_is(
    rows: int, group: int, exponent: int, outputs: int, bits: int, signed: bool, zeros: bool, seed: int
) -> None:
    """Scales are powers of two, so that all sums are whole numbers of one unit, and the result is rounded once."""
    codes = draw_codes(seed, outputs, group, 256 // group, bits, signed, zeros)
    codes.scales[:] = torch.exp2(torch.arange(outputs) % 5 - 3.0)[:, None]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (rows, 256), generator=draw)
    x[:, :: x_group(codes)] = 127  # the largest magnitude of every group
    x = (x * 2.0**exponent).to(torch.bfloat16)
    wanted = x.double() @ weight_of(codes).T
    assert torch.equal(linear_codes(x, pack_codes(codes, "int8"), None), wanted.to(torch.bfloat16))


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("inputs", [512, 2048, 4096])
def test_a_row_does_not_depend_on_the_others(to: Any, inputs: int) -> None:
    """Over several tasks and blocks of rows, whose bytes share sets of a cache or not."""
    packed = pack_codes(quantise("w", random(1, 700, inputs), to, {}), "int8")
    x = random(2, 300, inputs)
    together = linear_codes(x, packed, None)
    for count in (1, 7, 12, 13, 64):
        assert torch.equal(linear_codes(x[5 : 5 + count], packed, None), together[5 : 5 + count])


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_rows_of_experts(to: Any) -> None:
    counts = (3, 0, 40)
    weights, x = random(1, len(counts), 80, 128), random(2, sum(counts), 128)
    codes = ExpertCodes(tuple(quantise("experts", weight, to, {}) for weight in weights))
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    got = linear_experts(x, pack_experts(codes, "int8"), ends)
    parts = zip(x.split(counts), codes.each, strict=True)
    wanted = torch.cat([linear_codes(part.contiguous(), pack_codes(one, "int8"), None) for part, one in parts])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x = random(1, 3, 256)
    x[1, 200] = value
    out = linear_codes(x, pack_codes(quantise("w", random(2, 40, 256), "int8", {}), "int8"), None)
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


@pytest.mark.parametrize("magnitude", [0.0, 1e-40, 1e-37, 1e-30, 3e38])
def test_rows_at_the_ends_of_the_range_stay_close(magnitude: float) -> None:
    """The inverse of a scale would overflow for rows of subnormal numbers."""
    x = torch.tensor([magnitude, -magnitude / 2, 0, magnitude / 8]).repeat(8)[None].to(torch.bfloat16)
    codes = quantise("w", torch.eye(32).to(torch.bfloat16), "int8", {})
    out = linear_codes(x, pack_codes(codes, "int8"), None)
    assert (out.double() - x.double()).abs().max() <= max(magnitude * (1 / 254 + 2**-8), LEAST)


def test_groups_that_do_not_fit_keep_bfloat16() -> None:
    """Runs of 16 to 128 inputs that are multiples of 4 must divide a weight's groups."""
    codes = draw_codes(1, 40, 50, 2, 8, signed=True, zeros=False)
    assert x_group(codes) == 0
    x = random(2, 5, 100)
    assert torch.equal(linear_codes(x, pack_codes(codes, "int8"), None), linear_codes(x, pack_codes(codes), None))
