"""Compares the cost model with measured kernels: errors with their sign, by bands of sizes.

    python -m bench.cost.validate bench/cost/measurements/h100_attention_decode.csv --kind h100

A file of a layer's operators needs ``--model`` too.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.cost.published_times import (
    columns_of,
    decode_work,
    prefill_seconds,
    read_operators,
    read_products,
    read_reductions,
    read_table,
)
from lamina.core.errors import ConfigError
from lamina.core.types import DType
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.cost import GEMMS, POINTWISE, CostModel, Fits
from lamina.planning.plan.fit_store import packaged_fit
from lamina.planning.plan.kernel_times import Floats, gemm_seconds
from lamina.planning.plan.model_shapes import ModelShape

ROWS = (1, 17, 65, 129, 257, 1025)
DECODE_ROWS = 128
"""Most rows of a layer that counts as decode-sized."""

MEGABYTES = (0, 1, 8, 32, 64, 128, 512, 2048)
CHUNKS = (1, 16, 512, 1024, 3072, 8192)
KILOBYTES = (0, 64, 1024, 8192, 65537)


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one operator or kernel in one band of sizes, or of a whole group (``is_total``).

    Attributes:
        count: number of measurements.
        median, p95: absolute relative error.
        bias: median of the signed relative error.
    """

    operator: str
    band: str
    count: int
    median: float
    p95: float
    bias: float
    is_total: bool = False


def errors(file: Path, model: CostModel) -> Iterator[ErrorRow]:
    """Rows for whatever the file has: operators of a layer, matrix products, an attention kernel or all-reduces.

    ``model``'s shape matters for operators alone.

    Raises:
        ConfigError: see ``measurements``.
    """
    columns = columns_of(file)
    if "context" in columns or "chunk" in columns:
        yield from _attention(file, model)
    elif "depth" in columns:
        yield from _products(file, model)
    elif "elements" in columns or "time_stats.all_reduce.median" in columns:
        yield from _reductions(file, model)
    else:
        yield from _operators(file, model)


def needs_model(file: Path) -> bool:
    """Return whether predictions for the file depend on the shape of a model."""
    return "num_tokens" in columns_of(file)


def _operators(file: Path, model: CostModel) -> Iterator[ErrorRow]:
    """Every matrix product and then every other operator, each group followed by its total; and, if the file has all
    of them, the sum over a layer, which is what plans use."""
    series = read_operators(file, model.shape, (*GEMMS, *POINTWISE))
    predicted = [model.operator_seconds(one.operator, one.sizes, one.devices) for one in series]
    for title, names in (("matrix products", GEMMS), ("other operators", POINTWISE)):
        group, sizes = [], []
        for one, seconds in zip(series, predicted, strict=True):
            if one.operator in names:
                group.append(seconds / one.seconds - 1)
                sizes.append(one.sizes)
                yield from _by_band(one.operator, one.sizes, ROWS, "rows", group[-1])
        if group:
            yield _row(title, "all", np.concatenate(group), is_total=True)
    first = series[0]
    if len(series) == len(GEMMS) + len(POINTWISE) and all(len(one.sizes) == len(first.sizes) for one in series):
        error = np.sum(predicted, axis=0) / np.sum([one.seconds for one in series], axis=0) - 1
        yield from _by_band("sum of a layer", first.sizes, ROWS, "rows", error)
        for degree in np.unique(first.devices):
            own = (first.devices == degree) & (first.sizes <= DECODE_ROWS)
            if own.any():
                yield _row(f"decode-sized, TP {degree:.0f}", f"1-{DECODE_ROWS} rows", error[own])
        yield _row("decode-sized layers", f"1-{DECODE_ROWS} rows", error[first.sizes <= DECODE_ROWS])
        yield _row("sums of layers", "all", error, is_total=True)


def _attention(file: Path, model: CostModel) -> Iterator[ErrorRow]:
    table, device = read_table(file), model.hardware
    if "context" in table.columns:
        nbytes, units = decode_work(table)
        error = model.fits.decode.predict_decode(device, nbytes, units, repeated=True) / table.seconds - 1
        yield from _by_band("decode attention", nbytes / 1e6, MEGABYTES, "MB of KV", error)
        yield _row("decode attention", "from 32 MB of KV", error[nbytes >= 32e6], is_total=True)
    else:
        error = prefill_seconds(model.fits.prefill, device, table) / table.seconds - 1
        yield from _by_band("prefill attention", table["chunk"], CHUNKS, "tokens", error)
        yield _row("prefill attention", "from 512 tokens", error[table["chunk"] >= 512], is_total=True)


