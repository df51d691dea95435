"""Implements ``Runner`` on CPUs: runs the slices of a split model with their weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.device.base import Array, Partial
from lamina.compute.device.exchanged_rows import ExchangedRows
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
    """Return the padded number of rows: at most an eighth more than ``rows``, with few distinct values.

    oneDNN compiles a kernel for every number of rows, which takes 0.5 ms and 1 MB.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class NativeRunner:
    """Implements ``Carrier`` with rows in host memory and native kernels."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def transfers(self, exchanged: ExchangedRows) -> NativeTransfers:
        return NativeTransfers(exchanged, getattr(torch, self.dtype.value), torch.get_num_threads())

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
        """Do nothing: the system allocates memory when it is first written."""

    def recorded_steps(self, memory: Any) -> None:
        """Return None: starting a slice costs next to nothing on a CPU."""

    def padded(self, rows: int) -> int:
        return padded(rows)

    def run(
        self,
        index: int,
        rows: "Rows",
        attention: torch.Tensor | None,
        context: tuple[torch.Tensor, ...],
    ) -> SliceOutput:
        piece = self._slices[index]
        return piece.run(rows.ids, rows.positions, attention, context, rows.prepared(piece), rows.workspace)

    def logits(
        self, rows: "Rows", attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        count = len(chosen)
        if count < len(rows.ids):
            chosen = pad(chosen, padded(count))
            rows = Rows(rows.ids[chosen], rows.positions[chosen])
            attention, context = attention[chosen], tuple(tensor[chosen] for tensor in context)
        last = self._slices[len(self.attentions)]
        prepared = rows.prepared(last)
        output = last.run(rows.ids, rows.positions, attention, context, prepared, rows.workspace)
        return output.logits[:count]
