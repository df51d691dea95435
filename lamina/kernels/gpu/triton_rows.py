"""Triton kernels over rows: they write slabs, page tables and messages, and draw tokens from rows of logits."""

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
    """Writes rows of ``unit`` elements as ``compute.device.kit.Kit.write_rows`` says, with ``lead`` in elements.

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


@triton.jit
def draw(
    logits, stride, places, highest, least, temperature, keys, tokens, width, block: tl.constexpr
):  # fmt: skip
    """Draws as ``native/include/lamina/elementwise.h`` says of ``Draw``, in float32. Grid (rows,).

    Noise equals that of the CPU to 2e-6.
    """
    row = tl.program_id(0)
    source = logits + tl.load(places + row) * stride
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    peak, floor, scale = tl.load(highest + row), tl.load(least + row), tl.load(temperature + row)
    lanes = tl.arange(0, block)
    best = tl.full([block], float("-inf"), tl.float32)
    found = tl.zeros([block], tl.int32)
    for start in range(0, width, block):
        token = start + lanes
        logit = tl.load(source + token, mask=token < width, other=float("-inf")).to(tl.float32)
        z = key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        h = (z ^ (z >> 31)) >> 32
        u = (h.to(tl.float32) + 0.5) * 2.0**-32
        rest = ((0xFFFFFFFF - h).to(tl.float32) + 0.5) * 2.0**-32  # 1 - u
        # -log(1 - u), by its series where 1 - u has lost most digits of u.
        waiting = tl.where(u < 0.03125, u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25))), -tl.log(rest))
        score = (logit - peak) / scale - tl.log(waiting)
        better = (logit >= floor) & (score > best)
        best = tl.where(better, score, best)
        found = tl.where(better, token, found)
    winner = tl.min(tl.where(best == tl.max(best, 0), found, width), 0)
    tl.store(tokens + row, winner.to(tl.int64))
