"""The cost model against measured operators it was not fitted to: relative errors, operator by operator."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lamina.plan.cost import GEMMS, POINTWISE, CostModel
from lamina.plan.gemm import Floats
from lamina.plan.measurements import read_operators


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one operator at one degree of tensor parallelism, or of a whole group (``is_total``).

    Attributes:
        count: measurements. median, p95: of the absolute relative error. bias: median of the signed one.
    """

    operator: str
    tensor_parallel: str
    count: int
    median: float
    p95: float
    bias: float
    is_total: bool = False


def errors_by_operator(file: Path, model: CostModel) -> Iterator[ErrorRow]:
    """Rows for every matrix product and then every other operator in ``file``, each group followed by its total.

    Raises:
        ConfigError: see ``measurements.read_operators``.
    """
    series = read_operators(file, model.shape, (*GEMMS, *POINTWISE))
    for title, names in (("matrix products", GEMMS), ("other operators", POINTWISE)):
        errors = []
        for one in (one for one in series if one.operator in names):
            error = model.operator_seconds(one.operator, one.sizes, one.devices) / one.seconds - 1
            errors.append(error)
            for devices in np.unique(one.devices):
                yield _row(one.operator, f"{devices:.0f}", error[one.devices == devices])
        if errors:
            yield _row(title, "", np.concatenate(errors), is_total=True)


def _row(operator: str, tensor_parallel: str, error: Floats, is_total: bool = False) -> ErrorRow:
    absolute = np.abs(error)
    median, p95, bias = (float(value) for value in (np.median(absolute), np.quantile(absolute, 0.95), np.median(error)))
    return ErrorRow(operator, tensor_parallel, len(error), median, p95, bias, is_total)
