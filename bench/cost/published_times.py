"""Reads measured times, in milliseconds, from CSV files of two projects.

Vidur's profiler: columns ``time_stats.OPERATOR.median``; ``num_tokens`` and ``num_tensor_parallel_workers`` (for
networks: ``size``, in bytes, and ``num_workers``) say what was measured. AIConfigurator: a column ``latency_ms``, and
one for each dimension of an attention kernel or all-reduce, whose elements have 2 bytes (inferred from its bandwidth).
"""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamina.core.errors import ConfigError
from lamina.core.types import DType
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import Floats, PrefillAttentionFit
from lamina.planning.plan.model_shapes import Experts, ModelShape, WeightDType

_SIZES = {
    "n_embd": "hidden",
    "n_head": "query_heads",
    "n_kv_head": "kv_heads",
    "n_expanded_embd": "intermediate",
}


@dataclass(frozen=True)
class Series:
    """Times of one operator, one element per measurement.

    Attributes:
        sizes: token rows, or bytes.
        devices: in the tensor-parallel group or collective.
        seconds: measured times.
    """

    operator: str
    sizes: Floats
    devices: Floats
    seconds: Floats


ATTENTION = ("batch", "query_heads", "kv_heads", "head_dim")
USUAL_BYTES = (64 * 1024, 64 * 2**20)
"""All-reduces of a tensor-parallel layer, from a few decode rows to a long chunk."""


@dataclass(frozen=True)
class Table:
    """Times of an attention kernel: one element per measurement. ``table[column]`` are the values of a dimension."""

    file: Path
    columns: dict[str, Floats]
    seconds: Floats

    def __getitem__(self, column: str) -> Floats:
        return self.columns[column]


@dataclass(frozen=True)
class Products:
    """Times of matrix products of one element type: rows, columns, depth and seconds, one element per measurement."""

    file: Path
    rows: Floats
    columns: Floats
    depth: Floats
    seconds: Floats

    def where(self, kept: NDArray[np.bool_]) -> "Products":
        return Products(self.file, *(own[kept] for own in (self.rows, self.columns, self.depth, self.seconds)))


@dataclass(frozen=True)
class ExpertTimes:
    """Times of the experts of one layer with one kernel, element type and set of sizes: one element per measurement.

    Attributes:
        model: A model that has such experts.
        tokens: Tokens of a step.
        devices: Devices of the tensor-parallel group.
        seconds: Measured times.
    """

    model: ModelShape
    tokens: Floats
    devices: int
    seconds: Floats


@dataclass(frozen=True)
class Reduction:
    """Times of all-reduces: bytes, devices and seconds, one element per measurement."""

    file: Path
    sizes: Floats
    devices: Floats
    seconds: Floats

    @property
    def usual(self) -> NDArray[np.bool_]:
        """Mask of the measurements with sizes within USUAL_BYTES."""
        return np.asarray((self.sizes >= USUAL_BYTES[0]) & (self.sizes <= USUAL_BYTES[1]))

    def where(self, kept: NDArray[np.bool_]) -> "Reduction":
        return Reduction(self.file, self.sizes[kept], self.devices[kept], self.seconds[kept])

    def by_devices(self, predict: Callable[[Floats, int], Floats]) -> Floats:
        """``predict(sizes, devices)`` of all measurements, called once for each number of devices."""
        found = np.empty_like(self.seconds)
        for count in np.unique(self.devices):
            found[self.devices == count] = predict(self.sizes[self.devices == count], int(count))
        return found


def columns_of(file: Path) -> frozenset[str]:
    """Return the columns of a file of measurements. Raises ConfigError if it cannot be read or has no rows."""
    return frozenset(_rows(file)[0])


def read_table(file: Path) -> Table:
    """Times of attention kernels: decoding if the file has ``context``, chunks of prompts if it has ``chunk``.

    Raises:
        ConfigError: the file cannot be read, lacks a column or holds values that are not numbers.
    """
    rows = _rows(file, *ATTENTION, "latency_ms")
    own = ("context",) if "context" in rows[0] else ("chunk", "prefix")
    if missing := [name for name in own if name not in rows[0]]:
        raise ConfigError(f"{file} lacks the columns {', '.join(missing)}")
    return Table(
        file,
        {name: _numbers(file, rows, name, least=0.0 if name == "prefix" else 1.0) for name in (*ATTENTION, *own)},
        _numbers(file, rows, "latency_ms") / 1000,
    )


def decode_work(table: Table) -> tuple[Floats, Floats]:
    """(bytes of keys and values, sequences x KV heads) of every measurement of decode attention, in 16 bits."""
    tokens = table["batch"] * (table["context"] + 1)
    return 2 * 2 * tokens * table["kv_heads"] * table["head_dim"], table["batch"] * table["kv_heads"]


def prefill_seconds(fitted: PrefillAttentionFit, device: Hardware, table: Table) -> Floats:
    """Predicted seconds of every measurement of prompt chunks, in 16 bits."""
    head_size = int(table["head_dim"][0])
    chunk, prefix, queries, kept = (table[name] for name in ("chunk", "prefix", "query_heads", "kv_heads"))
    return fitted.predict_prefill(device, DType.BFLOAT16, chunk, prefix, queries, kept, head_size, table["batch"])


