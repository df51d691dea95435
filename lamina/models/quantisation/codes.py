"""Quantised weights: reads codes from a checkpoint, quantises dense weights, shards and dequantises codes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Union

import torch
from torch import Tensor

from lamina.core.errors import ConfigError
from lamina.core.types import Quantization
from lamina.models.quantisation.formats import Layout, Packed
from lamina.splitter.split_model import Shard, cut

GROUPS = (128, 64, 32)
"""Inputs that share a scale and a zero point in int4: the first of these that divides a matrix."""

Weight = Union[Tensor, "Codes", "ExpertCodes", "StackedCodes", "LibraryWeight"]
"""A weight as a device holds it."""

_ELEMENTS_AT_ONCE = 1 << 24  # elements converted at a time, which bounds the temporary memory


@dataclass(frozen=True)
class Codes:
    """A weight [outputs, inputs] = (values - zeros) * scales, with a zero point and a scale for each group.

    Attributes:
        bits: bits of a code, 8 or 4.
        values: the codes [outputs, inputs], int8, uint8 or fp8.
        scales: floating point [R, C].
        zeros: [R, C]; None: all are 0.
        rows: int64 [outputs]: the row of ``scales`` and ``zeros`` of each output.
        columns: int64 [inputs]: the column of ``scales`` and ``zeros`` of each input.
    """

    bits: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    rows: Tensor
    columns: Tensor

    @property
    def group(self) -> int:
        """The largest g such that inputs [i g, (i + 1) g) share a scale for every i; 1 for scattered groups."""
        return _runs(self.columns)

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """Return a copy with ``change`` applied to each tensor, which must keep values (a move to a device)."""
        zeros = None if self.zeros is None else change(self.zeros)
        parts = (change(part) for part in (self.rows, self.columns))
        return Codes(self.bits, change(self.values), change(self.scales), zeros, *parts)

    def shard(self, shard: Shard) -> "Codes":
        """Return the part that a rank holds. A group may be divided between ranks."""
        return replace(
            self,
            values=cut(self.values, shard),
            rows=cut(self.rows, {0: shard[0]} if 0 in shard else {}),
            columns=cut(self.columns, {0: shard[1]} if 1 in shard else {}),
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32 and rounded to ``dtype``."""
        outputs, inputs = self.values.shape
        result = torch.empty(outputs, inputs, dtype=dtype, device=self.values.device)
        for block in _row_blocks(outputs, inputs):
            part, rows = self.values[block].float(), self.rows[block]
            if self.zeros is not None:
                part -= self.zeros[rows].float()[:, self.columns]
            result[block] = part * self.scales[rows].float()[:, self.columns]
        return result


def _runs(columns: Tensor) -> int:
    """Return the largest g such that ``columns`` consists of runs of g equal numbers."""
    starts = (columns[1:] != columns[:-1]).nonzero().flatten() + 1
    return math.gcd(len(columns), *starts.tolist())


@dataclass(frozen=True)
class ExpertCodes:
    """Weights [experts, outputs, inputs] of a layer with experts: the codes of each."""

    each: tuple[Codes, ...]

    def shard(self, shard: Shard) -> "ExpertCodes":
        """Return the part that a rank holds."""
        here = cut(torch.arange(len(self.each)), {0: shard[0]} if 0 in shard else {})
        of_each = {dim - 1: ranges for dim, ranges in shard.items() if dim}
        return ExpertCodes(tuple(self.each[expert].shard(of_each) for expert in here.tolist()))

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> "ExpertCodes":
        return ExpertCodes(tuple(one.replace_tensors(change) for one in self.each))


