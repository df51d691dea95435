"""Attention and all-reduces: limits that no kernel beats, and measured kernels, by bands."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cost.fit import PUBLISHED_SHARE
from bench.cost.published_times import read_table
from bench.cost.validate import SHAPELESS, ErrorRow, errors
from lamina.core.errors import ConfigError
from lamina.core.types import DType
from lamina.planning.plan import hardware
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.kernel_times import DecodeAttentionFit

MEASUREMENTS = Path(__file__).parents[3] / "bench" / "cost" / "measurements"
CATALOGUE = hardware.load()


def totals(file: str, kind: str, kernels_of: str | None = None) -> list[ErrorRow]:
    """The totals of a file on ``kind``, with the attention kernels fitted to another kind if given."""
    device = CATALOGUE[kind]
    fits = Fits.load(device)
    if kernels_of is not None:
        other = Fits.load(CATALOGUE[kernels_of])
        share = PUBLISHED_SHARE[device.kind]
        fits = replace(
            fits,
            decode=replace(other.decode, memory_share=share),
            prefill=replace(other.prefill, memory_share=share),
        )
    return [row for row in errors(MEASUREMENTS / file, CostModel(SHAPELESS, device, fits)) if row.is_total]


@given(
    nbytes=st.floats(1e3, 1e12),
    units=st.integers(1, 10_000),
    kind=st.sampled_from(["a100", "h100", "h20", "l40s", "rtx3090"]),
)
def test_decoding_reads_no_faster_than_the_memory_and_more_takes_longer(nbytes: float, units: int, kind: str) -> None:
    device = CATALOGUE[kind]
    fit: DecodeAttentionFit = Fits.load(device).decode
    seconds = float(fit.predict_decode(device, nbytes, units))
    assert seconds > nbytes / device.memory_bytes_s
    assert float(fit.predict_decode(device, nbytes, units, repeated=True)) <= seconds
    assert seconds > fit.fixed_s > 1e-6
    assert float(fit.predict_decode(device, 1.5 * nbytes, units)) >= seconds
    assert float(fit.predict_decode(device, nbytes, 2 * units)) >= seconds
    assert float(fit.predict_decode(device, 0, 0)) == 0


@pytest.mark.parametrize(
    ("file", "kind", "kernels_of", "median"),
    [
        # On its own device, and with nothing but the catalogue entry changed, on the other: the targets.
        ("a100_attention_decode.csv", "a100", None, 0.06),
        ("h100_attention_decode.csv", "h100", None, 0.05),
        ("a100_attention_decode.csv", "a100", "h100", 0.12),
        ("h100_attention_decode.csv", "h100", "a100", 0.12),
        ("a100_attention_prefill.csv", "a100", None, 0.05),
        ("h100_attention_prefill.csv", "h100", None, 0.08),
        ("a100_attention_prefill.csv", "a100", "h100", 0.15),
        ("h100_attention_prefill.csv", "h100", "a100", 0.15),
        ("l40s_attention_decode.csv", "l40s", None, 0.12),
        ("l40s_attention_prefill.csv", "l40s", None, 0.12),
    ],
)
def test_measured_attention(file: str, kind: str, kernels_of: str | None, median: float) -> None:
    (row,) = totals(file, kind, kernels_of)
    assert row.count > 1500 and row.median < median


@pytest.mark.parametrize(
    ("file", "kind", "kernel", "median"),
    [
        ("a100_all_reduce_custom.csv", "a100", "fastest kernel", 0.11),
        ("a100_all_reduce_nccl.csv", "a100", "NCCL", 0.09),
        ("l40s_all_reduce_nccl.csv", "l40s", "fastest kernel", 0.20),
        ("h100_all_reduce_custom.csv", "h100", "fastest kernel", 0.11),
        ("h100_all_reduce_nccl.csv", "h100", "NCCL", 0.09),
        ("a100_dgx_all_reduce.csv", "a100", "NCCL", 0.15),  # not fitted: another machine, an older NCCL
    ],
)
def test_measured_all_reduces(file: str, kind: str, kernel: str, median: float) -> None:
    rows = [row for row in totals(file, kind) if row.operator.startswith(kernel)]
    assert len(rows) == 3
    assert all(row.median < median for row in rows)


@pytest.mark.parametrize(("kind", "medians"), [("h100", (0.06, 0.08)), ("l40s", (0.10, 0.11))])
def test_measured_products(kind: str, medians: tuple[float, float]) -> None:
    """In 16 bits and in 8-bit floats, whose activations are cast first."""
    rows = totals(f"{kind}_products.csv", kind)
    assert [row.operator for row in rows] == ["products in bfloat16", "products in fp8"]
    assert all(row.median < median and abs(row.bias) < 0.05 for row, median in zip(rows, medians, strict=True))


def test_the_sizes_that_vllm_leaves_to_nccl_are_known() -> None:
    """From one band of sizes to the next, another kernel takes over: no median hides that one is taken too early."""
    device = CATALOGUE["a100"]
    rows = errors(MEASUREMENTS / "a100_all_reduce_custom.csv", CostModel(SHAPELESS, device, Fits.load(device)))
    bands = [row for row in rows if row.operator.startswith("fastest kernel") and not row.is_total]
    assert len(bands) == 15
    assert all(row.median < 0.12 for row in bands)


def test_bands_do_not_hide_each_other() -> None:
    """Every measurement is in one band, and the sign of an error is kept."""
    device = CATALOGUE["a100"]
    rows = list(errors(MEASUREMENTS / "a100_attention_decode.csv", CostModel(SHAPELESS, device, Fits.load(device))))
    bands = [row for row in rows if not row.is_total]
    assert sum(row.count for row in bands) == len(read_table(MEASUREMENTS / "a100_attention_decode.csv").seconds)
    slow = replace(Fits.load(device).decode, fixed_s=1.0)
    slower = errors(
        MEASUREMENTS / "a100_attention_decode.csv",
        CostModel(SHAPELESS, device, replace(Fits.load(device), decode=slow)),
    )
    assert all(row.bias > 1 for row in slower)


def test_the_line_of_the_simulator_is_the_kernel_s_where_it_runs_long() -> None:
    from lamina.planning.plan import model_shapes

    for kind in ("h20", "rtx3090"):
        model = CostModel(model_shapes.find("Llama-3-70B"), CATALOGUE[kind], Fits.load(CATALOGUE[kind]))
        token_s, at_none = model.attention_line(np.arange(5))
        assert at_none[0] == 0
        for tokens in (100_000, 1_000_000):
            assert 4 * token_s * tokens / 4 + at_none[4] == pytest.approx(
                float(model.attention_seconds(tokens, 4)), rel=0.03
            )


def test_kernels_over_a_prefix_pack_the_query_heads_of_a_kv_head() -> None:
    """Full tiles take what a chunk's kernel takes for its prefix; 16 rows of 8 query heads to a KV head fill one."""
    entry = hardware.load()["h20"]
    fit = Fits.load(entry).prefill
    chunk = partial(fit.predict_prefill, entry, DType.BFLOAT16, query_heads=64, kv_heads=8, head_size=128)
    over = partial(fit.prefix_seconds, entry, DType.BFLOAT16, query_heads=64, kv_heads=8, head_size=128)
    for prefix in (1000, 100_000):
        assert over(512, prefix) == pytest.approx(chunk(512, prefix) - chunk(512, 0))
        assert over(1, prefix) == over(16, prefix) < over(17, prefix)
        memory = 2 * 128 * 8 * prefix * 2 / (fit.memory_share * entry.memory_bytes_s)
        assert over(128, prefix) - memory == pytest.approx(8 * (over(16, prefix) - memory))


def test_what_is_not_a_table_of_kernels_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "odd.csv"
    head = "batch,query_heads,kv_heads,head_dim,context,latency_ms\n"
    device = CATALOGUE["a100"]
    for text, message in (
        (head + "1,8,8,128,100,fast\n", "latency_ms of .* not numbers"),
        (head + "1,8,8,128,100,-1\n", "latency_ms of .* below"),
        (head.replace("batch,", "") + "8,8,128,100,1\n", "lacks the columns batch"),
        ("gpus,elements\n2,100\n", "lacks the columns latency_ms"),
        (head, "has no rows"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            list(errors(file, CostModel(SHAPELESS, device, Fits.load(device))))
