"""Requests that a device takes out of slots and answers itself: what attention is launched before they arrive."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lamina.memory.device.base import Array, New, Table
from lamina.transport.device.slots import Incoming, Outgoing, PolledSlots, SlotStream
from lamina.types import AttentionSpec

if TYPE_CHECKING:
    from lamina.memory.device.gpu import Gpu

Work = Callable[[Array, Array, Array], None]
"""Attends to a request, uint8 [nbytes], and writes out and lse; all three on the device."""


class PolledLane(Protocol):
    """The requests of one lane, in order. What is launched may run much later, so that it must not use what changes.

    Attributes:
        stream: that waits and answers.
    """

    stream: SlotStream

    def serve(
        self, incoming: Incoming, outgoing: Outgoing, record: int, nbytes: int, shape: tuple[int, int, int], work: Work
    ) -> None:
        """Launch the service of a request with a body of ``nbytes``: ``work`` writes out float32 of ``shape`` [R, Hq,
        Dv] and lse [R, Hq], which are the answer. ``record``: of the stream, written after that."""

    def attend(
        self, layer: int, table: Table, q: Array, out: Array, lse: Array, spec: AttentionSpec, new: New | None
    ) -> None:
        """As ``Table.attend``, but all arrays are on the device and it only launches; called by ``work``."""


class Polled(Protocol):
    """How a device serves requests without the host.

    Attributes:
        slots: what it can read and write.
    """

    slots: PolledSlots

    def lane(self, records: int, request_nbytes: int, reply_nbytes: int) -> PolledLane:
        """Serves another lane, whose messages have at most so many bytes."""


class GpuPolled:
    """``Polled`` of a GPU, or of its emulation."""

    def __init__(self, gpu: "Gpu", slots: PolledSlots) -> None:
        self.slots = slots
        self._gpu = gpu

    def lane(self, records: int, request_nbytes: int, reply_nbytes: int) -> "GpuLane":
        """See ``Polled``."""
        return GpuLane(self._gpu, self.slots.stream(records), request_nbytes, reply_nbytes)


class GpuLane:
    """A ``PolledLane``: its memory stays where it is, and its attentions share scratch with no other lane's."""

    def __init__(self, gpu: "Gpu", stream: SlotStream, request_nbytes: int, reply_nbytes: int) -> None:
        self.stream = stream
        self._gpu = gpu
        empty = gpu.backend.empty
        self._request: Any = empty((request_nbytes,), np.uint8)
        self._out, self._lse = (empty((reply_nbytes // 4,), np.float32) for _ in "ol")
        self._scratch = gpu.workspaces.lane_scratch()

    def serve(
        self, incoming: Incoming, outgoing: Outgoing, record: int, nbytes: int, shape: tuple[int, int, int], work: Work
    ) -> None:
        """See ``PolledLane``."""
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
        """See ``PolledLane``; the table is one of this GPU's."""
        self._gpu.launch(layer, table, q, out, lse, spec, new, self._scratch)
