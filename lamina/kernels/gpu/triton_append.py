"""Triton kernels that write to a memory worker's slab (rows of K and V) and to its page tables (changed words)."""

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
