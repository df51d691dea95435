"""Benchmarks of attention, its tilings, and merging on a GPU. Every function returns the rows of one table."""

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import cupy
import numpy as np
from rich.progress import track

from bench.gpu import peers
from bench.gpu.step import BATCHES, CYCLED_BYTES, GROUPS, HEAD_DIM, Gpu, Step, bfloat16
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu import measure_tilings
from lamina.kernels.gpu.attention import merge as merge_partials
from lamina.kernels.gpu.specialize import attend_program
from lamina.kernels.gpu.tilings import Choices, default
from lamina.kernels.gpu.triton_compile import compile_program
from lamina.memory.device.base import Pairs
from lamina.memory.device.gpu import Gpu as MemoryGpu

MERGED = 8
NARROW = (KvElement.INT8, KvElement.FP8)


def compile_ahead(cases: list[tuple[AttentionSpec, KvElement]], capability: int) -> None:
    """Compile all tilings that ``tune`` tries, on all cores."""
    kinds: list[tuple[bool, type[np.uint16] | None, bool]] = [(False, np.uint16, False)]  # decode steps also append
    kinds += [(prompt, None, joins) for prompt, joins in product((False, True), repeat=2)]
    programs = {
        attend_program(
            spec, element, tiling, measure_tilings.tile(spec, element, prompt), np.uint16, capability, new, joins
        )
        for spec, element in cases
        for prompt, new, joins in kinds
        for tiling in measure_tilings.candidates(element, prompt, measure_tilings.tile(spec, element, prompt))
    }
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        list(pool.map(compile_program, programs, [capability] * len(programs)))


def tune(gpu: Gpu) -> list[dict[str, Any]]:
    """Measure tilings for every class of step, and cache the fastest for this and later processes."""
    backend, choices, rows = gpu.backend, Choices.load(gpu.backend.name), []
    specs = [Step(backend, [1], group, KvElement.BFLOAT16, False).spec for group in GROUPS]
    cases = list(product(specs, (KvElement.BFLOAT16, *NARROW)))
    compile_ahead(cases, backend.capability)
    for spec, element in track(cases, "tuning", transient=True):
        measured = measure_tilings.times(backend, spec, element, np.uint16, measure_tilings.shapes_of(spec, element))
        choices.merge_measured({str(shape): measure_tilings.fastest(seconds) for shape, seconds in measured.items()})
        for shape, seconds in measured.items():
            block_m = measure_tilings.tile(spec, element, shape.prompt)
            best, usual = measure_tilings.fastest(seconds), default(shape, block_m, backend.capability)
            ratio = seconds.get(usual, float("nan")) / seconds[best]
            rows.append({"shape": str(shape), "best": str(best), "default over best": ratio})
    return rows


def attention(gpu: Gpu) -> list[dict[str, Any]]:
    """KV bytes per second of decode attention, and their ratio to those of a plain copy."""
    rows = []
    cases = list(product(BATCHES, GROUPS, (False, True), (KvElement.BFLOAT16, *NARROW)))
    for batch, group, scattered, element in track(cases, "attention", transient=True):
        step = Step(gpu.backend, BATCHES[batch], group, element, scattered)
        copy_rate, seconds = gpu.copy_rate(), gpu.layer_seconds(step)
        row = {"batch": batch, "group": group, "slots": "anywhere" if scattered else "in order"}
        row |= {"element": element.name.lower(), "us": seconds * 1e6, "kv_tb_per_s": step.kv_bytes / seconds / 1e12}
        rows.append(row | {"copy_tb_per_s": copy_rate / 1e12, "over_copy": step.kv_bytes / seconds / copy_rate})
    return rows


