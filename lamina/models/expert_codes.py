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
    inputs of an expert's matrices are grouped differently.
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
    columns = _columns(codes, arrange)
    if columns is None:
        return None
    rows = torch.arange(shape[1], device=values.device)
    of_each = [None] * shape[0] if zeros is None else list(zeros)
    parts = zip(values, scales, of_each, [rows] * shape[0], columns, strict=True)
    return ExpertCodes(tuple(Codes(first.bits, *part) for part in parts))


def _columns(codes: Mapping[str, Codes], arrange: Arrange) -> list[Tensor] | None:
    """The group of each input, of each expert; None if the matrices of one differ in that."""
    every, places = list(codes.values()), {name: place for place, name in enumerate(codes)}
    sources = arrange(lambda name: torch.full((len(codes[name].values), 1), places[name]))  # of each output
    found = []
    for expert in sources:
        first, *others = (every[place].columns for place in expert.unique().tolist())
        if not all(torch.equal(first, other) for other in others):
            return None
        found.append(first)
    return found


def _alike(one: Codes, other: Codes) -> bool:
    return (
        one.bits == other.bits
        and one.values.dtype == other.values.dtype
        and (one.zeros is None) == (other.zeros is None)
        and one.scales.shape[1] == other.scales.shape[1]
    )


def _zeros(codes: Codes) -> Tensor:
    assert codes.zeros is not None
    return codes.zeros[codes.rows]
