"""Partial attention on a GPU: sends a step's tables to the device, then makes one asynchronous call per layer.

Shapes use R query rows, Hq query heads, Hkv key/value heads, D and Dv head sizes, S pairs of (sequence, segment).
Arrays are the backend's; uint16 means bfloat16 bits.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.backend import ALIGNMENT, TRITON_NAMES, Backend, Program
from lamina.kernels.gpu.specialize import (
    WRITTEN_WORDS,
    append_program,
    attend_program,
    combine_program,
    decode_tile,
    merge_program,
    plan_numbers,
    plan_program,
    prompt_tile,
    sees_all,
    write_words_program,
)
from lamina.kernels.gpu.tilings import Choices, Context, Shape, Tiling, classify
from lamina.kernels.segments import STORAGE, SegmentTable

PAIR_WORDS, ITEM_WORDS = 8, 16
WORDS_ALIGNED = ALIGNMENT // 4
MOST_CHANGES = 1 << 16  # changed words of page tables that are sent at once: 512 KiB with their indices
PairArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepCapacity:
    """The largest step; a CUDA graph captured with it stays valid for every smaller step."""

    pairs: int
    rows: int


@dataclass(frozen=True)
class KvSlab:
    """K [slots, Hkv, D] and V [slots, Hkv, Dv] of one attention; float32 scales [slots, Hkv] if narrow."""

    element: KvElement
    k: Any
    v: Any
    k_scales: Any = None
    v_scales: Any = None

    @classmethod
    def allocate(
        cls, backend: Backend, element: KvElement, spec: AttentionSpec, slots: int, on_host: bool = False
    ) -> "KvSlab":
        """Return a slab of uninitialised slots; ``on_host``: in the host's memory."""
        empty = backend.on_host if on_host else backend.empty
        k = empty((slots, spec.kv_heads, spec.qk_dim), STORAGE[element])
        v = empty((slots, spec.kv_heads, spec.v_dim), STORAGE[element])
        if not element.scaled:
            return cls(element, k, v)
        k_scales, v_scales = (empty((slots, spec.kv_heads), np.float32) for _ in range(2))
        return cls(element, k, v, k_scales, v_scales)


def pair_table(
    segments: SegmentTable, tables: npt.NDArray[Any] | None = None, new_rows: npt.NDArray[Any] | None = None
) -> PairArray:
    """Return the device's description of every pair of a step, int32 [S, 8].

    Args:
        segments: lengths and positions; its slots are not read if ``tables`` is given.
        tables: [S], first word of each pair's page table; by default the segments' own ``slots`` hold all tables.
        new_rows: [S], row of the message's k and v of the pair's last token, for ``attend`` to append; -1: none.

    Raises:
        ValueError: a new row's token is not the only query's own, last one; or slots are missing.
    """
    if tables is None and segments.kv_offsets[-1] > len(segments.slots):
        raise ValueError(f"pairs have {segments.kv_offsets[-1]} tokens, and slots holds {len(segments.slots)}")
    table = np.zeros((len(segments.query_start), PAIR_WORDS), np.int32)
    table[:, 0], table[:, 1] = segments.query_offsets[:-1], np.diff(segments.query_offsets)
    table[:, 2], table[:, 3] = segments.query_start, segments.kv_start
    table[:, 4] = segments.kv_offsets[:-1] if tables is None else tables
    table[:, 5] = np.diff(segments.kv_offsets)
    table[:, 6] = -1 if new_rows is None else new_rows
    own = (table[:, 1] == 1) & (table[:, 5] > 0) & (table[:, 2] == table[:, 3] + table[:, 5] - 1)
    if wrong := np.flatnonzero((table[:, 6] >= 0) & ~own).tolist():
        raise ValueError(
            f"pairs {wrong} append a token while they attend, but have not exactly one query at their last token's "
            "position; append their tokens before"
        )
    return table


