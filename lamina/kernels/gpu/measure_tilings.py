"""Measures on a GPU which tiling of attention is the fastest for each class of steps, and stores the results.

That takes a few seconds for each kind of attention, once per user and kind of GPU. Decode steps and prompt chunks have
separate tilings.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table
from lamina.kernels.gpu.backend import Backend
from lamina.kernels.gpu.specialize import attend_program, decode_tile, prompt_tile, sees_all
from lamina.kernels.gpu.tilings import TALL_WARPS, Choices, Context, Shape, Tiling, is_tall
from lamina.kernels.segments import SegmentTable

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
    Tiling(64, 4, 3, 4),
    Tiling(128, 4, 3, 2),
    Tiling(128, 4, 3, 3),
)
"""Tried for elements of 8 bits. Their programs are bound by instructions: 4.2 and 4.7 an element where codes are
converted two at a time, in the code for compute capability 9.0."""
PROMPT = (Tiling(64, 4, 3, 2), Tiling(64, 8, 3, 2), Tiling(32, 4, 3, 2), Tiling(64, 8, 3, 1), Tiling(128, 8, 3, 1))
"""Tried for prompt chunks, whose programs have four times the query rows and more registers."""
TALL = (Tiling(64, TALL_WARPS, 3, 2),)
"""Tried for tall tiles over elements of 8 bits: the only tiling whose results have been checked on a GPU."""
WAVES = (1, 2)
PROMPT_ROWS = 64
SLAB_BYTES = 256 << 20  # several times what any GPU's cache holds; longer contexts read it more than once

STEPS: Mapping[tuple[Context, bool], Sequence[int]] = {
    (Context.NORMAL, False): [1024] * 64,
    (Context.NORMAL, True): [8000] + [512] * 31,
    (Context.LONG, False): [32_000] * 8,
    (Context.LONG, True): [32_000] + [1024] * 63,
    (Context.ULTRA, False): [128_000] * 4,
    (Context.ULTRA, True): [500_000] + [1024] * 32,
}
"""Tokens of the sequences of a step of each class; in prompt chunks, the last ``PROMPT_ROWS`` of each are queries."""


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
        choices.merge_measured(measured)
        backend.trim()


def fastest(seconds: Mapping[Tiling, float]) -> Tiling:
    """Return the tiling that took the least time."""
    return min(seconds, key=seconds.__getitem__)


def candidates(element: KvElement, prompt: bool, block_m: int) -> Sequence[Tiling]:
    """Return the tilings to measure for tiles of ``block_m`` rows. The caller also varies their number of waves."""
    if is_tall(element, block_m):
        return TALL
    if prompt:
        return PROMPT
    return NARROW if element.scaled else WIDE


def tile(spec: AttentionSpec, element: KvElement, prompt: bool) -> int:
    """Rows of a program's tile."""
    return prompt_tile(element) if prompt else decode_tile(spec)[0]


def shapes_of(spec: AttentionSpec, element: KvElement) -> dict[Shape, Sequence[int]]:
    """``STEPS`` by the shapes that this attention has in them."""
    group, most_rows = spec.query_heads // spec.kv_heads, decode_tile(spec)[1]
    kinds = (False, True) if most_rows < PROMPT_ROWS else (False,)
    return {
        Shape(*step, prompt, element, group, spec.qk_dim): lengths
        for prompt in kinds
        for step, lengths in STEPS.items()
    }


def times(
    backend: Backend,
    spec: AttentionSpec,
    element: KvElement,
    query: npt.DTypeLike,
    shapes: Mapping[Shape, Sequence[int]],
) -> dict[Shape, dict[Tiling, float]]:
    """Seconds of a layer's attention in a step of each of ``shapes``, by the tilings that this GPU has room for."""
    tried = {prompt: _fitting(backend, spec, element, query, prompt) for prompt in {shape.prompt for shape in shapes}}
    slots = max(1, SLAB_BYTES // spec.slab_bytes_per_token(element))
    slab = KvSlab.allocate(backend, element, spec, slots)
    order = np.random.default_rng(0).permutation(slots).astype(np.int32)
    return {
        shape: _times(backend, spec, slab, query, (shape, each), order, tried[shape.prompt])
        for shape, each in shapes.items()
    }


def _fitting(
    backend: Backend, spec: AttentionSpec, element: KvElement, query: npt.DTypeLike, prompt: bool
) -> list[Tiling]:
    """Return the candidates that this GPU has room for, in every variant that steps may need."""
    block_m, found = tile(spec, element, prompt), list[Tiling]()
    for tiling in candidates(element, prompt, block_m):
        given = spec, element, tiling, block_m, query, backend.capability
        variants = [attend_program(*given)]
        if not prompt:
            variants.append(attend_program(*given, query))
        if sees_all(spec):
            variants.append(attend_program(*given, joins=True))
        if all(map(backend.fits, variants)):
            found += [replace(tiling, waves=waves) for waves in ((1,) if prompt else WAVES)]
    return found


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
    each = PROMPT_ROWS if shape.prompt else 1
    rows, ends = each * len(lengths), np.cumsum([0, *lengths])
    words = backend.empty((int(ends[-1]),), np.int32)
    backend.upload(np.resize(order, len(words)), words)
    q = backend.empty((rows, spec.query_heads, spec.qk_dim), query)
    backend.upload(np.zeros(q.shape, query), q)
    out = backend.empty((rows, spec.query_heads, spec.v_dim), np.float32)
    lse = backend.empty((rows, spec.query_heads), np.float32)
    queries, first = np.arange(0, rows + 1, each, dtype=np.int32), np.array(lengths, np.int32) - each
    table = SegmentTable(queries, first, ends, np.zeros(len(lengths), np.int32), order[:0])
    seconds = {}
    for tiling in tried:
        capacity = StepCapacity(len(lengths), rows)
        attention = Attention(backend, capacity, Choices(backend.name, {str(shape): tiling}))
        attention.upload_pairs(pair_table(table, ends[:-1]))
        seconds[tiling] = backend.time_on_device(functools.partial(attention.partial, q, slab, words, spec, out, lse))
    return seconds
