"""Implements memory workers' ``Device`` on CPUs: KV slabs in host memory, and native attention. Needs no torch."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.attention import Scales, append, partial, partial_tasks
from lamina.kernels.host_memory import PagesAhead, allocate
from lamina.kernels.segments import STORAGE, SegmentTable
from lamina.memory.cuts import MOST_PRODUCTS, cuts
from lamina.memory.device.base import Array, Floats, New, Pairs, Slots, SlotsOf, parts
from lamina.memory.device.windows import Needed, Windows


@dataclass(frozen=True)
class KvArrays:
    """K [capacity, Hkv, D] and V [capacity, Hkv, Dv] of one attention, by slot; scales [capacity, Hkv] if quantised."""

    k: Array
    v: Array
    scales: Scales | None

    @classmethod
    def allocate(cls, spec: AttentionSpec, element: KvElement, capacity: int) -> "KvArrays":
        """Return arrays of ``capacity`` slots; pages become resident shortly before tokens are stored."""

        def rows(size: int) -> Array:
            stored = STORAGE[element]
            nbytes = capacity * spec.kv_heads * size * stored.itemsize
            return allocate(nbytes).view(stored).reshape(capacity, spec.kv_heads, size)

        def scales() -> Floats:
            return allocate(capacity * spec.kv_heads * 4).view(np.float32).reshape(capacity, spec.kv_heads)

        return cls(rows(spec.qk_dim), rows(spec.v_dim), (scales(), scales()) if element.scaled else None)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays, scales first: float32 scales stay aligned where slots are copied one array after another."""
        return (*(self.scales or ()), self.k, self.v)


class Cpu:
    """Implements ``Device`` on the CPU."""

    polled = None

    def __init__(
        self,
        attentions: Sequence[AttentionSpec],
        element: KvElement,
        capacity: int,
        threads: int,
        needed: Needed | None = None,
    ) -> None:
        """``needed``: Slots that layers with a window must keep; they keep no others. None: layers keep all tokens."""
        self._attentions = attentions
        self._threads = threads
        sizes = {spec.window for spec in attentions if spec.window and needed is not None}
        windows = {size: Windows(size, capacity, needed) for size in sizes if needed is not None}
        self._windows = [windows.get(spec.window) for spec in attentions]
        self._slabs = [KvArrays.allocate(spec, element, capacity) for spec in attentions]
        whole = [slab for slab, window in zip(self._slabs, self._windows, strict=True) if window is None]
        self._pages = PagesAhead([array for slab in whole for array in slab.arrays])

    inboxes = None

    def arrived(self, array: Array) -> Array:
        return array

    def copied(self, body: Array) -> memoryview:
        return memoryview(bytearray(body))

    def register_own(self, memory: memoryview) -> None:
        """Do nothing: the CPU reads all host memory equally fast."""

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        return True

    def unmap_peer(self, peer: str) -> None:
        """Do nothing: nothing was mapped."""

    def settle(self) -> None:
        """Do nothing: arrays are read before methods return."""

    def keep(self, layer: int, k: Array, v: Array, slots: Slots) -> None:
        slab, windows = self._slabs[layer], self._windows[layer]
        slots = slots if windows is None else windows.place(slots)
        append(slab.k, slab.v, k, v, slots, self._threads, slab.scales)

    def sent(self, array: Array) -> Array:
        return array

    def results(self, rows: int, spec: AttentionSpec) -> tuple[Floats, Floats]:
        shape = rows, spec.query_heads
        return np.empty((*shape, spec.v_dim), np.float32), np.empty(shape, np.float32)

    def device_results(self, rows: int, spec: AttentionSpec) -> tuple[Array, Array]:
        return self.results(rows, spec)

    def attend_there(
        self, layer: int, table: "CpuTable", q: Array, out: Array, lse: Array, spec: AttentionSpec, new: New | None
    ) -> None:
        for _ in table.attend(layer, q, out, lse, spec, new):
            pass

    def table(self, pairs: Pairs, slots: SlotsOf) -> "CpuTable":
        seen = zip(pairs.keys, pairs.first, pairs.stop, strict=True)
        return CpuTable(self, pairs.table(np.concatenate([slots(key)[first:stop] for key, first, stop in seen])))

    def forget(self, segments: Sequence[Hashable]) -> None:
        """Do nothing: nothing is cached by segment."""

    def prepare(self, slots: int) -> None:
        self._pages.prepare(slots)

    def attend(
        self, layer: int, table: SegmentTable, q: Array, out: Floats, lse: Floats, spec: AttentionSpec | None = None
    ) -> Iterator[None]:
        slab, windows, spec = self._slabs[layer], self._windows[layer], spec or self._attentions[layer]
        table = table if windows is None else windows.table(table)
        for place, cut in enumerate(cuts(table, spec, self._threads, MOST_PRODUCTS)):
            if place:
                yield
            part = slice(cut.start, cut.stop)
            arrays = q[part], slab.k, slab.v, cut.table, spec, self._threads, out[part], lse[part]
            if cut.tasks is None:
                partial(*arrays, scales=slab.scales)
            else:
                partial_tasks(*arrays, cut.tasks, adds=cut.adds, scales=slab.scales)

    def renew(self, target: Slots, source: Slots, first_query: int) -> None:
        for windows in {id(one): one for one in self._windows if one is not None}.values():
            windows.renew(target, source, first_query)

    def read(self, layer: int, slots: Slots, content: memoryview) -> None:
        windows = self._windows[layer]
        rows = slots if windows is None else windows.find(slots)
        for array, view in parts(content, len(slots), self._slabs[layer].arrays):
            view[:] = array[rows]

    def restore(self, layer: int, slots: Slots, content: memoryview) -> None:
        windows = self._windows[layer]
        rows = slots if windows is None else windows.place(slots)
        for array, view in parts(content, len(slots), self._slabs[layer].arrays):
            array[rows] = view


@dataclass(frozen=True)
class CpuTable:
    """Implements ``Table`` with the slots of all pairs in one array."""

    device: Cpu
    segments: SegmentTable

    def attend(
        self,
        layer: int,
        q: Array,
        out: Floats,
        lse: Floats,
        spec: AttentionSpec | None = None,
        new: New | None = None,
    ) -> Iterator[None]:
        if new is not None:
            self.device.keep(layer, new.k, new.v, new.slots)
        return self.device.attend(layer, self.segments, q, out, lse, spec)
