"""Profiles this machine for the cost model: times of slices by rows, and the overheads of the runtime.

``lamina plan --measure`` stores both in a profile store next to the hardware file. One compute and one memory worker
use half of the cores each.

Slices of two random Llamas of different width give the cost per weight and the fixed cost per slice. Attention of
prompt chunks is timed by itself. Then the runtime serves the smaller model, and its timelines give the time spent on
messages, sampling, attention and waiting.
"""

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lamina.core.types import DType
from lamina.planning.plan import model_shapes
from lamina.planning.plan.fit_store import Fit, ProfileStore, Sample
from lamina.planning.plan.kernel_times import AttendCurve, ChunkFit, Floats, SliceCurve, attention_flops
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.overheads import RuntimeFit
from lamina.planning.profiling.measure import Disturbance, Watch

if TYPE_CHECKING:
    from lamina.control.timeline import Span
    from lamina.engine.engine import Engine
    from lamina.observe.timing import Window

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUNDS = 7
WIDTHS = (512, 1024)
"""Hidden sizes of the two Llamas."""

LAYERS = 12
BATCHES = ((1, 32), (2, 32), (4, 32), (8, 32), (16, 32), (32, 32), (16, 512), (8, 1024))
"""(sequences, prompt tokens) of the runs with one lane: the first ones vary the rows, the others the tokens."""

CHUNKS = ((16, 0), (64, 0), (256, 0), (64, 256), (256, 256), (64, 1024), (256, 1024))
"""(tokens of a prompt chunk, cached tokens before it)."""

OVERLAPPED = ((16, 256), (32, 64), (32, 256))
"""(sequences, prompt tokens) of the runs with two lanes."""

DRAWN = 32
"""Tokens that every sequence of a run draws while all decode together."""

SOURCE = "this machine"
TIMEOUT_S = 300.0


