"""Merging partials against the definition in float64."""

import numpy as np
import pytest
import torch

from lamina.kernels.attention import merge


def partials(count: int, rows: int = 3, heads: int = 4, dim: int = 5, seed: int = 0):
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal((rows, heads, dim)).astype(np.float32) for _ in range(count)]
    lses = [(rng.standard_normal((rows, heads)) * 3).astype(np.float32) for _ in range(count)]
    return outs, lses


def definition(outs, lses, sinks=None):
    weights = np.exp(np.array(lses, np.float64))
    total = weights.sum(0) + (0 if sinks is None else np.exp(sinks.astype(np.float64)))
    return (weights[..., None] * np.array(outs, np.float64)).sum(0) / total[..., None], np.log(total)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_definition(count, with_sinks):
    outs, lses = partials(count)
    sinks = np.array([0.5, -2, 3, 0], np.float32) if with_sinks else None
    lse = np.empty_like(lses[0])
    wanted_out, wanted_lse = definition(outs, lses, sinks)
    np.testing.assert_allclose(merge(outs, lses, sinks, lse=lse), wanted_out, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("count", "rows", "threads"), [(1, 3, 1), (3, 2000, 3)])
def test_result_is_rounded_once_to_the_type_of_out(dtype, count, rows, threads):
    outs, lses = partials(count, rows=rows)
    outs[0][0, 0] = [np.inf, -np.inf, np.nan, 1e-40, 3.4e38]
    wanted = torch.from_numpy(merge(outs, lses)).to(dtype)
    out = torch.empty(outs[0].shape, dtype=dtype)
    merge(
        outs,
        lses,
        out=out.view(torch.int16).numpy().view(np.uint16 if dtype == torch.bfloat16 else np.float16),
        threads=threads,
    )
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


def test_is_associative():
    outs, lses = partials(3)
    lse = np.empty_like(lses[0])
    first = merge(outs[:2], lses[:2], lse=lse)
    np.testing.assert_allclose(merge([first, outs[2]], [lse, lses[2]]), merge(outs, lses), atol=1e-6)


def test_partial_that_saw_nothing_is_neutral():
    outs, lses = partials(2)
    wanted = merge(outs, lses)
    nothing = np.full_like(outs[0], np.nan), np.full_like(lses[0], -np.inf)
    for place in range(3):
        with_nothing = outs[:], lses[:]
        for values, extra in zip(with_nothing, nothing, strict=True):
            values.insert(place, extra)
        np.testing.assert_array_equal(merge(*with_nothing), wanted)


def test_rows_that_saw_nothing_anywhere():
    outs, lses = partials(2)
    lse = np.empty_like(lses[0])
    nothing = [np.full_like(lses[0], -np.inf)] * 2
    assert (merge(outs, nothing, lse=lse) == 0).all()
    assert (lse == -np.inf).all()
    sinks = np.array([0.5, -2, 3, 0], np.float32)
    assert (merge(outs, nothing, sinks, lse=lse) == 0).all()
    np.testing.assert_allclose(lse, np.broadcast_to(sinks, lse.shape), rtol=1e-6)


def test_far_apart_lses_do_not_overflow():
    outs, lses = partials(2)
    lses[0] += 500
    lses[1] -= 500
    np.testing.assert_allclose(merge(outs, lses), outs[0], atol=1e-6)


def test_writes_over_its_first_input():
    outs, lses = partials(3)
    wanted = merge(outs, lses)
    assert merge(outs, lses, out=outs[0], lse=lses[0]) is outs[0]
    np.testing.assert_array_equal(outs[0], wanted)


def test_nan_is_not_hidden():
    outs, lses = partials(2)
    lses[1][0, 0] = np.nan
    out = merge(outs, lses)
    assert np.isnan(out[0, 0]).all() and np.isfinite(out[1:]).all()


def test_mistakes_are_named():
    outs, lses = partials(2)
    with pytest.raises(ValueError, match="no partials"):
        merge([], [])
    with pytest.raises(ValueError, match="2 outs and 1 lses"):
        merge(outs, lses[:1])
    with pytest.raises(ValueError, match=r"lses has shape \[2, 4\]; expected \[3, 4\]"):
        merge(outs, [lses[0], lses[1][:2]])
    with pytest.raises(ValueError, match=r"sinks has shape \[3\]; expected \[4\]"):
        merge(outs, lses, np.zeros(3, np.float32))
