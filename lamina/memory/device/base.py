"""Defines the protocol ``Device``: where a memory worker stores K and V and runs attention."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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

    Pair i has ``rows[i]`` query rows, the first at position ``query_start[i]``. The rows attend to tokens
    [first[i], stop[i]) of segment ``keys[i]``, counted from the segment's first token on this worker; token
    ``first[i]`` is at position ``kv_start[i]``.
    """

    rows: Sequence[int]
    query_start: Sequence[int]
    kv_start: Sequence[int]
    keys: Sequence[Hashable]
    first: Sequence[int]
    stop: Sequence[int]
    new: Sequence[int] = ()
    """By pair: row of ``New`` that is its last token; -1: none. Empty if ``attend`` is called without ``New``."""

    def table(self, slots: Slots) -> SegmentTable:
        """Return the kernels' table. ``slots``: slots of all pairs' tokens, one pair after another."""
        return SegmentTable(
            query_offsets=_offsets(self.rows, np.int32),
            query_start=np.array(self.query_start, np.int32),
            kv_offsets=_offsets([stop - first for first, stop in zip(self.first, self.stop, strict=True)], np.int64),
            kv_start=np.array(self.kv_start, np.int32),
            slots=slots,
        )


class New(NamedTuple):
    """Tokens to store: k [T, Hkv, D], v [T, Hkv, Dv] and their slots [T], all as returned by ``Device.sent``."""

    k: Array
    v: Array
    slots: Slots


@dataclass(frozen=True)
class Largest:
    """Upper bounds of the steps of a memory worker.

    Attributes:
        pairs: Pairs of a request.
        rows: Query rows of a request, counted once for each shard of heads.
        tables: Tables of all steps that are planned at once.
        buffers: Bytes of each GPU array that serving one request needs at the same time.
        polled: Lanes that the GPU may serve itself, and query rows of the largest request that arrives in a slot.
        gpu_share: Fraction of the GPU's memory that all programs together may use.
    """

    pairs: int
    rows: int
    tables: int
    buffers: Sequence[int] = ()
    polled: tuple[int, int] = (0, 0)
    gpu_share: float = 1.0


class Table(Protocol):
    """The tokens that query rows attend to, in the device's own form. Made once per step, used for every layer.

    It stays valid while segments grow, until their slots are reused for other tokens.
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
        """Compute partial attention; yield every few milliseconds, where the work may pause.

        Args:
            layer: Index of the attention.
            q: Queries [R, Hq, D], as returned by ``Device.sent``. Must not change before the end.
            out: Result [R, Hq, Dv] in host memory or an inbox, complete at the end.
            lse: Result [R, Hq], like ``out``.
            spec: Replaces the layer's own spec.
            new: Tokens to store first, which the rows named by ``Pairs.new`` attend to.
        """


Work = Callable[[Array, Array, Array], None]
"""Attends to a request, uint8 [nbytes], and writes out and lse; all three on the device."""


class PolledLane(Protocol):
    """Serves the requests of one lane in order. Launched work may run much later: its arguments must not change.

    Attributes:
        stream: Stream that polls for requests and replies.
    """

    stream: SlotStream

    def serve(
        self, incoming: Incoming, outgoing: Outgoing, record: int, nbytes: int, shape: tuple[int, int, int], work: Work
    ) -> None:
        """Launch the service of one request.

        Args:
            incoming: Slot of the request.
            outgoing: Slot of the reply.
            record: Index of the stream's record that is written after the reply.
            nbytes: Bytes of the request's body.
            shape: Shape [R, Hq, Dv] of the reply's ``out``.
            work: Writes the reply: out and lse [R, Hq], float32.
        """

    def attend(
        self, layer: int, table: Table, q: Array, out: Array, lse: Array, spec: AttentionSpec, new: New | None
    ) -> None:
        """Launch ``Table.attend`` with all arrays in device memory. Called by ``work``."""


class Polled(Protocol):
    """Serves requests on a device without the host.

    Attributes:
        slots: Slots that the device reads and writes.
    """

    slots: PolledSlots

    def lane(self, records: int, request_nbytes: int, reply_nbytes: int) -> PolledLane:
        """Return the service of another lane, with at most ``records`` requests in flight and messages of at most
        ``request_nbytes`` and ``reply_nbytes``."""


class Device(Mapper, Protocol):
    """Holds the KV slabs of all attentions, by layer, and runs attention. One thread owns it.

    Shapes use T tokens, R query rows, Hq query heads, Hkv key/value heads, D and Dv head sizes.
    """

    @property
    def polled(self) -> Polled | None:
        """The service of requests without the host; None if the host serves all requests."""

    def sent(self, array: Array) -> Array:
        """Return an array of the host or of an inbox where the device can read it: a copy, or the array itself.

        Views of the result are readable as well. Inboxes and mapped memory must not change before ``settle``.
        """

    def settle(self) -> None:
        """Return once the device has read all arrays passed to ``sent``."""

    def results(self, rows: int, spec: AttentionSpec) -> tuple[Floats, Floats]:
        """Allocate out [rows, Hq, Dv] and lse [rows, Hq], float32, in host memory that the device can write."""

    def device_results(self, rows: int, spec: AttentionSpec) -> tuple[Array, Array]:
        """Allocate out [rows, Hq, Dv] and lse [rows, Hq], float32, in device memory."""

    def attend_there(
        self, layer: int, table: Any, q: Array, out: Array, lse: Array, spec: AttentionSpec, new: New | None
    ) -> None:
        """Launch ``Table.attend`` with ``out`` and ``lse`` from ``device_results``; later device work may read them."""

    def keep(self, layer: int, k: Array, v: Array, slots: Slots) -> None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] in ``slots`` [T], rounded to the slab's element type; all three as
        returned by ``sent``."""

    def table(self, pairs: Pairs, slots: SlotsOf) -> Table:
        """Return the table of ``pairs``. ``slots``: returns a segment's slots."""

    def forget(self, segments: Sequence[Hashable]) -> None:
        """Drop cached data of segments that have ended or lost tokens. Earlier tables stay valid."""

    def prepare(self, slots: int) -> None:
        """Prepare memory that tokens will need next, the first ``slots`` slots being in use. Takes at most the time of
        a few pages."""

    def renew(self, target: Slots, source: Slots, first_query: int) -> None:
        """Copy KV from the slots ``source`` [T] to ``target`` [T], which hold the same tokens.

        Only windowed layers that have dropped the KV of ``target`` get it.

        ``first_query``: offset, in tokens, of the first query that may still attend to them.
        """

    def read(self, layer: int, slots: Slots, content: memoryview) -> None:
        """Write KV in ``slots`` into ``content`` as it is stored: scales of k and v if they are quantised, k, v."""

    def restore(self, layer: int, slots: Slots, content: memoryview) -> None:
        """Store ``content``, as written by ``read``, in ``slots``."""


def _offsets(counts: Sequence[int], dtype: type[Any]) -> npt.NDArray[Any]:
    return np.array([0, *itertools.accumulate(counts)], dtype)


def parts(content: memoryview, rows: int, arrays: Sequence[Any]) -> Iterator[tuple[Any, Array]]:
    """Yield each of ``arrays``, which are indexed by slot, with a view of its ``rows`` rows in ``content``."""
    offset = 0
    for array in arrays:
        shape = (rows, *array.shape[1:])
        view = np.frombuffer(content, array.dtype, math.prod(shape), offset).reshape(shape)
        offset += view.nbytes
        yield array, view
