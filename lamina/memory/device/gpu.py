"""Implements memory workers' ``Device`` on GPUs: KV slabs in GPU memory, and attention by Triton kernels.

Messages arrive in host memory, where a layer costs one copy to the GPU and one back, or in inboxes on the GPU. The
table of a step is sent to the GPU when the step's plan arrives; of the page tables, only changed words are sent.
Prefixes that sequences share are read once for all of them, if that saves enough (``lamina.memory.shared_prefixes``).
Decode steps may be served by the GPU itself, see ``lamina.memory.device_steps``.
"""

import functools
import itertools
import logging
import os
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lamina.core.errors import CapacityError, ConfigError
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.attention import PAIR_WORDS, Attention, KvSlab, Scratch, append, pair_table, write_words
from lamina.kernels.gpu.backend import Backend
from lamina.kernels.gpu.specialize import power_of_two, sees_all
from lamina.kernels.gpu.tables import PageTables
from lamina.kernels.gpu.tilings import Tiling
from lamina.memory.device.base import Array, Floats, Largest, New, Pairs, Slots, SlotsOf, parts
from lamina.memory.device.polling import GpuPolled
from lamina.memory.device.workspaces import Workspaces
from lamina.memory.shared_prefixes import SharedPrefixes, rest_of, shared_of
from lamina.transport.device.inboxes import Inboxes
from lamina.transport.device.slots import PolledSlots

logger = logging.getLogger(__name__)

EMULATED = "emulated"
PINNED_BITS = 25  # pinned memory is allocated at start for results up to 2^24 bytes: some hundred decoding sequences
LEAST_SAVED = 80 << 20
"""Fewest bytes per layer that reading shared prefixes once must save: what an H200 reads in 20 us.

Two more launches and merging took as long there: to read once took 1.37 times as long where it saved 60 MiB, and 0.89
times where it saved 96 MiB (``bench/gpu.py cascade``).
"""
NO_SLOTS = np.empty(0, np.int32)


@functools.cache
def backend(name: str) -> Backend:
    """Return the backend of GPU "cuda:INDEX", or Triton's interpreter for "emulated" or "emulated:INDEX".

    Each name has one backend per process. Raises ConfigError if the device cannot be used.
    """
    kind, _, index = name.partition(":")
    if kind == EMULATED:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
        from lamina.kernels.gpu.interpreter import Interpreter

        return Interpreter()
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(f"unknown device {name!r}; give cpu, {EMULATED}, or cuda:INDEX")
    from lamina.kernels.gpu.device import find, require

    require(int(index), find())  # raises an error that names what is missing, unlike an import of CuPy
    from lamina.kernels.gpu.cuda import Cuda

    return Cuda(int(index))


def polled_slots(name: str) -> PolledSlots:
    """Return the slots that GPU ``name`` polls by itself; for "emulated", threads stand in for its streams."""
    if name.partition(":")[0] == EMULATED:
        from lamina.transport.device.emulated_slots import ThreadSlots

        return ThreadSlots()
    from lamina.transport.device.cuda import CudaSlots

    backend(name)  # makes the GPU the current device of this process
    return CudaSlots()


@functools.cache
def workspaces(name: str) -> Workspaces:
    """Return the workspaces of the GPU ``name``. Raises ConfigError if it cannot be used."""
    return Workspaces(backend(name))


def reserve(
    name: str, attentions: Sequence[AttentionSpec], element: KvElement, query: np.dtype[Any], largest: Largest
) -> None:
    """Compile all kernels and allocate the memory that steps up to the ``largest`` need besides slabs.

    Arguments are those of ``Workspaces.reserve``.

    Raises ConfigError if the device cannot be used, and MemoryError if it has too little memory.
    """
    workspaces(name).reserve(attentions, element, query, largest)
    held = [backend(name).pinned((1 << bits,), np.uint8) for bits in range(9, PINNED_BITS) for _ in range(2)]
    del held  # freed pinned memory is reused for results, see ``Backend.pinned``
    _run_once(Gpu(backend(name), attentions[:1], element, 2, workspaces(name)), attentions[0], element, query)


