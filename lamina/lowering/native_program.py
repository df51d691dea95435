"""Runs a slice as a native program: all its steps in one call, without Python, allocation or the GIL in between.

A program's values are bfloat16 matrices with a row for each token. Its steps are groups of linear layers with a common
input, norms, rotations and gates. ``translate`` makes the steps from a slice's graph.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina import _native
from lamina.lowering import native_operators
from lamina.splitter.split_model import SliceOutput

Program = _native.Program
_ELEMENT = torch.bfloat16


class Workspace:
    """Memory for the slices of a step: scratch memory, and the results of two slices.

    A slice's results are valid until two more slices have run.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._scratch = torch.empty(0, dtype=torch.bfloat16)
        self._results: dict[tuple[tuple[int, ...], ...], list[_Results]] = {}

    def scratch(self, elements: int) -> int:
        """Return the address of at least ``elements`` elements of scratch memory."""
        if elements > self._scratch.numel():
            self._scratch = torch.empty(elements, dtype=torch.bfloat16)
        return self._scratch.data_ptr()

    def results(self, shapes: tuple[tuple[int, ...], ...]) -> "_Results":
        """Return tensors of ``rows`` rows of these shapes, which differ from those of the previous call."""
        known = self._results.setdefault(shapes, [])
        known.insert(0, known.pop() if len(known) == 2 else _Results(self.rows, shapes))
        return known[0]


class _Results:
    def __init__(self, rows: int, shapes: tuple[tuple[int, ...], ...]) -> None:
        tensors = [torch.empty(rows, *shape, dtype=torch.bfloat16) for shape in shapes]
        self.output = SliceOutput(tuple(tensors))
        self.addresses = [tensor.data_ptr() for tensor in tensors]


@dataclass(frozen=True)
class Columns:
    """A value: elements of each row of a matrix from ``column`` on, viewed as [*[1] * ones, rows, *shape]."""

    matrix: int
    column: int
    shape: tuple[int, ...]
    ones: int = 0

    @property
    def width(self) -> int:
        return math.prod(self.shape)


NOWHERE = Columns(-1, 0, ())
"""A missing operand of a step."""


@dataclass(frozen=True)
class Step:
    """A step: ``add`` is a method ``add_...`` of ``Program``; operands among ``arguments`` are ``Columns``."""

    add: Callable[..., None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Steps:
    """A slice as steps, before its matrices are numbered for the native program.

    Attributes:
        widths: elements of a row, by matrix.
        steps: the steps in order.
        inputs: matrices that the slice takes: results of the prelude, attention, context, rows of the embedding.
        results: whole matrices that the slice returns.
        embedding: weight [vocab, d] whose rows are the last input; None without an embedding.
    """

    widths: list[int]
    steps: list[Step]
    inputs: list[int]
    results: list[Columns]
    embedding: Tensor | None


class SliceProgram:
    """A slice as a native program. The program holds addresses of ``weights``, so this object keeps them alive."""

    def __init__(self, steps: Steps, weights: Sequence[object]) -> None:
        self._weights = weights
        self._shapes = tuple(result.shape for result in steps.results)
        self._widths = [steps.widths[matrix] for matrix in steps.inputs]
        self._embedding = None if steps.embedding is None else steps.embedding.view(torch.int16).numpy()
        self._program = _assemble(steps, _join_products(steps.steps))

    def run(self, ids: Tensor, inputs: Sequence[Tensor], workspace: Workspace) -> SliceOutput:
        """Return the slice's results for ``workspace.rows`` rows, in memory of ``workspace``.

        Args:
            ids: int64 [rows].
            inputs: bfloat16 [rows, ...]: results of the prelude, attention, context.

        Raises ValueError for an input of another size or element type.
        """
        rows, threads = workspace.rows, torch.get_num_threads()
        if self._embedding is not None:
            # This thread alone: after an operation of torch on more elements, others spin for milliseconds.
            inputs = (*inputs, torch.from_numpy(self._embedding.take(ids.numpy(), 0)).view(_ELEMENT))
        results = workspace.results(self._shapes)
        for tensor, width in zip(inputs, self._widths, strict=True):
            if tensor.numel() != rows * width or tensor.dtype != _ELEMENT or not tensor.is_contiguous():
                raise ValueError(
                    f"a slice got {tensor.dtype} of shape {list(tensor.shape)} and strides {tensor.stride()}; it takes "
                    f"{rows * width} contiguous elements of bfloat16"
                )
        addresses = [*[tensor.data_ptr() for tensor in inputs], *results.addresses]
        program = self._program
        scratch = workspace.scratch(program.scratch_elements(rows))
        program.run(0, program.steps, rows, addresses, scratch, threads)
        return results.output


def _join_products(steps: Sequence[Step]) -> list[Step]:
    """Join products of the same input into one step, at the place of the first product."""
    joined: list[Step] = []
    for step in steps:
        siblings = [
            earlier
            for earlier in joined
            if earlier.add is step.add is Program.add_products and earlier.arguments[:2] == step.arguments[:2]
        ]
        if siblings:
            siblings[0].arguments[2].extend(step.arguments[2])
        elif step.add is Program.add_products:
            joined.append(Step(step.add, (*step.arguments[:2], list(step.arguments[2]))))
        else:
            joined.append(step)
    return joined


def _assemble(steps: Steps, ordered: Sequence[Step]) -> _native.Program:
    """Number the matrices for the native program: inputs, then results, then scratch."""
    results = [result.matrix for result in steps.results]
    given = [*steps.inputs, *results]
    order = [*given, *(matrix for matrix in range(len(steps.widths)) if matrix not in given)]
    number = {NOWHERE.matrix: -1} | {matrix: place for place, matrix in enumerate(order)}

    def placed(argument: Any) -> Any:
        if isinstance(argument, Columns):
            return number[argument.matrix], argument.column
        if isinstance(argument, list | tuple):
            return type(argument)(placed(item) for item in argument)
        return argument

    widths = [steps.widths[matrix] for matrix in order]
    program = Program(widths, len(given), native_operators.PATH)
    for step in ordered:
        step.add(program, *map(placed, step.arguments))
    return program