@dataclass(frozen=True)
class _Operands:
    q: Any
    slab: KvSlab
    tables: Any
    spec: AttentionSpec
    out: Any
    lse: Any
    new: tuple[Any, Any] | None

    def validate_shapes(self, least_rows: int, most_rows: int) -> None:
        """Raises ValueError for an invalid shape or element type, or too few or too many rows."""
        spec, slab, rows = self.spec, self.slab, len(self.q)
        shapes = tuple(tuple(array.shape[1:]) for array in (self.q, slab.k, slab.v, self.out, self.lse))
        wanted = (
            (spec.query_heads, spec.qk_dim),
            (spec.kv_heads, spec.qk_dim),
            (spec.kv_heads, spec.v_dim),
            (spec.query_heads, spec.v_dim),
            (spec.query_heads,),
        )
        if shapes != wanted or not least_rows <= rows == len(self.out) == len(self.lse) <= most_rows:
            raise ValueError(
                f"q, k, v, out and lse have rows of shapes {shapes} and q has {rows} rows; the spec of layer "
                f"{spec.layer} says {wanted}, the step has {least_rows} rows and the capacity is {most_rows} rows"
            )
        stored = STORAGE[slab.element]
        if self.q.dtype not in TRITON_NAMES or slab.k.dtype != stored or slab.v.dtype != stored:
            raise ValueError(
                f"q is {self.q.dtype}, k {slab.k.dtype} and v {slab.v.dtype}; q must be float32, float16 or uint16 "
                f"(bfloat16 bits), and a slab of {slab.element.name} is {stored}"
            )
        if self.tables.dtype != np.int32:
            raise ValueError(f"tables are {self.tables.dtype}; page tables are words of int32")
        if self.out.dtype != np.float32 or self.lse.dtype != np.float32:
            raise ValueError(f"out is {self.out.dtype} and lse {self.lse.dtype}; both are written as float32")
        if self.new is not None:
            _check_rows(slab, *self.new)


def _check_rows(slab: KvSlab, k: Any, v: Any) -> None:
    if k.shape[1:] != slab.k.shape[1:] or v.shape[1:] != slab.v.shape[1:] or len(k) != len(v):
        raise ValueError(
            f"new k {k.shape} and v {v.shape} are not rows of one number of tokens for a slab of k {slab.k.shape} and "
            f"v {slab.v.shape}"
        )
    if k.dtype != v.dtype or k.dtype not in TRITON_NAMES:
        raise ValueError(f"new k is {k.dtype} and v {v.dtype}; both must be float32, float16 or uint16 (bfloat16 bits)")


@dataclass(frozen=True)
class _PairClass:
    """Pairs with rows[0] to rows[1] query rows, of attentions with the same planning."""

    spec: AttentionSpec
    element: KvElement
    block_m: int
    rows: tuple[int, int]

    @classmethod
    def from_spec(cls, spec: AttentionSpec, element: KvElement, block_m: int, rows: tuple[int, int]) -> "_PairClass":
        """Return the class of these pairs: the spec without the fields that planning ignores."""
        cut = replace(spec, layer=0, scale=1.0, softcap=0.0, sinks=False, alibi_slopes=None)
        return cls(cut, element, block_m, rows)

    @classmethod
    def classes_of(cls, spec: AttentionSpec, element: KvElement, most_rows: int) -> "Iterator[_PairClass]":
        """Yield the class of pairs with few query rows and, if ``most_rows`` is larger, the class of all others."""
        block_m, few = decode_tile(spec)
        yield cls.from_spec(spec, element, block_m, (1, few))
        if most_rows > few:
            yield cls.from_spec(spec, element, prompt_tile(element), (few + 1, 2**30))


@dataclass(frozen=True)
class _Plan:
    """Items of one class of pairs for one tiling, on the device; at most ``bound`` items."""

    numbers: tuple[int, ...]
    tiling: Tiling
    bound: int
    items: Any
    splits: Any

    def part_rows(self, pairs: _PairClass) -> int:
        """Return the most rows that the partials of split tiles may have."""
        return self.bound * pairs.spec.kv_heads * pairs.block_m


