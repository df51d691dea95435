"""The measurements of gpu.py that need a card. Times are those of CUDA events, medians of several rounds."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from rich.progress import track

from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, merge, pair_table
from lamina.kernels.gpu.choice import Choices, Shape, Tiling, classify, default
from lamina.kernels.gpu.cuda import Cuda
from lamina.kernels.gpu.polling import Doorbell, Polling
from lamina.kernels.gpu.program import KvElement
from lamina.kernels.gpu.specialize import decode_tile
from lamina.kernels.segments import SegmentTable
from lamina.types import AttentionSpec

COPY_BYTES = 4 << 30
BATCHES = {
    "64 x 1k": [1024] * 64,
    "16 x 4k": [4096] * 16,
    "8 x 32k": [32768] * 8,
    "500k among 32 x 1k": [500_000] + [1024] * 32,
}
GROUPS = (1, 4, 8)
KV_HEADS, HEAD_DIM = 8, 128
PAPER_US = {"polled by the device": 33.0, "polled by the host": 66.6}  # Lamina, GPU to GPU over 400G RoCE
TIMEOUT_S = 10.0


class CardBench:
    """Measures one card. Every method returns the rows of one table."""

    def __init__(self, index: int) -> None:
        self.backend = Cuda(index)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()

    def describe(self) -> dict[str, Any]:
        """Card, driver and versions; copy bandwidth in bytes read and written per second."""
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        versions = {name: metadata.version(name) for name in ("triton", "cupy-cuda13x", "numpy")}
        return {"card": self.backend.name, "driver": driver, "python": sys.version.split()[0], **versions,
                "copy_bytes_per_s": self.copy_rate()}  # fmt: skip

    def copy_rate(self) -> float:
        """Bytes read and written per second by a copy within the card's memory."""
        source, target = (cupy.empty(COPY_BYTES, np.uint8) for _ in range(2))
        return 2 * COPY_BYTES / self.seconds(lambda: cupy.copyto(target, source))

    def seconds(self, call: Callable[[], object], rounds: int = 15, repeats: int = 3) -> float:
        """Seconds of one call on the card, the median over rounds; compiled and warm."""
        call()
        times = []
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

    def attention(self) -> list[dict[str, Any]]:
        """KV bytes per second of decode over the copy's, and peers at the same work where they are installed."""
        rows = []
        cases = list(product(BATCHES, GROUPS, (False, True), (KvElement.BFLOAT16, KvElement.INT8, KvElement.FP8)))
        for batch, group, scattered, element in track(cases, "attention", transient=True):
            step = Step(self.backend, BATCHES[batch], group, element, scattered)
            copy_rate = self.copy_rate()
            seconds = self.seconds(self.captured(step.attend))
            row = {"batch": batch, "group": group, "slots": "anywhere" if scattered else "in order"}
            row |= {"element": element.name.lower(), "us": seconds * 1e6, "kv_tb_per_s": step.kv_bytes / seconds / 1e12}
            row["over_copy"] = step.kv_bytes / seconds / copy_rate
            row |= {name: "-" if other is None else other / seconds for name, other in self._peers(step).items()}
            rows.append(row)
        return rows

    def _peers(self, step: "Step") -> dict[str, float | None]:
        """Times of torch and FlashInfer over ours; None where not installed or the case is not theirs."""
        names = ("torch_sdpa", "flashinfer")
        if step.element is not KvElement.BFLOAT16:
            return dict.fromkeys(names)
        import gpu_peers  # beside this file

        return {name: gpu_peers.seconds(name, step, self.seconds) for name in names}

    def merge(self) -> list[dict[str, Any]]:
        """Merging 8 partials, as a share of the attention that makes them."""
        rows = []
        for batch, group in product(BATCHES, GROUPS):
            step = Step(self.backend, BATCHES[batch], group, KvElement.BFLOAT16, False)
            shape = (8, *step.lse.shape)
            outs, lses = cupy.zeros((*shape, HEAD_DIM), np.float32), cupy.zeros(shape, np.float32)
            merged = self.captured(lambda s=step, o=outs, e=lses: merge(self.backend, o, e, s.out, s.lse))
            times = self.seconds(merged), self.seconds(self.captured(step.attend))
            rows.append({"batch": batch, "group": group, "merge_us": times[0] * 1e6, "attention_us": times[1] * 1e6,
                         "share": times[0] / times[1]})  # fmt: skip
        return rows

    def polling(self) -> list[dict[str, Any]]:
        """Round trips between two streams of this card: payload there, payload back."""
        rows = []
        for nbytes in (1 << power for power in range(10, 25, 2)):
            near, far = (cupy.zeros(nbytes, np.uint8) for _ in range(2))
            row: dict[str, Any] = {"bytes": nbytes}
            for mode, trip in (("polled by the device", self._device_trips), ("polled by the host", self._host_trips),
                               ("stream events", self._event_trips)):  # fmt: skip
                row[mode] = trip(near, far, 50)
            for mode, paper in PAPER_US.items():
                row[f"{mode}, paper's over ours"] = paper / row[mode]
            rows.append(row)
        plot(rows)
        return rows

    def _device_trips(self, near: Any, far: Any, count: int) -> float:
        """Microseconds per round trip; both sides are launched ahead."""
        other = cupy.cuda.Stream(non_blocking=True)
        bells = cupy.zeros(2 * 16, np.uint64)  # one to a cache line
        polling, far_polling = Polling("far stream"), Polling("near stream")
        asked, answered = bells.data.ptr, bells.data.ptr + 128
        near_bells = polling.doorbell(asked), polling.doorbell(answered)
        far_bells = far_polling.doorbell(asked), far_polling.doorbell(answered)
        self.stream.synchronize()

        def trips() -> None:
            for _ in range(count):
                cupy.copyto(far, near)
                polling.ring(near_bells[0])
                polling.wait(near_bells[1], TIMEOUT_S)
                with other:
                    far_polling.wait(far_bells[0], TIMEOUT_S)
                    cupy.copyto(near, far)
                    far_polling.ring(far_bells[1])

        microseconds = self.seconds(trips, rounds=7, repeats=1) / count * 1e6
        polling.check()
        far_polling.check()
        return microseconds

    def _host_trips(self, near: Any, far: Any, count: int) -> float:
        """The far side is a host that looks at a doorbell in pinned memory and launches the answer when it rings."""
        pinned = cupy.cuda.alloc_pinned_memory(8)
        word = np.frombuffer(pinned, np.uint64, 1)
        word[0] = 0
        polling = Polling("host")
        bell = polling.doorbell(pinned.ptr)
        times = []
        for trip in range(1, count + 1):
            start = time.perf_counter()
            for way in range(2):
                cupy.copyto(far, near)
                polling.ring(bell)
                while word[0] < 2 * trip - 1 + way:
                    if time.perf_counter() - start > TIMEOUT_S:
                        raise TimeoutError(f"the card did not ring within {TIMEOUT_S:.0f} s")
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    def _event_trips(self, near: Any, far: Any, count: int) -> float:
        """Streams that wait for each other's events."""
        other = cupy.cuda.Stream(non_blocking=True)

        def trips() -> None:
            for _ in range(count):
                cupy.copyto(far, near)
                other.wait_event(self.stream.record())
                with other:
                    cupy.copyto(near, far)
                    answered = other.record()
                self.stream.wait_event(answered)

        return self.seconds(trips, rounds=7, repeats=1) / count * 1e6

    def loop(self) -> list[dict[str, Any]]:
        """A memory worker's layer as one graph: wait, append and attend, ring. Against the bare attention."""
        rows = []
        for batch in (1, 4, 16, 64, 256):
            step = Step(self.backend, [2048] * batch, 4, KvElement.BFLOAT16, False, appends=True)
            polling, peer = Polling("compute side"), Polling("memory side")
            bells = cupy.zeros(2 * 16, np.uint64)
            arrived, answered = bells.data.ptr, bells.data.ptr + 128
            mine = polling.doorbell(arrived), polling.doorbell(answered)
            theirs = peer.doorbell(arrived), peer.doorbell(answered)
            other = cupy.cuda.Stream(non_blocking=True)
            self.stream.synchronize()
            layer = self._layer(step, polling, mine, peer, theirs, other)

            def turn(layer: Callable[[], object] = layer, peer: Polling = peer, theirs: Any = theirs,
                     other: Any = other) -> None:  # fmt: skip
                with other:
                    peer.ring(theirs[0])
                    peer.wait(theirs[1], TIMEOUT_S)
                layer()

            bare = self.seconds(self.captured(step.attend), repeats=32)
            whole = self.seconds(turn, repeats=32)
            polling.check()
            rows.append({"batch": batch, "bare_us": bare * 1e6, "layer_us": whole * 1e6,
                         "added_us": (whole - bare) * 1e6})  # fmt: skip
        return rows

    def _layer(
        self,
        step: "Step",
        polling: Polling,
        mine: tuple[Doorbell, Doorbell],
        peer: Polling,
        theirs: tuple[Doorbell, Doorbell],
        other: Any,
    ) -> Callable[[], object]:
        def call() -> None:
            polling.wait(mine[0], TIMEOUT_S)
            step.attend()
            polling.ring(mine[1])

        with other:  # for the run outside the graph
            peer.ring(theirs[0])
            peer.wait(theirs[1], TIMEOUT_S)
        return self.captured(call)

    def tune(self) -> Path:
        """Measure tilings around the default for every class of decode step and keep the fastest."""
        choices = Choices.load(self.backend.name)
        batches = ("16 x 4k", "8 x 32k", "500k among 32 x 1k")
        cases = list(product(batches, GROUPS, (KvElement.BFLOAT16, KvElement.INT8, KvElement.FP8)))
        for batch, group, element in track(cases, "tuning", transient=True):
            step = Step(self.backend, BATCHES[batch], group, element, True)
            shape = Shape(*classify(np.array(BATCHES[batch], np.int32)), False, element, group, HEAD_DIM)
            best, best_s = default(shape, decode_tile(step.spec)[0], self.backend.capability), float("inf")
            for name, values in (("waves", (2, 4, 8)), ("stages", (3, 5, 7)), ("block_n", (32, 64, 128)),
                                 ("warps", (2, 4, 8))):  # fmt: skip
                for tiling in (replace(best, **{name: value}) for value in values):
                    seconds = self._with(step, shape, tiling)
                    best, best_s = (tiling, seconds) if seconds < best_s else (best, best_s)
            choices.measured[str(shape)] = best
        return choices.save()

    def _with(self, step: "Step", shape: Shape, tiling: Tiling) -> float:
        """Seconds of a step with this tiling; infinite if the card cannot run it."""
        step.use(Choices(self.backend.name, {str(shape): tiling}))
        try:
            return self.seconds(self.captured(step.attend), rounds=5)
        except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError):
            if self.stream.is_capturing():
                self.stream.end_capture()
            return float("inf")