@dataclass(frozen=True)
class StackedCodes:
    """Weights of a layer's experts, or of one linear layer, in the form that a GPU's product reads.

    A weight is (value - zero) * scale.

    Attributes:
        values: int8 or fp8 (e4m3) [experts, outputs, inputs]; or uint8 [experts, outputs, inputs / 2], where the low
            halves of a group's bytes are its first inputs, and the high halves the others.
        scales: float32 [experts, outputs, inputs / group].
        zeros: float32 [experts, outputs, inputs / group]; None: all are 0.
        group: consecutive inputs that share a scale.
        order: int64 [experts, inputs], or [1, inputs] for all experts: the input of x that belongs to each place, so
            that scattered groups become consecutive; None: the order of x.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.values, self.scales, self.zeros, self.order

    @classmethod
    def stack(cls, codes: Iterable[Codes], experts: int) -> "StackedCodes":
        """Stack the codes of experts, which have the same ``stacked_group``. ``codes`` is consumed one by one, to save
        memory."""
        stacks: tuple[Tensor, ...] = ()
        group: int | None = None
        for number, one in enumerate(codes):
            group = stacked_group(one)
            assert group is not None
            parts = _stacked(one, group)
            stacks = stacks or tuple(part.new_empty(experts, *part.shape) for part in parts)
            for stack, part in zip(stacks, parts, strict=True):
                stack[number] = part
        assert group is not None
        values, scales, zeros, order = stacks
        return cls(values, scales, zeros if bool(zeros.any()) else None, group, _least_order(order))


def stacked_group(codes: Codes) -> int | None:
    """Return ``StackedCodes.group`` for these codes: all inputs, or one of ``GROUPS``; None if none fits."""
    group, inputs = _runs(codes.columns.sort().values), codes.values.shape[1]
    if codes.bits == 8 and codes.zeros is None and group == inputs:
        return inputs
    return next((size for size in GROUPS if group % size == 0), None)


def _least_order(order: Tensor) -> Tensor | None:
    """Return ``order`` [experts, inputs] as [1, inputs] if all experts have the same, None if it is that of x."""
    if not torch.equal(order, order[:1].expand_as(order)):
        return order
    return None if torch.equal(order[0], torch.arange(order.shape[1], device=order.device)) else order[:1].clone()


def _stacked(codes: Codes, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values, scales, zeros and order of one expert, for ``StackedCodes``."""
    columns, order = codes.columns.sort(stable=True)
    places = columns[::group]
    values = codes.values if torch.equal(columns, codes.columns) else codes.values[:, order]
    scales = codes.scales[codes.rows][:, places].float()
    zeros = torch.zeros_like(scales) if codes.zeros is None else codes.zeros[codes.rows][:, places].float()
    if codes.bits == 4:
        middle = 8 if values.dtype == torch.int8 else 0
        halves = (values + middle).to(torch.uint8).view(len(values), -1, 2, group // 2)
        return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1), scales, zeros + middle, order
    if values.dtype == torch.uint8:
        values, zeros = (values ^ 128).view(torch.int8), zeros - 128
    return values, scales, zeros, order


@dataclass(frozen=True)
class LibraryWeight:
    """A quantised weight in the private form of a library: a subclass of Tensor, wrapped so that ``isinstance``
    tells it from a plain tensor."""

    weight: Tensor


def plain(weight: Weight) -> Tensor:
    """Return ``weight``, which must be a tensor, with the type of a tensor."""
    assert isinstance(weight, Tensor)
    return weight


class Form:
    """How a device holds the weights of a model. This class: as tensors; subclasses keep codes.

    Attributes:
        names: names of the weights to quantise.
        experts: names of the weights [experts, outputs, inputs] that may be held as codes.
    """

    names: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()

    def quantise(self, name: str, weight: Tensor, shard: Shard) -> Weight:
        """Quantise the part ``shard`` of a weight in ``names``. Raises ConfigError."""
        return cut(weight, shard)

    def keep_codes(self, name: str, codes: Codes, dtype: torch.dtype) -> Weight | None:
        """Return a checkpoint's codes in the device's form; None: the weight must be dequantised to ``dtype``."""

    def hold_experts(self, codes: ExpertCodes, dtype: torch.dtype) -> Weight | None:
        """Return a checkpoint's codes of experts in the device's form; None: they must be dequantised to ``dtype``."""


DENSE = Form()


def quantise_experts(name: str, weight: Tensor, to: Quantization, shard: Shard) -> Iterator[Codes]:
    """Quantise the part ``shard`` of weights [experts, outputs, inputs], expert by expert. Raises ConfigError."""
    of_each = {dim - 1: ranges for dim, ranges in shard.items() if dim}
    here = cut(weight, {0: shard[0]} if 0 in shard else {})
    return (quantise(name, one, to, of_each) for one in here)


def quantise(name: str, weight: Tensor, to: Quantization, shard: Shard) -> Codes:
    """Quantise a weight [outputs, inputs], and return the part ``shard`` of its codes.

    int8 and fp8 (e4m3) have a scale for each output, from its largest weight. int4 has a scale and a zero point for
    each group of inputs (``group_size``), from its smallest and largest weight and 0. All round to nearest even.
    ``name`` is for messages. Raises ConfigError.
    """
    codes = _to_int4(weight, group_size(name, weight.shape[1], shard)) if to == "int4" else _to_bytes(weight, to)
    return codes.shard(shard)


def group_size(name: str, inputs: int, shard: Shard) -> int:
    """Return the number of inputs that share a scale in int4: the first of ``GROUPS`` that divides the inputs of a
    weight and of each rank. Raises ConfigError if none does."""
    bounds = [inputs, *(bound for part in shard.get(1, ()) for bound in part)]
    size = next((size for size in GROUPS if all(bound % size == 0 for bound in bounds)), None)
    if size is None:
        among = f" at input {' and '.join(map(str, bounds[1:]))}, where ranks cut them," if len(bounds) > 1 else ""
        raise ConfigError(
            f"{name} has {inputs} inputs, which{among} cannot be divided into groups of "
            f"{', '.join(map(str, GROUPS))} for int4: give --quantization int8, or leave it out"
        )
    return size


