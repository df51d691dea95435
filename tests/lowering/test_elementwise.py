"""Each fused kernel, on every instruction set this processor has, computes what transformers' own modules compute."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from lamina import _native
from lamina.lowering import native_operators

EPSILON = 1e-5
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SIZES = st.integers(1, 70)  # around the widths of all vectors, and not multiples of them
SEEDS = st.integers(0, 2**31)


@pytest.fixture(params=_native.attention_paths(), ids=lambda path: path.name, autouse=True, scope="module")
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_operators, "PATH", request.param)
        yield


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_as_rounded(actual: Tensor, expected: Tensor, roundings: int, absolute: float = 0.0) -> None:
    """As many units in the last place apart as ``roundings`` that may fall the other way."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    unit = torch.finfo(actual.dtype).eps * (8 if actual.dtype == torch.float32 else roundings)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=unit, atol=absolute)


@pytest.mark.parametrize(
    ("module", "offset", "early"), [(LlamaRMSNorm, 0.0, True), (Olmo2RMSNorm, 0.0, False), (Gemma2RMSNorm, 1.0, False)]
)
@given(dtype=DTYPES, rows=st.integers(0, 5), width=SIZES, transposed=st.booleans(), seed=SEEDS)
def test_norm(
    module: type, offset: float, early: bool, dtype: torch.dtype, rows: int, width: int, transposed: bool, seed: int
) -> None:
    norm = module(width, eps=EPSILON).to(dtype)
    norm.weight.data = random(seed + 1, dtype, width)
    x = random(seed, dtype, width, 1, rows).transpose(0, 2) if transposed else random(seed, dtype, rows, 1, width)
    fused = native_operators.rms_norm(x, norm.weight.data, EPSILON, offset, early)
    assert_as_rounded(fused, norm(x).detach(), 1 + early)


@given(dtype=DTYPES, rows=st.integers(1, 5), width=SIZES, seed=SEEDS)
def test_norm_of_sum(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    norm = LlamaRMSNorm(width, eps=EPSILON).to(dtype)
    x, residual = random(seed, dtype, 1, rows, width), random(seed + 1, dtype, 1, rows, width)
    total, fused = native_operators.add_rms_norm(x, residual, norm.weight.data, EPSILON, 0.0, True)
    assert torch.equal(total, x + residual)
    assert_as_rounded(fused, norm(x + residual).detach(), 2)


@given(
    dtype=DTYPES, rows=st.integers(0, 5), heads=st.integers(1, 4), half=st.integers(1, 40), rest=SIZES, seed=SEEDS,
    layout=st.sampled_from(["heads", "flat", "part of a row", "every other element"]),
)  # fmt: skip
def test_rotation(dtype: torch.dtype, rows: int, heads: int, half: int, rest: int, seed: int, layout: str) -> None:
    dim = 2 * half + rest
    x = random(seed, dtype, 1, rows, heads, dim)
    angles = random(seed + 1, torch.float32, 1, rows, 2 * half)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    rotated, _ = apply_rotary_pos_emb(*[x[..., : 2 * half].transpose(1, 2)] * 2, cosines, sines)
    expected = torch.cat([rotated.transpose(1, 2), x[..., 2 * half :]], -1)[0]
    given = {
        "heads": x,
        "flat": x.reshape(1, rows, heads * dim),
        "part of a row": torch.cat([x, x], 2)[:, :, :heads],
        "every other element": torch.stack([x, x], -1).flatten(-2)[..., ::2],
    }[layout]
    fused = native_operators.rotate(given, cosines[:, None], sines[:, None], heads)
    assert torch.equal(fused, expected) if dtype != torch.float32 else torch.allclose(fused, expected, atol=1e-6)


@pytest.mark.parametrize(("name", "module"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
@given(dtype=DTYPES, rows=st.integers(0, 5), width=SIZES, split=st.booleans(), seed=SEEDS)
def test_gate(name: str, module: str, dtype: torch.dtype, rows: int, width: int, split: bool, seed: int) -> None:
    both = random(seed, dtype, 1, rows, 2 * width)
    x, up = both.chunk(2, -1)
    if not split:
        x, up = x.contiguous(), up.contiguous()
    cancelled = 1e-6 * float((x * up).abs().max()) if rows else 0.0  # both compute 1 + tanh(x) for x near -4
    assert_as_rounded(native_operators.gate(x, up, name), ACT2FN[module](x) * up, 2, cancelled)


@pytest.mark.parametrize("name", native_operators.ACTIVATIONS)
def test_gate_at_the_ends_of_the_range(name: str) -> None:
    x = torch.tensor([-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 1e30, float("inf"), float("nan")])
    expected = ACT2FN[{"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[name]](x)
    torch.testing.assert_close(native_operators.gate(x, torch.ones(9), name), expected, equal_nan=True)


def test_many_rows_on_several_threads() -> None:
    """Enough work to be shared: every row is computed, once, wherever the parts meet."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x, up = random(0, torch.bfloat16, 1, 301, 640), random(1, torch.bfloat16, 1, 301, 640)
        shared = native_operators.gate(x, up, "silu"), native_operators.rms_norm(x, up[0, 0], EPSILON, 0.0, True)
        torch.set_num_threads(1)
        alone = native_operators.gate(x, up, "silu"), native_operators.rms_norm(x, up[0, 0], EPSILON, 0.0, True)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(shared[0], alone[0]) and torch.equal(shared[1], alone[1])


@given(
    dtype=DTYPES,
    rows=st.integers(0, 4),
    width=st.integers(1, 70),
    values=st.lists(st.sampled_from([-2.0, 0.0, 1.0, float("inf"), float("-inf"), float("nan")]), max_size=8),
    part=st.booleans(),
    seed=SEEDS,
)
@example(dtype=torch.bfloat16, rows=1, width=4, values=[-2.0, *[float("nan")] * 7], part=False, seed=0)
def test_largest(dtype: torch.dtype, rows: int, width: int, values: list[float], part: bool, seed: int) -> None:
    x = random(seed, dtype, rows, width + part).round()  # equal values: the first one counts
    for place, value in enumerate(values):
        x.view(-1)[(7919 * place + seed) % max(1, x.numel()) : (7919 * place + seed) % max(1, x.numel()) + 1] = value
    x = x[:, :width]
    found, indices = native_operators.largest(x)
    wanted = x.max(dim=-1)
    torch.testing.assert_close(found, wanted.values.float(), rtol=0, atol=0, equal_nan=True)
    known = ~found.isnan()
    assert torch.equal(indices[known], wanted.indices[known]) and ((indices >= 0) & (indices < width)).all()


@given(dtype=DTYPES, rows=st.integers(0, 4), width=st.integers(1, 170), part=st.booleans(), seed=SEEDS)
def test_masked(dtype: torch.dtype, rows: int, width: int, part: bool, seed: int) -> None:
    """Words without a bit, with all and with some, of which the last is often not whole."""
    chance = np.random.default_rng(seed)
    x = random(seed, dtype, rows, width + part)[:, :width]
    kept = (
        chance.random((rows, width)) < chance.choice([0.0, 0.5, 1.0], (rows, -(-width // 32))).repeat(32, 1)[:, :width]
    )
    packed = np.packbits(kept, axis=1, bitorder="little")
    bits = np.zeros((rows, -(-width // 32) * 4), np.uint8)
    bits[:, : packed.shape[1]] = packed
    before = x.clone()
    found = native_operators.masked(x, bits.view(np.int32))
    assert torch.equal(found, x.masked_fill(torch.from_numpy(~kept), float("-inf"))) and torch.equal(x, before)
