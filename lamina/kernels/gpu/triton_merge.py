"""Merges partials in Triton: the parts of one attention, and the partials of several memory workers."""

import triton
import triton.language as tl


@triton.jit
def merge_rows(outs, lses, stride, count, v_dim: tl.constexpr, block_dv: tl.constexpr, block_parts: tl.constexpr):
    """(weighted sum of out [block_dv], sum of weights, largest lse) of ``count`` partials of one row and head.

    Partial i has its lse at ``lses + i * stride`` and its out at ``outs + i * stride * v_dim``. Weights are relative to
    the largest lse. A partial whose lse is -inf is neutral whatever its out holds.
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
    """Merges the parts that ``attend`` wrote for one query row and head. Grid (query rows, Hq).

    row_pairs int32 [R]: the pair of each query row, or -1. Rows whose tiles were not cut are left alone. If it
    ``joins``, row i is row ``order[i]`` of out and lse, and what these hold is one more partial of it.
    """
    row, query_head = tl.program_id(0), tl.program_id(1)
    pair = tl.load(row_pairs + row)
    if pair < 0:
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
    """Merges ``count`` partials: outs [count, rows, Hq, Dv], lses [count, rows, Hq]. Grid (rows, Hq).

    sinks float32 [Hq]: one more logit per head in the denominator.
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
