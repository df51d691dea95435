"""Memory that attention on a GPU needs beside slabs: bounded, and allocated before slabs are sized.

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

MOST_TABLES = 64  # kept for later steps, before ``reserve`` says how many
PARTS_OF_TABLES = 3  # a step's pairs, and if they share prefixes, the prefixes and the rest


class Workspaces:
    """Memory for the tables of steps and for parts of attentions, shared by all steps of a GPU.

    Attributes:
        gpu_share: of the GPU's memory, which may be in use in all.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._choices = Choices.load(backend.name)
        self._scratch = Scratch(backend)
        self._most_tables, self._used = MOST_TABLES, 0
        self._lane_floats = 0
        self.gpu_share = 1.0
        self._unused = collections.deque[Attention]()  # in order of last use

    def take(self, pairs: int, rows: int) -> Attention:
        """Tables for a step of so many pairs and query rows. The caller returns them with ``give``."""
        capacity = StepCapacity(power_of_two(pairs), power_of_two(rows))
        found = next((each for each in reversed(self._unused) if each.capacity == capacity), None)
        if found is not None:
            self._unused.remove(found)
        self._used += 1
        self._shrink()
        return found or Attention(self._backend, capacity, self._choices, self._scratch)

    def give(self, attention: Attention) -> None:
        """Keep tables for later steps. Kernels launched with them may still run: later ones follow in the same
        stream."""
        self._used -= 1
        self._unused.append(attention)
        self._shrink()

    def lane_scratch(self) -> Scratch:
        """Scratch for a stream of its own, of the size for which ``reserve`` has left memory."""
        scratch = Scratch(self._backend)
        scratch.allocate_floats(self._lane_floats)
        return scratch

    def _shrink(self) -> None:
        while self._unused and len(self._unused) + self._used > self._most_tables:
            self._unused.popleft()

    def reserve(
        self, attentions: Sequence[AttentionSpec], element: KvElement, query: npt.DTypeLike, largest: Largest
    ) -> None:
        """Compile the kernels of steps up to the ``largest``, for messages of type ``query``; allocate their memory.

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
        # Tables of smaller steps fit in the memory of those of the largest, which is freed for them.
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
