"""Reads operator and network times in the CSV format of the Vidur project's profiler.

Columns ``time_stats.OPERATOR.median`` hold milliseconds; ``num_tokens`` and ``num_tensor_parallel_workers`` (for
networks: ``size``, in bytes, and ``num_workers``) say what was measured.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lamina.errors import ConfigError
from lamina.plan.gemm import Floats
from lamina.plan.models import ModelShape

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
        sizes: token rows, or bytes. devices: in the tensor-parallel group or collective. seconds: measured times.
    """

    operator: str
    sizes: Floats
    devices: Floats
    seconds: Floats


def read_operators(file: Path, shape: ModelShape, operators: Iterable[str]) -> list[Series]:
    """The series of those ``operators`` that the file has, in its order of rows.

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
    """The times of a collective or transfer by bytes. Raises ConfigError if the file has none."""
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
