"""Implements compute workers' ``Device``, ``Runner`` and ``Transfers`` on CPUs, with native kernels and torch."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lamina.compute.device.base import Array, ExchangedRows, Floats, Indices, Partial, Reply, Rows, pad
from lamina.compute.ranks import Ranks
from lamina.core.types import ActivationDType, AttentionSpec, DType, Quantization
from lamina.kernels.attention import merge, partial
from lamina.kernels.segments import SegmentTable
from lamina.lowering import LoweredModel, Target
from lamina.lowering.native_operators import tiles_refusal
from lamina.lowering.weight_forms import HostForm, require_byte_rows
from lamina.models.quantisation.codes import Weight, plain
from lamina.splitter import SliceOutput, as_numpy
from lamina.splitter.markers import Reduce
from lamina.splitter.parts import Rank

Arrays = tuple[Floats, Floats]

logger = logging.getLogger(__name__)


class NativeTransfers:
    """Implements ``Transfers`` by views if possible. Native kernels merge partials with ``threads`` threads."""

    lingers = False

    def __init__(self, exchanged: ExchangedRows, dtype: torch.dtype, threads: int) -> None:
        self._exchanged, self._dtype, self._threads = exchanged, dtype, threads
        asked = [number for number, shards in enumerate(exchanged.queries) if len(shards)]
        self._asked = asked  # memory workers whose replies have partials
        self._shards = [*exchanged.here, *(exchanged.queries[number] for number in asked)]  # by source of partials
        self._parts = [*exchanged.here_parts, *(exchanged.parts[number] for number in asked)]
        self._in_order = len(self._shards) == 1 and self._are_all(self._shards[0])  # as they arrive
        self._buffers: dict[tuple[int, int], Arrays] = {}
        self._outs: dict[tuple[int, int], tuple[Tensor, Array]] = {}
        self._replies: dict[tuple[int, ...], Arrays] = {}
        self._here: tuple[Sequence[Partial], list[Arrays]] = (), []

    def fill_messages(
        self, q: Tensor, k: Tensor, v: Tensor, bodies: Sequence[int] = ()
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Return the arrays of messages. ``bodies`` are all 0, since no peer's memory is mapped."""
        assert not any(bodies)
        asked, kept = self._exchanged.queries, self._exchanged.appends
        queries, keys, values = (
            [self._take(array, shards) for shards in which]
            for array, which in ((as_numpy(q), asked), (as_numpy(k), kept), (as_numpy(v), kept))
        )
        return queries, keys, values

    def bulk(self, k: Tensor, v: Tensor) -> tuple[Array, Array]:
        return as_numpy(k), as_numpy(v)

    def wait_for_reads(self) -> None:
        """Do nothing: every copy is complete when its call returns."""

    def merged(
        self, spec: AttentionSpec, here: Sequence[Partial], replies: Sequence[Reply], sinks: Floats | None
    ) -> Tensor:
        exchanged, key = self._exchanged, (spec.query_heads, spec.v_dim)
        if key not in self._outs:
            out = torch.empty(exchanged.rows, *key, dtype=self._dtype)  # torch would clear many rows with its threads
            out[exchanged.total :] = 0
            self._outs[key] = out, as_numpy(out)[: exchanged.total]
        out, tokens = self._outs[key]
        heads = spec.query_heads // exchanged.shards
        partials = self._views(here, heads)
        if self._asked:
            partials = partials + [self._read(each, heads, spec.v_dim, replies[each]) for each in self._asked]
        outs, lses = zip(*partials, strict=True) if self._in_order else self._scattered(spec, partials)
        merge(outs, lses, sinks, tokens, None, self._threads)
        return out

    def _views(self, here: Sequence[Partial], heads: int) -> list[Arrays]:
        """Return this worker's own partials as arrays [shards, heads, ...], cached: most layers reuse the tensors."""
        known, views = self._here
        if len(known) != len(here) or any(one is not other for one, other in zip(known, here, strict=True)):
            views = [
                (out.numpy().reshape(-1, heads, out.shape[-1]), lse.numpy().reshape(-1, heads)) for out, lse in here
            ]
            self._here = tuple(here), views
        return views

    def _read(self, number: int, heads: int, v_dim: int, reply: Reply) -> Arrays:
        """Return views of a reply, cached by slot."""
        slot, body = reply
        views = self._replies.get((number, slot, heads, v_dim)) if slot >= 0 else None
        if views is None:
            count = len(self._exchanged.queries[number])
            out = np.frombuffer(body, np.float32, count * heads * v_dim).reshape(count, heads, v_dim)
            lse = np.frombuffer(body, np.float32, count * heads, out.nbytes).reshape(count, heads)
            views = out, lse
            if slot >= 0:
                self._replies[number, slot, heads, v_dim] = views
        return views

    def _scattered(self, spec: AttentionSpec, partials: Sequence[Arrays]) -> tuple[list[Floats], list[Floats]]:
        """Return, for each p, partial p of all rows; lse is -inf for rows with fewer partials."""
        outs, lses = self._buffer(spec)
        shape = len(outs), self._exchanged.total * self._exchanged.shards
        by_shard = outs.reshape(*shape, -1, spec.v_dim), lses.reshape(*shape, -1)  # views
        for shards, parts, (out, lse) in zip(self._shards, self._parts, partials, strict=True):
            by_shard[0][parts, shards] = out
            by_shard[1][parts, shards] = lse
        return list(outs), list(lses)

    def _buffer(self, spec: AttentionSpec) -> Arrays:
        """Return the buffer for partials [P, T, Hq, Dv] and lse [P, T, Hq] of the step's T tokens.

        All layers write the same entries, so that all other lse stay -inf.
        """
        key = (spec.query_heads, spec.v_dim)
        if key not in self._buffers:
            shape = (self._exchanged.most_parts, self._exchanged.total, spec.query_heads)
            self._buffers[key] = np.zeros((*shape, spec.v_dim), np.float32), np.full(shape, -np.inf, np.float32)
        return self._buffers[key]

    def _are_all(self, shards: Indices) -> bool:
        return self._exchanged.shards == 1 and len(shards) == self._exchanged.total

    def _take(self, array: Array, shards: Indices) -> Array:
        """Return ``shards`` of ``array`` [T, H, D]; a view if they are all rows in order."""
        if self._are_all(shards):
            return array[: self._exchanged.total]
        count = self._exchanged.shards
        if count == 1:
            return array[shards]
        rows, heads, size = array.shape
        return array.reshape(rows, count, heads // count, size)[shards // count, shards % count]


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
        rows: Rows,
        attention: torch.Tensor | None,
        context: tuple[torch.Tensor, ...],
    ) -> SliceOutput:
        piece = self._slices[index]
        return piece.run(rows.ids, rows.positions, attention, context, rows.prepared(piece), rows.workspace)

    def logits(
        self, rows: Rows, attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        count = chosen.shape[0]
        if count < rows.ids.shape[0]:
            chosen = pad(chosen, padded(count))
            rows = Rows(rows.ids.index_select(0, chosen), rows.positions.index_select(0, chosen))
            # Indexing would use OpenMP's threads for a few rows. These busy-wait afterwards, for longer than the step.
            attention = attention.index_select(0, chosen)
            context = tuple(tensor.index_select(0, chosen) for tensor in context)
        last = self._slices[len(self.attentions)]
        prepared = rows.prepared(last)
        output = last.run(rows.ids, rows.positions, attention, context, prepared, rows.workspace)
        return output.logits[:count]


class Cpu:
    """Implements ``Device`` on this process's CPU cores."""

    target = Target.CPU
    place = torch.device("cpu")
    inboxes = None

    def register_own(self, memory: memoryview) -> None:
        """Do nothing: the CPU reads all host memory equally fast."""

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        """Return False: the host copies messages to peers itself."""
        return False

    def unmap_peer(self, peer: str) -> None:
        """Do nothing: nothing was mapped."""

    def arrived(self, array: Any) -> Any:
        return array

    def copied(self, body: Any) -> memoryview:
        return memoryview(bytearray(body))

    def limit(self, share: float) -> None:
        """Do nothing: the limit concerns the memory of GPUs."""

    def sums(self, rank: Rank, meeting: str) -> Ranks:
        """Return the all-reduce over ranks, which connect by their links; ``meeting`` is unused."""
        return Ranks(rank)

    def form(self, model: LoweredModel, to: Quantization) -> HostForm:
        return HostForm(model, to)

    def runner(
        self,
        model: LoweredModel,
        tensors: Mapping[str, Weight],
        reduce: Reduce | None = None,
        activations: ActivationDType = "auto",
    ) -> SliceRunner:
        """Return a runner of the model's slices. Packed weights are copies: drop ``tensors`` to free their memory."""
        if activations == "int8":
            require_byte_rows(tensors)
        if refusal := tiles_refusal():
            logger.warning("%s", refusal)
        return SliceRunner(model, tensors, reduce, activations)
