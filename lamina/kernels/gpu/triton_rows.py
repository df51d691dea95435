"""Triton kernels that write rows: into slabs, page tables and messages."""

import triton
import triton.language as tl

from lamina.kernels.gpu.triton_attend import append_row


@triton.jit
def append(
    k, v, k_scales, v_scales, new_k, new_v, slots,
    kv_heads: tl.constexpr, qk_dim: tl.constexpr, v_dim: tl.constexpr, element: tl.constexpr,
    block_d: tl.constexpr, block_dv: tl.constexpr,
):  # fmt: skip
    """Writes token t's row of KV head h to slot ``slots[t]``; -1: not written. Grid (tokens, kv_heads).

    Shapes as in ``attend``: new_k [tokens, Hkv, D], new_v [tokens, Hkv, Dv].
    """
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    d, dv = tl.arange(0, block_d), tl.arange(0, block_dv)
    source, target = token.to(tl.int64) * kv_heads + head, slot * kv_heads + head
    row = tl.load(new_k + source * qk_dim + d, mask=d < qk_dim, other=0.0).to(tl.float32)
    append_row(k + target * qk_dim + d, k_scales + target, row, d < qk_dim, True, element)
    row = tl.load(new_v + source * v_dim + dv, mask=dv < v_dim, other=0.0).to(tl.float32)
    append_row(v + target * v_dim + dv, v_scales + target, row, dv < v_dim, True, element)


@triton.jit
def write_words(words, changes, count, block: tl.constexpr):
    """Sets words[changes[0, i]] = changes[1, i] for i < count; changes int32 [2, count]. Grid (count / block)."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    there = index < count
    place = tl.load(changes + index, mask=there, other=0)
    tl.store(words + place, tl.load(changes + count + index, mask=there, other=0), mask=there)


@triton.jit
def write_rows(
    source, table, bodies, count, unit: tl.constexpr, lead: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Writes rows of ``unit`` elements as ``compute.device.kit.Kit.write`` says, with ``lead`` in elements.

    ``aligned``: everything in a message begins at a multiple of 16 bytes. Grid (``count``, blocks of a row).
    """
    column = tl.program_id(0)
    message = tl.load(table + count + column)
    if message < 0:
        return
    row, place = tl.load(table + column).to(tl.int64), tl.load(table + 2 * count + column).to(tl.int64)
    before = tl.load(table + 3 * count + column).to(tl.int64)
    # The host has written it since the last launch.
    body = tl.load(bodies + message, volatile=True).to(tl.pointer_type(source.dtype.element_ty))
    if aligned:
        body = tl.multiple_of(body, 16)
    elements = tl.program_id(1) * block + tl.arange(0, block)
    there = elements < unit
    values = tl.load(source + row * unit + elements, mask=there)
    tl.store(body + before * lead + place * unit + elements, values, mask=there)