def halves() -> tuple[list[int], list[int]]:
    """Return this process's cores in two halves, for compute and memory; the same core twice if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return cores[:half], cores[-half:]


def measure(kind: str, store: ProfileStore) -> Disturbance:
    """Measure slices and the runtime; store the fits ``slices`` and ``runtime`` of ``kind``. Takes about a minute.

    Returns the disturbance by other processes, which the fits' source mentions if it was too high. Raises LaminaError
    if the runtime failed.
    """
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="lamina-profile-") as place:
        paths = [random_llama(Path(place) / str(width), width, LAYERS) for width in WIDTHS]
        shapes = [model_shapes.find(str(path)) for path in paths]
        with on_cores(halves()[0]):
            times = [slice_seconds(path, ROWS) for path in paths]
            chunk_times = chunk_seconds(shapes[-1], CHUNKS)
        layers = [shape.layer_parameters for shape in shapes]
        curve = SliceCurve.fit(ROWS, layers, times)
        samples = [
            Sample(
                slice_operator(shape.hidden), rows, 1, seconds, float(curve.predict_slice(rows, shape.layer_parameters))
            )
            for shape, own in zip(shapes, times, strict=True)
            for rows, seconds in zip(ROWS, own, strict=True)
        ]
        slices = _fit("slices", kind, asdict(curve), samples), samples
        alone, overlapped = (decode(paths[0], batches, n) for batches, n in ((BATCHES, 1), (OVERLAPPED, 2)))
    chunks = fit_chunks(shapes[-1], CHUNKS, chunk_times)
    runtime, attention = fit_runtime(shapes[0], curve, alone, overlapped, chunks), _attend(shapes[0], alone)
    samples = [
        Sample(
            "attention", round(run.batch * run.live), 1, run.attention_s, attention.predict_memory_step(shapes[0], run)
        )
        for run in alone
    ]
    samples += [
        Sample("chunk attention", own, 1, seconds, _chunk_s(shapes[-1], chunks, own, prefix))
        for (own, prefix), seconds in zip(CHUNKS, chunk_times, strict=True)
    ]
    disturbance = watch.so_far()
    source = f"{SOURCE}, while {disturbance}" if disturbance.disturbed else SOURCE
    for fit, own in (slices, (_fit("runtime", kind, asdict(runtime), samples), samples)):
        store.save_fit(replace(fit, source=source), own)
    return disturbance


def slice_operator(hidden: int) -> str:
    """Return the operator of the samples of slices of ``hidden`` width."""
    return f"slice {hidden}"


def _fit(name: str, kind: str, parameters: Mapping[str, Any], samples: Sequence[Sample]) -> Fit:
    errors = np.abs([sample.error for sample in samples])
    return Fit(name, kind, SOURCE, parameters, float(np.median(errors)), float(np.quantile(errors, 0.95)))


def random_llama(place: Path, hidden: int, layers: int) -> Path:
    """Write a model directory without weights: a Llama with heads of 64, 4 query heads per KV head."""
    from lamina.models import directory

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    place.mkdir()
    (place / directory.CONFIG).write_text(json.dumps(config))
    for file in (directory.TOKENIZER, directory.TOKENIZER_CONFIG):
        (place / file).write_bytes((directory.BUNDLED / file).read_bytes())
    return place


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread, and torch's threads, on ``cores`` with one thread per core."""
    import torch

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def slice_seconds(path: Path, rows: Sequence[int]) -> list[float]:
    """Return seconds per inner slice at each number of rows: median of ROUNDS passes over all inner slices."""
    import torch

    from lamina.lowering import lower
    from lamina.models import directory, pretrained
    from lamina.models.pretrained import load_config
    from lamina.splitter import split

    place = directory.find(path, weights=False)
    config = load_config(place)
    model = split(config, DType.BFLOAT16)
    tensors = pretrained.load(place, sorted(model.weights), config, DType.BFLOAT16, "dummy")
    inner = lower(model).with_weights(tensors)[1:-1]
    spec, cut = model.attentions[1], model.cuts[0]

    @torch.inference_mode()
    def once(count: int) -> float:
        ids, positions = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        attention = torch.randn(count, spec.query_heads, spec.v_dim, dtype=torch.bfloat16)
        context = tuple(torch.randn(count, *part.shape).to(part.dtype) for part in cut.context)
        prepared = inner[0].prepare(positions)
        begun = time.perf_counter()
        for each in inner:
            each.run(ids, positions, attention, context, prepared)
        return (time.perf_counter() - begun) / len(inner)

    return [statistics.median([once(count) for _ in range(ROUNDS + 2)][2:]) for count in rows]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measured decoding.

    Attributes:
        batch: Sequences that decode.
        live: Mean cached tokens of a sequence.
        lanes: Batches in flight.
        step_s: Time between two tokens of a sequence.
        slice_s: Time in slices, of one lane's step on the compute worker.
        exchange_s: Time for messages, of the same.
        draw_s: Time for sampling, of the same.
        wait_s: Time of waiting, of the same.
        attention_s: Time of one lane's step on the memory worker, including its replies.
    """

    batch: int
    live: float
    lanes: int
    step_s: float
    slice_s: float
    exchange_s: float
    draw_s: float
    wait_s: float
    attention_s: float


def decode(path: Path, batches: Sequence[tuple[int, int]], lanes: int) -> list[Run]:
    """Serve random prompts on one compute and one memory worker, each on its half of the cores."""
    from lamina.config.engine_config import EngineConfig
    from lamina.launch import launch

    compute, memory = (",".join(map(str, cores)) for cores in halves())
    config = EngineConfig(
        model=str(path), load_format="dummy", lanes=lanes, compute_cores=compute, memory_cores=memory, trace=os.devnull
    )
    spans: dict[str, list[Span]] = {}
    engine = launch(config, None, spans.update)
    try:
        windows = [_decode(engine, batch, prompt) for batch, prompt in batches]
    finally:
        engine.close()
    return [_run(spans, batch, prompt, lanes, window) for (batch, prompt), window in zip(batches, windows, strict=True)]


def _decode(engine: "Engine", batch: int, prompt: int) -> "Window":
    from lamina.observe.timing import decode_batch, decode_window

    draw = random.Random(batch)
    prompts = [[draw.randrange(3, 900) for _ in range(prompt)] for _ in range(batch)]
    # Sequences that are prefilled first decode longer, so that all decode together for DRAWN tokens.
    return decode_window(decode_batch(engine, prompts, DRAWN + 2 * batch, TIMEOUT_S))


def _run(spans: Mapping[str, Sequence["Span"]], batch: int, prompt: int, lanes: int, window: "Window") -> Run:
    from lamina.observe.timing import shares

    step_s = window.seconds / (window.drawn / batch)
    steps = window.seconds / step_s * min(lanes, batch)  # steps of all lanes
    times = shares(spans, window.begin_ns, window.end_ns)
    parts = {(part.worker, part.stage): part.seconds / steps for part in times}

    def of(worker: str, *stages: str) -> float:
        return sum(parts.get((worker, stage), 0.0) for stage in stages)

    return Run(
        batch=batch,
        live=prompt + (DRAWN + 2 * batch) / 2,
        lanes=lanes,
        step_s=step_s,
        slice_s=of("compute0", "slice"),
        exchange_s=of("compute0", "send", "receive"),
        draw_s=of("compute0", "draw"),
        wait_s=of("compute0", "wait"),
        attention_s=of("memory0", "attention", "send"),
    )


def chunk_seconds(shape: ModelShape, chunks: Sequence[tuple[int, int]]) -> list[float]:
    """Return seconds of a layer's causal attention of each of ``chunks`` (tokens, cached tokens before them).

    Medians of ROUNDS runs, with torch's number of threads.
    """
    import torch

    from lamina.core.types import AttentionSpec
    from lamina.kernels.attention import partial
    from lamina.kernels.segments import SegmentTable
    from lamina.splitter import as_numpy

    size, heads = shape.head_size, (shape.query_heads, shape.kv_heads)
    spec = AttentionSpec(0, *heads, size, size, size**-0.5)

    def seconds(own: int, prefix: int) -> float:
        q, k, v = (
            as_numpy(torch.randn(rows, count, size, dtype=torch.bfloat16))
            for rows, count in ((own, heads[0]), (prefix + own, heads[1]), (prefix + own, heads[1]))
        )
        bounds = ([0, own], [prefix], [0, prefix + own], [0], range(prefix + own))
        table = SegmentTable(*(np.array(each, np.int32) for each in bounds))
        times = []
        for _ in range(ROUNDS + 2):
            begun = time.perf_counter()
            partial(q, k, v, table, spec, torch.get_num_threads())
            times.append(time.perf_counter() - begun)
        return statistics.median(times[2:])

    return [seconds(own, prefix) for own, prefix in chunks]


def fit_chunks(shape: ModelShape, chunks: Sequence[tuple[int, int]], seconds: Sequence[float]) -> ChunkFit:
    """Fit a ``ChunkFit`` to measured ``seconds`` of ``chunks``."""
    own, prefix = np.array(chunks, dtype=np.float64).T
    rows = own * shape.query_heads
    flops = attention_flops(rows, own, prefix, shape.head_size)
    fixed, row, flop = _least_squares([np.ones_like(own), rows, flops], seconds)
    return ChunkFit(fixed_s=fixed, row_s=row, flops_s=1 / max(flop, 1e-15))


def _chunk_s(shape: ModelShape, fit: ChunkFit, own: int, prefix: int) -> float:
    return float(fit.predict_chunk(own, prefix, shape.query_heads, shape.head_size))


def fit_runtime(
    shape: ModelShape, curve: SliceCurve, alone: Sequence[Run], overlapped: Sequence[Run], chunks: ChunkFit
) -> RuntimeFit:
    """Fit the runtime's overheads to runs with one lane (``alone``) and two (``overlapped``), all non-negative."""
    batch = np.array([run.batch for run in alone], dtype=np.float64)
    one = np.ones_like(batch)
    outside = [max(1e-6, run.slice_s - _slices_s(shape, curve, run.batch) + run.exchange_s) for run in alone]
    exchange = _least_squares([one, batch], [seconds / shape.layers for seconds in outside])
    rest = [max(1e-6, run.step_s - run.slice_s - run.exchange_s - run.wait_s) for run in alone]
    step = _least_squares([one, batch], rest)
    attention = _attend(shape, alone)
    without = RuntimeFit(
        exchange_s=exchange[0],
        exchange_row_s=exchange[1],
        step_s=step[0],
        step_row_s=step[1],
        attend=attention.curve,
        kv_bytes_s=attention.kv_bytes_s,
        chunks=chunks,
        round_trip_s=max(0.0, float(np.median([(run.wait_s - run.attention_s) / shape.layers for run in alone]))),
    )
    longer = [_contention(shape, curve, without, attention, run) for run in overlapped]
    return replace(without, contention=min(0.9, max(0.0, float(np.median(longer)))))


