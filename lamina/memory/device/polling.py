"""GPUs that poll for messages: attention is launched before its request arrives, and the GPU replies itself.

The setting ``polling`` says whether the GPU or the host polls. With "auto", the faster one does, which is measured once
for each kind of GPU and cached (``lamina.kernels.tuning_cache``).
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamina.core.errors import ConfigError, DeadlineError, TransportError
from lamina.core.types import AttentionSpec, Polling
from lamina.kernels import tuning_cache
from lamina.kernels.gpu.backend import Backend
from lamina.memory.device.base import Array, New, Work
from lamina.memory.device.workspaces import Workspaces
from lamina.transport.device.inboxes import Inboxes
from lamina.transport.device.slots import HEADER_WORDS, SLOTS, Incoming, Outgoing, PolledSlots, SlotStream

logger = logging.getLogger(__name__)

NBYTES = 128 << 10  # bytes of a request and of its reply: some tens of decoding sequences
TRIPS, WARM = 40, 10  # round trips made, and those at the start that are not measured
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Trips:
    """Seconds from a request in host memory to the reply in host memory, without attention.

    Attributes:
        device_s: If the GPU polls.
        host_s: If the host copies to and from the GPU.
    """

    device_s: float
    host_s: float


def polls(polling: Polling, backend: Backend, slots: Callable[[], PolledSlots]) -> bool:
    """Return whether the GPU of ``backend`` polls; False if "auto" cannot measure.

    The first time on a kind of GPU, "auto" measures for a moment. Nothing else may run on the GPU meanwhile.

    Raises ConfigError for "device" if the driver ends kernels that run for long.
    """
    if polling == "device" and backend.ends_long_kernels:
        raise ConfigError(
            f"polling is device, but the driver ends kernels of {backend.name} that run for seconds, as this GPU has a "
            "display; give polling auto or host, or stop the display server"
        )
    if backend.ends_long_kernels:
        return False
    if polling != "auto":
        return polling == "device"
    if not backend.timed:
        return False
    path = tuning_cache.file_for("polling", backend.name)
    found = tuning_cache.load(path, Trips)
    if found is None:
        try:
            found = measure(backend, slots())
        except (DeadlineError, TransportError) as error:
            logger.warning("%s cannot poll for messages, so the host does: %s", backend.name, error)
            return False
        logger.warning(
            "%s answers a message in %.1f us if it polls, in %.1f us if the host does",
            backend.name,
            1e6 * found.device_s,
            1e6 * found.host_s,
        )
        tuning_cache.save(path, found)
    return found.device_s < found.host_s


def measure(backend: Backend, slots: PolledSlots) -> Trips:
    """Return median round-trip times of messages that this thread sends. Raises DeadlineError if the GPU is silent."""
    return Trips(_device_trip(backend, slots), _host_trip(backend))


def _device_trip(backend: Backend, slots: PolledSlots) -> float:
    words = backend.pinned((SLOTS + 1, HEADER_WORDS + NBYTES // 8), np.uint64)  # a request per slot, then the reply
    bells = backend.pinned((SLOTS + 1, HEADER_WORDS), np.uint64)  # one to a cache line
    words[:], bells[:] = 0, 0
    there = backend.empty((NBYTES,), np.uint8)
    stream, times = slots.stream(TRIPS), []
    places, doorbells = ([one + row * size for row in range(SLOTS + 1)] for one, size in _strides(words, bells))

    def launch(trip: int) -> None:
        incoming = Incoming(tuple(places[:SLOTS]), (0,) * SLOTS, tuple(doorbells[:SLOTS]), (trip, trip), 0, 1)
        body = places[SLOTS] + 8 * HEADER_WORDS
        outgoing = Outgoing(places[SLOTS], body, doorbells[SLOTS], trip, (0,) * 6)

        def work() -> None:
            stream.receive(incoming, there, NBYTES)
            stream.answer(outgoing, (there,), trip - 1, 1)

        stream.launch(work)

    try:
        for trip in range(1, TRIPS + 1):
            launch(trip)
        for trip in range(1, TRIPS + 1):
            start = time.perf_counter()
            words[0, 0] = trip << 48
            bells[0, 0] = trip
            while bells[SLOTS, 0] != trip:
                if time.perf_counter() - start > TIMEOUT_S:
                    raise DeadlineError(f"{backend.name} has not answered a message within {TIMEOUT_S:g} s")
            times.append(time.perf_counter() - start)
    finally:
        stream.close()
    return statistics.median(times[WARM:])


def _strides(*arrays: np.ndarray) -> list[tuple[int, int]]:
    """Return the address of each array, and its bytes from one row to the next."""
    return [(array.ctypes.data, array.strides[0]) for array in arrays]


def _host_trip(backend: Backend) -> float:
    request, there = np.zeros(NBYTES, np.uint8), backend.empty((NBYTES,), np.uint8)
    answer, times = backend.pinned((NBYTES,), np.uint8), []
    for _ in range(TRIPS):
        start = time.perf_counter()
        backend.upload(request, there)
        backend.download((there, answer))
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:])


Launch = Callable[..., None]
"""Launches attention, with the arguments of ``Gpu.launch``."""


class GpuPolled:
    """Implements ``Polled`` on a GPU or its emulation."""

    def __init__(
        self, backend: Backend, workspaces: Workspaces, launch: Launch, slots: PolledSlots, inboxes: Inboxes
    ) -> None:
        """``launch`` launches the GPU's attention."""
        self.slots = slots
        self._inboxes = inboxes
        self._backend, self._workspaces, self._launch = backend, workspaces, launch

    def lane(self, records: int, request_nbytes: int, reply_nbytes: int) -> "GpuLane":
        self._inboxes.fixed = True
        empty, floats = self._backend.empty, (reply_nbytes // 4,)
        results = empty(floats, np.float32), empty(floats, np.float32)
        request, scratch = empty((request_nbytes,), np.uint8), self._workspaces.lane_scratch()
        return GpuLane(self.slots.stream(records), request, results, functools.partial(self._launch, scratch=scratch))


class GpuLane:
    """Implements ``PolledLane`` with buffers at fixed addresses and scratch memory of its own."""

    def __init__(self, stream: SlotStream, request: Array, results: tuple[Array, Array], launch: Launch) -> None:
        """``request``, and ``results`` for out and lse: GPU memory for the largest messages."""
        self.stream = stream
        self._request, (self._out, self._lse), self._launch = request, results, launch

    def serve(
        self, incoming: Incoming, outgoing: Outgoing, record: int, nbytes: int, shape: tuple[int, int, int], work: Work
    ) -> None:
        rows, heads, size = shape
        request = self._request[:nbytes]
        out = self._out[: rows * heads * size].reshape(shape)
        lse = self._lse[: rows * heads].reshape(rows, heads)

        def launched() -> None:
            self.stream.receive(incoming, request, nbytes)
            work(request, out, lse)
            self.stream.answer(outgoing, (out, lse), record, incoming.pieces)

        self.stream.launch(launched)

    def attend(
        self, layer: int, table: Any, q: Array, out: Array, lse: Array, spec: AttentionSpec, new: New | None
    ) -> None:
        """Attend with one of this GPU's tables."""
        self._launch(layer, table, q, out, lse, spec, new)
