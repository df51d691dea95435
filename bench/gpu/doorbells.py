"""Measures round trips by doorbells on a GPU, and a memory worker's layer between two doorbells.

All kernels are launched behind a gate, a doorbell that the host rings once everything is queued. So no figure includes
launch times, which a worker that plans one step ahead hides too.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cupy
import numpy as np

from bench.gpu.loop import capture_layer
from bench.gpu.step import Gpu, Step
from lamina.core.types import KvElement
from lamina.transport.device.polling import Doorbell, Polling

TRIPS = 50
TURNS = 32
ROUNDS = 7
PAPER_US = {"polled by the device": 33.0, "polled by the host": 66.6}  # Lamina, GPU to GPU over 400G RoCE
TIMEOUT_S = 10.0
# Not a memcpy: the copies of all streams share a queue, where a copy that waits for its stream blocks the others.
COPY = cupy.ElementwiseKernel("uint64 x", "uint64 y", "y = x", "lamina_bench_copy")


class Gated:
    """Two sides, each on its own stream, which start when the host opens the gate."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._pinned = cupy.cuda.alloc_pinned_memory(8)
        self._word = np.frombuffer(self._pinned, np.uint64, 1)
        self._word[0] = 0
        bells = cupy.zeros(2 * 16, np.uint64)  # one to a cache line
        self._keep = bells
        addresses = bells.data.ptr, bells.data.ptr + 128
        self.near, self.far = Polling("far side"), Polling("near side")
        self.near_bells, self.far_bells = self._bells(self.near, addresses), self._bells(self.far, addresses)
        self._near_gate = self.near.doorbell(self._pinned.ptr)
        self._far_gate = self.far.doorbell(self._pinned.ptr)
        gpu.stream.synchronize()

    @staticmethod
    def _bells(polling: Polling, addresses: tuple[int, int]) -> tuple[Doorbell, Doorbell]:
        return polling.doorbell(addresses[0]), polling.doorbell(addresses[1])

    def seconds(self, near: Callable[[], object], far: Callable[[], object] | None) -> float:
        """Seconds from the gate's opening until the near side is done, the median of rounds after one to warm up."""
        times = [self._round(near, far) for _ in range(ROUNDS + 1)]
        return statistics.median(times[1:])

    def _round(self, near: Callable[[], object], far: Callable[[], object] | None) -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        self.near.wait(self._near_gate, TIMEOUT_S)
        start.record(self.gpu.stream)
        near()
        stop.record(self.gpu.stream)
        with self.gpu.other:
            self.far.wait(self._far_gate, TIMEOUT_S)
            if far:
                far()
        self._word[0] += 1
        self.near.synchronize(lambda: True)
        with self.gpu.other:
            self.far.synchronize(lambda: True)
        return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3


