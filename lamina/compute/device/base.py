"""The protocol of devices. Nothing above it asks which device it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.runner import Rows
from lamina.kernels.segments import SegmentTable
from lamina.lowering import LoweredModel, Target
from lamina.splitter import Crossing, SliceOutput
from lamina.types import AttentionSpec, DType

Floats = npt.NDArray[np.float32]
Partial = tuple[Floats, Floats]
"""(out [R, Hq, Dv], lse [R, Hq]), in host memory."""

Attend = Callable[[SliceOutput, npt.NDArray[np.int64], SegmentTable, AttentionSpec], Partial]
"""See ``Runner.attend``."""


class Device(Protocol):
    """What a compute worker runs on. One thread owns it.

    Attributes:
        target: what slices are lowered for. place: where weights are loaded to.
    """

    target: Target
    place: torch.device

    def runner(self, model: LoweredModel, tensors: Mapping[str, torch.Tensor]) -> "Runner":
        """The model with its weights: ``tensors`` holds all of ``model.weights``, on ``place``."""

    def free_bytes(self) -> int:
        """Bytes of the device's own memory that are free; 0 if it has none of its own."""


class Runner(Protocol):
    """Runs one slice at a time; attention is left to the caller.

    Attributes:
        attentions, contexts, dtype: those of the model. sinks: logits [Hq] of each attention, or None.
    """

    attentions: tuple[AttentionSpec, ...]
    contexts: tuple[tuple[Crossing, ...], ...]
    dtype: DType
    sinks: Sequence[Floats | None]

    def padded(self, rows: int) -> int:
        """The number of rows that ``rows`` are padded to."""

    def attend(
        self, output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec
    ) -> Partial:
        """Attention of prompt chunks to themselves, without sinks.

        ``output`` is a slice's; its k and v serve as slab, row r as slot r. ``rows`` int64 [R] are those of its q that
        ``table`` covers in order.
        """

    def run(
        self,
        index: int,
        rows: Rows,
        attention: torch.Tensor | None,
        context: tuple[torch.Tensor, ...],
        on_query: Callable[[torch.Tensor], None] | None,
    ) -> SliceOutput:
        """q, k, v and context of slice ``index``, not the last; ``on_query`` is called with q before k and v exist.

        ``attention`` and ``context`` may be in host memory. The next slice that runs here may overwrite q, k and v;
        context lasts until the next slice but one that runs with the same ``rows``.
        """

    def logits(
        self, rows: Rows, attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        """Logits [len(chosen), vocab] of rows ``chosen``, int64, ascending. The next call may overwrite them."""