def _to_bytes(weight: Tensor, to: Quantization) -> Codes:
    outputs, inputs = weight.shape
    place = weight.device
    most, kind = (127.0, torch.int8) if to == "int8" else (448.0, torch.float8_e4m3fn)
    scales = weight.abs().amax(1, keepdim=True).float().clamp_min(_LEAST_SCALE) / most
    values = torch.empty(outputs, inputs, dtype=kind, device=place)
    for part in _row_blocks(outputs, inputs):
        codes = weight[part].float() / scales[part]
        values[part] = (codes.round() if kind == torch.int8 else codes).to(kind)
    rows, columns = torch.arange(outputs, device=place), torch.zeros(inputs, dtype=torch.int64, device=place)
    return Codes(8, values, scales, None, rows, columns)


def _to_int4(weight: Tensor, group: int) -> Codes:
    outputs, inputs = weight.shape
    place = weight.device
    grouped = weight.reshape(outputs, -1, group)
    least, largest = grouped.amin(2).float().clamp_max(0), grouped.amax(2).float().clamp_min(0)
    scales = ((largest - least) / 15).clamp_min(_LEAST_SCALE)
    zeros = -least / scales
    values = torch.empty(outputs, inputs, dtype=torch.uint8, device=place)
    for part in _row_blocks(outputs, inputs):
        codes = grouped[part].float() / scales[part].unsqueeze(2) + zeros[part].unsqueeze(2)
        values[part] = codes.round().clamp(0, 15).to(torch.uint8).flatten(1)
    rows, columns = torch.arange(outputs, device=place), torch.arange(inputs, device=place) // group
    return Codes(4, values, scales, zeros, rows, columns)


_LEAST_SCALE = 1e-30  # scale of rows of zeros


def _row_blocks(outputs: int, inputs: int) -> list[slice]:
    step = max(1, _ELEMENTS_AT_ONCE // max(1, inputs))
    return [slice(start, start + step) for start in range(0, outputs, step)]


Arrange = Callable[[Callable[[str], Tensor]], Tensor]
"""Makes one tensor of tensors that it gets by name."""


def arranged(codes: Mapping[str, Codes], arrange: Arrange, shape: Sequence[int]) -> ExpertCodes | None:
    """Return the codes of weights [experts, outputs, inputs] that ``arrange`` makes of quantised matrices.

    That works if ``arrange`` only stacks matrices and joins their outputs, which moves scales as it moves codes.
    Returns None if it does more, or if the matrices of one expert have different groups of inputs.
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
    """Return ``Codes.columns`` of each expert; None if the matrices of one expert differ in that."""
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
"""Returns the checkpoint's tensor of this name."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Lists, for each code of an AWQ word from the lowest bits on, which of the word's eight outputs it belongs to."""


def read_codes(packed: Packed, read: Read) -> Codes:
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
    """Reshape scales to [R, C]: some writers leave out dimensions of size 1."""
    outputs, inputs = packed.shape
    return scales.reshape(-(-outputs // packed.block[0]), -(-inputs // packed.block[1]))


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 [..., W] to uint8 [..., n * W]. ``order``: places of a word's n codes, lowest bits first."""
    count = 32 // bits
    result = torch.empty(*words.shape[:-1], words.shape[-1] * count, dtype=torch.uint8, device=words.device)
    for number, place in enumerate(order or range(count)):
        result[..., place::count] = (words >> (bits * number)) & ((1 << bits) - 1)
    return result


def _read_gptq(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    words = read(packed.codes).T.contiguous()
    if packed.zeros is None:
        return _signed(words, packed.bits), None
    stored = _unpack(read(packed.zeros), packed.bits).T
    zeros = (stored.int() + packed.zero_offset) & ((1 << packed.bits) - 1)
    return _unpack(words, packed.bits), zeros


def _read_awq(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    assert packed.zeros is not None
    values, zeros = (_unpack(read(name), packed.bits, _AWQ_ORDER).T for name in (packed.codes, packed.zeros))
    return values.contiguous(), zeros


def _read_rows(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    """Read codes and zero points that are stored with an offset of half their range."""
    zeros = None if packed.zeros is None else read(packed.zeros)
    if zeros is not None and zeros.dtype == torch.int32:  # packed too, along the outputs
        zeros = _signed(zeros.T.contiguous(), packed.bits).T[: packed.shape[0]]
    return _signed(read(packed.codes), packed.bits), zeros


def _signed(words: Tensor, bits: int) -> Tensor:
    """Unpack codes that are stored with an offset of half their range to int8."""
    return (_unpack(words, bits).short() - (1 << (bits - 1))).to(torch.int8)


def _read_plain(packed: Packed, read: Read) -> tuple[Tensor, Tensor | None]:
    return read(packed.codes), None if packed.zeros is None else read(packed.zeros)


_LAYOUTS = {
    Layout.GPTQ: _read_gptq,
    Layout.AWQ: _read_awq,
    Layout.ROWS: _read_rows,
    Layout.PLAIN: _read_plain,
}
