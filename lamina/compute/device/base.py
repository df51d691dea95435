"""Protocols of compute devices, ``Device``, ``Runner`` and ``Transfers``, and the rows of a step that they take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lamina.core.types import ActivationDType, AttentionSpec, DType, Quantization
from lamina.kernels.segments import SegmentTable
from lamina.lowering import LoweredModel, LoweredSlice, Target, Workspace
from lamina.models.quantisation.codes import Form, Weight
from lamina.splitter import Crossing, SliceOutput
from lamina.splitter.markers import Reduce
from lamina.splitter.parts import Rank
from lamina.transport.endpoint import Wait
from lamina.worker.device_slots import Mapper
from lamina.worker.links import Links

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Partial = tuple[torch.Tensor, torch.Tensor]
"""(out [R, Hq, Dv], lse [R, Hq]), float32."""

Reply = tuple[int, Any]
"""A memory worker's message with its partial: its slot (-1: none), and its bytes (laid out by ``dataplane.wire``).

The bytes are a memoryview, or a uint8 device array (``Mapper.arrived``) if the message arrived in an inbox.
"""


class Rows:
    """Token ids and positions of a step, int64 [rows], and the values that slices derive only from positions.

    Attributes:
        workspace: Memory for the step's slices. It may come from an earlier step with as many rows.
        placed: Copy of ids and positions on the GPU; None until a GPU's runner has copied them.
    """

    placed: object = None

    def __init__(self, ids: torch.Tensor, positions: torch.Tensor, workspace: Workspace | None = None) -> None:
        self.ids = ids
        self.positions = positions
        self.workspace = workspace or Workspace(len(ids))
        self._prepared: dict[object, tuple[torch.Tensor, ...]] = {}

    def prepared(self, piece: LoweredSlice) -> tuple[torch.Tensor, ...]:
        """Return the values that ``piece`` derives from positions, such as rotary embeddings.

        Slices with the same ``prelude_key`` share them: they are computed once per step.
        """
        prepared = self._prepared.get(piece.prelude_key)
        if prepared is None:
            prepared = self._prepared[piece.prelude_key] = piece.prepare(self.positions)
        return prepared


def pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``rows``, int64 [T], extended with zeros to [count]."""
    given = rows.shape[0]  # ``len`` takes six times as long
    return rows if count == given else torch.nn.functional.pad(rows, (0, count - given))


@dataclass(frozen=True, eq=False)
class ExchangedRows:
    """The rows to write into messages and to merge from replies. Planned once per step, used for every attention.

    A *shard* is an equal part of a row's heads: with n shards per row, shard s of row r has number r * n + s.

    Attributes:
        total: Rows of the step.
        rows: ``total`` plus padding rows.
        shards: Shards per row.
        queries: By memory worker, the shards whose q it receives and whose partials it replies with.
        appends: By memory worker, the shards whose k and v it receives.
        parts: By memory worker, the index of each of its partials among all partials of the same shard.
        here: By source of partials on the compute worker itself, the shards of its partials.
        here_parts: Like ``parts``, for ``here``.
    """

    total: int
    rows: int
    shards: int
    queries: Sequence[Indices]
    appends: Sequence[Indices]
    parts: Sequence[Indices]
    here: Sequence[Indices]
    here_parts: Sequence[Indices]

    @property
    def most_parts(self) -> int:
        """The largest number of partials of any shard, at least 1."""
        parts = [*self.parts, *self.here_parts]
        return 1 + max((int(each.max()) for each in parts if len(each)), default=0)


class Sums(Protocol):
    """All-reduce over the ranks of a tensor-parallel replica, which all make the same calls in the same order.

    One thread owns it.

    Attributes:
        may_leave: Whether a rank may abandon a sum that it or another rank has begun.
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
        """Broadcast the tokens of rank 0, and return them; all ranks pass equally many. Raises the errors of
        ``reduce``."""


class Device(Mapper, Protocol):
    """Loads weights and runs slices on a CPU or GPU. One thread owns it.

    Attributes:
        target: Target that slices are lowered for.
        place: torch's device that weights are loaded to.
    """

    target: Target
    place: torch.device

    def limit(self, share: float) -> None:
        """Make allocations that would leave less than ``1 - share`` of the device's memory free raise
        torch.OutOfMemoryError.

        Raises ConfigError if no more than that is free already.
        """

    def sums(self, rank: Rank, meeting: str) -> Sums:
        """Return the all-reduce of ``rank`` with the other ranks of its replica. Raises ConfigError.

        ``meeting``: Name of a folder for temporary files, which all ranks of the stage pass.
        """

    def form(self, model: LoweredModel, to: Quantization) -> Form:
        """Return how this device holds weights. ``to``: quantised type of linear layers. Raises ConfigError."""

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
            tensors: All of ``model.weights``, on ``place``, as ``form`` holds them.
            reduce: All-reduce over the ranks of the replica; None for one rank.
            activations: Element type in which quantised linear layers multiply their inputs.

        Raises ConfigError if this device cannot multiply inputs of that type.
        """


