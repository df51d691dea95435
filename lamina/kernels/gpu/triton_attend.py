"""Partial attention in Triton: split-KV flash-decoding over token-granular slots; all lengths are read on the GPU.

``plan`` cuts a step's work into items of about equal size. A pair is a sequence and one of its KV segments; an item is
a tile of a pair's packed query rows and a range of the segment's tokens, called a part.
``attend`` runs one program per KV head and item; ``combine`` merges split tiles, and ``merge`` the partials of several
memory workers. A tile packs the query heads of a GQA group: its row m is query head ``m % group`` of query row
``m // group``, so K and V are read once for the whole group.

A pair is PAIR_WORDS int32: first query row, query rows, position of the first query, position of the first token, first
word of its page table, tokens, row of k and v to append (or -1), 0.
"""

import triton
import triton.language as tl

PAIR_WORDS = tl.constexpr(8)
ITEM_WORDS = tl.constexpr(16)  # 7 words of the pair, tile, first token, last token + 1, the tile's parts
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# How KV is stored; ``specialize._element_code`` uses the same numbers.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
FP8_BY_BITS = tl.constexpr(3)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter runs no assembly


@triton.jit
def visible_range(first_query, last_query, kv_start, tokens, window, chunk):
    """Return the tokens [first, last) that queries at first_query to last_query attend to; may be empty."""
    lowest = kv_start
    if window > 0:
        lowest = tl.maximum(lowest, first_query - window + 1)
    if chunk > 0:
        lowest = tl.maximum(lowest, first_query // chunk * chunk)
    last = tl.maximum(tl.minimum(tokens, last_query + 1 - kv_start), 0)
    return tl.minimum(lowest - kv_start, last), last


@triton.jit
def plan(
    pairs, items, splits,
    pair_count, least_rows, most_rows, group, window, chunk, block_m, block_n, wanted_items, least_tokens,
    block_pairs: tl.constexpr,
):  # fmt: skip
    """Write the items of pairs with least_rows to most_rows query rows. One program per pair; each reads all pairs.

    Parts are the shortest, of at least ``least_tokens`` tokens, with which there are at most ``wanted_items`` items or
    half of them plus one per tile, whichever is more. Within a tile, parts are about equal. Pairs with longer parts
    come first, so that the programs started last end soon. splits int32 [3 * pair_count + 1]: first item, parts
    per tile and first query row of every pair, then the number of items.
    """
    me = tl.program_id(0)
    pair = tl.arange(0, block_pairs)
    there = pair < pair_count
    rows = tl.load(pairs + pair * PAIR_WORDS + 1, mask=there, other=0)
    start = tl.load(pairs + pair * PAIR_WORDS + 2, mask=there, other=0)
    kv_start = tl.load(pairs + pair * PAIR_WORDS + 3, mask=there, other=0)
    tokens = tl.load(pairs + pair * PAIR_WORDS + 5, mask=there, other=0)
    rows = tl.where((rows >= least_rows) & (rows <= most_rows), rows, 0)

    first, last = visible_range(start, start + rows - 1, kv_start, tokens, window, chunk)
    seen = last - first
    tiles = (rows * group + block_m - 1) // block_m
    most_items = tl.maximum(wanted_items, tl.sum(tiles) + wanted_items // 2)
    short, size = least_tokens - 1, tl.maximum(tl.max(seen), least_tokens)
    while size - short > 1:  # parts of `size` fit, or cannot be fewer, and parts of `short` are too many or too short
        middle = short + (size - short) // 2
        fits = tl.sum(tiles * tl.maximum((seen + middle - 1) // middle, 1)) <= most_items
        short, size = tl.where(fits, short, middle), tl.where(fits, middle, size)
    parts = tl.maximum((seen + size - 1) // size, 1)
    sizes = tl.maximum((seen + parts - 1) // parts, 1)
    sizes = (sizes + block_n - 1) // block_n * block_n
    parts = tl.maximum((seen + sizes - 1) // sizes, 1)
    counts = tl.where(tiles > 0, tiles * parts, 0)

    mine = pair == me
    my_size = tl.sum(tl.where(mine, sizes, 0))
    begin = tl.sum(tl.where((sizes > my_size) | ((sizes == my_size) & (pair < me)), counts, 0))
    my_count, my_parts = tl.sum(tl.where(mine, counts, 0)), tl.sum(tl.where(mine, parts, 0))
    my_first, my_last = tl.sum(tl.where(mine, first, 0)), tl.sum(tl.where(mine, last, 0))
    tl.store(splits + 3 * me, begin)
    tl.store(splits + 3 * me + 1, tl.where(my_count > 0, my_parts, 0))
    tl.store(splits + 3 * me + 2, tl.load(pairs + me * PAIR_WORDS))
    tl.store(splits + 3 * pair_count, tl.sum(counts))
    for done in range(0, my_count, 128):
        index = done + tl.arange(0, 128)
        tile, part = index // my_parts, index % my_parts
        item, mask = items + (begin + index) * ITEM_WORDS, index < my_count
        for word in tl.static_range(7):
            tl.store(item + word, tl.load(pairs + me * PAIR_WORDS + word), mask=mask)
        tl.store(item + 7, tile, mask=mask)
        tl.store(item + 8, my_first + part * my_size, mask=mask)
        tl.store(item + 9, tl.minimum(my_first + (part + 1) * my_size, my_last), mask=mask)
        tl.store(item + 10, my_parts, mask=mask)


@triton.jit
def widen(stored, to: tl.constexpr, element: tl.constexpr):
    """Return stored elements, without their scales, in type ``to`` for products. Exact for bfloat16 and float16."""
    if element == FP8:
        # Through float32: float16 to bfloat16 directly is a slow instruction per element, these two are fast.
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(to)
    elif element == FP8_BY_BITS:
        # e4m3's exponent counts from 7 and float16's from 15: shifted into place it is 2**8 too small. Codes 0x7f and
        # 0xff are NaN by the format and 480 here: append never writes them, nor does anything that rounds weights.
        code = stored.to(tl.uint16)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(to)
    else:
        return stored.to(to)


# PTX that converts two codes to bfloat16 at once: those in bytes 0 and 2 of $1 (LOW), or in bytes 1 and 3 (HIGH).
# int8: 128 plus the code's low 7 bits, less 128 or, for negative codes, 256. e4m3: its exponent counts from 7 and
# bfloat16's from 127, so it is 2**120 too small after its bits are shifted into place. Both are exact.
INT8_LOW = tl.constexpr("""{
    .reg .b32 a, b, c;
    lop3.b32 a, $1, 0x007f007f, 0x43004300, 0xEA;
    lop3.b32 b, $1, 0x00800080, 0x43004300, 0xEA;
    mov.b32 c, 0xBF80BF80;
    fma.rn.bf16x2 $0, b, c, a;
}""")
INT8_HIGH = tl.constexpr("""{
    .reg .b32 a, b, c;
    shr.u32 a, $1, 8;
    lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xEA;
    mov.b32 c, 0xBF80BF80;
    fma.rn.bf16x2 $0, b, c, a;
}""")
FP8_LOW = tl.constexpr("""{
    .reg .b32 a, b, c, z;
    shl.b32 a, $1, 4;
    and.b32 a, a, 0x07f007f0;
    shl.b32 b, $1, 8;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mov.b32 c, 0x7B807B80;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, a, c, z;
}""")
FP8_HIGH = tl.constexpr("""{
    .reg .b32 a, c, z;
    shr.u32 a, $1, 4;
    and.b32 a, a, 0x07f007f0;
    lop3.b32 a, $1, 0x80008000, a, 0xEA;
    mov.b32 c, 0x7B807B80;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, a, c, z;
}""")


@triton.jit
def widen_half(codes, second: tl.constexpr, element: tl.constexpr):
    """Return the first or the ``second`` code of the two that each int16 holds, without its scale, as bfloat16.

    Tensor cores take operands of 16 bits: single bytes would be loaded from shared memory one by one.
    """
    if INTERPRETED:
        code = (codes >> 8 if second else codes) & 0xFF
        return widen(code.to(tl.int8 if element == INT8 else tl.uint8), tl.bfloat16, element)
    elif element == INT8:
        return tl.inline_asm_elementwise(
            INT8_HIGH if second else INT8_LOW, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            FP8_HIGH if second else FP8_LOW, "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def quantize(row, element: tl.constexpr):
    """Return (codes, scale) of one float32 row: scale is its largest magnitude over the format's largest value.

    Rounds to nearest even. A row with NaN or an infinity gets NaN as its scale, so that the error is not hidden.
    """
    largest: tl.constexpr = 127.0 if element == INT8 else 448.0
    peak = tl.max(tl.abs(row), 0)
    scaled = row * tl.where(peak > 0, tl.div_rn(largest, tl.where(peak > 0, peak, 1.0)), 0.0)
    scale = tl.div_rn(peak, largest) + tl.sum(row * 0.0, 0)
    if element == INT8:
        # The clamp changes no value. It keeps the compiler from fusing the product above with the sum below, which
        # would round ties differently from a CPU. 12582912 is 1.5 * 2**23: adding it rounds to an integer.
        clamped = tl.minimum(tl.maximum(scaled, -largest), largest)
        codes = ((clamped + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        # With the exponent moved by 120 a float32 has e4m3's exponent field, denormals included.
        bits = (tl.abs(scaled) * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        codes = (bits | tl.where(scaled < 0, 0x80, 0).to(tl.uint32)).to(tl.uint8)
    return codes, scale


@triton.jit
def append_row(slab, scales, values, kept, write, element: tl.constexpr):
    """Write one float32 row to a slab at the given pointers, and return the values that a later read will give."""
    if element == PLAIN:
        stored = values.to(slab.dtype.element_ty)
        tl.store(slab, stored, mask=kept & write)
        return stored.to(tl.float32)
    else:
        codes, scale = quantize(values, element)
        tl.store(slab, codes, mask=kept & write)
        tl.store(scales, scale, mask=write)
        return widen(codes, tl.float32, element) * scale


@triton.jit
def shape_scores(scores, distance, slope, softcap, capped: tl.constexpr, alibi: tl.constexpr):
    """Apply softcap and ALiBi to scaled scores, and convert them to log2. ``distance``: key minus query position."""
    if capped:
        # tanh by exp: 1 - 2 / (exp(2x) + 1) needs no library and saturates on both sides.
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
    if alibi:
        scores += slope * distance
    return scores * LOG2_E


@triton.jit
def visible(position, key_position, window: tl.constexpr, chunk: tl.constexpr):
    """Return the mask of keys that the queries attend to, as defined in AttentionSpec."""
    seen = key_position <= position
    if window > 0:
        seen &= position - key_position < window
    if chunk > 0:
        seen &= key_position // chunk == position // chunk
    return seen


@triton.jit
def take_new_token(
    queries, tokens, new_row, head, tile, end, k, v, k_scales, v_scales, new_k, new_v, table, scale, softcap,
    kv_heads: tl.constexpr, qk_dim: tl.constexpr, v_dim: tl.constexpr, capped: tl.constexpr, element: tl.constexpr,
    block_m: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
):  # fmt: skip
    """Append a pair's last token, if the request carries it and this item covers it, and begin the softmax with it.

    Returns (top, total, acc, end) for the loop to continue from: the token is used from registers, so this kernel reads
    nothing that it writes. Only the pair's single query sees it, at distance 0.
    """
    new_row = tl.where(end == tokens, new_row, -1)
    fresh = new_row >= 0
    d, dv = tl.arange(0, block_d), tl.arange(0, block_dv)
    slot = tl.load(table + tokens - 1, mask=fresh, other=0).to(tl.int64) * kv_heads + head
    source = tl.where(fresh, new_row, 0).to(tl.int64) * kv_heads + head
    key = tl.load(new_k + source * qk_dim + d, mask=fresh & (d < qk_dim), other=0.0).to(tl.float32)
    value = tl.load(new_v + source * v_dim + dv, mask=fresh & (dv < v_dim), other=0.0).to(tl.float32)
    writes = tl.where(tile == 0, new_row, -1) >= 0
    key = append_row(k + slot * qk_dim + d, k_scales + slot, key, d < qk_dim, writes, element)
    value = append_row(v + slot * v_dim + dv, v_scales + slot, value, dv < v_dim, writes, element)
    scores = tl.sum(queries.to(tl.float32) * key[None, :], 1) * scale
    top = tl.where(fresh, shape_scores(scores, 0, 0.0, softcap, capped, False), float("-inf"))
    total = tl.zeros([block_m], tl.float32) + tl.where(fresh, 1.0, 0.0)
    acc = tl.zeros([block_m, block_dv], tl.float32) + tl.where(fresh, value, 0.0)[None, :]
    return top, total, acc, tl.where(fresh, end - 1, end)


@triton.jit
def store_result(out, lse, row, top, total, acc, alive, v_dim: tl.constexpr, block_dv: tl.constexpr):
    """Divide by the softmax's denominator and write a tile; 0 and -inf for rows that attend to no token."""
    dv = tl.arange(0, block_dv)
    tl.store(lse + row, tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2), mask=alive)
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + row[:, None] * v_dim + dv[None, :], result, mask=alive[:, None] & (dv < v_dim)[None, :])


@triton.jit
def load_rows(head, slot, there, stride, width: tl.constexpr, block: tl.constexpr):
    """Return the rows of one KV head in the given slots, [slots, block]; 0 beyond ``width`` and where none is there."""
    d = tl.arange(0, block)
    return tl.load(head + slot[:, None] * stride + d[None, :], mask=there[:, None] & (d < width)[None, :], other=0)


@triton.jit
def attend(  # noqa: PLR0912, PLR0915
    q, k, v, k_scales, v_scales, new_k, new_v, slopes,
    tables, items, splits, order, out, lse, part_out, part_lse,
    pair_count, scale, softcap,
    kv_heads: tl.constexpr, group: tl.constexpr, qk_dim: tl.constexpr, v_dim: tl.constexpr,
    window: tl.constexpr, chunk: tl.constexpr, capped: tl.constexpr, alibi: tl.constexpr,
    element: tl.constexpr, by_twos: tl.constexpr, appends: tl.constexpr, joins: tl.constexpr,
    product: tl.constexpr, value_product: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
):  # fmt: skip
    """Attend to one KV head of one item. Grid (kv_heads * items or more): programs without an item end at once.

    Shapes: q [R, Hq, D]; k [slots, Hkv, D] and v [slots, Hkv, Dv] with scales float32 [slots, Hkv] if quantised; new_k
    and new_v [new rows, Hkv, ...]; tables int32; slopes float32 [Hq]; out float32 [R, Hq, Dv] and lse float32 [R, Hq]
    for tiles in one part; else part_out float32 [items, Hkv, block_m, Dv] and part_lse. With ``joins``, the pairs'
    query row i is row ``order[i]`` of q, and every tile is written to part_out, which ``combine`` merges into out.
    With ``by_twos``, codes are read two at a time, and the even and the odd dimensions are multiplied apart.
    """
    head, item = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads  # the other axes have 65,535 at most
    # K and V depend on two earlier reads of memory: one line with the item, together with the count; then the slots.
    count, word = tl.load(splits + 3 * pair_count), items + item * ITEM_WORDS
    first_row, rows, query_start, kv_start = tl.load(word), tl.load(word + 1), tl.load(word + 2), tl.load(word + 3)
    table, tokens, new_row = tables + tl.load(word + 4), tl.load(word + 5), tl.load(word + 6)
    tile, begin, end, parts = tl.load(word + 7), tl.load(word + 8), tl.load(word + 9), tl.load(word + 10)
    if item >= count:
        return
    m = tile * block_m + tl.arange(0, block_m)
    row, query_head = m // group, head * group + m % group
    alive, position = row < rows, query_start + row
    last_row = tl.minimum(((tile + 1) * block_m - 1) // group, rows - 1)
    first, last = visible_range(
        query_start + tile * block_m // group, query_start + last_row, kv_start, tokens, window, chunk
    )
    begin, end = tl.maximum(begin, first), tl.minimum(end, last)

    d = tl.arange(0, block_d)
    given = tl.load(order + first_row + row, mask=alive, other=0) if joins else first_row + row
    q_row, q_kept = given.to(tl.int64) * (kv_heads * group) + query_head, alive[:, None] & (d < qk_dim)[None, :]
    queries = tl.load(q + q_row[:, None] * qk_dim + d[None, :], mask=q_kept, other=0.0).to(product)
    slope = tl.load(slopes + query_head, mask=alive, other=0.0)[:, None] if alibi else 0.0
    if appends:
        top, total, acc, end = take_new_token(
            queries, tokens, new_row, head, tile, end, k, v, k_scales, v_scales, new_k, new_v, table, scale, softcap,
            kv_heads, qk_dim, v_dim, capped, element, block_m, block_d, block_dv,
        )  # fmt: skip
    else:
        top = tl.full([block_m], float("-inf"), tl.float32)
        total = tl.zeros([block_m], tl.float32)
        acc = tl.zeros([block_m, block_dv], tl.float32)

    head_k, head_v = k + head * qk_dim, v + head * v_dim
    if by_twos:
        first_queries, second_queries = tl.split(tl.reshape(queries, [block_m, block_d // 2, 2]))
        first_acc, second_acc = tl.split(tl.reshape(acc, [block_m, block_dv // 2, 2]))
        head_k2 = head_k.to(tl.pointer_type(tl.int16), bitcast=True)
        head_v2 = head_v.to(tl.pointer_type(tl.int16), bitcast=True)
    for at in range(begin, end, block_n):
        n = at + tl.arange(0, block_n)
        there = n < end
        slot = tl.load(table + n, mask=there, other=0).to(tl.int64)
        if by_twos:
            keys = load_rows(head_k2, slot, there, kv_heads * qk_dim // 2, qk_dim // 2, block_d // 2)
            scores = tl.dot(first_queries, tl.trans(widen_half(keys, False, element)))
            scores = tl.dot(second_queries, tl.trans(widen_half(keys, True, element)), scores) * scale
        else:
            keys = load_rows(head_k, slot, there, kv_heads * qk_dim, qk_dim, block_d)
            scores = tl.dot(queries, tl.trans(widen(keys, product, element)), input_precision="ieee") * scale
        if element != PLAIN:
            scores *= tl.load(k_scales + slot * kv_heads + head, mask=there, other=0.0)[None, :]
        key_position = (kv_start + n)[None, :]
        scores = shape_scores(scores, key_position - position[:, None], slope, softcap, capped, alibi)
        seen = there[None, :] & visible(position[:, None], key_position, window, chunk)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row without visible tokens so far
        weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        if element != PLAIN:
            weights *= tl.load(v_scales + slot * kv_heads + head, mask=there, other=0.0)[None, :]
        if by_twos:
            values = load_rows(head_v2, slot, there, kv_heads * v_dim // 2, v_dim // 2, block_dv // 2)
            weights = weights.to(value_product)
            first_acc = tl.dot(weights, widen_half(values, False, element), first_acc * shrink[:, None])
            second_acc = tl.dot(weights, widen_half(values, True, element), second_acc * shrink[:, None])
        else:
            values = load_rows(head_v, slot, there, kv_heads * v_dim, v_dim, block_dv)
            acc = acc * shrink[:, None] + tl.dot(
                weights.to(value_product), widen(values, value_product, element), input_precision="ieee"
            )
        top = new_top

    if by_twos:
        acc = tl.interleave(first_acc, second_acc)
    if joins or parts > 1:
        part_row = (item.to(tl.int64) * kv_heads + head) * block_m + tl.arange(0, block_m)
        store_result(part_out, part_lse, part_row, top, total, acc, alive, v_dim, block_dv)
    else:
        store_result(out, lse, q_row, top, total, acc, alive, v_dim, block_dv)


@triton.jit
def merge_rows(outs, lses, stride, count, v_dim: tl.constexpr, block_dv: tl.constexpr, block_parts: tl.constexpr):
    """Return (weighted sum of out [block_dv], sum of weights, largest lse) of ``count`` partials of one row and head.

    Partial i has its lse at ``lses + i * stride`` and its out at ``outs + i * stride * v_dim``. Weights are relative to
    the largest lse. A partial with lse -inf does not contribute, whatever its out holds.
    """
    part, dv = tl.arange(0, block_parts), tl.arange(0, block_dv)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([block_dv], tl.float32)
    for done in range(0, count, block_parts):
        row = (done + part).to(tl.int64) * stride
        there = done + part < count
        part_lse = tl.load(lses + row, mask=there, other=float("-inf"))
        kept = part_lse != float("-inf")
        # Masked afterwards, so that the load does not wait for the lses.
        values = tl.load(
            outs + row[:, None] * v_dim + dv[None, :], mask=there[:, None] & (dv < v_dim)[None, :], other=0.0
        )
        values = tl.where(kept[:, None], values, 0.0)
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(part_lse - base)
        shrink = tl.exp(top - base)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    return acc, total, top


@triton.jit
def combine(
    part_out, part_lse, row_pairs, order, splits, out, lse,
    kv_heads: tl.constexpr, group: tl.constexpr, v_dim: tl.constexpr, joins: tl.constexpr,
    block_m: tl.constexpr, block_dv: tl.constexpr, block_parts: tl.constexpr,
):  # fmt: skip
    """Merge the parts that ``attend`` wrote for one query row and head. Grid (query rows, Hq).

    row_pairs int32 [R]: the pair of each query row, or -1 for padding, which gets 0 and -inf. Rows of tiles with one
    part are not changed. With ``joins``, row i is row ``order[i]`` of out and lse, and its present value there is
    merged as one more partial.
    """
    row, query_head = tl.program_id(0), tl.program_id(1)
    pair = tl.load(row_pairs + row)
    if pair < 0:
        if not joins:
            empty, d = row.to(tl.int64) * (kv_heads * group) + query_head, tl.arange(0, block_dv)
            tl.store(lse + empty, float("-inf"))
            tl.store(out + empty * v_dim + d, tl.zeros([block_dv], tl.float32), mask=d < v_dim)
        return
    begin, parts, first_row = tl.load(splits + 3 * pair), tl.load(splits + 3 * pair + 1), tl.load(splits + 3 * pair + 2)
    if parts <= 1 - joins:
        return
    m = (row - first_row) * group + query_head % group
    item = begin + m // block_m * parts
    first = (item.to(tl.int64) * kv_heads + query_head // group) * block_m + m % block_m
    stride: tl.constexpr = kv_heads * block_m
    acc, total, top = merge_rows(
        part_out + first * v_dim, part_lse + first, stride, parts, v_dim, block_dv, block_parts
    )
    given = tl.load(order + row) if joins else row
    dv, at = tl.arange(0, block_dv), given.to(tl.int64) * (kv_heads * group) + query_head
    if joins:
        held_top, held = tl.load(lse + at), tl.load(out + at * v_dim + dv, mask=dv < v_dim, other=0.0)
        new_top = tl.maximum(top, held_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, shrink = tl.exp(held_top - base), tl.exp(top - base)
        acc, total, top = acc * shrink + held * weight, total * shrink + weight, new_top
    tl.store(lse + at, tl.where(total == 0, float("-inf"), top + tl.log(total)))
    tl.store(out + at * v_dim + dv, acc / tl.where(total == 0, 1.0, total), mask=dv < v_dim)


@triton.jit
def merge(
    outs, lses, sinks, out, lse, count, rows,
    query_heads: tl.constexpr, v_dim: tl.constexpr, has_sinks: tl.constexpr,
    block_dv: tl.constexpr, block_parts: tl.constexpr,
):  # fmt: skip
    """Merge ``count`` partials: outs [count, rows, Hq, Dv], lses [count, rows, Hq]. Grid (rows, Hq).

    sinks float32 [Hq]: one more logit per head in the softmax's denominator.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    at = row.to(tl.int64) * query_heads + head
    stride = rows.to(tl.int64) * query_heads
    acc, total, top = merge_rows(outs + at * v_dim, lses + at, stride, count, v_dim, block_dv, block_parts)
    if has_sinks:
        sink = tl.load(sinks + head)
        new_top = tl.maximum(top, sink)
        shrink = tl.exp(top - new_top)
        acc, total, top = acc * shrink, total * shrink + tl.exp(sink - new_top), new_top
    dv = tl.arange(0, block_dv)
    tl.store(lse + at, tl.where(total == 0, float("-inf"), top + tl.log(total)))
    tl.store(out + at * v_dim + dv, acc / tl.where(total == 0, 1.0, total), mask=dv < v_dim)
