"""GPU memory that attention needs besides KV slabs: bounded, and allocated before slabs are sized.

Allocations come from the backend's pool, which keeps freed memory for the next allocation.
"""

import collections
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.attention import MOST_CHANGES, Attention, Scratch, StepCapacity
from lamina.kernels.gpu.backend import Backend
from lamina.kernels.gpu.measure_tilings import measure
from lamina.kernels.gpu.specialize import append_program, power_of_two, write_words_program
from lamina.kernels.gpu.tilings import Choices
from lamina.memory.device.base import Largest

MOST_TABLES = 64  # tables kept until ``reserve`` sets the number
PARTS_OF_TABLES = 3  # tables per step: of all pairs, of shared prefixes, and of what follows the prefixes


class Workspaces:
    """Pools the memory of steps' tables and of partial attention results, shared by all steps on a GPU.

    Attributes:
        gpu_share: Fraction of the GPU's memory that all programs together may use.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._choices = Choices.load(backend.name)
        self._scratch = Scratch(backend)
        self._most_tables, self._used_count = MOST_TABLES, 0
        self._lane_floats = 0
        self.gpu_share = 1.0
        self._unused = collections.deque[Attention]()  # least recently used first

    def take(self, pairs: int, rows: int) -> Attention:
        """Return tables for a step of ``pairs`` pairs and ``rows`` query rows. Callers return them with ``give``."""
        capacity = StepCapacity(power_of_two(pairs), power_of_two(rows))
        found = next((each for each in reversed(self._unused) if each.capacity == capacity), None)
        if found is not None:
            self._unused.remove(found)
        self._used_count += 1
        self._drop_unused()
        return found or Attention(self._backend, capacity, self._choices, self._scratch)

    def make_fixed(self, rows: int) -> Attention:
        """Return tables for steps of up to ``rows`` pairs of one query row each, which stay the caller's."""
        return Attention(self._backend, StepCapacity(*[power_of_two(rows)] * 2), self._choices, self._scratch)

    def give(self, attention: Attention) -> None:
        """Accept tables for reuse by later steps. Their kernels may still run: later steps use the same stream."""
        self._used_count -= 1
        self._unused.append(attention)
        self._drop_unused()

    def lane_scratch(self) -> Scratch:
        """Return scratch memory for the stream of one lane, reserved by ``reserve``."""
        scratch = Scratch(self._backend)
        scratch.allocate_floats(self._lane_floats)
        return scratch

    def _drop_unused(self) -> None:
        while self._unused and len(self._unused) + self._used_count > self._most_tables:
            self._unused.popleft()

    def reserve(
        self, attentions: Sequence[AttentionSpec], element: KvElement, query: npt.DTypeLike, largest: Largest
    ) -> None:
        """Compile the kernels of all steps up to the ``largest``, and fill the backend's pool with their memory.

        Args:
            attentions: Attentions of the model's layers.
            element: Element type of KV in the slab.
            query: Element type of queries in messages.
            largest: Upper bounds of steps, and memory used besides tables.

        Raises MemoryError if the GPU has too little.
        """
        self._most_tables, self.gpu_share = largest.tables * PARTS_OF_TABLES, largest.gpu_share
        measure(self._backend, list(dict.fromkeys(attentions)), element, query, self._choices)
        pairs, rows = power_of_two(min(largest.pairs, largest.rows)), power_of_two(largest.rows)
        specs = list(dict.fromkeys(replace(spec, layer=0) for spec in attentions))
        sizes = [StepCapacity(2**each, max(2**each, rows)) for each in range(pairs.bit_length())]
        programs = {write_words_program()}
        for spec in specs:
            programs.add(append_program(element, query, spec.kv_heads, spec.qk_dim, spec.v_dim))
        # Only tables of the largest size are counted: smaller ones reuse their memory.
        count = self._most_tables
        tables = [Attention(self._backend, sizes[-1], self._choices, self._scratch) for _ in range(count)]
        few = [Attention(self._backend, size, self._choices, self._scratch) for size in sizes[:-1]]
        for attention, spec in itertools.product(tables + few, specs):
            programs |= attention.reserve(spec, element, query)
        lanes, lane_rows = largest.polled
        if lanes:
            capacity, alone = StepCapacity(*[power_of_two(lane_rows)] * 2), Scratch(self._backend)
            attention = Attention(self._backend, capacity, self._choices, alone)
            for spec in specs:
                programs |= attention.reserve(spec, element, query)
            self._lane_floats = len(alone.allocate_floats(0))
        for program in sorted(programs, key=str):
            self._backend.prepare(program)
        sizes_held = (*largest.buffers, 8 * MOST_CHANGES, *[4 * self._lane_floats] * lanes)
        held = [self._backend.empty((nbytes,), np.uint8) for nbytes in sizes_held]
        del held
