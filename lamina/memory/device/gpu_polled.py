"""Launches attention before its request arrives: the GPU polls slots for requests and replies itself."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lamina.core.types import AttentionSpec
from lamina.kernels.gpu.backend import Backend
from lamina.memory.device.base import Array, New, Work
from lamina.memory.device.workspaces import Workspaces
from lamina.transport.device.inboxes import Inboxes
from lamina.transport.device.slots import Incoming, Outgoing, PolledSlots, SlotStream

Launch = Callable[..., None]
"""Launches attention, with the arguments of ``Gpu.launch``."""


class GpuPolled:
    """Implements ``Polled`` on a GPU or its emulation."""

    def __init__(
        self, backend: Backend, workspaces: Workspaces, launch: Launch, slots: PolledSlots, inboxes: Inboxes
    ) -> None:
        """``launch``: launches the GPU's attention. ``inboxes``: the GPU's inboxes."""
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
