"""Measures on a GPU which tiling of decode attention is the fastest for each class of steps, and keeps the results.

A few seconds for each kind of attention, once per kind of GPU and user: what has been measured is in the user's cache.
Prompt chunks take the default tiling.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table
from lamina.kernels.gpu.choice import Choices, Context, Shape, Tiling
from lamina.kernels.gpu.program import Backend
from lamina.kernels.gpu.specialize import attend_program, decode_tile
from lamina.kernels.segments import SegmentTable
from lamina.types import AttentionSpec, KvElement

logger = logging.getLogger(__name__)

WIDE = (
    Tiling(64, 4, 3, 4),
    Tiling(64, 4, 3, 3),
    Tiling(64, 4, 5, 3),
    Tiling(64, 8, 3, 3),
    Tiling(32, 4, 3, 5),
    Tiling(32, 4, 5, 4),
    Tiling(128, 8, 3, 2),
)
"""Tried for elements of 16 bits."""
NARROW = (
    Tiling(64, 8, 3, 2),
    Tiling(64, 4, 3, 2),
    Tiling(64, 4, 3, 3),
    Tiling(128, 8, 3, 2),
    Tiling(32, 4, 3, 4),
    Tiling(32, 4, 5, 3),
)
"""Tried for elements of 8 bits."""
WAVES = (1, 2)
SLAB_BYTES = 256 << 20  # several times what any GPU's cache holds; longer contexts read it more than once

STEPS: Mapping[tuple[Context, bool], Sequence[int]] = {
    (Context.NORMAL, False): [1024] * 64,
    (Context.NORMAL, True): [8000] + [512] * 31,
    (Context.LONG, False): [32_000] * 8,
    (Context.LONG, True): [32_000] + [1024] * 63,
    (Context.ULTRA, False): [128_000] * 4,
    (Context.ULTRA, True): [500_000] + [1024] * 32,
}
"""Tokens of the sequences of a step of each class."""


def measure(
    backend: Backend, attentions: Sequence[AttentionSpec], element: KvElement, query: npt.DTypeLike, choices: Choices
) -> None:
    """Add to ``choices``, here and in the user's cache, the fastest tilings of these attentions for messages of type
    ``query``, unless they have been measured. Does nothing on a device that cannot be timed, nor without a cache.

    Raises MemoryError if the GPU has no room for ``SLAB_BYTES``.
    """
    if not backend.timed or not choices.kept or element is KvElement.FLOAT32:  # products of float32 have one tiling
        return
    measured = dict(choices.measured)
    for spec in attentions:
        shapes = {shape: lengths for shape, lengths in shapes_of(spec, element).items() if str(shape) not in measured}
        if shapes:
            logger.warning("measuring attention on this %s, once: the results are kept", backend.name)
            found = times(backend, spec, element, query, shapes)
            measured |= {str(shape): fastest(each) for shape, each in found.items() if each}
    if measured != choices.measured:
        choices.add(measured)
        backend.trim()


def fastest(seconds: Mapping[Tiling, float]) -> Tiling:
    """The tiling that took the least time."""
    return min(seconds, key=seconds.__getitem__)


def candidates(element: KvElement) -> Sequence[Tiling]:
    """What is tried, without waves."""
    return NARROW if element.scaled else WIDE


def shapes_of(spec: AttentionSpec, element: KvElement) -> dict[Shape, Sequence[int]]:
    """``STEPS`` by the shapes that this attention has in them."""
    group = spec.query_heads // spec.kv_heads
    return {Shape(*step, False, element, group, spec.qk_dim): lengths for step, lengths in STEPS.items()}


def times(
    backend: Backend,
    spec: AttentionSpec,
    element: KvElement,
    query: npt.DTypeLike,
    shapes: Mapping[Shape, Sequence[int]],
) -> dict[Shape, dict[Tiling, float]]:
    """Seconds of a layer's attention in a step of each of ``shapes``, by the tilings that this GPU has room for."""
    block_m = decode_tile(spec)[0]
    tried = [
        replace(tiling, waves=waves)
        for tiling in candidates(element)
        if all(
            backend.fits(attend_program(spec, element, tiling, block_m, query, backend.capability, new))
            for new in (None, query)
        )
        for waves in WAVES
    ]
    slots = max(1, SLAB_BYTES // spec.slab_bytes_per_token(element))
    slab = KvSlab.allocate(backend, element, spec, slots)
    order = np.random.default_rng(0).permutation(slots).astype(np.int32)
    return {shape: _times(backend, spec, slab, query, (shape, each), order, tried) for shape, each in shapes.items()}


def _times(
    backend: Backend,
    spec: AttentionSpec,
    slab: KvSlab,
    query: npt.DTypeLike,
    step: tuple[Shape, Sequence[int]],
    order: npt.NDArray[np.int32],
    tried: Sequence[Tiling],
) -> dict[Tiling, float]:
    """``order``: the slab's slots, from which page tables are made."""
    shape, lengths = step
    rows, ends = len(lengths), np.cumsum([0, *lengths])
    words = backend.empty((int(ends[-1]),), np.int32)
    backend.upload(np.resize(order, len(words)), words)
    q = backend.empty((rows, spec.query_heads, spec.qk_dim), query)
    backend.upload(np.zeros(q.shape, query), q)
    out = backend.empty((rows, spec.query_heads, spec.v_dim), np.float32)
    lse = backend.empty((rows, spec.query_heads), np.float32)
    last = np.array(lengths, np.int32) - 1
    table = SegmentTable(np.arange(rows + 1, dtype=np.int32), last, ends, np.zeros(rows, np.int32), order[:0])
    seconds = {}
    for tiling in tried:
        attention = Attention(backend, StepCapacity(rows, rows), Choices(backend.name, {str(shape): tiling}))
        attention.begin(pair_table(table, ends[:-1]))
        seconds[tiling] = backend.seconds(functools.partial(attention.partial, q, slab, words, spec, out, lse))
    return seconds
