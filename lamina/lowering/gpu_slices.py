"""Runs lowered slices on a GPU, or on another device of torch, as graphs of torch's operators.

Nothing is packed or fused: CUDA's libraries take weights as they are, and a captured CUDA graph costs no host time per
operator.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lamina.lowering.cpu_slices import LoweredModel, LoweredPart, PositionTable, SliceGraphs
from lamina.lowering.expert_operators import TORCHS, experts_stacked, is_grouped, linear_held
from lamina.models.quantisation.codes import LibraryWeight, StackedCodes, Weight, plain
from lamina.splitter.markers import Reduce

Main = Callable[..., Sequence[Tensor]]
"""A slice's graph, or a function equivalent to the graph."""

_INDEX = torch.ops.aten.index.Tensor  # has the tags because of masks; slices index by numbers, which need no host
_NEEDS_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class PlacedSlice:
    """A slice with its weights on a device. Computes what ``Slice.run`` computes.

    Attributes:
        graph: the slice's graph; slices with equal graphs share one.
        digest: equal in all processes for slices with equal graphs, and weights of the same types and shapes.
        capturable: True if no operator needs the host, so that the slice can be captured in a CUDA graph.
        prelude_key: equal for slices whose ``prepare`` returns the same.
    """

    def __init__(
        self,
        part: LoweredPart,
        graphs: SliceGraphs,
        table: PositionTable,
        tensors: Mapping[str, Weight],
    ) -> None:
        self.prelude_key = id(table)
        self.capturable = not any(_needs_host(node) for node in graphs.main.graph.nodes)
        self.graph: Main = graphs.main
        self._table = table
        weights = [tensors[name] for name in part.weights]
        self._weights = [weight.contiguous() if isinstance(weight, Tensor) else weight for weight in weights]
        likes = [_like(weight) for weight in self._weights]
        self.digest = hashlib.sha256(f"{graphs.main.code}{likes}".encode()).hexdigest()[:16]

    @property
    def fixed(self) -> list[Tensor]:
        """Tensors of the weights, without those in the private form of a library."""
        found: list[Tensor] = []
        for weight in self._weights:
            parts = weight.tensors if isinstance(weight, StackedCodes) else (weight,)
            found += [part for part in parts if isinstance(part, Tensor)]
        return found

    def prepare(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the values that depend only on positions int64 [T], which are in host memory."""
        return self._table.lookup(positions)

    def __call__(
        self,
        prepared: tuple[Tensor, ...],
        ids: Tensor,
        positions: Tensor,
        arrived: Sequence[Tensor],
        main: Main | None = None,
    ) -> tuple[Tensor, ...]:
        """Return (q, k, v, *context), or (logits,), for T rows, everything on the device.

        Args:
            prepared: result of ``prepare``.
            ids: token ids [T].
            positions: int64 [T].
            arrived: attention (not in slice 0), then context.
            main: function to run instead of ``graph``.
        """
        run = self.graph if main is None else main
        results: tuple[Tensor, ...] = tuple(run(*self._weights, *prepared, ids, positions, *arrived))
        return results


def place_slices(
    model: LoweredModel,
    tensors: Mapping[str, Weight],
    device: torch.device,
    reduce: Reduce | None = None,
    grouped: bool = False,
) -> list[PlacedSlice]:
    """Return the slices of a model lowered for ``Target.GPU``; ``tensors`` holds all of its weights, on the device.

    Args:
        reduce: sums tensors over the ranks of a replica; slices of a single rank need none.
        grouped: use torch's product of experts; False: Lamina's, as torch's needs the host on this device.
    """
    moved: dict[int, SliceGraphs] = {}
    graphs = model.with_codes(tensors, linear_held, experts_stacked, reduce)
    for each in graphs:
        if id(each) not in moved:
            prelude = None if each.prelude is None else _on(each.prelude, device, grouped)
            moved[id(each)] = SliceGraphs(_on(each.main, device, grouped), prelude)
    placed = [moved[id(each)] for each in graphs]
    constants = {name: value.to(device) for name, value in model.constants.items()}
    tables = model.position_tables([each.prelude for each in placed], constants, device)
    return [PlacedSlice(*given, tensors) for given in zip(model.parts, placed, tables, strict=True)]


def _like(weight: Weight) -> tuple[str, ...]:
    if isinstance(weight, StackedCodes):
        shapes = [None if part is None else tuple(part.shape) for part in weight.tensors]
        return str(weight.values.dtype), str(shapes), str(weight.group)
    tensor = inner = weight.weight if isinstance(weight, LibraryWeight) else plain(weight)
    return type(inner).__name__, str(tensor.dtype), str(tuple(tensor.shape))


def _on(module: fx.GraphModule, device: torch.device, grouped: bool) -> fx.GraphModule:
    """Return a copy of a graph captured on the CPU that creates its tensors on ``device``."""
    moved = copy.deepcopy(module)
    for node in moved.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
        if is_grouped(node) and not (grouped and node.target is TORCHS):
            node.target = torch.ops.lamina.grouped_product.default
    moved.recompile()
    return moved


def _needs_host(node: fx.Node) -> bool:
    """True if the host must read an operator's result, or its size, before the next operator can run."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is _INDEX:
        return False
    return target.namespace == "transformers" or any(tag in _NEEDS_HOST for tag in target.tags)
