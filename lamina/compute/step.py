"""Runs one step of one lane on a compute worker: the slices of its replica or stage, one at a time, in order."""

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lamina.compute.device.base import Partial, Rows, Runner, Sums, WholeSteps, pad
from lamina.compute.exchange import StepExchange
from lamina.compute.mail import Mail
from lamina.control.messages import Connect, StepDone
from lamina.control.timeline import Timeline
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.steps import LAST_DRAWN, StepPlan
from lamina.core.topology import Topology
from lamina.core.types import AttentionSpec
from lamina.dataplane.wire import Array
from lamina.lowering import Workspace
from lamina.splitter import Crossing, SliceOutput, as_numpy

AHEAD_SLICE_S = 1e-4  # time between two checks while the device runs a whole step


@dataclass(frozen=True)
class Replica:
    """Context of all steps that a compute worker runs in one epoch.

    Attributes:
        number: Number of this worker's stage, see ``Pipeline.stage``.
        names: By stage, the compute worker with the same rank as this worker; "" for stages of fewer ranks.
        lenders: By name of local memory of another replica with heads of this rank, the worker there that has K and V
            of each attention; "" for attentions that this worker neither asks for nor merges.
        pipeline: Order in which stages run slices.
        runner: Runs this worker's slices.
        timeline: Records spans.
        sums: All-reduce over the ranks of the stage.
    """

    number: int
    names: tuple[str, ...]
    lenders: Mapping[str, tuple[str, ...]]
    pipeline: Pipeline
    runner: Runner
    timeline: Timeline
    sums: Sums

    @classmethod
    def linked(cls, connect: Connect, own: str, runner: Runner, timeline: Timeline, sums: Sums) -> "Replica":
        """Return the context of the first epoch of a worker. ``own``: its name."""
        number, names = _alike(connect.computes, connect.pipeline, own)
        lenders = _lenders(connect.computes, connect.pipeline, own, len(runner.attentions))
        return cls(number, names, lenders, connect.pipeline, runner, timeline, sums)

    def within(self, topology: Topology, own: str) -> "Replica":
        """Return a copy for the members of ``topology``. ``own``: this worker's name."""
        number, names = _alike(topology.computes, topology.pipeline, own)
        lenders = _lenders(topology.computes, topology.pipeline, own, len(self.runner.attentions))
        return dataclasses.replace(self, number=number, names=names, lenders=lenders, pipeline=topology.pipeline)

    @property
    def is_staged(self) -> bool:
        """Whether this worker is one of several stages of its replica."""
        return self.shape.stages > 1

    @property
    def others(self) -> frozenset[str]:
        """The workers of ``lenders``."""
        return frozenset(name for names in self.lenders.values() for name in names if name)

    @property
    def shape(self) -> Shape:
        """The shape of this worker's replica."""
        return self.pipeline.shapes[self.number >= self.pipeline.prefill * self.pipeline.shapes[0].stages]

    def runs(self, plan: StepPlan) -> bool:
        """Return whether this worker's replica runs the first slice of the plan's step."""
        order, turn = self.pipeline, (plan.lane, plan.turn)
        first, stages = order.stage(*turn, 0, plan.rotates), order.shape_of(order.replica(*turn, plan.rotates)).stages
        return first <= self.number < first + stages

    def begins(self, plan: StepPlan) -> bool:
        """Return whether this worker runs the first slice of the plan's step."""
        return self.pipeline.stage(plan.lane, plan.turn, 0, plan.rotates) == self.number


def _alike(computes: Sequence[str], pipeline: Pipeline, own: str) -> tuple[int, tuple[str, ...]]:
    """Return the stage of compute worker ``own``, and the names of ``Replica``."""
    number = computes.index(own)
    rank, by_stage = number - pipeline.ranks_at(number).start, dict[int, str]()
    for other, name in enumerate(computes):
        if other - pipeline.ranks_at(other).start == rank:
            by_stage[pipeline.stage_at(other)] = name
    return pipeline.stage_at(number), tuple(by_stage.get(stage, "") for stage in range(pipeline.stage_count))


def _lenders(computes: Sequence[str], pipeline: Pipeline, own: str, attentions: int) -> dict[str, tuple[str, ...]]:
    """Return ``Replica.lenders`` of compute worker ``own``, for a model of so many ``attentions``."""
    if not pipeline.lends:
        return {}
    number, found = computes.index(own), dict[str, tuple[str, ...]]()
    first, stop = pipeline.slices_at(number)
    for replica in set(range(pipeline.replicas)) - {pipeline.replica_at(number)}:
        start = pipeline.workers_in(replica).start
        for home in range(start, start + pipeline.shape_of(replica).ranks):
            if pipeline.shares_heads(number, home):
                found[computes[home]] = tuple(
                    computes[pipeline.holder(home, each)] if first <= each + 1 <= stop else ""
                    for each in range(attentions)
                )
    return found