def polling(gpu: Gpu) -> list[dict[str, Any]]:
    """Round trips between two streams of this GPU: payload there, payload back."""
    rows = []
    for nbytes in (1 << power for power in range(10, 25, 2)):
        near, far = (cupy.zeros(nbytes // 8, np.uint64) for _ in range(2))
        COPY(near, far)  # loaded now: loading may wait for kernels that wait
        row: dict[str, Any] = {"bytes": nbytes}
        row["polled by the device"] = device_trip(gpu, near, far) * 1e6
        row["polled by the host"] = host_trip(gpu, near, far) * 1e6
        row["stream events"] = event_trip(gpu, near, far) * 1e6
        for mode, paper in PAPER_US.items():
            row[f"{mode}, paper's over ours"] = paper / row[mode]
        rows.append(row)
    plot(rows)
    return rows


def device_trip(gpu: Gpu, near: Any, far: Any) -> float:
    """Seconds of a round trip; both sides wait on the device."""
    both = Gated(gpu)

    def ask() -> None:
        for _ in range(TRIPS):
            COPY(near, far)
            both.near.ring(both.near_bells[0])
            both.near.wait(both.near_bells[1], TIMEOUT_S)

    def answer() -> None:
        for _ in range(TRIPS):
            both.far.wait(both.far_bells[0], TIMEOUT_S)
            COPY(far, near)
            both.far.ring(both.far_bells[1])

    return both.seconds(ask, answer) / TRIPS


def host_trip(gpu: Gpu, near: Any, far: Any) -> float:
    """Return seconds of a round trip between two hosts' threads that poll pinned memory and launch the next kernel."""
    pinned = cupy.cuda.alloc_pinned_memory(8)
    word = np.frombuffer(pinned, np.uint64, 1)
    word[0] = 0
    polling = Polling("host")
    bell = polling.doorbell(pinned.ptr)
    times = []
    for trip in range(TRIPS):
        start = time.perf_counter()
        for way, (source, target) in enumerate(((near, far), (far, near)), 1):
            COPY(source, target)
            polling.ring(bell)
            while word[0] < 2 * trip + way:
                if time.perf_counter() - start > TIMEOUT_S:
                    raise TimeoutError(f"the GPU did not ring within {TIMEOUT_S:.0f} s")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def event_trip(gpu: Gpu, near: Any, far: Any) -> float:
    """Seconds of a round trip of streams that wait for each other's events; launched ahead like the device's."""
    gate = Gated(gpu)

    def trips() -> None:
        for _ in range(TRIPS):
            COPY(near, far)
            gpu.other.wait_event(gpu.stream.record())
            with gpu.other:
                COPY(far, near)
                answered = gpu.other.record()
            gpu.stream.wait_event(answered)

    return gate.seconds(trips, None) / TRIPS


def plot(rows: list[dict[str, Any]]) -> None:
    """Bars of microseconds on a logarithmic scale, on the terminal."""
    modes = ("polled by the device", "polled by the host", "stream events")
    least = min(row[mode] for row in rows for mode in modes)
    for row in rows:
        for mode in modes:
            bar = "#" * (1 + round(8 * float(np.log2(row[mode] / least))))
            print(f"{row['bytes']:>9} B  {mode:<21} {row[mode]:>9.1f} us {bar}")


def loop(gpu: Gpu) -> list[dict[str, Any]]:
    """A memory worker's layer as one graph (wait, append and attend, write back, ring), against its attention alone.

    The other side waits for every answer before it rings again: its two kernels are in what doorbells add.
    """
    rows = []
    for batch in (1, 4, 16, 64, 256):
        step = Step(gpu.backend, [2048] * batch, 4, KvElement.BFLOAT16, False, appends=True)
        bare, whole = Gated(gpu), Gated(gpu)
        alone = list(captured(step, bare, doorbells=False))
        layers = list(captured(step, whole, doorbells=True))

        def worker(graphs: list[Any]) -> None:
            for turn in range(TURNS):
                graphs[turn % len(graphs)].launch(gpu.stream)

        def compute(both: Gated = whole) -> None:
            for _ in range(TURNS):
                both.far.ring(both.far_bells[0])
                both.far.wait(both.far_bells[1], TIMEOUT_S)

        bare_s = bare.seconds(partial(worker, alone), None) / TURNS
        layer_s = whole.seconds(partial(worker, layers), compute) / TURNS
        rows.append({"batch": batch, "bare_us": bare_s * 1e6, "layer_us": layer_s * 1e6,
                     "added_us": (layer_s - bare_s) * 1e6, "layer_over_bare": layer_s / bare_s})  # fmt: skip
    return rows


def captured(step: Step, both: Gated, doorbells: bool) -> Iterator[Any]:
    """One graph per layer: its attention, with its doorbells or alone."""
    for layer in range(step.layers):

        def work(layer: int = layer) -> None:
            step.attend(layer)  # appends too, and writes into what would be the peer's arena

        yield capture_layer(work, both.near, both.near_bells if doorbells else None, TIMEOUT_S)
