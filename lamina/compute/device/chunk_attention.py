"""Computes attention of prompt chunks to themselves with torch, on any device.

A chunk without window, softcap or slopes uses torch's fused kernel if the device has one that returns the log-sum-exp;
other chunks are computed block by block, so that the scores of a long chunk need little memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.core.types import AttentionSpec
from lamina.kernels.segments import SegmentTable

Fused = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor] | None]
"""Causal attention of q, k, v [1, H, T, D], scaled: (out [1, H, T, D], natural-log lse float32 [1, H, T]); None if no
kernel takes this element type."""

MOST_SCORES = 1 << 26  # float32 of a block: 256 MiB


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, first_rows: list[int], table: SegmentTable, spec: AttentionSpec, fused: Fused
) -> tuple[Tensor, Tensor]:
    """Return causal attention of each pair's rows to themselves: out float32 [R, Hq, Dv] and lse float32 [R, Hq].

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]; pair i begins at row ``first_rows[i]``, its length is in ``table``.
    """
    counts = (table.query_offsets[1:] - table.query_offsets[:-1]).tolist()
    parts = []
    for row, count, start in zip(first_rows, counts, table.query_start.tolist(), strict=True):
        rows = slice(row, row + count)
        parts.append(_attend(q[rows], k[rows], v[rows], start, spec, fused))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _fits_fused(spec: AttentionSpec, rows: int, start: int) -> bool:
    """Return whether torch's fused causal kernels can compute a chunk's attention."""
    plain = not spec.softcap and spec.alibi_slopes is None and (spec.window == 0 or spec.window >= rows)
    in_one = spec.chunk == 0 or start // spec.chunk == (start + rows - 1) // spec.chunk
    heads = spec.qk_dim == spec.v_dim and spec.qk_dim <= 256 and spec.qk_dim % 8 == 0
    return plain and in_one and heads


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, spec: AttentionSpec, fused: Fused) -> tuple[Tensor, Tensor]:
    group = spec.query_heads // spec.kv_heads
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))  # heads first
    k, v = (each.repeat_interleave(group, 0) for each in (k, v))
    found = fused(q[None], k[None], v[None], spec.scale) if _fits_fused(spec, q.shape[1], start) else None
    if found is not None:
        out, lse = found
        return out[0].transpose(0, 1).float(), lse[0].transpose(0, 1)
    return _blocks(q, k.float(), v.float(), start, spec)


def _blocks(q: Tensor, k: Tensor, v: Tensor, start: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return attention of q [Hq, T, D] over k [Hq, T, D] and v [Hq, T, Dv]: out [T, Hq, Dv] and lse [T, Hq]."""
    tokens = q.shape[1]
    block = max(16, MOST_SCORES // (spec.query_heads * tokens))
    positions = torch.arange(start, start + tokens, device=q.device)
    slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=q.device)[:, None, None]
    outs, lses = [], []
    for first in range(0, tokens, block):
        last = min(first + block, tokens)
        seen = slice(0, last)
        scores = (q[:, first:last].float() @ k[:, seen].transpose(1, 2)) * spec.scale
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        distance = positions[first:last, None] - positions[None, seen]
        if slopes is not None:
            scores -= slopes * distance
        visible = distance >= 0
        if spec.window:
            visible &= distance < spec.window
        if spec.chunk:
            visible &= positions[first:last, None] // spec.chunk == positions[None, seen] // spec.chunk
        scores.masked_fill_(~visible, -torch.inf)  # every row sees itself
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp_() @ v[:, seen])
        lses.append(lse)
    return torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1).transpose(0, 1)
