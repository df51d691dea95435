"""Packed linear layers against the same product in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina import _native
from lamina.lowering.linear import NATIVE, ONEDNN, Packing

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


@needs_kernels
@given(
    rows=st.integers(0, 45),
    inputs=st.integers(1, 40).map(lambda n: 2 * n),
    outputs=st.integers(1, 100),
    biased=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_native(rows: int, inputs: int, outputs: int, biased: bool, threads: int, seed: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bias = random(seed + 2, outputs) if biased else None
        check(NATIVE, random(seed, 1, rows, inputs), random(seed + 1, outputs, inputs), bias)
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 14, 15, 300])
def test_native_over_several_tasks_and_chunks_of_rows(rows: int) -> None:
    check(NATIVE, random(1, 1, rows, 1536), random(2, 700, 1536), random(3, 700))


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
