"""The time of a matrix product: against limits, one kernel by hand, and measurements it was not fitted to."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cost.validate import errors
from lamina.core.types import DType
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.kernel_times import TILES, gemm_seconds

MEASUREMENTS = Path(__file__).parents[3] / "bench" / "cost" / "measurements"
CATALOGUE = hardware.load()
FIT = Fits.load(CATALOGUE["a100"]).gemm

sizes = st.integers(1, 30000)


@given(m=st.integers(1, 5000), n=sizes, k=sizes, kind=st.sampled_from(sorted(CATALOGUE.kinds)))
def test_never_faster_than_the_device(m: int, n: int, k: int, kind: str) -> None:
    device = CATALOGUE[kind]
    seconds = float(gemm_seconds(FIT, device, m, n, k, DType.BFLOAT16))
    clock = max(1.0, device.product_share or 0.0)  # some cards run faster than the clock of their specification
    assert seconds > 2 * m * n * k / (clock * device.flops[DType.BFLOAT16])
    assert seconds > 2 * n * k / device.memory_bytes_s
    assert math.isfinite(seconds)


def by_hand(m: int, n: int, k: int, tile: tuple[int, int], cuts: int) -> float | None:
    """One kernel on the A100 in plain arithmetic; None if the library would not use it."""
    fit = FIT
    tiles = math.ceil(m / tile[0]) * math.ceil(n / tile[1]) * cuts
    if cuts > 1 and tiles > 108:
        return None
    rounds = tiles / 108
    waves = 1 if tiles <= 108 else fit.quantisation * math.ceil(rounds) + (1 - fit.quantisation) * rounds
    depth = math.ceil(k / cuts / 32) * 32
    compute = waves * (2 * tile[0] * tile[1] * depth / (312e12 / 108 * fit.share) + fit.tile_s)
    moved = 2 * (n * k + fit.activation_weight * (m * k + m * n))
    if cuts > 1:  # partial sums in float32, written and read
        moved += 2 * 4 * cuts * m * n
    memory = moved / (2039e9 * fit.memory_share)
    return (compute**fit.overlap + memory**fit.overlap) ** (1 / fit.overlap) + fit.launch_s


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (64, 1536, 4096), (200, 3072, 1000), (512, 4096, 11008), (4096, 22016, 4096)]
)
def test_a_mean_over_kernels_that_favours_the_fast(m: int, n: int, k: int) -> None:
    kernels = [by_hand(m, n, k, tile, cuts) for tile in TILES for cuts in (1, 2, 3)]
    times = [seconds for seconds in kernels if seconds is not None]
    weights = [(min(times) / time) ** FIT.choice for time in times]
    expected = sum(time * weight for time, weight in zip(times, weights, strict=True)) / sum(weights)
    assert float(gemm_seconds(FIT, CATALOGUE["a100"], m, n, k, DType.BFLOAT16)) == pytest.approx(expected, rel=1e-9)


def test_a_device_twice_as_fast_takes_half_but_for_the_constants() -> None:
    slow = CATALOGUE["a100"]
    fast = replace(
        slow,
        flops={dtype: 2 * flops for dtype, flops in slow.flops.items()},
        memory_bytes_s=2 * slow.memory_bytes_s,
    )
    fit = replace(FIT, launch_s=0, tile_s=0)
    rows = np.array([1, 64, 500, 4096])
    halves = gemm_seconds(fit, fast, rows, 12288, 4096, DType.BFLOAT16)
    assert halves == pytest.approx(gemm_seconds(fit, slow, rows, 12288, 4096, DType.BFLOAT16) / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("file", "model", "kind", "products", "layers"),
    [
        ("a100_llama2_7b_mlp.csv", "Llama-2-7B", "a100-80g", (0.053, 0.15), (0.035, 0.11)),
        ("a100_internlm_20b_mlp.csv", "InternLM-20B", "a100-80g", (0.05, 0.19), (0.033, 0.1)),
        ("a40_llama2_7b_mlp.csv", "Llama-2-7B", "a40", (0.059, 0.222), (0.033, 0.106)),
    ],
)
def test_measured_products_and_layers(
    file: str, model: str, kind: str, products: tuple[float, float], layers: tuple[float, float]
) -> None:
    cost = CostModel(model_shapes.find(model), CATALOGUE[kind], Fits.load(CATALOGUE[kind]))
    rows = list(errors(MEASUREMENTS / file, cost))
    totals = {row.operator: row for row in rows if row.is_total}
    (decode,) = (row for row in rows if row.operator == "decode-sized layers")
    assert decode.count > 70 and abs(decode.bias) < 0.042
    for name, (median, p95) in (("matrix products", products), ("sums of layers", layers)):
        assert totals[name].count > 1000
        assert totals[name].median < median and totals[name].p95 < p95
