"""Specialises kernels for an attention: their element types, constants and launch options. Pure functions."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lamina.core.types import AttentionSpec, KvElement, Quantization
from lamina.kernels.gpu.backend import ALIGNMENT, SLAB_NAMES, TRITON_NAMES, Constant, Program
from lamina.kernels.gpu.tilings import Tiling

LARGEST_TILE = 64
LEAST_BLOCK = 16  # rows and columns of the smallest tile that tensor cores multiply
TWO_CODES = 80  # least compute capability that converts two codes at a time; GPUs of other makers have 0
HARDWARE_FP8 = 89  # least compute capability with an instruction that converts e4m3
COMBINED_PARTS = 16  # partials that ``combine`` reads at once
WRITTEN_WORDS = 256  # words of page tables that one program writes
DRAWN_LOGITS = 2048  # logits of a row that a program reads at once to draw from
WRITTEN_ELEMENTS = 1024  # elements of messages that one program writes: a row of q has several thousand


def sees_all(spec: AttentionSpec) -> bool:
    """Return whether a query sees all earlier tokens alike: shared ones may be read for several queries at once."""
    return not spec.window and not spec.chunk and spec.alibi_slopes is None


def decode_tile(spec: AttentionSpec) -> tuple[int, int]:
    """Return the tile of decode programs: its rows, and the most query rows of a pair that such a program takes.

    A tile's rows are query rows times the query heads that share a KV head.
    """
    group = spec.query_heads // spec.kv_heads
    block_m = min(LARGEST_TILE, _block(group))
    return block_m, 2**30 if block_m == LARGEST_TILE else block_m // group


def prompt_tile(element: KvElement) -> int:
    """Return the rows of a prompt program's tile, as in ``decode_tile``; float32 products need twice the registers."""
    return LARGEST_TILE // 2 if element is KvElement.FLOAT32 else LARGEST_TILE


def plan_program(pairs: int) -> Program:
    """Return ``triton_attend.plan`` for a table of ``pairs`` pairs."""
    return _program("triton_attend.plan", ["*i32"] * 3 + ["i32"] * 10, block_pairs=power_of_two(pairs))


def plan_numbers(
    spec: AttentionSpec, tiling: Tiling, block_m: int, rows: tuple[int, int], wanted_items: int
) -> tuple[int, ...]:
    """Return the integer arguments of ``plan`` that follow the number of pairs.

    Args:
        rows: Fewest and most query rows of the pairs to plan.
        wanted_items: Programs that run at once.
    """
    group = spec.query_heads // spec.kv_heads
    return (*rows, group, spec.window, spec.chunk, block_m, tiling.block_n, wanted_items, tiling.least_tokens)


def attend_program(
    spec: AttentionSpec,
    element: KvElement,
    tiling: Tiling,
    block_m: int,
    query: npt.DTypeLike,
    capability: int,
    new: npt.DTypeLike | None = None,
    joins: bool = False,
) -> Program:
    """Return ``triton_attend.attend`` for queries of element type ``query``.

    Args:
        new: Element type of the k and v that the kernel appends; None: it appends none.
        joins: Whether the kernel merges its results into those of an earlier call, of rows that an index selects.
    """
    query_name = TRITON_NAMES[np.dtype(query)]
    new_name = query_name if new is None else TRITON_NAMES[np.dtype(new)]
    # Narrow KV is exact in either 16-bit type; weights times scales need bfloat16's range.
    value_product = "bf16" if element.scaled else SLAB_NAMES[element]
    product = "fp16" if element.scaled and query_name == "fp16" else value_product
    slab = [f"*{SLAB_NAMES[element]}"] * 2
    halves = all(dim % 2 == 0 and _block(dim) >= 2 * LEAST_BLOCK for dim in (spec.qk_dim, spec.v_dim))
    program = _program(
        "triton_attend.attend",
        [f"*{query_name}", *slab, *["*fp32"] * 2, *[f"*{new_name}"] * 2, "*fp32"]
        + ["*i32"] * 4
        + ["*fp32"] * 4
        + ["i32", "fp32", "fp32"],
        tiling.warps,
        tiling.stages,
        kv_heads=spec.kv_heads,
        group=spec.query_heads // spec.kv_heads,
        qk_dim=spec.qk_dim,
        v_dim=spec.v_dim,
        window=spec.window,
        chunk=spec.chunk,
        capped=spec.softcap > 0,
        alibi=spec.alibi_slopes is not None,
        element=_element_code(element, capability),
        by_twos=element.scaled and product == "bf16" and halves and capability >= TWO_CODES,
        appends=new is not None,
        joins=joins,
        product=product,
        value_product=value_product,
        block_m=block_m,
        block_n=tiling.block_n,
        block_d=_block(spec.qk_dim),
        block_dv=_block(spec.v_dim),
    )
    return replace(program, registers=tiling.registers)


