"""Defines the protocols of compute devices: ``Device`` loads, ``Runner`` runs slices, ``Transfers`` moves rows."""

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
    """All-reduce over the ranks of a tensor-parallel replica, which all make the same calls in the same order.

    One thread owns it.

    Attributes:
        may_leave: Whether a rank may leave a sum that it or another rank has begun.
    """

    rank: Rank

    @property
    def may_leave(self) -> bool: ...

    def connect(self, links: Links, wait: Wait, names: Sequence[str]) -> None:
        """Connect to the other ranks, before the first step. ``names``: workers of all ranks, in order."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, bitwise equal on all ranks; may overwrite ``x``.

        Raises PeerLostError, DeadlineError.
        """

    def meet(self) -> None:
        """Wait until all ranks have called this (a barrier). Raises the errors of ``reduce``."""

    def reset(self, first: int) -> None:
        """Begin a new epoch: drop unfinished sums, and number later sums from ``first`` on."""

    def agree(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of rank 0; all ranks pass equally many. Raises the errors of ``reduce``."""


class Device(Mapper, Protocol):
    """Loads weights and runs slices on a CPU or GPU. One thread owns it.

    Attributes:
        target: Target that slices are lowered for.
        place: torch's device that weights are loaded to.
    """

    target: Target
    place: torch.device

    def limit(self, share: float) -> None:
        """Limit allocations to those that leave ``1 - share`` of the device's memory free.

        Larger allocations raise torch.OutOfMemoryError. Raises ConfigError if less is free already.
        """

    def sums(self, rank: Rank, meeting: str) -> Sums:
        """Return the all-reduce of ``rank`` with the other ranks of its replica. Raises ConfigError.

        ``meeting``: path of a file on this machine, the same for all ranks, by which they find each other.
        """

    def form(self, model: LoweredModel, to: Quantization) -> Form:
        """Return the form of weights on this device, with linear layers quantised ``to`` a type. Raises ConfigError."""

    def runner(
        self,
        model: LoweredModel,
        tensors: Mapping[str, Weight],
        reduce: Reduce | None = None,
        activations: ActivationDType = "auto",
    ) -> "Runner":
        """Return a runner of the model's slices.

        Args:
            model: The lowered model.
            tensors: All of ``model.weights``, on ``place``, in this device's ``form``.
            reduce: All-reduce over the ranks of the replica; None for one rank.
            activations: Element type of the inputs of linear layers whose weights are held as codes.

        Raises ConfigError: this device has no products with ``activations``.
        """


class WholeSteps(Protocol):
    """Runs whole decode steps over KV in the device's own memory, without the host between their slices."""

    def reserve(self, rows: int) -> None:
        """Prepare for steps of up to ``rows`` rows."""

    def has_ended(self) -> bool:
        """Return whether the device has run everything that it was given."""

    def run(self, rows: Rows, table: Any) -> torch.Tensor | None:
        """Append k and v, and return logits [rows, vocab] of a step whose rows attend to ``table``, in order; None if
        this step has to run slice by slice. The next step that runs here may overwrite them.

        Args:
            table: Of the memory's device (``memory.device.base.Table``)."""


class Carrier(Protocol):
    """The part of a runner that needs no model: moves and attends rows that slices have computed.

    Attributes:
        dtype: The model's element type.
    """

    dtype: DType

    def transfers(self, moves: Moves) -> "Transfers":
        """Return the transfers of one step's rows."""

    def lent(self, output: SliceOutput) -> tuple[Any, Any, Any]:
        """Return q, k and v as contiguous arrays for the memory device of the same GPU or CPU; bfloat16 as uint16."""

    def borrowed(self, array: Any) -> torch.Tensor:
        """Return an array of the memory device, or of host memory, as a tensor that shares its memory."""

    def attend(
        self, output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec
    ) -> Partial:
        """Compute attention of prompt chunks to themselves, without sinks.

        Args:
            output: A slice's output. Its k and v serve as slab, with row r in slot r.
            rows: Rows of q that ``table`` covers in order, int64 [R].
            table: Tokens that the rows attend to.
            spec: The attention.
        """


class Runner(Carrier, Protocol):
    """Runs one slice at a time; attention is left to the caller.

    Attributes:
        attentions: All attentions of the model.
        contexts: The context between all slices of the model.
        slices: Slices whose weights are loaded.
    """

    attentions: tuple[AttentionSpec, ...]
    contexts: tuple[tuple[Crossing, ...], ...]
    slices: range

    @property
    def sinks(self) -> Sequence[Floats | None]:
        """Sink logits float32 [Hq] of the attention before each of ``slices``; None for one without sinks."""

    def reserve(self, rows: int, draws: int, shards: int) -> None:
        """Allocate memory for steps of up to ``rows`` rows, of which ``draws`` draw a token, and record graphs.

        ``shards``: shards per row, see ``Moves``. Raises torch.OutOfMemoryError if there is too little memory.
        """

    def recorded_steps(self, memory: Any) -> WholeSteps | None:
        """Return what runs whole steps over ``memory``, a ``memory.device.base.Device`` of this device; None if
        they always run slice by slice here."""

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

        ``attention`` and ``context`` may be in host memory. The next slice on this runner may overwrite q, k and v;
        ``context`` stays valid until two more slices have run with the same ``rows``.
        """

    def logits(
        self, rows: Rows, attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [len(chosen), vocab] of rows ``chosen``, int64, ascending, until the next call."""


class Transfers(Protocol):
    """Moves rows of one step between the device and messages; planned once, used for every attention.

    Lists are by memory worker. Arrays are in host memory, and may be overwritten by the next call.

    Attributes:
        lingers: Whether replies are still being read after ``merged`` returns, until another method returns.
    """

    lingers: bool

    def fill_messages(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bodies: Sequence[int] = ()
    ) -> tuple[Sequence[Array], Sequence[Array], Sequence[Array]]:
        """Return the shards of q, k and v to send, by message: [Rq, Hq / n, D], [Rk, Hkv / n, D], [Rk, Hkv / n, Dv].

        Args:
            q: Queries [rows, Hq, D].
            k: Keys [rows, Hkv, D].
            v: Values [rows, Hkv, Dv].
            bodies: By message, the mapped address to write its k, v and q to instead of its arrays; 0: arrays.
        """

    def merged(
        self, spec: AttentionSpec, here: Sequence[Partial], replies: Sequence[Reply], sinks: Floats | None
    ) -> torch.Tensor:
        """Merge partials; return out [rows, Hq, Dv] in the model's element type, 0 in padding rows.

        The next call overwrites the result. ``here``: partials computed on this worker, one for each of ``Moves.here``.
        ``replies``: partials of memory workers; see ``lingers``.
        """

    def bulk(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Array, Array]:
        """Return all rows of k [rows, Hkv, D] and v [rows, Hkv, Dv]."""

    def wait_for_reads(self) -> None:
        """Return once replies have been read."""
