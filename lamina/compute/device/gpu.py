"""Implements compute workers' ``Device`` on GPUs: slices are recorded once for each number of rows, then replayed.

A ``Kit`` has the operations that differ between a real GPU and its emulation in tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lamina.compute.device.base import ExchangedRows, Floats, Partial, Rows, Runner
from lamina.compute.device.chunk_attention import attend_chunks
from lamina.compute.device.fusion import Fusion
from lamina.compute.device.kit import ROWS, Kit, Replay, padded_rows
from lamina.compute.device.recorded_steps import RecordedSteps
from lamina.compute.device.sums import GpuSums
from lamina.compute.device.transfers import GpuTransfers, Lines
from lamina.compute.sampler import Row, sample
from lamina.core.errors import ConfigError
from lamina.core.sampling import SamplingParams
from lamina.core.types import ActivationDType, AttentionSpec, DType, Quantization
from lamina.kernels.segments import SegmentTable
from lamina.lowering import LoweredModel, Target
from lamina.lowering.gpu_slices import Main, PlacedSlice, place_slices
from lamina.lowering.weight_forms import PlacedForm
from lamina.models.quantisation.codes import Weight, plain
from lamina.splitter import SliceOutput
from lamina.splitter.markers import Reduce
from lamina.splitter.parts import Rank
from lamina.transport.device.inboxes import Inboxes


class Gpu:
    """Implements ``Device`` with the operations of a ``Kit``."""

    target = Target.GPU

    def __init__(self, kit: Kit) -> None:
        self.place = kit.place
        maker = kit.inbox_maker()
        self.inboxes = None if maker is None else Inboxes(maker)
        self._kit = kit

    def arrived(self, array: Any) -> Tensor:
        return self._kit.borrowed(array)

    def copied(self, body: Tensor) -> memoryview:
        return memoryview(bytearray(body.cpu().numpy()))

    def register_own(self, memory: memoryview) -> None:
        self._kit.register_own(memory)

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        return self._kit.map_peer(peer, memory)

    def unmap_peer(self, peer: str) -> None:
        self._kit.unmap_peer(peer)

    def limit(self, share: float) -> None:
        self._kit.limit(share)

    def sums(self, rank: Rank, meeting: str) -> GpuSums:
        return GpuSums(rank, self._kit, meeting)

    def form(self, model: LoweredModel, to: Quantization) -> PlacedForm:
        return PlacedForm(model, to, self.place)

    def runner(
        self,
        model: LoweredModel,
        tensors: Mapping[str, Weight],
        reduce: Reduce | None = None,
        activations: ActivationDType = "auto",
    ) -> "GpuRunner":
        if activations == "int8":
            raise ConfigError(
                f"--activation-dtype {activations} runs on CPUs with AVX-512 and VNNI, not on {self.place.type}: leave "
                "it out"
            )
        return GpuRunner(model, tensors, self._kit, reduce)


@dataclass
class _Placed:
    """A step's ``Rows`` in device memory."""

    ids: Tensor
    positions: Tensor
    prepared: dict[object, tuple[Tensor, ...]] = field(default_factory=dict)


class GpuCarrier:
    """Implements ``Carrier`` on a GPU."""

    def __init__(self, kit: Kit, dtype: DType) -> None:
        self.dtype = dtype
        self._kit = kit
        self.lines = Lines(kit, ROWS[-1])

    def transfers(self, exchanged: ExchangedRows) -> GpuTransfers:
        return GpuTransfers(self.lines, exchanged, getattr(torch, self.dtype.value))

    def lent(self, output: SliceOutput) -> tuple[Any, Any, Any]:
        """Return q, k and v as contiguous device arrays, copied where the model computes them as one tensor."""
        lend = self._kit.lent
        return lend(output.q.contiguous()), lend(output.k.contiguous()), lend(output.v.contiguous())

    def borrowed(self, array: Any) -> Tensor:
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else self._kit.borrowed(array)

    def attend(
        self, output: SliceOutput, rows: npt.NDArray[np.int64], table: SegmentTable, spec: AttentionSpec
    ) -> Partial:
        first = rows[table.query_offsets[:-1]].tolist()
        out, lse = attend_chunks(output.q, output.k, output.v, first, table, spec, self._kit.fused)
        return out, lse