class WholeSteps(Protocol):
    """Runs whole decode steps over KV in the device's own memory, without the host between their slices."""

    def reserve(self, rows: int) -> None:
        """Prepare for steps of up to ``rows`` rows."""

    def has_ended(self) -> bool:
        """Return whether the device has completed all work launched on it."""

    def run_step(self, rows: Rows, table: Any) -> torch.Tensor | None:
        """Run a step: append its k and v, and return its logits [rows, vocab].

        Returns None if this step has to run slice by slice. The next call may overwrite the logits.

        Args:
            rows: The step's rows.
            table: Tokens that the rows attend to, one query after another (``memory.device.base.Table``).
        """


class Carrier(Protocol):
    """The part of a runner that needs no model: moves q, k and v of a slice, and computes attention of prompt chunks.

    Attributes:
        dtype: The model's element type.
    """

    dtype: DType

    def transfers(self, exchanged: ExchangedRows) -> "Transfers":
        """Return the transfers of one step's rows."""

    def lent(self, output: SliceOutput) -> tuple[Any, Any, Any]:
        """Return q, k and v as contiguous arrays for ``memory.device`` on the same GPU or CPU; bfloat16 as uint16."""

    def borrowed(self, array: Any) -> torch.Tensor:
        """Return an array of ``memory.device``, or of the host, as a tensor over the same memory, without a copy."""

    def attend(
        self, output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec
    ) -> Partial:
        """Compute attention of prompt chunks to themselves, without sinks.

        Args:
            output: A slice's output. Its k and v serve as the slab: row r is in slot r.
            rows: Rows of q, int64 [R], in the order of the queries of ``table``.
            table: Tokens that the rows attend to.
            spec: The attention.
        """


class Runner(Carrier, Protocol):
    """Runs one slice at a time; attention is left to the caller.

    Attributes:
        attentions: All attentions of the model.
        contexts: For each two successive slices of the model, the tensors that the first passes to the second.
        slices: Slices whose weights are loaded.
    """

    attentions: tuple[AttentionSpec, ...]
    contexts: tuple[tuple[Crossing, ...], ...]
    slices: range

    @property
    def sinks(self) -> Sequence[Floats | None]:
        """Sink logits float32 [Hq] by attention; None if it has none, or does not precede one of ``slices``."""

    def reserve(self, rows: int, draws: int, shards: int) -> None:
        """Allocate memory for steps, and record graphs. Raises torch.OutOfMemoryError if there is too little memory.

        Args:
            rows: Most rows of a step.
            draws: Most rows of a step that sample a token.
            shards: Shards per row, see ``ExchangedRows``.
        """

    def recorded_steps(self, memory: Any) -> WholeSteps | None:
        """Return the runner of whole steps over KV in ``memory``; None if this device always runs slice by slice.

        ``memory``: A ``memory.device.base.Device`` on the same GPU or CPU.
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
        """Run slice ``index``, which must not be the last; return its q, k, v and context.

        ``attention`` and ``context`` may be in host memory. The next slice on this runner may overwrite q, k and v;
        the returned context stays valid until two more slices have run with the same ``rows``.
        """

    def logits(
        self, rows: Rows, attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        """Run the last slice; return logits [len(chosen), vocab], valid until the next call.

        ``chosen``: Rows to compute logits of, int64, ascending.
        """


class Transfers(Protocol):
    """Moves rows of one step between the device and messages; planned once, used for every attention.

    Lists, except ``here``, have one item per message, that is, per memory worker. The next call may overwrite returned
    arrays, which are in host memory.

    Attributes:
        lingers: Whether the device may still read replies after ``merged`` has returned, until any other method
            returns.
    """

    lingers: bool

    def fill_messages(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bodies: Sequence[int] = ()
    ) -> tuple[Sequence[Array], Sequence[Array], Sequence[Array]]:
        """Return the shards of q, k and v to send: [Rq, Hq / n, D], [Rk, Hkv / n, D] and [Rk, Hkv / n, Dv].

        n, and Rq and Rk of a message, are ``shards`` and the lengths of ``queries`` and ``appends`` of the step's
        ``ExchangedRows``.

        Args:
            q: Queries [rows, Hq, D].
            k: Keys [rows, Hkv, D].
            v: Values [rows, Hkv, Dv].
            bodies: Mapped address to which k, v and q of a message are written; 0: they are written to the returned
                arrays. Empty: 0 for all messages.
        """

    def merged(
        self, spec: AttentionSpec, here: Sequence[Partial], replies: Sequence[Reply], sinks: Floats | None
    ) -> torch.Tensor:
        """Merge partials; return out [rows, Hq, Dv] in the model's element type, 0 in padding rows.

        The next call overwrites the result.

        Args:
            spec: The attention.
            here: Partials computed on this worker, one for each of ``ExchangedRows.here``.
            replies: Partials of memory workers; see ``lingers``.
            sinks: Sink logits [Hq], if the attention has them.
        """

    def bulk(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Array, Array]:
        """Return all rows of k [rows, Hkv, D] and v [rows, Hkv, Dv] in host memory, copied there if a GPU has them."""

    def wait_for_reads(self) -> None:
        """Wait until the device has read the replies passed to ``merged``."""
