"""Runs the slices of a split model with their weights."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from lamina.kernels.attention import partial
from lamina.kernels.segments import SegmentTable
from lamina.lowering import LoweredModel, LoweredSlice, Workspace
from lamina.splitter import SliceOutput
from lamina.types import AttentionSpec

Floats = npt.NDArray[np.float32]


def padded(rows: int) -> int:
    """The number of rows that ``rows`` are padded to: at most an eighth more, with few distinct values.

    oneDNN compiles a kernel for every number of rows, at half a millisecond and a megabyte each.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def attend_natively(
    output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec, threads: int
) -> tuple[Floats, Floats]:
    """Attention of prompt chunks to themselves: (out float32 [R, Hq, Dv], lse float32 [R, Hq]).

    A slice's k and v serve as slab, row r as slot r. ``rows`` int64 [R] are those of its q that ``table`` covers.
    """
    q, k, v = output.arrays
    first, last = int(rows[0]), int(rows[-1]) + 1
    return partial(q[first:last] if last - first == len(rows) else q[rows], k, v, table, spec, threads)


class SliceRunner:
    """A lowered model with its weights. Runs one slice at a time; attention is left to the caller."""

    def __init__(self, model: LoweredModel, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors`` holds the model's weights by name, but not its constants."""
        self.attentions: tuple[AttentionSpec, ...] = model.attentions
        self.contexts = model.contexts
        self.dtype = model.dtype
        self.sinks = [None if name is None else tensors[name].float().numpy() for name in model.sinks]
        *self._inner, self._last = model.with_weights(tensors)

    def padded(self, rows: int) -> int:
        """See ``padded``."""
        return padded(rows)

    def attend(
        self, output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec
    ) -> tuple[Floats, Floats]:
        """See ``attend_natively``."""
        return attend_natively(output, rows, table, spec, torch.get_num_threads())

    def run(
        self,
        index: int,
        rows: "Rows",
        attention: torch.Tensor | None,
        context: tuple[torch.Tensor, ...],
        on_query: Callable[[torch.Tensor], None] | None,
    ) -> SliceOutput:
        """q, k, v and context of slice ``index``, not the last; ``on_query`` is called with q before k and v exist.

        They are overwritten by the next slice but one that runs with the same ``rows``.
        """
        piece = self._inner[index]
        return piece.run(rows.ids, rows.positions, attention, context, rows.prepared(piece), on_query, rows.workspace)

    def logits(
        self, rows: "Rows", attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        """Logits [len(chosen), vocab] of rows ``chosen``, int64, ascending."""
        count = len(chosen)
        if count < len(rows.ids):
            chosen = pad(chosen, padded(count))
            rows = Rows(rows.ids[chosen], rows.positions[chosen])
            attention, context = attention[chosen], tuple(tensor[chosen] for tensor in context)
        prepared = rows.prepared(self._last)
        output = self._last.run(rows.ids, rows.positions, attention, context, prepared, workspace=rows.workspace)
        return output.logits[:count]


class Rows:
    """Token ids and positions of a step, int64 [rows], and what slices derive from the positions alone.

    Attributes:
        workspace: memory for the step's slices; may be reused from another step with as many rows.
        placed: what a GPU keeps of them.
    """

    placed: object = None

    def __init__(self, ids: torch.Tensor, positions: torch.Tensor, workspace: Workspace | None = None) -> None:
        self.ids = ids
        self.positions = positions
        self.workspace = workspace or Workspace(len(ids))
        self._prepared: dict[object, tuple[torch.Tensor, ...]] = {}

    def prepared(self, piece: LoweredSlice) -> tuple[torch.Tensor, ...]:
        """What ``piece`` derives from the positions, computed once a step for all slices that need the same."""
        prepared = self._prepared.get(piece.prelude_key)
        if prepared is None:
            prepared = self._prepared[piece.prelude_key] = piece.prepare(self.positions)
        return prepared


def pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [T], extended with zeros to [count]."""
    if count == len(rows):
        return rows
    return torch.nn.functional.pad(rows, (0, count - len(rows)))