class GpuRunner(GpuCarrier):
    """Implements ``Runner`` on a GPU. Recorded slices read and write fixed memory, shared by all numbers of rows.

    Context is copied out of fixed memory, since it must outlast the slices of other lanes.
    """

    def __init__(
        self, model: LoweredModel, tensors: Mapping[str, Weight], kit: Kit, reduce: Reduce | None = None
    ) -> None:
        super().__init__(kit, model.dtype)
        self.attentions: tuple[AttentionSpec, ...] = model.attentions
        self.contexts = model.contexts
        self.sinks: list[Floats | None] = [
            None if name is None else plain(tensors[name]).float().cpu().numpy() for name in model.sinks
        ]
        self.slices = model.slices
        self._slices = dict(
            zip(model.slices, place_slices(model, tensors, kit.place, reduce, kit.grouped), strict=True)
        )
        self._prepared: dict[tuple[object, int], tuple[Tensor, ...]] = {}
        self._held: dict[tuple[object, int], Rows] = {}  # by kind of value: the step whose values are in fixed memory
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        # Not with several ranks, which would have to make the same choice and time the same recordings together.
        self._fusion = Fusion(kit) if reduce is None else None

    def reserve(self, rows: int, draws: int, shards: int) -> None:
        _rehearse(self, rows, draws, shards)

    def padded(self, rows: int) -> int:
        return padded_rows(rows)

    def run(self, index: int, rows: Rows, attention: Tensor | None, context: tuple[Tensor, ...]) -> SliceOutput:
        arrived = context if attention is None else (attention, *context)
        results = self._results(index, rows, arrived)
        return SliceOutput((*results[:3], *(tensor.clone() for tensor in results[3:])))

    def logits(self, rows: Rows, attention: Tensor, context: tuple[Tensor, ...], chosen: Tensor) -> Tensor:
        count = self.padded(len(chosen))
        which = torch.nn.functional.pad(chosen, (0, count - len(chosen)))
        arrived = [tensor[which.to(tensor.device)] for tensor in (attention, *context)]
        few = Rows(rows.ids[which], rows.positions[which])
        return self._results(len(self.attentions), few, arrived)[0][: len(chosen)]

    def recorded_steps(self, memory: Any) -> RecordedSteps | None:
        every = range(len(self.attentions) + 1)
        runs_whole_model = self._fusion is not None and self.slices == every
        if not runs_whole_model or not all(piece.capturable for piece in self._slices.values()):
            return None
        return RecordedSteps(self, self._kit, memory.fixed_table)

    def place_rows(self, rows: Rows) -> None:
        placed = self._placed(rows)
        for key, piece in {piece.prelude_key: piece for piece in self._slices.values()}.items():
            if key not in placed.prepared:
                placed.prepared[key] = piece.prepare(rows.positions)
            self._fill_shared(piece, rows, placed, placed.prepared[key])

    def launch(self, index: int, count: int, arrived: Sequence[Tensor]) -> Sequence[Tensor]:
        recorded = self._recorded.get((index, count))
        inputs = self._fill_inputs(count, arrived)
        results = self._launch(self._slices[index], count, inputs, None if recorded is None else recorded.main)
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        context = [each.clone() if each.untyped_storage().data_ptr() in taken else each for each in results[3:]]
        return *self._copy_results(count, results[:3]), *context

    def _results(self, index: int, rows: Rows, arrived: Sequence[Tensor]) -> Sequence[Tensor]:
        piece, count = self._slices[index], len(rows.ids)
        placed = self._placed(rows)
        prepared = placed.prepared.get(piece.prelude_key)
        if prepared is None:
            prepared = placed.prepared[piece.prelude_key] = piece.prepare(rows.positions)
        if count > ROWS[-1] or not piece.capturable:
            there = [tensor.to(self._kit.place) for tensor in arrived]
            return piece(prepared, placed.ids, placed.positions, there)
        self._fill_shared(piece, rows, placed, prepared)
        inputs = self._fill_inputs(count, arrived)
        recorded = self._recorded.get((index, count))
        if recorded is None:
            recorded = self._recorded[index, count] = self._record(piece, count, inputs)
        recorded.replay()
        return recorded.results

    def _fill_inputs(self, count: int, arrived: Sequence[Tensor]) -> list[Tensor]:
        """Copy the inputs of a slice of ``count`` rows to where its recording reads them, and return that memory."""
        inputs = [self._at(f"in {number}", count, tensor) for number, tensor in enumerate(arrived)]
        for fixed, tensor in zip(inputs, arrived, strict=True):
            if fixed.data_ptr() != tensor.data_ptr():
                fixed.copy_(tensor)
        return inputs

    def _placed(self, rows: Rows) -> _Placed:
        if not isinstance(rows.placed, _Placed):
            rows.placed = _Placed(rows.ids.to(self._kit.place), rows.positions.to(self._kit.place))
        return rows.placed

    def _fill_shared(self, piece: PlacedSlice, rows: Rows, placed: _Placed, prepared: tuple[Tensor, ...]) -> None:
        """Copy what all slices of a step read (ids, positions, ``prepared``) to fixed memory, unless it is there."""
        count = len(rows.ids)
        for what, tensor in (("ids", placed.ids), ("positions", placed.positions)):
            if self._held.get((what, 0)) is not rows:
                self._at(what, count, tensor).copy_(tensor)
                self._held[what, 0] = rows
        key = piece.prelude_key, count
        if key not in self._prepared:
            self._prepared[key] = tuple(tensor.clone() for tensor in prepared)
        elif self._held.get(key) is not rows:
            for fixed, tensor in zip(self._prepared[key], prepared, strict=True):
                fixed.copy_(tensor)
        self._held[key] = rows

    def _at(self, what: str, count: int, like: Tensor) -> Tensor:
        """Return fixed memory for ``count`` rows, by purpose (``what``)."""
        return self.lines.fixed_rows(what, count, tuple(like.shape[1:]), like.dtype)

    def _record(self, piece: PlacedSlice, count: int, inputs: Sequence[Tensor]) -> "_Recorded":
        """Record a slice for ``count`` rows; its ``inputs`` are in fixed memory."""
        fixed: list[Tensor] = []
        made: list[tuple[Replay, Main]] = []

        def record(main: Main) -> Replay:
            def work() -> None:
                fixed[:] = self._copy_results(count, self._launch(piece, count, inputs, main))

            replay = self._kit.capture(work)
            made.append((replay, main))
            return replay

        replay = record(piece.graph) if self._fusion is None else self._fusion.record(piece, count, record)
        return _Recorded(replay, fixed, next(main for each, main in made if each is replay))

    def _launch(self, piece: PlacedSlice, count: int, inputs: Sequence[Tensor], main: Main | None) -> Sequence[Tensor]:
        """Launch a slice on the rows in fixed memory. ``main``: computes what the slice's graph does."""
        ids = self._at("ids", count, torch.empty(0, dtype=torch.int64))
        positions = self._at("positions", count, torch.empty(0, dtype=torch.int64))
        return piece(self._prepared[piece.prelude_key, count], ids, positions, inputs, main)

    def _copy_results(self, count: int, results: Sequence[Tensor]) -> list[Tensor]:
        """Copy results to fixed memory, and return that memory."""
        fixed = [self._at(f"out {number}", count, tensor) for number, tensor in enumerate(results)]
        for target, tensor in zip(fixed, results, strict=True):
            target.copy_(tensor)
        return fixed


