"""The protocol of devices. Nothing above it asks which device it is."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.device.exchanged_rows import Moves
from lamina.compute.rows import Rows
from lamina.core.types import ActivationDType, AttentionSpec, DType, Quantization
from lamina.kernels.segments import SegmentTable
from lamina.lowering import LoweredModel, Target
from lamina.models.quantisation.codes import Form, Weight
from lamina.splitter import Crossing, SliceOutput
from lamina.splitter.markers import Reduce
from lamina.splitter.parts import Rank
from lamina.transport.endpoint import Wait
from lamina.worker.device_slots import Mapper
from lamina.worker.links import Links

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Partial = tuple[torch.Tensor, torch.Tensor]
"""(out [R, Hq, Dv], lse [R, Hq]), float32."""

Reply = tuple[int, Any]
"""A memory worker's message with its partial: the slot it is in (-1: none), and its bytes, see ``dataplane.wire``: a
memoryview, or uint8 of the device that have ``arrived`` in an inbox."""


class Sums(Protocol):
    """Adds tensors up with the other ranks of a tensor-parallel replica, all of which do the same in the same order.

    One thread owns it.
    """

    rank: Rank

    def connect(self, links: Links, wait: Wait, names: Sequence[str]) -> None:
        """``names``: of all ranks, in order, with this worker's, to whom ``links`` lead. Before the first step."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, the same bits on each; may overwrite ``x``.

        Raises PeerLostError, DeadlineError.
        """

    def meet(self) -> None:
        """Return once all ranks have called this as often as this one. Raises what ``reduce`` raises."""

    def reset(self, first: int) -> None:
        """Begin another epoch: drop sums that have begun, and number those that follow from ``first`` on."""

    def agree(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that the first rank gives; all give as many. Raises what ``reduce`` raises."""


class Device(Mapper, Protocol):
    """What a compute worker runs on. One thread owns it.

    Attributes:
        target: what slices are lowered for.
        place: where weights are loaded to.
    """

    target: Target
    place: torch.device

    def limit(self, share: float) -> None:
        """Take no memory here that would leave less than ``1 - share`` of it free: taking more raises
        torch.OutOfMemoryError. Raises ConfigError if no more is free now."""

    def sums(self, rank: Rank, meeting: str) -> Sums:
        """How ``rank`` adds up with the others of its replica, which give the same path in a folder of this machine as
        ``meeting``; the file is theirs. Raises ConfigError."""

    def form(self, model: LoweredModel, to: Quantization) -> Form:
        """How weights are held here if those of linear layers are quantised ``to`` a type. Raises ConfigError."""

    def runner(
        self,
        model: LoweredModel,
        tensors: Mapping[str, Weight],
        reduce: Reduce | None = None,
        activations: ActivationDType = "auto",
    ) -> "Runner":
        """Return the model with its weights.

        Args:
            tensors: all of ``model.weights``, on ``place``, as ``form`` says.
            reduce: how the ranks of a replica add up what each has computed, if there are several.
            activations: element type of what is multiplied by weights held as codes.

        Raises ConfigError: this device has no products with ``activations``.
        """


class Carrier(Protocol):
    """Where the rows of slices are.

    Attributes:
        dtype: the model's element type.
    """

    dtype: DType

    def transfers(self, moves: Moves) -> "Transfers":
        """Return what moves the rows of a step."""

    def lent(self, output: SliceOutput) -> tuple[Any, Any, Any]:
        """q, k and v as contiguous arrays, as ``memory.device.base`` takes those that have been ``sent`` to the same
        device; bfloat16 as uint16."""

    def borrowed(self, array: Any) -> torch.Tensor:
        """Return an array of that device, or of host memory, as a tensor with the same memory."""

    def attend(
        self, output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec
    ) -> Partial:
        """Attention of prompt chunks to themselves, without sinks.

        ``output`` is a slice's; its k and v serve as slab, row r as slot r. ``rows`` int64 [R] are those of its q that
        ``table`` covers in order.
        """


class Runner(Carrier, Protocol):
    """Runs one slice at a time; attention is left to the caller.

    Attributes:
        attentions, contexts: those of the model.
        slices: those that it has the weights of.
    """

    attentions: tuple[AttentionSpec, ...]
    contexts: tuple[tuple[Crossing, ...], ...]
    slices: range

    @property
    def sinks(self) -> Sequence[Floats | None]:
        """The sink logits float32 [Hq] of each attention before one of ``slices``, or None."""

    def reserve(self, rows: int, draws: int, shards: int) -> None:
        """Prepare for steps of up to ``rows`` rows, of which ``draws`` draw a token: take the device's memory that they
        need, and keep it; record them. ``shards``: to a row, see ``Moves``.

        Raises torch.OutOfMemoryError if there is too little.
        """

    def padded(self, rows: int) -> int:
        """Return the number of rows that ``rows`` are padded to."""

    def run(
        self,
        index: int,
        rows: Rows,
        attention: torch.Tensor | None,
        context: tuple[torch.Tensor, ...],
    ) -> SliceOutput:
        """Return q, k, v and context of slice ``index``, not the last.

        ``attention`` and ``context`` may be in host memory. The next slice that runs here may overwrite q, k and v;
        ``context`` stays valid until two more slices have run with the same ``rows``.
        """

    def logits(
        self, rows: Rows, attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        """Logits [len(chosen), vocab] of rows ``chosen``, int64, ascending. The next call may overwrite them."""


class Transfers(Protocol):
    """Moves rows of one step between the device and messages; planned once, used for every attention.

    Lists are by memory worker. Arrays are in host memory, and may be overwritten by the next call.

    Attributes:
        lingers: replies are still being read when ``merged`` returns, until the next call of another method does.
    """

    lingers: bool

    def fill_messages(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bodies: Sequence[int] = ()
    ) -> tuple[Sequence[Array], Sequence[Array], Sequence[Array]]:
        """Return the shards of q [rows, Hq, D], k [rows, Hkv, D] and v [rows, Hkv, Dv] that travel, by message:
        [Rq, Hq / n, D], [Rk, Hkv / n, D] and [Rk, Hkv / n, Dv] each.

        Args:
            bodies: by message, an address that has been mapped, where its k, v and q are written one after another and
                not in its arrays; 0: none.
        """

    def merged(
        self, spec: AttentionSpec, here: Sequence[Partial], replies: Sequence[Reply], sinks: Floats | None
    ) -> torch.Tensor:
        """Attention out [rows, Hq, Dv] in the model's element type, 0 in padding rows; the next call overwrites it.

        ``here``: the partials attended here, one for each of ``Moves.here``. Replies: see ``lingers``.
        """

    def bulk(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Array, Array]:
        """Return all rows of k [rows, Hkv, D] and v [rows, Hkv, Dv]."""

    def wait_for_reads(self) -> None:
        """Return once replies have been read."""
