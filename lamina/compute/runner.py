"""Runs the slices of a split model with their weights."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.device.base import Array, Partial
from lamina.compute.device.exchanged_rows import Moves
from lamina.compute.device.native import NativeTransfers
from lamina.compute.rows import Rows, pad
from lamina.core.types import ActivationDType, AttentionSpec, DType
from lamina.kernels.attention import partial
from lamina.kernels.segments import SegmentTable
from lamina.lowering import LoweredModel
from lamina.models.quantisation.codes import Weight, plain
from lamina.splitter import SliceOutput
from lamina.splitter.markers import Reduce


def padded(rows: int) -> int:
    """Return the number of rows that ``rows`` are padded to: at most an eighth more, with few distinct values.

    oneDNN compiles a kernel for every number of rows, at half a millisecond and a megabyte each.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class NativeRunner:
    """The part of a ``Runner`` that needs no model: rows and partials in host memory, native kernels."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def transfers(self, moves: Moves) -> NativeTransfers:
        return NativeTransfers(moves, getattr(torch, self.dtype.value), torch.get_num_threads())

    def lent(self, output: SliceOutput) -> tuple[Array, Array, Array]:
        return output.arrays

    def borrowed(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def attend(
        self, output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec
    ) -> Partial:
        q, k, v = output.arrays
        first, last = int(rows[0]), int(rows[-1]) + 1
        q = q[first:last] if last - first == len(rows) else q[rows]
        out, lse = partial(q, k, v, table, spec, torch.get_num_threads())
        return torch.from_numpy(out), torch.from_numpy(lse)


class SliceRunner(NativeRunner):
    """A lowered model, or a stage of one, with its weights. Runs one slice at a time, without its attention."""

    def __init__(
        self,
        model: LoweredModel,
        tensors: Mapping[str, Weight],
        reduce: Reduce | None = None,
        activations: ActivationDType = "auto",
    ) -> None:
        """``tensors`` holds the model's weights by name, but not its constants. For the others, see
        ``Device.runner``."""
        super().__init__(model.dtype)
        self.attentions: tuple[AttentionSpec, ...] = model.attentions
        self.contexts = model.contexts
        self.sinks = [None if name is None else plain(tensors[name]).float().numpy() for name in model.sinks]
        self.slices = model.slices
        self._slices = dict(zip(model.slices, model.with_weights(tensors, reduce, activations), strict=True))

    def reserve(self, rows: int, draws: int, shards: int) -> None:
        """Nothing: the system gives memory when it is written to."""

    def padded(self, rows: int) -> int:
        return padded(rows)

    def run(
        self,
        index: int,
        rows: "Rows",
        attention: torch.Tensor | None,
        context: tuple[torch.Tensor, ...],
    ) -> SliceOutput:
        """Return q, k, v and context of slice ``index``, not the last. They stay valid until two more slices have run
        with the same ``rows``."""
        piece = self._slices[index]
        return piece.run(rows.ids, rows.positions, attention, context, rows.prepared(piece), rows.workspace)

    def logits(
        self, rows: "Rows", attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        """Logits [len(chosen), vocab] of rows ``chosen``, int64, ascending."""
        count = len(chosen)
        if count < len(rows.ids):
            chosen = pad(chosen, padded(count))
            rows = Rows(rows.ids[chosen], rows.positions[chosen])
            attention, context = attention[chosen], tuple(tensor[chosen] for tensor in context)
        last = self._slices[len(self.attentions)]
        prepared = rows.prepared(last)
        output = last.run(rows.ids, rows.positions, attention, context, prepared, rows.workspace)
        return output.logits[:count]
