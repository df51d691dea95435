"""The protocol of devices."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lamina.core.types import AttentionSpec
from lamina.kernels.segments import SegmentTable
from lamina.transport.device.slots import Incoming, Outgoing, PolledSlots, SlotStream
from lamina.worker.device_slots import Mapper

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int32]


SlotsOf = Callable[[Any], Slots]
"""A segment's page table: int32 [tokens], valid until the segment changes, see ``Slab.slots``."""


@dataclass(frozen=True)
class Pairs:
    """Which query rows attend to which tokens, in the order of the rows.

    Pair i has ``rows[i]`` query rows, the first at position ``query_start[i]``. They see tokens [first[i], stop[i]) of
    segment ``keys[i]``, counted from its first token here; the first of them is at position ``kv_start[i]``.
    """

    rows: Sequence[int]
    query_start: Sequence[int]
    kv_start: Sequence[int]
    keys: Sequence[Hashable]
    first: Sequence[int]
    stop: Sequence[int]
    new: Sequence[int] = ()
    """Which row of ``New`` is each pair's last token; -1: none. Empty: no attention is given any."""

    def table(self, slots: Slots) -> SegmentTable:
        """Return the table as kernels take it. ``slots``: the slots of all pairs' tokens, one pair after another."""
        return SegmentTable(
            query_offsets=_offsets(self.rows, np.int32),
            query_start=np.array(self.query_start, np.int32),
            kv_offsets=_offsets([stop - first for first, stop in zip(self.first, self.stop, strict=True)], np.int64),
            kv_start=np.array(self.kv_start, np.int32),
            slots=slots,
        )


@dataclass(frozen=True)
class New:
    """Tokens to store: k [T, Hkv, D] and v [T, Hkv, Dv], and their slots [T]. All have been ``sent``."""

    k: Array
    v: Array
    slots: Slots


@dataclass(frozen=True)
class Largest:
    """The largest steps, as a memory worker sees them.

    Attributes:
        pairs, rows: of a request; query rows count once for each shard of heads.
        tables: of all steps that are planned at once.
        buffers: bytes of the arrays on the GPU that serving one request takes at once.
        polled: lanes that the GPU may serve itself, and query rows of the largest request that comes in a slot.
        gpu_share: of the GPU's memory, which may be in use in all.
    """

    pairs: int
    rows: int
    tables: int
    buffers: Sequence[int] = ()
    polled: tuple[int, int] = (0, 0)
    gpu_share: float = 1.0


class Table(Protocol):
    """What query rows attend to, wherever the device reads it. Made once per step, used for every layer.

    It stays valid while segments grow, and until their slots are used again for other tokens.
    """

    def attend(
        self,
        layer: int,
        q: Array,
        out: Floats,
        lse: Floats,
        spec: AttentionSpec | None = None,
        new: New | None = None,
    ) -> Iterator[None]:
        """Partial attention of q [R, Hq, D], which has been ``sent``; ``spec``: instead of the layer's own. ``new``:
        tokens to keep that the rows see already, as ``Pairs.new`` says.

        Writes out [R, Hq, Dv] and lse [R, Hq], in host memory or an inbox, complete at the end. Yields every few
        milliseconds, where the work may pause; q must not change before the end.
        """


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
        """Launch the attention of ``Table.attend`` with all arrays on the device. ``work`` calls this."""


class Polled(Protocol):
    """How a device serves requests without the host.

    Attributes:
        slots: what it can read and write.
    """

    slots: PolledSlots

    def lane(self, records: int, request_nbytes: int, reply_nbytes: int) -> PolledLane:
        """Serves another lane, whose messages have at most so many bytes."""


class Device(Mapper, Protocol):
    """Holds the slabs of all attentions, by layer. One thread owns it.

    Shapes use T tokens, R query rows, Hq query heads, Hkv key/value heads, D and Dv head sizes.
    """

    @property
    def polled(self) -> Polled | None:
        """How it serves requests without the host; None if the host serves them all."""

    def sent(self, array: Array) -> Array:
        """Return an array of the host or of an inbox where the device reads it: a copy, or the array itself. So are
        views of it. Inboxes, and memory that was adopted, must not change before ``settle``."""

    def settle(self) -> None:
        """Return once everything that was ``sent`` has been read."""

    def results(self, rows: int, spec: AttentionSpec) -> tuple[Floats, Floats]:
        """Host memory for out [rows, Hq, Dv] and lse [rows, Hq], which the device writes fastest."""

    def made(self, rows: int, spec: AttentionSpec) -> tuple[Array, Array]:
        """Memory of the device for out [rows, Hq, Dv] and lse [rows, Hq], float32."""

    def attend_there(
        self, layer: int, table: Any, q: Array, out: Array, lse: Array, spec: AttentionSpec, new: New | None
    ) -> None:
        """Compute ``Table.attend`` with one of this device's tables. ``out`` and ``lse`` come from ``made``, and are
        there for what the device does next."""

    def keep(self, layer: int, k: Array, v: Array, slots: Slots) -> None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] in ``slots`` [T], rounded to the slab's element type. All have been
        ``sent``."""

    def table(self, pairs: Pairs, slots: SlotsOf) -> Table:
        """Return what rows attend to. ``slots``: of the segments that ``pairs`` name."""

    def forget(self, segments: Sequence[Hashable]) -> None:
        """Drop what is kept of segments that have ended or lost tokens. Tables made before stay valid."""

    def renew(self, slots: Slots, others: Slots, left: int) -> None:
        """Copy KV from ``others`` [T] to ``slots`` [T], which hold the same tokens, where windowed layers dropped it.

        ``left``: offset, in tokens, of the first position that may still be attended from.
        """

    def read(self, layer: int, slots: Slots, content: memoryview) -> None:
        """Write what ``slots`` hold into ``content``, as it is stored: scales of k and v if they are codes, k, v."""

    def restore(self, layer: int, slots: Slots, content: memoryview) -> None:
        """Store what ``read`` wrote, in these slots."""


def _offsets(counts: Sequence[int], dtype: type[Any]) -> npt.NDArray[Any]:
    return np.array([0, *itertools.accumulate(counts)], dtype)


def parts(content: memoryview, rows: int, arrays: Sequence[Any]) -> Iterator[tuple[Any, Array]]:
    """Each of ``arrays``, indexed by slot, and where ``rows`` of its rows lie in ``content``, one after another."""
    offset = 0
    for array in arrays:
        shape = (rows, *array.shape[1:])
        view = np.frombuffer(content, array.dtype, math.prod(shape), offset).reshape(shape)
        offset += view.nbytes
        yield array, view