def combine_program(spec: AttentionSpec, block_m: int, joins: bool = False) -> Program:
    """Return ``triton_attend.combine``, after an ``attend_program`` with the same ``joins``."""
    return _program(
        "triton_attend.combine",
        ["*fp32"] * 2 + ["*i32"] * 3 + ["*fp32"] * 2,
        2,
        kv_heads=spec.kv_heads,
        group=spec.query_heads // spec.kv_heads,
        v_dim=spec.v_dim,
        joins=joins,
        block_m=block_m,
        block_dv=_block(spec.v_dim),
        block_parts=COMBINED_PARTS,
    )


def append_program(element: KvElement, new_element: npt.DTypeLike, kv_heads: int, qk_dim: int, v_dim: int) -> Program:
    """Return ``triton_rows.append`` for rows of ``new_element``."""
    new = TRITON_NAMES[np.dtype(new_element)]
    return _program(
        "triton_rows.append",
        [f"*{SLAB_NAMES[element]}"] * 2 + ["*fp32"] * 2 + [f"*{new}"] * 2 + ["*i32"],
        1,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        element=_element_code(element, HARDWARE_FP8 - 1),  # capabilities differ in reading FP8, not in writing it
        block_d=_block(qk_dim),
        block_dv=_block(v_dim),
    )


def merge_program(count: int, query_heads: int, v_dim: int, has_sinks: bool) -> Program:
    """Return ``triton_attend.merge`` of ``count`` partials."""
    return _program(
        "triton_attend.merge",
        ["*fp32"] * 5 + ["i32"] * 2,
        2,
        query_heads=query_heads,
        v_dim=v_dim,
        has_sinks=has_sinks,
        block_dv=_block(v_dim),
        block_parts=power_of_two(min(count, COMBINED_PARTS)),
    )


@dataclass(frozen=True)
class GroupedWeights:
    """The weights of experts that ``triton_grouped.multiply`` takes.

    Attributes:
        experts: Number of experts.
        inputs: Inputs of an expert.
        outputs: Outputs of an expert.
        inner: Whether the weights of one output are contiguous, as codes always are.
        codes: How weights are stored; "none": as elements like those of x.
        group: Inputs that share a scale.
        shifted: Whether codes have zero points.
    """

    experts: int
    inputs: int
    outputs: int
    inner: bool = True
    codes: Quantization = "none"
    group: int = 0
    shifted: bool = False

    @property
    def in_groups(self) -> bool:
        """True if each group is multiplied on its own; otherwise each output has one scale, or none."""
        return self.codes == "int4" or (self.codes != "none" and (self.group < self.inputs or self.shifted))