@dataclass(frozen=True)
class _Recorded:
    """A recorded slice; ``results`` are the tensors that replaying it writes, ``main`` is what was recorded."""

    replay: Replay
    results: Sequence[Tensor]
    main: Main


COSTLIEST = SamplingParams(top_p=0.5, top_k=0, min_p=1e-9, repetition_penalty=1.1, logprobs=20)
"""Sampling parameters with which drawing a token needs most memory."""


def _rehearse(runner: Runner, rows: int, draws: int, shards: int) -> None:
    """Run steps of every size up to ``rows`` on zeros before the first request, to warm up a GPU.

    Afterwards, slices and transfers of decode steps are recorded for every number of rows, libraries are loaded, and
    torch's allocator has reserved the memory of the largest step. Raises torch.OutOfMemoryError.

    Args:
        rows: Most rows of a step.
        draws: Most rows of a step that sample a token.
        shards: Head shards per row.
    """
    most = runner.padded(rows)
    for count in sorted({most, *(each for each in ROWS if each < most)}, reverse=True):  # the smaller fit in after that
        _run(runner, count, min(count, draws), shards, rows if count == most else 0)


def _run(runner: Runner, count: int, draws: int, shards: int, chunk: int) -> None:
    """Run a step of ``count`` decode rows on one memory worker; the first ``chunk`` rows are also a prompt chunk.

    Tokens are drawn with the costliest sampling parameters.
    """
    step = Rows(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    every = np.arange(count * shards)
    transfers = runner.transfers(ExchangedRows(count, count, shards, [every], [every], [np.zeros_like(every)], [], []))
    attention, context = None, _context_before(runner, count)
    for index in runner.slices:
        if index:
            spec = runner.attentions[index - 1]
            reply = memoryview(bytearray(4 * count * spec.query_heads * (spec.v_dim + 1)))
            attention = transfers.merged(spec, [], [(-1, reply)], runner.sinks[index - 1])
        if attention is not None and index == len(runner.attentions):
            logits = runner.logits(step, attention, context, torch.arange(draws))
            if chunk:
                for params in (COSTLIEST, SamplingParams()):  # the second draws from the model's type
                    sample(torch.zeros_like(logits), [Row(0, params, prompt=[0], output=[0])] * draws)
            break
        spec = runner.attentions[index]
        output = runner.run(index, step, attention, context)
        transfers.fill_messages(output.q, output.k, output.v)
        if chunk:
            bounds, start = np.array([0, chunk], np.int32), np.zeros(1, np.int32)
            table = SegmentTable(bounds, start, bounds, start, np.arange(chunk, dtype=np.int32))
            runner.attend(output, np.arange(chunk), table, spec)
        context = output.context


def _context_before(runner: Runner, count: int) -> tuple[Tensor, ...]:
    """Return zeros for the context that the first slice receives from the stage before."""
    first = runner.slices.start
    crossings = runner.contexts[first - 1] if first else ()
    return tuple(torch.zeros((count, *one.shape), dtype=one.dtype) for one in crossings)
