"""Attention, its tilings and merging on a GPU. Every function returns the rows of one table."""

import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import cupy
import numpy as np
from rich.progress import track

from bench.gpu import peers
from bench.gpu.step import BATCHES, GROUPS, HEAD_DIM, Gpu, Step
from lamina.kernels.gpu.attention import merge as merge_partials
from lamina.kernels.gpu.choice import SHARED_BYTES, Choices, Shape, Tiling, classify, default
from lamina.kernels.gpu.program import Program
from lamina.kernels.gpu.specialize import attend_program, decode_tile
from lamina.kernels.gpu.triton_compile import compile_program
from lamina.types import KvElement

MERGED = 8
NARROW = (KvElement.INT8, KvElement.FP8)
# Tokens of a turn, warps, stages, programs resident: what tune tries for elements of 16 bits and for narrow ones.
WIDE = [(64, 4, 3, 4), (64, 4, 3, 3), (64, 4, 5, 3), (64, 8, 3, 3), (32, 4, 3, 5), (32, 4, 5, 4), (128, 8, 3, 2)]
SCALED = [(64, 8, 3, 2), (64, 4, 3, 2), (64, 4, 3, 3), (128, 8, 3, 2), (32, 4, 3, 4), (32, 4, 5, 3)]


def shared_bytes(program: Program, capability: int) -> int:
    """Compile; what it leaves in Triton's cache other processes take."""
    return compile_program(program, capability).shared_bytes


def compiled_ahead(cases: list[tuple[Any, KvElement, Tiling]], capability: int) -> dict[Program, int]:
    """Shared memory of the programs of these cases, compiled on all cores."""
    programs = list({attend_program(spec, element, tiling, decode_tile(spec)[0], np.uint16, capability)
                     for spec, element, tiling in cases})  # fmt: skip
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        return dict(zip(programs, pool.map(shared_bytes, programs, [capability] * len(programs)), strict=True))


def tune(gpu: Gpu) -> list[dict[str, Any]]:
    """Measures tilings for every class of decode step and keeps the fastest for this and later processes."""
    capability, choices = gpu.backend.capability, Choices.load(gpu.backend.name)
    room = SHARED_BYTES.get(capability, 64) * 1024
    times: dict[Shape, dict[Tiling, float]] = defaultdict(lambda: defaultdict(float))
    steps = [(group, element) for group in GROUPS for element in (KvElement.BFLOAT16, *NARROW)]
    specs = {group: Step(gpu.backend, [1], group, KvElement.BFLOAT16, False).spec for group in GROUPS}
    candidates = {element: [Tiling(*tried) for tried in (SCALED if element.scaled else WIDE)] for _, element in steps}
    cases = [(specs[group], element, tiling) for group, element in steps for tiling in candidates[element]]
    sizes = compiled_ahead(cases, capability)
    for (group, element), batch in track(list(product(steps, BATCHES)), "tuning", transient=True):
        step = Step(gpu.backend, BATCHES[batch], group, element, scattered=True)
        context = classify(np.array(BATCHES[batch], np.int32))
        shape, block_m = Shape(*context, False, element, group, HEAD_DIM), decode_tile(step.spec)[0]
        for tiling in candidates[element]:
            program = attend_program(step.spec, element, tiling, block_m, np.uint16, capability)
            for waves in (1, 2) if sizes[program] <= room else ():
                tried = replace(tiling, waves=waves)
                step.use(Choices(gpu.backend.name, {str(shape): tried}))
                times[shape][tried] += gpu.layer_seconds(step, rounds=5) / step.kv_bytes
    rows = []
    for shape, measured in times.items():
        best = min(measured, key=measured.__getitem__)
        choices.measured[str(shape)] = best
        usual = measured.get(default(shape, 16, capability), float("nan"))
        rows.append({"shape": str(shape), "best": str(best), "default over best": usual / measured[best]})
    choices.save()
    return rows


def attention(gpu: Gpu) -> list[dict[str, Any]]:
    """KV bytes per second of decode over the copy's."""
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
    """Another library at the same decode steps, and its time over ours; no rows for steps that it cannot do."""
    rows = []
    for batch, group, scattered in product(BATCHES, GROUPS, (False, True)):
        step = Step(gpu.backend, BATCHES[batch], group, KvElement.BFLOAT16, scattered)
        other = peers.seconds(name, step, gpu.seconds)
        if other is not None:
            ours = gpu.layer_seconds(step)
            row = {"batch": batch, "group": group, "slots": "anywhere" if scattered else "in order"}
            rows.append(row | {"us": ours * 1e6, f"{name}_us": other * 1e6, "theirs_over_ours": other / ours})
    return rows


def merge(gpu: Gpu) -> list[dict[str, Any]]:
    """Merging 8 partials: as a share of one of the attentions that make them, and of all 8."""
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