def _run_once(device: "Gpu", spec: AttentionSpec, element: KvElement, query: np.dtype[Any]) -> None:
    """Run each operation once, so that libraries load and compile their own kernels."""
    q, k, v = (
        device.sent(np.zeros((2, heads, size), query))
        for heads, size in (
            (spec.query_heads, spec.qk_dim),
            (spec.kv_heads, spec.qk_dim),
            (spec.kv_heads, spec.v_dim),
        )
    )
    slots, content = np.arange(2, dtype=np.int32), memoryview(bytearray(2 * spec.slab_bytes_per_token(element)))
    device.keep(0, k, v, device.sent(slots))
    device.read(0, slots, content)
    device.restore(0, slots, content)
    table = device.table(Pairs([2], [0], [0], [0], [0], [2]), lambda key: slots)
    out, lse = device.results(2, spec)
    for _ in table.attend(0, q[device.sent(np.arange(2))], out, lse):
        pass
    device.forget([0])


class Gpu:
    """Implements ``Device`` on a GPU. An attention is one launch and cannot pause; prompt chunks take milliseconds."""

    def __init__(
        self,
        backend: Backend,
        attentions: Sequence[AttentionSpec],
        element: KvElement,
        capacity: int,
        workspaces: Workspaces | None = None,
        slots: PolledSlots | None = None,
        least_saved: int = LEAST_SAVED,
    ) -> None:
        """Allocate slabs of ``capacity`` slots.

        Args:
            backend: The GPU.
            attentions: Attentions of the model, by layer.
            element: Element type of KV in slabs.
            capacity: Token slots.
            workspaces: Workspaces of ``backend``; None: new ones.
            slots: Slots that the GPU polls to serve requests itself; None: the host serves all requests.
            least_saved: Fewest bytes per layer that a step must save for shared prefixes to be read once.
        """
        self._backend = backend
        self._workspaces = workspaces or Workspaces(backend)
        self.inboxes: Inboxes | None = (inboxes := Inboxes(backend.inbox_maker()))
        self.polled = None if slots is None else GpuPolled(backend, self._workspaces, self.launch, slots, inboxes)
        self._specs = attentions
        self._pages = _Pages(backend, power_of_two(2 * capacity))
        self._slabs = _slabs(backend, element, attentions, capacity, self._workspaces.gpu_share)
        kinds = dict.fromkeys(replace(spec, layer=0) for spec in attentions)
        self._element = element
        self._cascading = [spec for spec in kinds if sees_all(spec)]
        self._not_cascading = [spec for spec in kinds if not sees_all(spec)]
        token_bytes = max(spec.slab_bytes_per_token(element) for spec in attentions)
        self._sharing = SharedPrefixes(least_saved // token_bytes)
        self._reads_inbox = False  # whether a kernel has read an inbox since the last ``settle``

    def register_own(self, memory: memoryview) -> None:
        """Register memory that peers write into for fast copies to the GPU. A GPU that polls copies by itself."""
        if self.polled is None:
            self._backend.register_upload(memory)

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        """Let kernels write into a peer's memory, and return whether they can.

        False if the GPU polls: it then writes replies by itself.
        """
        return self.polled is None and self._backend.register_download(peer, memory)

    def unmap_peer(self, peer: str) -> None:
        self._backend.unregister_download(peer)

    def arrived(self, array: Any) -> Any:
        return array

    def copied(self, body: Any) -> memoryview:
        copy = np.empty(body.shape, np.uint8)
        self._backend.download((body, copy))
        return copy.data

    def settle(self) -> None:
        self._backend.wait_for_uploads()
        if self._reads_inbox:
            self._backend.download()  # copies nothing, and returns once all launched kernels have ended
            self._reads_inbox = False

    def sent(self, array: Array) -> Any:
        if self._backend.is_on_device(array):
            self._reads_inbox = True
            return array
        there = self._backend.empty(array.shape, array.dtype)
        self._backend.upload(np.ascontiguousarray(array), there)
        return there

    def results(self, rows: int, spec: AttentionSpec) -> tuple[Floats, Floats]:
        shape = rows, spec.query_heads
        return self._backend.pinned((*shape, spec.v_dim), np.float32), self._backend.pinned(shape, np.float32)

    def device_results(self, rows: int, spec: AttentionSpec) -> tuple[Array, Array]:
        shape = rows, spec.query_heads
        return self._backend.empty((*shape, spec.v_dim), np.float32), self._backend.empty(shape, np.float32)

    def attend_there(
        self, layer: int, table: "GpuTable", q: Array, out: Array, lse: Array, spec: AttentionSpec, new: New | None
    ) -> None:
        self.launch(layer, table, q, out, lse, spec, new)

    def keep(self, layer: int, k: Array, v: Array, slots: Slots) -> None:
        append(self._backend, self._slabs[layer], self._backend.aligned(k), self._backend.aligned(v), slots)

    def table(self, pairs: Pairs, slots: SlotsOf) -> "GpuTable":
        pages, starts = self._send_pages(pairs, slots)
        shared = self._sharing.find(pairs, slots) if self._cascading else []
        whole = cascade = None
        if not shared:
            whole = self._plan_attention(pairs, starts, [*self._cascading, *self._not_cascading])
        elif self._not_cascading:
            whole = self._plan_attention(pairs, starts, self._not_cascading)
        if shared:
            (together, order), first = shared_of(pairs, shared), [starts[one.pairs[0]] for one in shared]
            rest = self._plan_attention(rest_of(pairs, shared), starts, self._cascading)
            cascade = rest, self._plan_attention(together, first, self._cascading, order, sum(pairs.rows))
        table, reader = GpuTable(self, pages, whole, cascade), pages.tables.pin_tables()
        given_back, used = self._workspaces.give, [each for each in (whole, *(cascade or ())) if each is not None]

        def end() -> None:
            pages.tables.unpin_tables(reader)
            for attention in used:
                given_back(attention)

        weakref.finalize(table, end).atexit = False
        return table

    def _plan_attention(
        self,
        pairs: Pairs,
        starts: Sequence[int],
        kinds: Sequence[AttentionSpec],
        order: Slots | None = None,
        rows: int = 0,
    ) -> Attention:
        """Return an ``Attention`` with the tables of ``pairs``, planned for the specs ``kinds``.

        Args:
            starts: First word of the page table of each pair's segment.
            order: Order of query rows, where pairs do not have contiguous rows.
            rows: Query rows of the step, if not the sum over ``pairs``.
        """
        new = np.array(pairs.new, np.int32) if pairs.new else None
        words = pair_table(pairs.table(NO_SLOTS), np.add(starts, pairs.first), new)
        attention = self._workspaces.take(len(words), rows or sum(pairs.rows))
        attention.upload_pairs(words, order)
        attention.plan(kinds, self._element)  # a lane that the GPU serves must not take memory
        return attention

    def fixed_table(self, rows: int) -> "FixedTable":
        """Return memory for the tables of decode steps of up to ``rows`` rows, to be read by recordings."""
        attention = self._workspaces.make_fixed(rows)
        attention.upload_pairs(np.zeros((0, PAIR_WORDS), np.int32))
        attention.plan([*self._cascading, *self._not_cascading], self._element)
        return FixedTable(GpuTable(self, self._pages, attention, None))

    def forget(self, segments: Sequence[Hashable]) -> None:
        self._sharing.forget(segments)
        for segment in segments:
            self._pages.tables.free(segment)

    def prepare(self, slots: int) -> None:
        """Do nothing: the slabs' memory is resident."""

    def attend(
        self,
        layer: int,
        table: "GpuTable",
        q: Array,
        out: Floats,
        lse: Floats,
        spec: AttentionSpec | None = None,
        new: New | None = None,
    ) -> Iterator[None]:
        out_there, lse_there = (self._backend.empty(array.shape, np.float32) for array in (out, lse))
        self.launch(layer, table, q, out_there, lse_there, spec or self._specs[layer], new)
        self._backend.download((out_there, out), (lse_there, lse))
        yield from ()

    def launch(
        self,
        layer: int,
        table: "GpuTable",
        q: Array,
        out: Array,
        lse: Array,
        spec: AttentionSpec,
        new: New | None,
        scratch: Scratch | None = None,
    ) -> None:
        """Launch attention that writes ``out`` and ``lse`` on the GPU. ``scratch``: For a stream of its own."""
        added = None if new is None else (self._backend.aligned(new.k), self._backend.aligned(new.v))
        operands = self._backend.aligned(q), self._slabs[layer], table.pages.words, spec, out, lse
        attention, shared = table.attentions(spec)
        attention.partial(*operands, added, scratch)
        if shared is not None:
            shared.partial(*operands, None, scratch)

    def renew(self, target: Slots, source: Slots, first_query: int) -> None:
        """Do nothing: GPUs keep all tokens."""

    def read(self, layer: int, slots: Slots, content: memoryview) -> None:
        there = self.sent(slots)
        self._backend.download(
            *((array[there], view) for array, view in parts(content, len(slots), self._arrays(layer)))
        )

    def restore(self, layer: int, slots: Slots, content: memoryview) -> None:
        there = self.sent(slots)
        for array, view in parts(content, len(slots), self._arrays(layer)):
            array[there] = self.sent(view)

    def _arrays(self, layer: int) -> tuple[Any, ...]:
        slab = self._slabs[layer]
        scales = () if slab.k_scales is None else (slab.k_scales, slab.v_scales)
        return (*scales, slab.k, slab.v)

    def _send_pages(self, pairs: Pairs, slots: SlotsOf) -> tuple["_Pages", list[int]]:
        """Send changed words of the segments' page tables; return the tables and the first word of each segment's."""
        try:
            starts = self._pages.send(pairs.keys, slots)
        except CapacityError:  # many segments share slots, or have just been freed
            self._pages = _Pages(self._backend, 2 * self._pages.tables.words)
            return self._send_pages(pairs, slots)
        return self._pages, starts


def _slabs(
    backend: Backend, element: KvElement, attentions: Sequence[AttentionSpec], capacity: int, share: float
) -> list[KvSlab]:
    """Return the slabs of all layers, in GPU memory.

    If they do not all fit, up to ``share`` of the GPU's memory is used, and the slabs of the last layers are allocated
    in host memory, with a warning.
    """
    sizes = [capacity * spec.slab_bytes_per_token(element) for spec in attentions]
    left, total = backend.memory()
    if sum(sizes) > left:
        left -= round((1 - share) * total)
    here = [end <= left for end in itertools.accumulate(sizes)]
    if not all(here):
        logger.warning(
            "%s has memory for the KV of %d of %d layers; the rest is in host memory, which it reads much more slowly",
            backend.name,
            sum(here),
            len(here),
        )
    pairs = zip(attentions, here, strict=True)
    return [KvSlab.allocate(backend, element, spec, capacity, on_host=not fits) for spec, fits in pairs]


class _Pages:
    """The page tables of all segments. When they are full, larger ones replace them; earlier steps keep the old ones.

    Attributes:
        tables: Bookkeeping on the host.
        words: The tables themselves, int32 on the GPU.
    """

    def __init__(self, backend: Backend, words: int) -> None:
        self._backend = backend
        self.tables = PageTables(words)
        self.words = backend.empty((words,), np.int32)

    def send(self, segments: Sequence[Hashable], slots: SlotsOf) -> list[int]:
        """Send changed words and return the first word of each segment's table. Raises CapacityError."""
        for segment in segments:
            self.tables.update(segment, slots(segment))
        write_words(self._backend, self.words, self.tables.changes())
        return [self.tables.start(segment) for segment in segments]


@dataclass(eq=False)
class GpuTable:
    """Implements ``Table`` for one step.

    Attributes:
        pages: Page tables that the step reads.
        whole: Attention over all tokens of each pair; None if no layer needs it.
        cascade: Attention over what follows shared prefixes, and over the prefixes; None if no prefix is shared.
    """

    device: Gpu
    pages: _Pages
    whole: Attention | None
    cascade: tuple[Attention, Attention] | None

    def attentions(self, spec: AttentionSpec) -> tuple[Attention, Attention | None]:
        """Return the attention to run for ``spec``, and the one whose result is merged into it, if any."""
        if self.cascade is not None and sees_all(spec):
            return self.cascade
        assert self.whole is not None
        return self.whole, None

    def attend(
        self,
        layer: int,
        q: Array,
        out: Floats,
        lse: Floats,
        spec: AttentionSpec | None = None,
        new: New | None = None,
    ) -> Iterator[None]:
        return self.device.attend(layer, self, q, out, lse, spec, new)


class FixedTable:
    """Tables of decode steps in memory that stays where it is: a recording of attention reads them, for any step that
    was loaded before the replay. Empty at first.

    A recording stays valid while ``reads`` is the same.
    """

    def __init__(self, table: GpuTable) -> None:
        assert table.whole is not None
        self._table, self._attention = table, table.whole

    @property
    def reads(self) -> tuple[Any, tuple[Tiling, ...]]:
        """The page tables' memory, and the tilings of the step's work."""
        return self._table.pages, self._attention.tilings

    def load(self, table: GpuTable) -> bool:
        """Copy a step's tables here. False if they do not fit: prefixes are shared, or there are more rows."""
        step = table.whole
        if step is None or table.cascade is not None or step.capacity != self._attention.capacity:
            return False
        self._attention.copy_step(step)
        self._table = GpuTable(table.device, table.pages, self._attention, None)
        return True

    def divide_work(self) -> None:
        """Cut the step's work. The first part of a recording."""
        self._attention.plan_again()

    def attend(self, layer: int, q: Array, k: Array, v: Array, out: Array, lse: Array, spec: AttentionSpec) -> None:
        """Append k and v of the step's rows and attend, as ``Gpu.launch`` does; padding rows get 0 and -inf."""
        new = New(k, v, NO_SLOTS)
        self._table.device.launch(layer, self._table, q, out, lse, spec, new)