def _slices_s(shape: ModelShape, curve: SliceCurve, rows: float) -> float:
    head = float(curve.predict_slice(rows, shape.vocabulary * shape.hidden))
    return shape.layers * float(curve.predict_slice(rows, shape.layer_parameters)) + head


class _Attention(NamedTuple):
    """Time of a layer's attention by rows, and the bytes of KV per second that longer contexts add."""

    curve: AttendCurve
    kv_bytes_s: float

    def predict_memory_step(self, shape: ModelShape, run: Run) -> float:
        """Return seconds of a step of ``run`` on the memory worker."""
        read_s = run.batch * run.live * shape.kv_bytes_per_token / self.kv_bytes_s
        return read_s + shape.layers * float(self.curve.predict(run.batch, shape.query_heads))


def _attend(shape: ModelShape, alone: Sequence[Run]) -> _Attention:
    """Fit attention to runs with one lane: the runs with the shortest prompts give the curve, all others the rate."""
    token_bytes = shape.kv_bytes_per_token / shape.layers
    shortest = min(run.live - DRAWN / 2 - run.batch for run in alone)
    growing = sorted((run for run in alone if run.live - DRAWN / 2 - run.batch == shortest), key=lambda run: run.batch)
    rows = [float(run.batch) for run in growing]
    short = [run.attention_s / shape.layers for run in growing]
    rates = []
    for run in (run for run in alone if run not in growing):
        at = float(np.interp(run.batch, rows, short))
        known = float(np.interp(run.batch, rows, [own.batch * own.live for own in growing]))
        seconds = max(1e-9, run.attention_s / shape.layers - at)
        rates.append((run.batch * run.live - known) * token_bytes / seconds)
    kv_bytes_s = float(np.median(rates))
    read = [own.batch * own.live * token_bytes / kv_bytes_s for own in growing]
    seconds_beside = [max(1e-7, whole - reading) for whole, reading in zip(short, read, strict=True)]
    return _Attention(AttendCurve(rows=rows, seconds=seconds_beside, heads=shape.query_heads), kv_bytes_s)


def _contention(shape: ModelShape, curve: SliceCurve, runtime: RuntimeFit, attention: _Attention, run: Run) -> float:
    """Return the relative slowdown of slices and attention while both pools work, from a run with two lanes."""
    lane = replace(run, batch=run.batch // run.lanes)
    exchange_s = shape.layers * (runtime.exchange_s + runtime.exchange_row_s * lane.batch)
    compute_s, alone_s = run.slice_s + run.exchange_s, _slices_s(shape, curve, lane.batch) + exchange_s
    more = compute_s - alone_s + run.attention_s - attention.predict_memory_step(shape, lane)
    return more / (2 * min(compute_s, run.attention_s))


def _least_squares(columns: Sequence[Floats], values: Sequence[float]) -> list[float]:
    """Return non-negative coefficients of least relative error; columns with negative coefficients are dropped."""
    wanted = np.array(values)
    kept = list(range(len(columns)))
    while True:
        table = np.stack([columns[index] for index in kept], axis=1) / wanted[:, None]
        found = np.linalg.lstsq(table, np.ones_like(wanted), rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            result = [0.0] * len(columns)
            for index, value in zip(kept, found, strict=True):
                result[index] = float(value)
            return result
        kept.pop(int(found.argmin()))