def peer(gpu: Gpu, name: str) -> list[dict[str, Any]]:
    """Time of another library for the same decode steps over ours. Steps that it cannot do have no rows."""
    rows = []
    for batch, group, scattered in product(BATCHES, GROUPS, (False, True)):
        step = Step(gpu.backend, BATCHES[batch], group, KvElement.BFLOAT16, scattered)
        other = peers.seconds(name, step, gpu.seconds)
        if other is not None:
            ours = gpu.layer_seconds(step)
            row = {"batch": batch, "group": group, "slots": "anywhere" if scattered else "in order"}
            rows.append(row | {"us": ours * 1e6, f"{name}_us": other * 1e6, "theirs_over_ours": other / ours})
    return rows


def cascade(gpu: Gpu) -> list[dict[str, Any]]:
    """Decode attention of sequences that share a prefix: each reads it, over reading it once for all."""
    rows, own, spec = [], 256, Step(gpu.backend, [1], 4, KvElement.BFLOAT16, False).spec
    for count, shared in track(list(product((4, 16, 64), (1024, 8192, 32768))), "cascade", transient=True):
        row: dict[str, Any] = {"sequences": count, "shared_tokens": shared, "own_tokens": own}
        for way, least in ("apart", 1 << 62), ("once", 0):
            row[f"{way}_us"] = 1e6 * _shared_seconds(gpu, spec, (count, shared, own), least)
        rows.append(row | {"apart_over_once": row["apart_us"] / row["once_us"]})
    return rows


def _shared_seconds(gpu: Gpu, spec: AttentionSpec, step: tuple[int, int, int], least: int) -> float:
    """Return seconds of one layer of a memory worker's attention.

    ``step``: number of sequences, tokens of their shared prefix, further tokens of each.
    """
    (count, shared, own), rng = step, np.random.default_rng(0)
    tokens = shared + count * own
    layers = -(-CYCLED_BYTES // (tokens * spec.slab_bytes_per_token(KvElement.BFLOAT16)))
    device = MemoryGpu(gpu.backend, [spec] * layers, KvElement.BFLOAT16, tokens, least_saved=least)
    some, slots = bfloat16(rng, (1024, spec.kv_heads, HEAD_DIM)), np.arange(tokens, dtype=np.int32)
    for layer, first in product(range(layers), range(0, tokens, len(some))):
        there = cupy.asarray(slots[first : first + len(some)])
        device.keep(layer, some[: len(there)], some[: len(there)], there)
    pages = [np.concatenate([slots[:shared], part]) for part in np.split(slots[shared:], count)]
    last, starts = [shared + own - 1] * count, [0] * count
    table = device.table(
        Pairs([1] * count, last, starts, range(count), starts, [shared + own] * count), lambda key: pages[key]
    )
    q = bfloat16(rng, (count, spec.query_heads, HEAD_DIM))
    out, lse = device.device_results(count, spec)

    def call() -> None:
        for layer in range(layers):
            device.launch(layer, table, q, out, lse, spec, None)

    return gpu.seconds(gpu.captured(call)) / layers


def merge(gpu: Gpu) -> list[dict[str, Any]]:
    """Time to merge 8 partials, as a share of one of the attentions that make them, and of all 8."""
    rows = []
    for batch, group in product(BATCHES, GROUPS):
        step = Step(gpu.backend, BATCHES[batch], group, KvElement.BFLOAT16, False)
        shape = (MERGED, *step.lse.shape)
        outs, lses = cupy.ones((*shape, HEAD_DIM), np.float32), cupy.zeros(shape, np.float32)

        def call(outs: Any = outs, lses: Any = lses, step: Step = step) -> None:
            for _ in range(10):
                merge_partials(gpu.backend, outs, lses, step.out, step.lse)

        merged, one = gpu.seconds(gpu.captured(call)) / 10, gpu.layer_seconds(step)
        rows.append({"batch": batch, "group": group, "merge_us": merged * 1e6, "attention_us": one * 1e6,
                     "share_of_one": merged / one, f"share_of_{MERGED}": merged / (MERGED * one)})  # fmt: skip
    return rows
