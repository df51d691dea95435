"""Rows that lanes of a card send to memory workers, and replies that they merge."""

from typing import Any

import numpy as np
import torch

from lamina.compute.device.base import ExchangedRows
from lamina.compute.device.kit import ROWS, Kit
from lamina.compute.device.transfers import GpuTransfers, Lines
from lamina.core.types import AttentionSpec

SPEC = AttentionSpec(0, 4, 2, 6, 5, 0.3)


def draw_exchanged_rows(rng: np.random.Generator, total: int, rows: int, shards: int, workers: int) -> ExchangedRows:
    """Any shards to any workers, some to several and some to none; some attend here as well."""
    every = np.arange(total * shards)
    picked = [np.sort(rng.choice(every, rng.integers(0, len(every) + 1), replace=False)) for _ in range(workers + 1)]
    parts, so_far = [], np.zeros(len(every), np.int64)
    for chosen in picked:
        parts.append(so_far[chosen].copy())
        so_far[chosen] += 1
    appends = [rng.choice(every, rng.integers(0, 3)) for _ in range(workers)]
    return ExchangedRows(total, rows, shards, picked[1:], appends, parts[1:], picked[:1], parts[:1])


def reply(rng: np.random.Generator, count: int, shards: int) -> tuple[np.ndarray, np.ndarray, memoryview]:
    out = rng.standard_normal((count, SPEC.query_heads // shards, SPEC.v_dim)).astype(np.float32)
    lse = rng.standard_normal(out.shape[:2]).astype(np.float32) * 5
    return out, lse, memoryview(bytearray(out.tobytes() + lse.tobytes()))


def mapped(
    kit: Kit, rng: np.random.Generator, exchanged: ExchangedRows, sizes: list[int]
) -> tuple[list[Any], list[int]]:
    """Memory for the bodies of some messages, and its addresses. ``sizes``: bytes of a shard of q, k and v."""
    memories: list[Any] = []
    for appends, asked in zip(exchanged.appends, exchanged.queries, strict=True):
        nbytes = len(appends) * (sizes[1] + sizes[2]) + len(asked) * sizes[0]
        memories.append(kit.pinned((nbytes if rng.integers(0, 3) else 0,), torch.uint8).numpy())
    return [memory.data for memory in memories], [memory.ctypes.data if len(memory) else 0 for memory in memories]


def expected(exchanged: ExchangedRows, partials: list[tuple[Any, Any, Any]], sinks: np.ndarray | None) -> np.ndarray:
    heads = SPEC.query_heads // exchanged.shards
    shape = exchanged.rows * exchanged.shards, heads
    sums, outs = np.zeros(shape), np.zeros((*shape, SPEC.v_dim))
    for shards, out, lse in partials:
        for place, shard in enumerate(shards):
            weight = np.exp(lse[place].astype(np.float64))
            sums[shard] += weight
            outs[shard] += weight[:, None] * out[place]
    seen = sums > 0
    if sinks is not None:
        sums += np.exp(sinks.astype(np.float64)).reshape(exchanged.shards, heads)[
            np.arange(shape[0]) % exchanged.shards
        ]
    merged = np.where(seen[..., None], outs / np.where(sums > 0, sums, 1)[..., None], 0)
    return merged.reshape(exchanged.rows, SPEC.query_heads, SPEC.v_dim)


def check_lanes(
    kit: Kit, total: int, padding: int, shards: int, workers: int, is_recorded: bool, has_sinks: bool, seed: int
) -> None:
    """Two steps of one size share recordings and memory; each attention of theirs moves what it would alone."""
    rng, rows = np.random.default_rng(seed), total + padding
    lines = Lines(kit, ROWS[-1] if is_recorded else 0)
    steps = [draw_exchanged_rows(rng, total, rows, shards, workers) for _ in range(2)]
    transfers = [GpuTransfers(lines, exchanged, torch.float32) for exchanged in steps]
    heads = (SPEC.query_heads, SPEC.qk_dim), (SPEC.kv_heads, SPEC.qk_dim), (SPEC.kv_heads, SPEC.v_dim)
    fixed = [lines.fixed_rows(f"out {place}", rows, shape, torch.float32) for place, shape in enumerate(heads)]
    if not is_recorded:  # parts of one tensor, as models compute them
        sizes = [count * size for count, size in heads]
        parts = torch.empty(rows, sum(sizes), device=kit.place).split(sizes, 1)
        fixed = [part.view(rows, *shape) for part, shape in zip(parts, heads, strict=True)]
    for turn in range(4):
        exchanged, transfer = steps[turn % 2], transfers[turn % 2]
        for tensor in fixed:
            tensor.copy_(torch.from_numpy(rng.standard_normal(tensor.shape)))
        q, k, v = (each.cpu().numpy().reshape(rows * shards, -1, each.shape[2]).copy() for each in fixed)
        in_place: list[Any] = [b""] * workers
        if turn < 2:
            in_place, places = mapped(kit, rng, exchanged, [tensor[0].nbytes // shards for tensor in fixed])
            queries, keys, values = transfer.fill_messages(fixed[0], fixed[1], fixed[2], places)
        else:
            queries, keys, values = transfer.fill_messages(fixed[0], fixed[1], fixed[2])
        for got, source, groups in (
            (queries, q, exchanged.queries),
            (keys, k, exchanged.appends),
            (values, v, exchanged.appends),
        ):
            assert len(got) == len(groups)
            for message, shard_numbers, body in zip(got, groups, in_place, strict=True):
                if not body:
                    np.testing.assert_array_equal(message, source[shard_numbers])
        for appends, asked, body in zip(exchanged.appends, exchanged.queries, in_place, strict=True):
            if body:
                assert bytes(body) == k[appends].tobytes() + v[appends].tobytes() + q[asked].tobytes()
        replies = [reply(rng, len(shard_numbers), shards) for shard_numbers in exchanged.queries]
        out, lse, _ = reply(rng, len(exchanged.here[0]), shards)
        sinks = rng.standard_normal(SPEC.query_heads).astype(np.float32) if has_sinks else None
        here = [(torch.from_numpy(out).to(kit.place), torch.from_numpy(lse).to(kit.place))]
        bodies = [(-1, body) for _, _, body in replies]
        merged = transfer.merged(SPEC, here, bodies, sinks)
        partials = [(numbers, *each[:2]) for numbers, each in zip(exchanged.queries, replies, strict=True)]
        wanted = expected(exchanged, [*partials, (exchanged.here[0], out, lse)], sinks)
        np.testing.assert_allclose(merged.cpu().numpy(), wanted, atol=1e-5)