def read_products(file: Path, dtype: str) -> Products:
    """Return the products of ``dtype``: ``bfloat16`` or ``fp8``. Raises ConfigError like ``read_table``."""
    rows = [row for row in _rows(file, "dtype", "rows", "columns", "depth", "latency_ms") if row["dtype"] == dtype]
    count, columns, depth = (_numbers(file, rows, name) for name in ("rows", "columns", "depth"))
    return Products(file, count, columns, depth, _numbers(file, rows, "latency_ms") / 1000)


EXPERT_SIZES = ("hidden", "intermediate", "active", "experts", "tp")
EXPERT_WEIGHTS: dict[str, WeightDType] = {"bfloat16": "auto", "fp8": "fp8", "mxfp4": "int4", "int4": "int4"}


def read_experts(file: Path, kernel: str, dtype: str, like: ModelShape) -> list[ExpertTimes]:
    """Return the times of experts by ``kernel`` with weights of ``dtype``, by sizes and degree of TP.

    ``like``: a mixture of experts; what the file does not say is its. Raises ConfigError like ``read_table``.
    """
    rows = _rows(file, "kernel", "dtype", "tokens", "latency_ms", *EXPERT_SIZES)
    groups: dict[tuple[int, ...], list[dict[str, str]]] = {}
    for row in rows:
        if (row["kernel"], row["dtype"]) == (kernel, dtype):
            groups.setdefault(tuple(int(row[name]) for name in EXPERT_SIZES), []).append(row)
    found = []
    for (hidden, intermediate, active, count, devices), own in groups.items():
        experts = Experts(count=count, active=active, intermediate=intermediate, layers=like.layers)
        model = replace(like, hidden=hidden, experts=experts, weight_dtype=EXPERT_WEIGHTS[dtype])
        tokens, seconds = (_numbers(file, own, name) for name in ("tokens", "latency_ms"))
        found.append(ExpertTimes(model, tokens, devices, seconds / 1000))
    return found


def read_reductions(file: Path) -> Reduction:
    """Return all-reduces in either project's columns. Raises ConfigError like ``read_table``."""
    rows = _rows(file)
    if "elements" in rows[0]:
        rows = _rows(file, "gpus", "elements", "latency_ms")
        sizes = 2 * _numbers(file, rows, "elements")
        return Reduction(file, sizes, _numbers(file, rows, "gpus"), _numbers(file, rows, "latency_ms") / 1000)
    series = read_network(file, "all_reduce")
    return Reduction(file, series.sizes, series.devices, series.seconds)


def _numbers(file: Path, rows: list[dict[str, str]], column: str, least: float = 1e-9) -> Floats:
    try:
        values = np.array([row[column] for row in rows], dtype=np.float64)
    except ValueError as error:
        raise ConfigError(f"the column {column} of {file} holds values that are not numbers: {error}") from error
    if not (np.isfinite(values) & (values >= least)).all():
        raise ConfigError(f"the column {column} of {file} holds values below {least:g}")
    return values


def read_operators(file: Path, shape: ModelShape, operators: Iterable[str]) -> list[Series]:
    """Return the series of those ``operators`` that the file has, in its order of rows.

    Raises:
        ConfigError: the file cannot be read, is for another model, or has none of the operators.
    """
    rows = _rows(file, "num_tokens", "num_tensor_parallel_workers")
    for column, size in _SIZES.items():
        stated = {row[column].removesuffix(".0") for row in rows if row.get(column)}
        if stated - {str(getattr(shape, size))}:
            raise ConfigError(
                f"{file} was measured with {column} {sorted(stated)[0]}; {shape.name} has {getattr(shape, size)}. "
                "Give --model the model that was measured"
            )
    found = [
        _series(rows, operator, "num_tokens", "num_tensor_parallel_workers")
        for operator in operators
        if f"time_stats.{operator}.median" in rows[0]
    ]
    if not found:
        raise ConfigError(f"{file} has no column time_stats.OPERATOR.median for any of {', '.join(operators)}")
    return found


def read_network(file: Path, operator: str) -> Series:
    """Return the times of a collective or transfer by bytes. Raises ConfigError if the file has none."""
    rows = _rows(file, "size", "num_workers", f"time_stats.{operator}.median")
    return _series(rows, operator, "size", "num_workers")


def _rows(file: Path, *needed: str) -> list[dict[str, str]]:
    try:
        with file.open(newline="") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"the measurements {file} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{file} has no rows")
    if missing := [name for name in needed if name not in rows[0]]:
        raise ConfigError(f"{file} lacks the columns {', '.join(missing)}")
    return rows


def _series(rows: list[dict[str, str]], operator: str, size: str, devices: str) -> Series:
    column = f"time_stats.{operator}.median"
    try:
        table = np.array([(row[size], row[devices], row[column]) for row in rows if row[column]], dtype=np.float64)
    except ValueError as error:
        raise ConfigError(
            f"the column {column}, {size} or {devices} holds values that are not numbers: {error}"
        ) from error
    if not len(table) or not (np.isfinite(table) & (table > 0)).all():
        raise ConfigError(f"the column {column}, {size} or {devices} is empty or holds values not above 0")
    return Series(operator, table[:, 0], table[:, 1], table[:, 2] / 1000)
