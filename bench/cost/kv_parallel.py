"""Mnemosyne's KV parallelism: a prompt's KV spread over groups of servers, in the cost model and in the simulator."""

import itertools
from dataclasses import replace

import numpy as np

from bench.cost.lamina_paper import cost_model
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.overheads import ROUND_TRIP_S
from lamina.planning.simulate import Arrivals, Deployment
from lamina.planning.simulate.virtual_runtime import Simulation

TENSOR_PARALLEL, STAGES = 8, 4
CHUNKS = (128, 512, 2048, 4096)
PROMPTS = (1_000_000, 2_000_000, 4_000_000)
GROUPS = (1, 2, 4)


def chunk_times(model: CostModel, prompt: int, chunk: int, groups: int) -> Floats:
    """Return seconds of each chunk of a prompt on all stages, with its prefix divided over ``groups``; with several
    groups, queries and partials of every layer are sent between them."""
    shape = model.shape
    starts = np.arange(0, prompt, chunk, dtype=np.float64)
    sizes = np.minimum(chunk, prompt - starts)
    attention = model.chunk_attention_seconds(sizes, starts / groups, TENSOR_PARALLEL)
    asked = 2 * sizes * shape.query_heads * shape.head_size * shape.dtype.itemsize / TENSOR_PARALLEL
    messages = ROUND_TRIP_S + model.wire_seconds(asked) if groups > 1 else 0.0
    return np.asarray(shape.layers * (model.slice_seconds(sizes, TENSOR_PARALLEL) + attention + messages))


def first_and_between(model: CostModel, prompt: int, chunk: int, groups: int) -> tuple[float, float]:
    """Return the TTFT with chunks in flight on all stages, and the TBT of a sequence that decodes behind the longest
    chunk (the last full one), which passes all stages before the next token."""
    times = chunk_times(model, prompt, chunk, groups)
    return float(times.sum() / STAGES + times[0] * (STAGES - 1) / STAGES), float(times.max())


def helped(model: CostModel) -> tuple[int, int]:
    """Count the steps from one number of groups to the next in which both times fall; return (count, all steps)."""
    pairs = [
        (first_and_between(model, prompt, chunk, few), first_and_between(model, prompt, chunk, many))
        for prompt in PROMPTS
        for chunk in CHUNKS
        for few, many in itertools.pairwise(GROUPS)
    ]
    return sum(more[0] < less[0] and more[1] < less[1] for less, more in pairs), len(pairs)


def steadiness(model: CostModel, prompt: int, part: int, chunk: int = 4096) -> tuple[float, float]:
    """The slowest chunk over the mean of all: with another group for every ``part`` tokens, and with one group."""
    starts = np.arange(0, prompt, chunk)
    most = -(-prompt // part)
    by_groups = [chunk_times(model, prompt, chunk, groups + 1) for groups in range(most)]
    growing = np.array([by_groups[start // part][place] for place, start in enumerate(starts.tolist())])
    return float(growing.max() / growing.mean()), float(by_groups[0].max() / by_groups[0].mean())


def joining(shape: ModelShape, device: Hardware, prompt: int, workers: int) -> list[float]:
    """The simulator's own placement: at which share of a prompt each of ``workers`` first attends to a part of it.

    A worker stands for a server: as much memory, bandwidth and FLOP/s as TENSOR_PARALLEL devices.
    """
    server = replace(
        device,
        kind=f"{TENSOR_PARALLEL} {device.kind}",
        like=device.kind,
        processors=TENSOR_PARALLEL * device.processors,
        flops={dtype: TENSOR_PARALLEL * flops for dtype, flops in device.flops.items()},
        memory_bytes=TENSOR_PARALLEL * device.memory_bytes,
        memory_bytes_s=TENSOR_PARALLEL * device.memory_bytes_s,
        nic_bytes_s=TENSOR_PARALLEL * device.nic_bytes_s,
    )
    part = -(-prompt // workers)
    room = cost_model(shape, server).kv_tokens
    deployment = Deployment(
        model=shape,
        compute=device,
        compute_workers=TENSOR_PARALLEL,
        tensor_parallel=TENSOR_PARALLEL,
        memory=server,
        memory_workers=workers,
        max_num_batched_tokens=CHUNKS[-1],
        kv_tokens_per_worker=min(part, room),
    )
    arrivals = Arrivals(np.zeros(1), np.array([prompt]), np.array([1]))
    spans = Simulation(deployment, arrivals, (), recorded=10**7).simulate().spans
    steps = np.array([span.begin_ns for span in spans["compute0"]])
    first = [
        min(span.begin_ns for span in spans[f"memory{index}"] if span.stage == "attention") for index in range(workers)
    ]
    return [float((steps < at).mean()) for at in first]
