"""Decode steps on a GPU, and how they are timed, for the other modules here. Times are medians of CUDA events."""

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any

import cupy
import numpy as np

from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table
from lamina.kernels.gpu.cuda import Cuda
from lamina.kernels.gpu.tilings import Choices
from lamina.kernels.segments import STORAGE, SegmentTable

COPY_BYTES = 2 << 30
CYCLED_BYTES = 1 << 30  # read in turn: much more than any GPU's cache holds
BATCHES = {
    "64 x 1k": [1024] * 64,
    "16 x 4k": [4096] * 16,
    "8 x 32k": [32768] * 8,
    "500k among 32 x 1k": [500_000] + [1024] * 32,
}
GROUPS = (1, 4, 8)
KV_HEADS, HEAD_DIM = 8, 128


class Gpu:
    """One GPU and the stream on which everything is timed.

    Measure ``with gpu.stream``: CuPy forgets a stream that was made the current one by ``use`` when a ``with`` of
    another one ends.
    """

    def __init__(self, index: int) -> None:
        self.backend = Cuda(index)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.other = cupy.cuda.Stream(non_blocking=True)
        self._copied: tuple[Any, Any] | None = None

    def describe(self) -> dict[str, Any]:
        versions = {"gpu": self.backend.name, "driver": driver_version(), "python": sys.version.split()[0]}
        for package in ("triton", "cupy-cuda13x", "torch", "flashinfer-python", "flash-attn"):
            with suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        return versions

    def copy_rate(self) -> float:
        """Bytes read and written per second by a copy within the GPU's memory."""
        if self._copied is None:
            self._copied = cupy.empty(COPY_BYTES, np.uint8), cupy.empty(COPY_BYTES, np.uint8)
        source, target = self._copied
        return 2 * COPY_BYTES / self.seconds(lambda: cupy.copyto(target, source), rounds=7)

    def seconds(self, call: Callable[[], object], rounds: int = 15, repeats: int = 3) -> float:
        """Seconds of one call on the GPU, the median over rounds; compiled and warm."""
        call()
        times: list[float] = []
        for _ in range(rounds):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self.stream)
            for _ in range(repeats):
                call()
            stop.record(self.stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) / repeats / 1e3)
        return statistics.median(times)

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as a CUDA graph, after one run outside that compiles and allocates."""
        call()
        self.stream.synchronize()
        self.stream.begin_capture()
        call()
        graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def layer_seconds(self, step: "Step", rounds: int = 15) -> float:
        """Seconds of one layer's attention, of all layers of the step in one graph."""

        def layers() -> None:
            for layer in range(step.layers):
                step.attend(layer)

        return self.seconds(self.captured(layers), rounds) / step.layers


class Step:
    """One decode step of sequences of given lengths, with slabs of random values.

    There are so many layers that they exceed all caches: as in a model, a layer finds nothing of the last one cached.
    """

    def __init__(
        self, backend: Cuda, lengths: list[int], group: int, element: KvElement, scattered: bool, appends: bool = False
    ) -> None:
        rng, tokens, count = np.random.default_rng(0), sum(lengths), len(lengths)
        self.backend, self.element, self.lengths = backend, element, lengths
        self.spec = AttentionSpec(0, KV_HEADS * group, KV_HEADS, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5)
        self.layers = min(32, -(-CYCLED_BYTES // self.kv_bytes))
        self.slabs = [KvSlab.allocate(backend, element, self.spec, tokens) for _ in range(self.layers)]
        for slab in self.slabs:
            fill(slab)
        slots = rng.permutation(tokens) if scattered else np.arange(tokens)
        self.slots = cupy.asarray(slots.astype(np.int32))
        offsets = np.cumsum([0, *lengths])
        segments = SegmentTable(
            query_offsets=np.arange(count + 1, dtype=np.int32),
            query_start=np.array(lengths, np.int32) - 1,
            kv_offsets=offsets,
            kv_start=np.zeros(count, np.int32),
            slots=slots[:0].astype(np.int32),
        )
        self.table = pair_table(segments, offsets[:-1], np.arange(count) if appends else None)
        self.q = bfloat16(rng, (count, self.spec.query_heads, HEAD_DIM))
        new = [bfloat16(rng, (count, KV_HEADS, HEAD_DIM)) for _ in range(2)]
        self.new = (new[0], new[1]) if appends else None
        self.out = cupy.empty((count, self.spec.query_heads, HEAD_DIM), np.float32)
        self.lse = cupy.empty((count, self.spec.query_heads), np.float32)
        self.use(None)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, scales included, that one layer reads."""
        return sum(self.lengths) * KV_HEADS * 2 * (HEAD_DIM * STORAGE[self.element].itemsize + 4 * self.element.scaled)

    def use(self, choices: Choices | None) -> None:
        """Replace the attention by one with these choices or the GPU's own."""
        self._attention = Attention(self.backend, StepCapacity(len(self.lengths), len(self.lengths)), choices)
        self._attention.upload_pairs(self.table)

    def attend(self, layer: int = 0) -> None:
        slab = self.slabs[layer]
        self._attention.partial(self.q, slab, self.slots, self.spec, self.out, self.lse, self.new)


def driver_version() -> str:
    """The driver's, as nvidia-smi says; else the CUDA version that it offers."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]):
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return f"CUDA {cupy.cuda.runtime.driverGetVersion()}"


def bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return cupy.asarray((rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def fill(slab: KvSlab) -> None:
    for array in (slab.k, slab.v):
        rows = random_rows(slab.element, array.shape[1:])
        for start in range(0, len(array), len(rows)):
            array[start : start + len(rows)] = rows[: len(array) - start]
    if slab.element.scaled:
        slab.k_scales[...] = slab.v_scales[...] = 1.0


@cache
def random_rows(element: KvElement, shape: tuple[int, ...]) -> Any:
    """Elements of both signs near 1, on the GPU: random bits, as data that is not constant costs more."""
    rng = np.random.default_rng(1)
    block = rng.standard_normal((4096, *shape)).astype(np.float32)
    if element is KvElement.BFLOAT16:
        values = (block.view(np.uint32) >> 16).astype(np.uint16)
    elif element is KvElement.INT8:
        values = np.clip(block * 40, -127, 127).astype(np.int8)
    else:
        values = (rng.integers(0x28, 0x48, block.shape) | (block < 0) << 7).astype(np.uint8)
    return cupy.asarray(values)
