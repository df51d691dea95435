"""Compares the cost model with measurements it was not fitted to: relative errors by operator."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lamina.plan.cost import GEMMS, POINTWISE, CostModel
from lamina.plan.gemm import Floats
from lamina.profiling.measurements import read_operators


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one operator at one degree of tensor parallelism, or of a whole group (``is_total``).

    Attributes:
        count: number of measurements. median, p95: absolute relative error. bias: median of the signed relative error.
    """

    operator: str
    tensor_parallel: str
    count: int
    median: float
    p95: float
    bias: float
    is_total: bool = False


def errors_by_operator(file: Path, model: CostModel) -> Iterator[ErrorRow]:
    """Rows for every matrix product and then every other operator in ``file``, each group followed by its total; and,
    if the file has all operators, for the sum over a layer, which is what plans use.

    Raises:
        ConfigError: see ``measurements.read_operators``.
    """
    series = read_operators(file, model.shape, (*GEMMS, *POINTWISE))
    predicted = [model.operator_seconds(one.operator, one.sizes, one.devices) for one in series]
    for title, names in (("matrix products", GEMMS), ("other operators", POINTWISE)):
        errors = []
        for one, seconds in zip(series, predicted, strict=True):
            if one.operator in names:
                errors.append(seconds / one.seconds - 1)
                yield from _by_degree(one.operator, one.devices, errors[-1])
        if errors:
            yield _row(title, "", np.concatenate(errors), is_total=True)
    first = series[0]
    if len(series) == len(GEMMS) + len(POINTWISE) and all(len(one.sizes) == len(first.sizes) for one in series):
        error = np.sum(predicted, axis=0) / np.sum([one.seconds for one in series], axis=0) - 1
        yield from _by_degree("sum of a layer", first.devices, error)
        yield _row("sums of layers", "", error, is_total=True)


def _by_degree(operator: str, devices: Floats, error: Floats) -> Iterator[ErrorRow]:
    for degree in np.unique(devices):
        yield _row(operator, f"{degree:.0f}", error[devices == degree])


def _row(operator: str, tensor_parallel: str, error: Floats, is_total: bool = False) -> ErrorRow:
    absolute = np.abs(error)
    median, p95, bias = (float(value) for value in (np.median(absolute), np.quantile(absolute, 0.95), np.median(error)))
    return ErrorRow(operator, tensor_parallel, len(error), median, p95, bias, is_total)
