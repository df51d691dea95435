"""Slabs in the memory of a GPU, and attention by Triton kernels; the host keeps the slots and plans.

Queries are copied to the GPU and results back for every call: messages arrive in host memory. The table of a step is
sent once, with the first layer that uses it.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lamina.errors import ConfigError
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table
from lamina.kernels.gpu.program import Backend
from lamina.kernels.gpu.specialize import power_of_two
from lamina.kernels.segments import SegmentTable
from lamina.memory.device.base import Array, Floats, Slots, parts
from lamina.types import AttentionSpec, KvElement

EMULATED = "emulated"


def backend(name: str) -> Backend:
    """The GPU "cuda:INDEX", or Triton's interpreter for "emulated", with or without an index.

    Raises ConfigError if it cannot be used.
    """
    kind, _, index = name.partition(":")
    if kind == EMULATED:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
        from lamina.kernels.gpu.interpreter import Interpreter

        return Interpreter()
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(f"unknown device {name!r}; give cpu, {EMULATED}, or cuda:INDEX")
    from lamina.kernels.gpu.device import find, require

    require(int(index), find())  # says what is missing; importing CuPy would only fail
    from lamina.kernels.gpu.cuda import Cuda

    return Cuda(int(index))


class Gpu:
    """A ``Device``. An attention is one launch, which nothing can pause: prompt chunks take milliseconds at most."""

    def __init__(
        self, backend: Backend, attentions: Sequence[AttentionSpec], element: KvElement, capacity: int
    ) -> None:
        self._backend = backend
        self._specs = attentions
        self._slabs = [KvSlab.allocate(backend, element, spec, capacity) for spec in attentions]
        self._attentions: dict[StepCapacity, Attention] = {}
        self._table: SegmentTable | None = None  # sent last
        self._attention: Attention | None = None
        self._slots: Any = None

    def keep(self, layer: int, k: Array, v: Array, slots: Slots) -> None:
        """See ``Device``."""
        if len(slots):
            self._any().append(self._slabs[layer], self._sent(k), self._sent(v), self._sent(slots))

    def attend(
        self, layer: int, table: SegmentTable, q: Array, out: Floats, lse: Floats, spec: AttentionSpec | None = None
    ) -> Iterator[None]:
        """See ``Device``."""
        attention = self._begin(table)
        out_there, lse_there = (self._backend.empty(array.shape, np.float32) for array in (out, lse))
        spec = spec or self._specs[layer]
        attention.partial(self._sent(q), self._slabs[layer], self._slots, spec, out_there, lse_there)
        self._backend.download(out_there, out)
        self._backend.download(lse_there, lse)
        yield from ()

    def read(self, layer: int, slots: Slots, content: memoryview) -> None:
        """See ``Device``."""
        there = self._sent(slots)
        for array, view in parts(content, len(slots), self._arrays(layer)):
            self._backend.download(array[there], view)

    def restore(self, layer: int, slots: Slots, content: memoryview) -> None:
        """See ``Device``."""
        there = self._sent(slots)
        for array, view in parts(content, len(slots), self._arrays(layer)):
            array[there] = self._sent(view)

    def _arrays(self, layer: int) -> tuple[Any, ...]:
        slab = self._slabs[layer]
        scales = () if slab.k_scales is None else (slab.k_scales, slab.v_scales)
        return (*scales, slab.k, slab.v)

    def _sent(self, array: Array) -> Any:
        """A copy on the GPU."""
        there = self._backend.empty(array.shape, array.dtype)
        self._backend.upload(np.ascontiguousarray(array), there)
        return there

    def _begin(self, table: SegmentTable) -> Attention:
        """Send a table, unless it is the one sent last."""
        if table is self._table and self._attention is not None:
            return self._attention
        pairs, rows = len(table.query_start), int(table.query_offsets[-1])
        attention = self._with_capacity(StepCapacity(power_of_two(pairs), power_of_two(rows)))
        attention.begin(pair_table(table))
        self._slots = self._sent(np.append(table.slots, np.int32(-1)))  # programs may not take empty arrays
        self._table, self._attention = table, attention
        return attention

    def _any(self) -> Attention:
        return next(iter(self._attentions.values()), None) or self._with_capacity(StepCapacity(1, 1))

    def _with_capacity(self, capacity: StepCapacity) -> Attention:
        if capacity not in self._attentions:
            self._attentions[capacity] = Attention(self._backend, capacity)
        return self._attentions[capacity]
