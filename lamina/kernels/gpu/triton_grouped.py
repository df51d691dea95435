"""Triton kernel that multiplies rows, sorted by expert, by the weights of their experts.

Only the device knows how many rows each expert has. So the grid has a program for every tile that may be needed, and
programs beyond the last tile end at once.
"""

import triton
import triton.language as tl

from lamina.kernels.gpu.triton_attend import widen


@triton.jit
def multiply(
    x, weight, scales, zeros, ends, out, experts,
    inputs: tl.constexpr, outputs: tl.constexpr, inner: tl.constexpr,
    bits: tl.constexpr, element: tl.constexpr, group: tl.constexpr, in_groups: tl.constexpr, shifted: tl.constexpr,
    block_e: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Write to out [rows, outputs]: rows of x [rows, inputs] times the weights of their experts, summed in float32.

    ``ends`` int32 [experts] has the row after each expert's last one. Grid (tiles, blocks of outputs).

    ``weight`` has the weights of all ``experts``, stored as ``bits`` says:

    * 0: elements like those of x; [inputs, outputs] of each expert, or [outputs, inputs] if ``inner``.
    * 8: int8 or, as ``element`` says, fp8 as bytes; [outputs, inputs].
    * 4: two codes in a byte, [outputs, inputs / 2]; a group's bytes have its first half of inputs in their low halves.

    Codes have ``scales`` float32 [outputs, inputs / group]. With ``in_groups``, each group is multiplied on its own,
    and ``zeros`` of the same shape are subtracted if ``shifted``. Otherwise all inputs are one group.
    """
    tile = tl.program_id(0)
    each = tl.arange(0, block_e)
    stops = tl.load(ends + each, mask=each < experts, other=0)
    starts = tl.load(ends + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = (stops - starts + block_m - 1) // block_m
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)  # all before it have their tiles
    if expert >= experts:
        return
    before = tl.sum(tl.where(each < expert, tiles, 0), 0)
    stop = tl.sum(tl.where(each == expert, stops, 0), 0)
    first = tl.sum(tl.where(each == expert, starts, 0), 0) + (tile - before) * block_m
    row = first + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    at = expert.to(tl.int64) * outputs
    acc = tl.zeros([block_m, block_n], tl.float32)
    if in_groups:
        for number in range(0, inputs // group):
            part, total = _of_group(x, row, stop, weight, at + n, n < outputs, number, inputs, bits, element, group)
            of_group = (at + n) * (inputs // group) + number
            scale = tl.load(scales + of_group, mask=n < outputs, other=0.0)
            if shifted:
                part -= total[:, None] * tl.load(zeros + of_group, mask=n < outputs, other=0.0)[None, :]
            acc += part * scale[None, :]
    else:
        for start in range(0, inputs, block_k):
            k = start + tl.arange(0, block_k)
            there = (k < inputs)[:, None] & (n < outputs)[None, :]
            if inner:
                places = (at + n)[None, :] * inputs + k[:, None]
            else:
                places = at * inputs + k[:, None].to(tl.int64) * outputs + n[None, :]
            values = tl.load(weight + places, mask=there, other=0)
            values = widen(values, x.dtype.element_ty, element)
            acc = tl.dot(_rows(x, row, stop, k, inputs), values, acc, input_precision="ieee")
        if bits == 8:
            acc *= tl.load(scales + at + n, mask=n < outputs, other=0.0)[None, :]
    target = out + row[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(row < stop)[:, None] & (n < outputs)[None, :])


@triton.jit
def _of_group(
    x, row, stop, weight, output, there, number,
    inputs: tl.constexpr, bits: tl.constexpr, element: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Return rows of x times the codes of group ``number``, without zeros and scales, and sums of x over its inputs."""
    if bits == 4:
        half: tl.constexpr = group // 2
        k = tl.arange(0, half)
        low_x = _rows(x, row, stop, number * group + k, inputs)
        high_x = _rows(x, row, stop, number * group + half + k, inputs)
        places = output[None, :] * (inputs // 2) + (number * half + k)[:, None]
        codes = tl.load(weight + places, mask=there[None, :], other=0)
        part = tl.dot(low_x, (codes & 15).to(x.dtype.element_ty), input_precision="ieee")
        part = tl.dot(high_x, (codes >> 4).to(x.dtype.element_ty), part, input_precision="ieee")
        return part, tl.sum(low_x.to(tl.float32), 1) + tl.sum(high_x.to(tl.float32), 1)
    else:
        k = number * group + tl.arange(0, group)
        own_x = _rows(x, row, stop, k, inputs)
        codes = tl.load(weight + output[None, :] * inputs + k[:, None], mask=there[None, :], other=0)
        part = tl.dot(own_x, widen(codes, x.dtype.element_ty, element), input_precision="ieee")
        return part, tl.sum(own_x.to(tl.float32), 1)


@triton.jit
def _rows(x, row, stop, k, inputs: tl.constexpr):
    """Return elements ``k`` of rows ``row`` of x, 0 from row ``stop`` on."""
    places = row[:, None].to(tl.int64) * inputs + k[None, :]
    return tl.load(x + places, mask=(row < stop)[:, None] & (k < inputs)[None, :], other=0.0)
