"""Slices on a device of torch's, as graphs of its own operators: what a GPU runs.

Nothing is packed or fused here: CUDA's libraries take weights as they are, and a captured graph costs nothing per
operator on the host.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lamina.lowering.cpu_slices import LoweredModel, LoweredPart, PositionTable, SliceGraphs
from lamina.lowering.expert_operators import TORCHS, experts_stacked, is_grouped, linear_held
from lamina.models.quantisation.codes import Held, StackedCodes, Weight, plain
from lamina.splitter.markers import Reduce

Main = Callable[..., Sequence[Tensor]]
"""A slice's graph, or another function that computes the same of the same arguments."""

_INDEX = torch.ops.aten.index.Tensor  # tagged for masks; slices, whose results have as many rows as come, use numbers
_NEEDS_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class PlacedSlice:
    """A slice with its weights on a device. Computes what ``Slice.run`` computes.

    Attributes:
        graph: what it runs; slices that compute the same share one.
        digest: equal for slices that compute the same of weights of the same types and sizes, in any process.
        capturable: it runs without the host between its operators, so that they can be recorded once and replayed.
        prelude_key: equal for slices that derive the same from positions.
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
        """Its weights, but for those in a library's own form."""
        found: list[Tensor] = []
        for weight in self._weights:
            parts = weight.tensors if isinstance(weight, StackedCodes) else (weight,)
            found += [part for part in parts if isinstance(part, Tensor)]
        return found

    def prepare(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the values that depend on positions int64 [T], in host memory, alone."""
        return self._table.lookup(positions)

    def __call__(
        self,
        prepared: tuple[Tensor, ...],
        ids: Tensor,
        positions: Tensor,
        arrived: Sequence[Tensor],
        main: Main | None = None,
    ) -> tuple[Tensor, ...]:
        """(q, k, v, *context), or (logits,), of T rows, everything on the device.

        ``arrived``: attention, but for slice 0, then context. ``main``: computes what ``graph`` does.
        """
        run = self.graph if main is None else main
        results: tuple[Tensor, ...] = tuple(run(*self._weights, *prepared, ids, positions, *arrived))
        return results


def place(
    model: LoweredModel,
    tensors: Mapping[str, Weight],
    device: torch.device,
    reduce: Reduce | None = None,
    grouped: bool = False,
) -> list[PlacedSlice]:
    """Return the slices of a model lowered for ``Target.GPU``; ``tensors`` holds all of its weights, on the device.

    ``reduce``: how the ranks of a replica add up what each has computed; slices of one rank alone need none.
    ``grouped``: torch's product of experts runs on this device without the host; Lamina's is used instead otherwise.
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
    tensor = inner = weight.weight if isinstance(weight, Held) else plain(weight)
    return type(inner).__name__, str(tensor.dtype), str(tuple(tensor.shape))


def _on(module: fx.GraphModule, device: torch.device, grouped: bool) -> fx.GraphModule:
    """Return a copy that makes tensors on ``device``: it was captured on the CPU. ``grouped``: see ``place``."""
    moved = copy.deepcopy(module)
    for node in moved.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
        if is_grouped(node) and not (grouped and node.target is TORCHS):
            node.target = torch.ops.lamina.grouped_product.default
    moved.recompile()
    return moved


def _needs_host(node: fx.Node) -> bool:
    """True if an operator's result decides on the host what runs next, or how large it is."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is _INDEX:
        return False
    return target.namespace == "transformers" or any(tag in _NEEDS_HOST for tag in target.tags)