class StepRun:
    """Runs this worker's slices of one step: call ``run_slice`` for each, once messages of ``awaited`` have arrived.

    Attributes:
        tokens: The step's token ids, known once this worker's first slice has run.
        is_launched: Whether all slices have been given to the device at once, which may still run them.
        index: Index of this worker's next slice, -1 after its last one. While the step only attends after this stage's
            last slice, the index of the next stage's first slice.
        moved_here: Whether another replica or stage ran the slice before the next one. For slice 0, that is the last
            slice of the lane's last step, unless lanes rotate.
    """

    def __init__(
        self,
        plan: StepPlan,
        replica: Replica,
        exchange: StepExchange,
        mail: Mail,
        workspace: Workspace,
        follows: bool = False,
        whole: WholeSteps | None = None,
    ) -> None:
        """``workspace`` has memory for the exchange's rows, shared by steps of one lane, which run one after another.

        ``follows``: whether the lane has had an earlier step in the epoch. ``whole``: runs steps that need no peer.
        """
        self.plan = plan
        self.tokens: list[int] = []
        self.is_launched = False
        self._replica = replica
        self._runner = replica.runner
        self._timeline = replica.timeline
        self._exchange = exchange
        self._mail = mail
        pipeline, slices = replica.pipeline, len(replica.runner.attentions) + 1
        self._stages = pipeline.stages_of(plan.lane, plan.turn, slices, plan.rotates)
        self._own = [index for index, stage in enumerate(self._stages) if stage == replica.number]
        self._follows = follows and replica.is_staged
        self._advance_to(0)
        prompts = [at for chunk in plan.chunks for at in range(chunk.start, chunk.stop)]
        positions = torch.tensor(plan.decoding.starts + prompts)
        self._rows = Rows(torch.zeros(exchange.rows, dtype=torch.int64), pad(positions, exchange.rows), workspace)
        self._count = plan.row_count
        self._news = False
        ends = itertools.accumulate(len(step.tokens) for step in plan.sequences)
        chosen = [end - 1 for end, step in zip(ends, plan.sequences, strict=True) if step.draws]
        self._chosen = torch.tensor(chosen, dtype=torch.int64)
        is_whole = len(self._own) == slices and len(chosen) == self._count > 0
        self._table = exchange.only_table if whole is not None and is_whole else None
        self._whole = whole
        self._launched_ns = 0  # when all slices were given to the device; 0: not, or no time is recorded
        self._context: tuple[torch.Tensor, ...] = ()
        self._chunks: Partial | None = None
        self._pending: SliceOutput | None = None  # of the latest slice, until it has attended to local memory
        # Whether only the attention after this stage's last slice is left. It runs as if it were one more slice, in all
        # steps with prompt chunks, so that all ranks of the stage count alike, whether or not one has to wait.
        self._leaves = False

    def _advance_to(self, place: int) -> None:
        """Let the next slice be number ``place`` of this worker's."""
        self._next = place
        self.index = self._own[place] if place < len(self._own) else -1
        self.moved_here = self._stages[self.index - 1] != self._replica.number

    @property
    def tick(self) -> int:
        """Tick at which the next slice is due, see ``Pipeline.tick``."""
        return self._replica.pipeline.tick(self.plan.lane, self.plan.turn, self.index)

    @property
    def ends_here(self) -> bool:
        """Whether this worker runs the last slice."""
        return self._own[-1:] == [len(self._runner.attentions)]

    @property
    def shares(self) -> float:
        """Estimated time of all the step's slices over the time of this worker's; stages have about equal weights."""
        stages = self._replica.shape.stages
        return stages if stages > 1 else len(self._stages) / len(self._own)

    def awaited(self) -> list[str]:
        """Return the peers whose messages the next slice waits for."""
        if self.index == 0:
            return [self._former] if self._follows else []
        if self.index < 0 or self._leaves:
            return []
        return [*self._exchange.repliers(self.index - 1), *([self._former] if self.moved_here else [])]

    @property
    def is_pending(self) -> bool:
        """Whether attention to local memory is left to do, since it had to wait for earlier chunks of other lanes."""
        return self._pending is not None

    @property
    def is_parked(self) -> bool:
        """Whether the next slice must wait because attention to local memory still does."""
        return self._pending is not None and self._exchange.must_wait(self.index - 1)

    @property
    def pending_nbytes(self) -> int:
        """Bytes of q, k and v that are kept until this step attends to local memory."""
        return 0 if self._pending is None else sum(each.nbytes for each in self._pending.results)

    def take_news(self) -> bool:
        """Return True at the first call after ``tokens`` has become known, else False."""
        news, self._news = self._news, False
        return news

    @property
    def _former(self) -> str:
        return self._replica.names[self._stages[self.index - 1]]

    def run_slice(self, drawn: Mapping[int, int]) -> torch.Tensor | None:
        """Run the next slice; return logits [rows that draw, vocab] after the last slice.

        The first slice of a step that needs no peer may run together with all others.

        ``drawn``: tokens that the lane's last step drew, by sequence. Raises PeerLostError.
        """
        index = self.index
        if self._leaves:
            self._leave(index - 1)
            return None
        if index == 0:
            self._begin(self._receive_draws() if self._follows else drawn)
            logits = self._run_whole()
            if logits is not None:
                return logits
            self._advance_to(1)
            self._run_inner(0, None)
            return None
        if self.moved_here:
            self._receive_context(index)
        if self._pending is not None:
            self._attend_here(index - 1, self._pending)
            self._pending = None
        attention = self._gather(index)
        self._advance_to(self._next + 1)
        if index < len(self._runner.attentions):
            self._run_inner(index, attention)
            return None
        return self._run_last(attention)

    def _run_whole(self) -> torch.Tensor | None:
        """Run all slices at once, if the step can run so; returns logits [rows that draw, vocab]."""
        if self._whole is None or self._table is None:
            return None
        begun = self._timeline.now()
        logits = self._whole.run_step(self._rows, self._table)
        if logits is None:
            return None
        self.is_launched, self._launched_ns = True, begun
        self._advance_to(len(self._own))
        return logits[: self._count]

    def record_launched(self) -> None:
        """Wait for the device to end a launched step, and record its time; do nothing if no time is recorded.

        The wait delays the draws of a recorded step by the time that it takes to launch them.
        """
        if self._whole is None or not self._launched_ns:
            return
        while not self._whole.has_ended():  # the draws, which follow, would wait as long
            time.sleep(AHEAD_SLICE_S)
        self._timeline.record_span("slice", self.plan.lane, self._launched_ns)

    def _gather(self, index: int) -> torch.Tensor:
        begun = self._timeline.now()
        spec, sinks = self._runner.attentions[index - 1], self._runner.sinks[index - 1]
        attention = self._exchange.gather(index - 1, spec, self._chunks, sinks)
        self._timeline.record_span("receive", self.plan.lane, begun)
        return attention

    def _run_last(self, attention: torch.Tensor) -> torch.Tensor | None:
        self._exchange.return_slots()
        if not self._chosen.shape[0]:
            # A barrier: when a step ends on one rank, all ranks have received their replies, so that memory workers
            # have stored all K and V. With logits, their all-reduce is the barrier.
            self._replica.sums.meet()
            return None
        begun = self._timeline.now()
        logits = self._runner.logits(self._rows, attention, self._context, self._chosen)
        self._timeline.record_span("slice", self.plan.lane, begun)
        return logits

    def _run_inner(self, index: int, attention: torch.Tensor | None) -> None:
        spec, exchange, timeline, lane = self._runner.attentions[index], self._exchange, self._timeline, self.plan.lane
        begun = timeline.now()
        output = self._runner.run(index, self._rows, attention, self._context)
        timeline.record_span("slice", lane, begun)
        begun = timeline.now()
        exchange.send_requests(index, spec, output)
        timeline.record_span("send", lane, begun)
        self._context = output.context
        following = self._stages[index + 1]
        self._leaves = following != self._replica.number and bool(self.plan.chunks) and exchange.attends_here
        if self._leaves:
            self.index, self.moved_here = index + 1, False
        if self._leaves or exchange.must_wait(index):
            exchange.keep_here(index, output)
            # Other slices overwrite what a GPU's slice returns.
            self._pending = SliceOutput(tuple(each.clone() for each in output.results[:3]))
        else:
            self._attend_here(index, output)
        if exchange.local_rows:
            begun = timeline.now()
            self._chunks = exchange.attend_chunks(index, spec, output)
            timeline.record_span("chunk attention", lane, begun)
        if following != self._replica.number and not self._leaves:
            self._send_context(self._replica.names[following], self.plan.turn + index + 1)

    def _leave(self, index: int) -> None:
        """Attend to local memory after this stage's last slice, and let the next stage go on."""
        assert self._pending is not None
        self._attend_here(index, self._pending)
        self._pending, self._leaves = None, False
        self._advance_to(self._next)
        self._send_context(self._replica.names[self._stages[index + 1]], self.plan.turn + index + 1)

    def _attend_here(self, index: int, output: SliceOutput) -> None:
        begun = self._timeline.now()
        if self._exchange.attend_here(index, output):
            self._timeline.record_span("attention", self.plan.lane, begun)

    def _begin(self, drawn: Mapping[int, int]) -> None:
        # A sequence without a last draw had no finite logits: its request is ending, and its token does not matter.
        tokens = [
            drawn.get(step.sequence, 0) if token == LAST_DRAWN else token
            for step in self.plan.sequences
            for token in step.tokens
        ]
        self._set_tokens(tokens, torch.tensor(tokens))

    def _set_tokens(self, tokens: list[int], ids: torch.Tensor) -> None:
        self.tokens, self._news = tokens, True
        self._rows.ids[: self._count] = ids

    def _send_context(self, peer: str, turn: int) -> None:
        """Send ids, partials of prompt chunks and of local memory, and context to the worker that runs the next
        slice."""
        parts: list[Array] = [np.asarray(self.tokens, np.int64)]
        parts += [as_numpy(tensor) for tensor in (*(self._chunks or ()), *(self._exchange.share_partial or ()))]
        parts += [as_numpy(tensor) for tensor in self._context]
        nbytes = sum(part.nbytes for part in parts)
        self._mail.channels[peer].begin(self.plan.lane, turn, nbytes).send_piece(parts)

    def finish_last_slice(self, done: StepDone) -> None:
        """Send the tokens drawn after the last slice to the first stage, if there are several stages.

        The first stage waits for them before the lane's next step, whose plan may have ``LAST_DRAWN`` in their place.
        """
        if not self._replica.is_staged:
            return
        parts = [np.array([*done.drawn(self.plan)], np.int64)] if done.tokens else []
        channel = self._mail.channels[self._replica.names[self._stages[0]]]
        turn = self.plan.turn + len(self._runner.attentions)
        channel.send_message(self.plan.lane, turn, sum(part.nbytes for part in parts), parts)

    def _receive_draws(self) -> dict[int, int]:
        message = self._mail.pop_message(self.plan.lane, self._former)
        drawn: list[list[int]] = np.frombuffer(message.whole, np.int64).reshape(-1, 2).tolist()
        message.free()
        return {sequence: token for sequence, token in drawn}

    def _receive_context(self, index: int) -> None:
        message = self._mail.pop_message(self.plan.lane, self._former)
        reader = _Reader(message.whole)
        ids = reader.copy_tensor((self._count,), torch.int64)
        if not self.tokens:
            self._set_tokens(ids.tolist(), ids)
        spec, rows = self._runner.attentions[index - 1], self._exchange.local_rows
        self._chunks = reader.copy_partial(rows, spec.query_heads, spec.v_dim) if rows else None
        if (shape := self._exchange.share_shape(spec))[0]:
            self._exchange.receive_share(reader.copy_partial(*shape))
        crossings = self._runner.contexts[index - 1]
        self._context = tuple(reader.copy_tensor((self._exchange.rows, *part.shape), part.dtype) for part in crossings)
        message.free()


class _Reader:
    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._offset = 0

    def copy_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the next tensor, which outlives the message's slot."""
        count = math.prod(shape)
        tensor = torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=self._offset).reshape(shape).clone()
        self._offset += count * dtype.itemsize
        return tensor

    def copy_partial(self, rows: int, heads: int, v_dim: int) -> Partial:
        """Return a copy of the next partial: out [rows, heads, v_dim], and lse [rows, heads]."""
        out = self.copy_tensor((rows, heads, v_dim), torch.float32)
        return out, self.copy_tensor((rows, heads), torch.float32)


def context_nbytes_per_token(
    attentions: tuple[AttentionSpec, ...], contexts: tuple[tuple[Crossing, ...], ...], local: bool = False
) -> int:
    """Return the most bytes per row of a context message: id, partial of a prompt chunk, context.

    ``local``: Whether there is also a partial of local memory.
    """
    partials = 2 if local else 1
    return 8 + max(
        partials * spec.query_heads * (spec.v_dim + 1) * 4 + sum(part.bytes_per_token for part in crossings)
        for spec, crossings in zip(attentions, contexts, strict=True)
    )
