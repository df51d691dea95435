"""Reads weights that a checkpoint stores as codes, in any of its formats."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lamina.models.quantisation.codes import Codes, ExpertCodes
from lamina.models.quantisation.formats import Layout, Packed

Arrange = Callable[[Callable[[str], Tensor]], Tensor]
"""Makes one tensor of those that it is given by name."""


def arranged(codes: Mapping[str, Codes], arrange: Arrange, shape: Sequence[int]) -> ExpertCodes | None:
    """Return the codes of the weights [experts, outputs, inputs], of this shape, that ``arrange`` makes of matrices.

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
    """Return the group of each input, of each expert; None if the matrices of one differ in that."""
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


Read = Callable[[str], Tensor]
"""Gives a tensor of the checkpoint."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, that each code of a word belongs to."""


def read_codes(packed: Packed, read: Read) -> Codes:
    """Return the codes of a weight."""
    outputs, inputs = packed.shape
    turned = packed.layout in (Layout.GPTQ, Layout.AWQ)
    values, zeros = _LAYOUTS[packed.layout](packed, read)
    scales = read(packed.scales)
    place = values.device
    columns = torch.arange(inputs, device=place) // packed.block[1]
    if packed.groups is not None:
        columns = read(packed.groups).to(place, torch.int64)
    return Codes(
        packed.bits,
        values,
        _as_matrix(scales.T if turned else scales, packed),
        None if zeros is None else _as_matrix(zeros, packed),
        torch.arange(outputs, device=place) // packed.block[0],
        columns,
    )


def _as_matrix(scales: Tensor, packed: Packed) -> Tensor:
    """Scales [R, C]: some writers leave out dimensions of size 1."""
    outputs, inputs = packed.shape
    return scales.reshape(-(-outputs // packed.block[0]), -(-inputs // packed.block[1]))


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8 [..., n * W] from int32 [..., W]: the n codes of a word, the lowest bits first or in this ``order``."""
    count = 32 // bits
    result = torch.empty(*words.shape[:-1], words.shape[-1] * count, dtype=torch.uint8, device=words.device)
    for number, place in enumerate(order or range(count)):
        result[..., place::count] = (words >> (bits * number)) & ((1 << bits) - 1)
    return result


def _read_gptq(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    assert packed.zeros is not None
    stored = _unpack(read(packed.zeros), packed.bits).T
    zeros = (stored.int() + packed.zero_offset) & ((1 << packed.bits) - 1)
    return _unpack(read(packed.codes).T.contiguous(), packed.bits), zeros


def _read_awq(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    assert packed.zeros is not None
    values, zeros = (_unpack(read(name), packed.bits, _AWQ_ORDER).T for name in (packed.codes, packed.zeros))
    return values.contiguous(), zeros


def _read_rows(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    """Stored codes and zero points are larger than they mean by half of their range."""
    half = 1 << (packed.bits - 1)

    def signed(words: Tensor) -> Tensor:
        return (_unpack(words, packed.bits).short() - half).to(torch.int8)

    zeros = None if packed.zeros is None else read(packed.zeros)
    if zeros is not None and zeros.dtype == torch.int32:  # packed too, along the outputs
        zeros = signed(zeros.T.contiguous()).T[: packed.shape[0]]
    return signed(read(packed.codes)), zeros


def _read_plain(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    return read(packed.codes), None if packed.zeros is None else read(packed.zeros)


_LAYOUTS = {
    Layout.GPTQ: _read_gptq,
    Layout.AWQ: _read_awq,
    Layout.ROWS: _read_rows,
    Layout.PLAIN: _read_plain,
}
