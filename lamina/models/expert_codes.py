"""Puts the codes of a layer's experts together, which checkpoints store one matrix at a time."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lamina.models.codes import Codes, ExpertCodes

Arrange = Callable[[Callable[[str], Tensor]], Tensor]
"""Makes one tensor of those that it is given by name."""


def arranged(codes: Mapping[str, Codes], arrange: Arrange, shape: Sequence[int]) -> ExpertCodes | None:
    """The codes of the weights [experts, outputs, inputs], of this shape, that ``arrange`` makes of matrices.

    It may stack matrices and join their outputs, which moves scales as it moves codes. None if it does more, or if the
    inputs of the matrices are grouped differently.
    """
    first = next(iter(codes.values()))
    if not all(_alike(one, first) for one in codes.values()):
        return None
    values = arrange(lambda name: codes[name].values)
    scales = arrange(lambda name: codes[name].scales[codes[name].rows])
    groups = (*shape[:2], first.scales.shape[1])
    if tuple(values.shape) != tuple(shape) or tuple(scales.shape) != groups:
        return None
    zeros = None if first.zeros is None else arrange(lambda name: _zeros(codes[name]))
    rows, columns = torch.arange(shape[1], device=values.device), first.columns
    of_each = [None] * shape[0] if zeros is None else list(zeros)
    parts = zip(values, scales, of_each, strict=True)
    return ExpertCodes(tuple(Codes(first.bits, *part, rows, columns) for part in parts))


def _alike(one: Codes, other: Codes) -> bool:
    return (
        one.bits == other.bits
        and one.values.dtype == other.values.dtype
        and (one.zeros is None) == (other.zeros is None)
        and torch.equal(one.columns, other.columns)
    )


def _zeros(codes: Codes) -> Tensor:
    assert codes.zeros is not None
    return codes.zeros[codes.rows]