def _products(file: Path, model: CostModel) -> Iterator[ErrorRow]:
    for dtype, fit in (("bfloat16", model.fits.gemm), ("fp8", model.fits.gemm_fp8)):
        times = read_products(file, dtype)
        sizes = times.rows, times.columns, times.depth
        found = gemm_seconds(fit, model.hardware, *sizes, DType.BFLOAT16, dtype == "fp8")
        error = found / times.seconds - 1
        yield from _by_band(f"products in {dtype}", times.rows, ROWS, "rows", error)
        yield _row(f"products in {dtype}", "all", error, is_total=True)


def _reductions(file: Path, model: CostModel) -> Iterator[ErrorRow]:
    times = read_reductions(file)
    link = model.hardware.link_bytes_s
    ring = model.fits.pcie if model.hardware.link.startswith("PCIe") else model.fits.nvlink
    for name, found in (
        ("NCCL", times.by_devices(lambda nbytes, n: ring.predict_all_reduce(nbytes, n, link))),
        ("fastest kernel", times.by_devices(model.all_reduce_seconds)),
    ):
        error = found / times.seconds - 1
        for count in np.unique(times.devices):
            own = times.devices == count
            yield from _by_band(f"{name}, {count:.0f} devices", times.sizes[own] / 1024, KILOBYTES, "KB", error[own])
        for count in np.unique(times.devices):
            usual = error[(times.devices == count) & times.usual]
            if len(usual):
                yield _row(f"{name}, {count:.0f} devices", "64 KB to 64 MB", usual, is_total=True)


def _by_band(operator: str, sizes: Floats, starts: Sequence[int], unit: str, error: Floats) -> Iterator[ErrorRow]:
    band = np.searchsorted(starts, sizes, side="right") - 1
    for index, start in enumerate(starts):
        if (band == index).any():
            end = f"-{starts[index + 1] - (unit in ('rows', 'tokens'))}" if index + 1 < len(starts) else "+"
            yield _row(operator, f"{start}{end} {unit}", error[band == index])


def _row(operator: str, band: str, error: Floats, is_total: bool = False) -> ErrorRow:
    absolute = np.abs(error)
    median, p95, bias = (float(value) for value in (np.median(absolute), np.quantile(absolute, 0.95), np.median(error)))
    return ErrorRow(operator, band, len(error), median, p95, bias, is_total)


SHAPELESS = ModelShape(
    name="any", layers=1, hidden=1, intermediate=1, query_heads=1, kv_heads=1, head_size=1, vocabulary=1
)
"""A shape for files whose measurements do not depend on a model."""


def show(file: Path, model: str | None, kind: str) -> None:
    """Print the cost model's errors against measurements of ``kind``, by band. Raises ConfigError."""
    entry = hardware.load()[kind]
    if needs_model(file) and model is None:
        raise ConfigError(f"{file} has a layer's operators; give --model, the model that was measured")
    shape = model_shapes.find(model) if needs_model(file) and model else SHAPELESS
    print(f"predicted against measured: {file.name} on {entry.kind}; bias: median with its sign, negative: too fast")
    print(f"{'operator':<32} {'band':<24} {'count':>6} {'median':>7} {'p95':>7} {'bias':>7}")
    for row in errors(file, CostModel(shape, entry, Fits.load(entry))):
        print(
            f"{row.operator:<32} {row.band:<24} {row.count:>6} {row.median:>7.1%} {row.p95:>7.1%} {row.bias:>+7.1%}"
            + ("  total" if row.is_total else "")
        )
    names = ("gemm", "decode", "prefill", "pcie" if entry.link.startswith("PCIe") else "nvlink")
    sources = dict.fromkeys(packaged_fit(name, entry.like or entry.kind).source for name in names)
    print(f"fitted to {', '.join(sources)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the cost model's errors against measurements of kernels.")
    parser.add_argument("file", type=Path, help="a CSV in a format of bench/cost/measurements")
    parser.add_argument("--kind", required=True, help="the hardware that was measured")
    parser.add_argument("--model", help="the model whose operators were measured")
    arguments = parser.parse_args()
    show(arguments.file, arguments.model, arguments.kind)


if __name__ == "__main__":
    main()