class Step:
    """One decode step of sequences of these lengths, its slab full of random values."""

    def __init__(
        self, backend: Cuda, lengths: list[int], group: int, element: KvElement, scattered: bool, appends: bool = False
    ) -> None:
        rng, tokens, count = np.random.default_rng(0), sum(lengths), len(lengths)
        self.backend, self.element, self.lengths, self.scattered = backend, element, lengths, scattered
        self.spec = AttentionSpec(0, KV_HEADS * group, KV_HEADS, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5)
        self.slab = KvSlab.allocate(backend, element, self.spec, tokens)
        fill(self.slab)
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
        """Bytes of K and V, scales included, that one call reads."""
        return sum(self.lengths) * KV_HEADS * 2 * (HEAD_DIM * self.element.storage.itemsize + 4 * self.element.scaled)

    def use(self, choices: Choices | None) -> None:
        """Make the attention anew, with these choices or the card's own."""
        self._attention = Attention(self.backend, StepCapacity(len(self.lengths), len(self.lengths)), choices)
        self._attention.begin(self.table)

    def attend(self) -> None:
        """One layer."""
        self._attention.partial(self.q, self.slab, self.slots, self.spec, self.out, self.lse, self.new)


def bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Normal values on the card."""
    return cupy.asarray((rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def fill(slab: KvSlab) -> None:
    """Random elements of both signs near 1, and scales of 1: random bits, as data that is not constant costs more."""
    rng = np.random.default_rng(1)
    for array in (slab.k, slab.v):
        block = rng.standard_normal((4096, *array.shape[1:])).astype(np.float32)
        if slab.element is KvElement.BFLOAT16:
            values = (block.view(np.uint32) >> 16).astype(np.uint16)
        elif slab.element is KvElement.INT8:
            values = np.clip(block * 40, -127, 127).astype(np.int8)
        else:
            values = (rng.integers(0x28, 0x48, block.shape) | (block < 0) << 7).astype(np.uint8)
        there = cupy.asarray(values)
        for start in range(0, len(array), len(there)):
            array[start : start + len(there)] = there[: len(array) - start]
    if slab.element.scaled:
        slab.k_scales[...] = slab.v_scales[...] = 1.0


def plot(rows: list[dict[str, Any]]) -> None:
    """Bars of microseconds on a logarithmic scale, on the terminal."""
    modes = ("polled by the device", "polled by the host", "stream events")
    least = min(row[mode] for row in rows for mode in modes)
    for row in rows:
        for mode in modes:
            bar = "#" * (1 + round(8 * float(np.log2(row[mode] / least))))
            print(f"{row['bytes']:>9} B  {mode:<21} {row[mode]:>9.1f} us {bar}")