class Scratch:
    """Memory for the partials that an attention's first kernel writes and its last one merges.

    Attentions of one stream share it, because they run in order.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers = [backend.empty((0,), np.float32)]

    def allocate_floats(self, count: int) -> Any:
        """Return memory for ``count`` float32. Smaller buffers are kept, because captured graphs point to them."""
        if len(self._buffers[-1]) < count:
            self._buffers.append(self._backend.empty((count,), np.float32))
        return self._buffers[-1]


class Attention:
    """Runs the attention of one memory worker's steps on one GPU. One thread owns it.

    ``upload_pairs`` sends a step's table (a few words per pair and row) and cuts its work; everything happens on the
    device, in stream order. ``partial`` can be captured in a CUDA graph after it has run once, which compiles and
    allocates. Replays use the tables sent last, and are valid for steps of the same ``step_class``, with prompt chunks
    only if the captured step had them.

    Attributes:
        capacity: The largest step.
    """

    def __init__(
        self,
        backend: Backend,
        capacity: StepCapacity,
        choices: Choices | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self._backend = backend
        self.capacity = capacity
        self._choices = choices or Choices.load(backend.name)
        of_pairs = capacity.pairs * PAIR_WORDS
        aligned = -(-capacity.rows // WORDS_ALIGNED) * WORDS_ALIGNED
        self._words = backend.empty((of_pairs + 2 * aligned,), np.int32)
        self._row_pairs, self._order = self._words[of_pairs:][:aligned], self._words[of_pairs + aligned :]
        self._plans: dict[tuple[_PairClass, Tiling], _Plan] = {}
        self._current: dict[_PairClass, _Plan] = {}
        self._scratch = scratch or Scratch(backend)
        self.step_class = (Context.NORMAL, False)
        """Context class and raggedness of the step: what a captured graph depends on besides the capacity."""
        self._rows, self._most_rows, self._new_rows, self._joins = 0, 0, 0, False

    def upload_pairs(self, table: PairArray, order: npt.NDArray[np.int32] | None = None) -> None:
        """Send one step's pairs (``pair_table``) to the device.

        Args:
            table: the pairs.
            order: the pairs' query row i is row ``order[i]`` of q, none of them twice, and ``partial`` merges its
                results with what out and lse hold. Without it, rows are in order, and out and lse are written.

        Raises:
            ValueError: they exceed the capacity.
        """
        pairs, rows = len(table), int(table[:, 1].sum())
        if pairs > self.capacity.pairs or rows > self.capacity.rows:
            raise ValueError(
                f"a step of {pairs} pairs and {rows} query rows is larger than this attention's capacity of "
                f"{self.capacity.pairs} and {self.capacity.rows}; make one with a larger StepCapacity"
            )
        words = np.zeros(self._words.shape, np.int32)
        words[: table.size] = table.ravel()
        row_pairs, given = words[self.capacity.pairs * PAIR_WORDS :].reshape(2, -1)
        row_pairs[:rows], row_pairs[rows:] = np.repeat(np.arange(pairs), table[:, 1]), -1
        given[:rows] = 0 if order is None else order
        self._backend.upload(words, self._words)
        self.step_class = classify(table[:, 5])
        self._joins = order is not None
        self._rows = rows if order is None else int(order.max(initial=-1)) + 1
        self._most_rows = int(table[:, 1].max(initial=0))
        self._new_rows = int(table[:, 6].max(initial=-1)) + 1
        self._current = {pairs_of: self._plan(pairs_of) for pairs_of in self._current}

    def plan(self, specs: Sequence[AttentionSpec], element: KvElement) -> None:
        """Cut the step's work for these attentions now, in the current stream, instead of with their first call."""
        for spec in specs:
            for pairs in _PairClass.classes_of(spec, element, self._most_rows):
                if pairs not in self._current:
                    self._current[pairs] = self._plan(pairs)

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """Tilings of the step's planned work: a captured graph serves the steps that have the same ones."""
        return tuple(plan.tiling for plan in self._current.values())

    def copy_step(self, other: "Attention") -> None:
        """Copy the tables of the step that ``other``, of the same capacity, has been sent, on the device in stream
        order. ``plan_again`` then cuts the step's work."""
        self._words[...] = other._words
        self.step_class, self._joins, self._rows = other.step_class, other._joins, other._rows
        self._most_rows, self._new_rows = other._most_rows, other._new_rows
        # The classes of pairs are those that this object serves: ``other`` may also have served prompt chunks.
        self._current = {pairs: self._cut(pairs, self.step_class) for pairs in self._current}

    def plan_again(self) -> None:
        """Cut the work of the step that was copied last. Can be captured, together with ``partial``."""
        for pairs in self._current:
            self._plan(pairs)

    def partial(
        self,
        q: Any,
        slab: KvSlab,
        tables: Any,
        spec: AttentionSpec,
        out: Any,
        lse: Any,
        new: tuple[Any, Any] | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Attention of every query row over its pair's segment, without sinks, which ``merge`` applies.

        Args:
            q: [R, Hq, D] float32 or 16 bits wide; rounded to the element of products (bfloat16 for narrow KV).
            slab: read through ``tables``, int32 words of all page tables.
            spec: scale, window, chunk, softcap and alibi slopes; head counts and sizes of q and slab.
            out: float32 [R, Hq, Dv] and lse: float32 [R, Hq], natural log; written. 0 and -inf for a row that sees
                nothing. Merged with what they hold if the step has an ``order``.
            new: k [T, Hkv, D] and v [T, Hkv, Dv] of which pairs append rows while they attend.
            scratch: memory for partials; by default this object's own, which one stream at a time may use.

        Raises:
            ValueError: a shape or an element type is invalid, or ``new`` lacks rows that pairs append.
        """
        given = _Operands(q, slab, tables, spec, out, lse, new)
        given.validate_shapes(self._rows, self.capacity.rows)
        if self._new_rows > (0 if new is None else len(new[0])):
            raise ValueError(
                f"pairs of this step append tokens up to row {self._new_rows - 1} while they attend; give the "
                "message's k and v, with as many rows, as new"
            )
        for pairs in _PairClass.classes_of(spec, slab.element, self._most_rows):
            self._run(pairs, given if pairs.rows[0] == 1 else replace(given, new=None), scratch or self._scratch)

    def reserve(self, spec: AttentionSpec, element: KvElement, query: npt.DTypeLike) -> set[Program]:
        """Allocate the memory that attentions of ``spec`` need in steps of any lengths within the capacity.

        Returns the programs that they launch for queries of type ``query``: if a query ``sees_all``, also those of
        steps with an order.
        """
        programs, rows, joins = {plan_program(self.capacity.pairs)}, 0, sees_all(spec)
        for pairs in _PairClass.classes_of(spec, element, self.capacity.rows):
            programs |= {combine_program(spec, pairs.block_m, each) for each in {False, joins}}
            for step_class in itertools.product(Context, (False, True)):
                plan, capability = self._cut(pairs, step_class), self._backend.capability
                given = spec, element, plan.tiling, pairs.block_m, query, capability
                for new in (None, query) if pairs.rows[0] == 1 else (None,):
                    programs.add(attend_program(*given, new))
                if joins:
                    programs.add(attend_program(*given, joins=True))
                rows = max(rows, plan.part_rows(pairs))
        self._scratch.allocate_floats(rows * (spec.v_dim + 1))
        if spec.alibi_slopes is not None:
            self._backend.constant(spec.alibi_slopes)
        return programs

    def _run(self, pairs: _PairClass, given: _Operands, scratch: Scratch) -> None:
        if pairs not in self._current:
            self._current[pairs] = self._plan(pairs)
        plan, spec, slab, q, out, lse = self._current[pairs], given.spec, given.slab, given.q, given.out, given.lse
        part_rows = plan.part_rows(pairs)
        parts = scratch.allocate_floats(part_rows * (spec.v_dim + 1))
        part_lse, part_out = parts[:part_rows], parts[part_rows:]
        slopes = lse if spec.alibi_slopes is None else self._backend.constant(spec.alibi_slopes)
        new_type = None if given.new is None else given.new[0].dtype
        program = attend_program(
            spec, slab.element, plan.tiling, pairs.block_m, q.dtype, self._backend.capability, new_type, self._joins
        )
        shared = [plan.items, plan.splits, self._order, out, lse, part_out, part_lse]
        arrays = [q, slab.k, slab.v, *_scales(slab, lse), *(given.new or (q, q)), slopes, given.tables, *shared]
        numbers = (self.capacity.pairs, spec.scale, spec.softcap)
        self._backend.launch(program, (spec.kv_heads * plan.bound,), [*arrays, *numbers])
        merged = [part_out, part_lse, self._row_pairs, self._order, plan.splits, out, lse]
        self._backend.launch(combine_program(spec, pairs.block_m, self._joins), (len(q), spec.query_heads), merged)

    def _plan(self, pairs: _PairClass) -> _Plan:
        plan, count = self._cut(pairs, self.step_class), self.capacity.pairs
        self._backend.launch(
            plan_program(count), (count,), [self._words, plan.items, plan.splits, count, *plan.numbers]
        )
        return plan

    def _cut(self, pairs: _PairClass, step_class: tuple[Context, bool]) -> _Plan:
        """Return how the work of these pairs is cut in steps of a class, with memory for its items."""
        spec, group = pairs.spec, pairs.spec.query_heads // pairs.spec.kv_heads
        shape = Shape(*step_class, pairs.rows[0] > 1, pairs.element, group, spec.qk_dim)
        tiling = self._choices.tiling(shape, pairs.block_m, self._backend.capability)
        if (pairs, tiling) not in self._plans:
            programs = self._backend.multiprocessors * tiling.resident * tiling.waves
            wanted = max(1, programs // spec.kv_heads)
            numbers = plan_numbers(spec, tiling, pairs.block_m, pairs.rows, wanted)
            tiles = self.capacity.pairs
            if pairs.rows[1] * group > pairs.block_m:
                tiles += self.capacity.rows * group // pairs.block_m
            bound = max(wanted, tiles + wanted // 2)
            items = self._backend.empty((bound * ITEM_WORDS,), np.int32)
            splits = self._backend.empty((3 * self.capacity.pairs + 1,), np.int32)
            self._plans[pairs, tiling] = _Plan(numbers, tiling, bound, items, splits)
        return self._plans[pairs, tiling]


def append(backend: Backend, slab: KvSlab, k: Any, v: Any, slots: Any) -> None:
    """Write k [T, Hkv, D] and v [T, Hkv, Dv] to ``slots`` int32 [T]; a token with slot -1 is skipped.

    Raises ValueError for an invalid shape or element type.
    """
    _check_rows(slab, k, v)
    if slots.shape != k.shape[:1] or slots.dtype != np.int32:
        raise ValueError(f"slots are {slots.dtype} {slots.shape}; give one int32 for each of {len(k)} tokens")
    if len(k):
        program = append_program(slab.element, k.dtype, k.shape[1], k.shape[2], v.shape[2])
        backend.launch(program, (len(k), k.shape[1]), [slab.k, slab.v, *_scales(slab, slots), k, v, slots])


def merge(backend: Backend, outs: Any, lses: Any, out: Any, lse: Any, sinks: Any = None) -> None:
    """Merge P partials of the same rows, over disjoint tokens.

    Args:
        outs: float32 [P, R, Hq, Dv].
        lses: float32 [P, R, Hq], natural log; -inf partials are neutral.
        out: float32 [R, Hq, Dv], and lse: float32 [R, Hq], sinks included; written.
        sinks: float32 [Hq], one more logit per head in the denominator: give it once, in the last merge.

    Raises:
        ValueError: shapes that do not match.
    """
    count, rows, heads, v_dim = outs.shape
    if lses.shape != (count, rows, heads) or out.shape != (rows, heads, v_dim) or lse.shape != (rows, heads):
        raise ValueError(
            f"outs {outs.shape}, lses {lses.shape}, out {out.shape} and lse {lse.shape} are not partials of one shape"
        )
    program = merge_program(count, heads, v_dim, sinks is not None)
    backend.launch(program, (rows, heads), [outs, lses, lse if sinks is None else sinks, out, lse, count, rows])


def write_words(backend: Backend, words: Any, changes: npt.NDArray[np.int32]) -> None:
    """Update page tables on the device: words[changes[0]] = changes[1], int32 [2, n]."""
    for first in range(0, changes.shape[1], MOST_CHANGES):
        part = np.ascontiguousarray(changes[:, first : first + MOST_CHANGES])
        sent, count = backend.empty(part.shape, np.int32), part.shape[1]
        backend.upload(part, sent)
        backend.launch(write_words_program(), (-(-count // WRITTEN_WORDS),), [words, sent, count])


def _scales(slab: KvSlab, unused: Any) -> tuple[Any, Any]:
    return (slab.k_scales, slab.v_scales) if slab.element.scaled else (unused, unused)
