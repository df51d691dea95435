"""Packed linear layers against the same product in float64."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina import _native
from lamina.core.types import Quantization
from lamina.lowering.cpu_codes import (
    can_pack,
    linear_codes,
    linear_experts,
    pack_codes,
    pack_experts,
)
from lamina.lowering.native_operators import NATIVE, ONEDNN, Packing, linear_native
from lamina.models.quantisation.codes import Codes, ExpertCodes, quantise_experts

paths = pytest.mark.parametrize("path", _native.attention_paths()[1:], ids=lambda path: path.name.lower())
needs_kernels = pytest.mark.skipif(not _native.linear_available(), reason="this processor has no AVX2")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def check(way: Packing, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Summed in float32 and rounded once: half a unit of bfloat16, and what float32 sums of so many terms lose."""
    actual = way.linear(x, way.pack(weight), bias, weight.shape[0])
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().T
    assert actual.shape == exact.shape and actual.dtype == torch.bfloat16
    error = (actual.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + terms * 2**-20 + 1e-30).all()


@paths
@given(
    rows=st.integers(0, 45),
    inputs=st.integers(1, 40).map(lambda n: 2 * n),
    outputs=st.integers(1, 100),
    biased=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_native(
    path: _native.AttentionPath, rows: int, inputs: int, outputs: int, biased: bool, threads: int, seed: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bias = random(seed + 2, outputs) if biased else None
        way = dataclasses.replace(NATIVE, linear=functools.partial(linear_native, path=path))
        check(way, random(seed, 1, rows, inputs), random(seed + 1, outputs, inputs), bias)
    finally:
        torch.set_num_threads(before)


@needs_kernels
@paths
@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("counts", [(3, 0, 9), (0, 0, 1), (0, 0, 0), (40, 1, 0)])
def test_rows_of_experts(to: Quantization, counts: tuple[int, ...], path: _native.AttentionPath) -> None:
    """Sorted by expert; some have none."""
    weight, x = random(1, len(counts), 80, 64), random(2, sum(counts), 64)
    codes = ExpertCodes(tuple(quantise_experts("experts", weight, to, {})))
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    got = linear_experts(x, pack_experts(codes), ends, path=path)
    experts = zip([0, *ends.tolist()], ends.tolist(), codes.each, strict=False)
    wanted = torch.cat([x[first:end].double() @ one.dense(torch.float64).T for first, end, one in experts])
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rows", [1, 14, 15, 300])
def test_native_over_several_tasks_and_chunks_of_rows(rows: int) -> None:
    check(NATIVE, random(1, 1, rows, 1536), random(2, 700, 1536), random(3, 700))


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "inputs", "width"), [(8, 2048, 2048), (45, 2048, 2048), (9, 60, 2048), (16, 2016, 2048)]
)
def test_native_where_rows_share_the_sets_of_a_cache(rows: int, inputs: int, width: int) -> None:
    """Multiply rows a multiple of 4 KiB apart from a copy, whose rows must not collide again, as with 2,016."""
    check(NATIVE, random(1, 1, rows, width)[..., :inputs], random(2, 40, inputs), random(3, 40))


@needs_kernels
def test_native_takes_part_of_a_wider_product() -> None:
    wide = random(1, 1, 5, 96)
    check(NATIVE, wide[..., 32:64], random(2, 33, 32), None)


def test_onednn() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN does not multiply bfloat16 on this processor")
    check(ONEDNN, random(1, 1, 7, 64), random(2, 33, 64), random(3, 33))


@needs_kernels
def test_infinities_and_nans_stay_what_they_are() -> None:
    x = random(1, 1, 3, 64)
    x[0, 0, 5], x[0, 1, 6] = float("inf"), float("nan")
    weight = random(2, 40, 64).abs() + 1
    out = NATIVE.linear(x, NATIVE.pack(weight), None, 40)
    assert (out[0, 0] == float("inf")).all() and out[0, 1].isnan().all() and out[0, 2].isfinite().all()


@paths
@given(
    rows=st.integers(0, 70),
    group=st.sampled_from([16, 17, 32, 48, 50]),
    groups=st.integers(1, 4),
    outputs=st.integers(1, 80),
    bits=st.sampled_from([4, 8]),
    signed=st.booleans(),
    zeros=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_products_of_codes(
    path: _native.AttentionPath,
    rows: int,
    group: int,
    groups: int,
    outputs: int,
    bits: int,
    signed: bool,
    zeros: bool,
    biased: bool,
    seed: int,
) -> None:
    """Weights are what the codes say, in float64, and results are rounded once."""
    draw, inputs = torch.Generator().manual_seed(seed), group * groups
    least = -(1 << (bits - 1)) if signed else 0
    values = torch.randint(least, least + (1 << bits), (outputs, inputs), generator=draw)
    points = torch.randint(least, least + (1 << bits), (outputs, groups), generator=draw)
    scales = torch.rand(outputs, groups, generator=draw) / 16
    columns = torch.arange(inputs) // group
    if not signed and not zeros:
        points[:] = 1 << (bits - 1)  # unsigned codes always have zero points
    stored = values.to(torch.int8 if signed else torch.uint8)
    codes = Codes(bits, stored, scales, points if zeros or not signed else None, torch.arange(outputs), columns)
    weight = values - (points[:, columns] if codes.zeros is not None else 0)
    exact_weight = weight.double() * scales.double()[:, columns]
    assert can_pack(codes)
    packed = pack_codes(codes)
    assert (packed.zeros is None) == (codes.zeros is None or bool((points == (least + (1 << (bits - 1)))).all()))
    x, bias = random(seed + 1, rows, inputs), random(seed + 2, outputs) if biased else None
    actual = linear_codes(x, packed, bias, path=path)
    exact = torch.nn.functional.linear(x.double(), exact_weight, None if bias is None else bias.double())
    terms = x.double().abs() @ (exact_weight.abs() + 256 * scales.double()[:, columns]).T
    assert actual.shape == exact.shape and actual.dtype == torch.bfloat16
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 + terms * 2**-20 + 1e-30).all()