@dataclass(frozen=True)
class GroupedTile:
    """Rows, outputs and inputs that a program of ``triton_grouped.multiply`` loads at once; ``in_groups``, a group is
    loaded instead of ``inputs``."""

    rows: int
    outputs: int
    inputs: int

    def grid(self, rows: int, weights: GroupedWeights) -> tuple[int, int]:
        """Return a program for every tile that there may be: each expert may have one that is not full."""
        return min(rows, -(-rows // self.rows) + weights.experts), -(-weights.outputs // self.outputs)


def grouped_tile(rows: int, itemsize: int, weights: GroupedWeights) -> GroupedTile:
    """Return the tile for ``rows`` rows of elements of ``itemsize`` bytes.

    Steps that decode have few rows for each expert: 16 suffice to read each weight once. Larger steps use 64. Tiles
    have fewer outputs where they need more registers.
    """
    height = 16 if rows <= 16 * weights.experts else 64
    if itemsize == 2:
        in_groups = 32 if height == 64 else 128 if weights.group == 32 else 64
        return GroupedTile(height, in_groups if weights.in_groups else 128, 64)
    return GroupedTile(height, 64 if weights.codes == "none" else 32, 32)


def grouped_program(element: npt.DTypeLike, weights: GroupedWeights, tile: GroupedTile, capability: int) -> Program:
    """Return ``triton_grouped.multiply`` for x of type ``element``; fp8 is passed as bytes."""
    name = TRITON_NAMES[np.dtype(element)]
    weight = {"none": f"*{name}", "int8": "*i8"}.get(weights.codes, "*u8")
    of_groups = "*i32" if weights.codes == "none" else "*fp32"
    of_codes = _element_code(KvElement.FP8, capability) if weights.codes == "fp8" else 0
    constants: dict[str, Constant] = {
        "inputs": weights.inputs, "outputs": weights.outputs, "inner": weights.inner,
        "bits": {"none": 0, "int4": 4}.get(weights.codes, 8), "element": of_codes,
        "group": weights.group, "in_groups": weights.in_groups, "shifted": weights.shifted,
        "block_e": power_of_two(weights.experts),
        "block_m": tile.rows, "block_n": tile.outputs, "block_k": tile.inputs,
    }  # fmt: skip
    types = [f"*{name}", weight, of_groups, of_groups, "*i32", f"*{name}", "i32"]
    return _program("triton_grouped.multiply", types, 4, 3, **constants)


def write_rows_program(element: npt.DTypeLike, unit: int, lead: int) -> Program:
    """Return ``triton_rows.write_rows`` for rows of ``unit`` elements.

    ``lead``: See ``Kit.write_rows``, here in elements.
    """
    kind = np.dtype(element)
    aligned = (unit * kind.itemsize) % ALIGNMENT == 0 and (lead * kind.itemsize) % ALIGNMENT == 0
    constants = {"unit": unit, "lead": lead, "aligned": aligned, "block": WRITTEN_ELEMENTS}
    return _program("triton_rows.write_rows", [f"*{TRITON_NAMES[kind]}", "*i32", "*i64", "i32"], **constants)


def draw_program(element: npt.DTypeLike) -> Program:
    """Return ``triton_rows.draw`` for logits of type ``element``."""
    arrays = ["*i64", "*fp32", "*fp32", "*fp32", "*i64", "*i64"]
    types = [f"*{TRITON_NAMES[np.dtype(element)]}", "i32", *arrays, "i32"]
    return _program("triton_rows.draw", types, 8, block=DRAWN_LOGITS)


def write_words_program() -> Program:
    return _program("triton_rows.write_words", ["*i32", "*i32", "i32"], block=WRITTEN_WORDS)


def _program(path: str, types: list[str], warps: int = 4, stages: int = 1, /, **constants: Constant) -> Program:
    module, _, kernel = path.partition(".")
    return Program(module, kernel, tuple(types), tuple(constants.items()), warps, stages)


def _element_code(element: KvElement, capability: int) -> int:
    """Return the kernels' constant: 0 no scales, 1 INT8, 2 FP8 converted by the hardware, 3 FP8 in software."""
    if element is KvElement.FP8:
        return 2 if capability >= HARDWARE_FP8 else 3
    return 1 if element is KvElement.INT8 else 0


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def _block(size: int) -> int:
    return max(LEAST_BLOCK, power_of_two(size))
