"""Predicts how long a simulated step's slices, attentions and messages take."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lamina import _native
from lamina.core.steps import StepPlan
from lamina.dataplane.wire import attends_locally
from lamina.planning.plan.cost import GEMMS, POINTWISE, CostModel
from lamina.planning.simulate.scenario import Deployment, Ints

Places = Sequence[tuple[int, int, int | None]]
"""The memory worker, first token and end of each segment of a sequence, by ascending token; the end is None for the
last segment while it grows."""

_AT_ONCE = 64
"""Later steps whose attention is predicted in one call: a call takes as long for one step as for many."""

_BEFORE_ATTENTION = ("input_layernorm", "attn_pre_proj", "attn_rope")
"""Operators of a layer that slice k runs before attention k; the others follow it."""


@lru_cache(maxsize=32)
def slice_times(cost: CostModel, tensor_parallel: int, most_rows: int) -> "SliceTimes":
    """Return the ``SliceTimes``, cached: making the table takes as long as a short simulation."""
    return SliceTimes(cost, tensor_parallel, most_rows)


class SliceTimes:
    """Table of the seconds of a step's slices by rows, on ``tensor_parallel`` devices.

    Attributes:
        first: The first slice, which ends at the first layer's attention.
        inner: A slice between the attentions of two layers.
        after: The last slice: the last layer after its attention.
        ends: The embedding and the output head.
    """

    def __init__(self, cost: CostModel, tensor_parallel: int, most_rows: int) -> None:
        rows = np.maximum(np.arange(most_rows + 1), 1)
        before = sum(cost.operator_seconds(name, rows, tensor_parallel) for name in _BEFORE_ATTENTION)
        layer = cost.slice_seconds(rows, tensor_parallel)
        ends = cost.ends_seconds(rows, tensor_parallel)
        if cost.fits.slices is not None and tensor_parallel == 1:
            # Slices were measured as a whole; the operators' shares divide them.
            whole = sum(cost.operator_seconds(name, rows, 1) for name in (*GEMMS, *POINTWISE))
            before = before / whole * layer
        self.first: list[float] = np.asarray(before).tolist()
        self.inner: list[float] = layer.tolist()
        self.after: list[float] = np.asarray(layer - before).tolist()
        self.ends: list[float] = ends.tolist()


class SplitSequence:
    """A sequence with KV on several memory workers, the last of which is still growing.

    Attributes:
        places: Its segments.
        homes: The other workers.
        tokens: Tokens on each of ``homes``.
        elsewhere: Sum of ``tokens``.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        held = _tokens(places, places[-1][1])[:-1]
        self.homes = [home for home, _ in held]
        self.tokens = [tokens for _, tokens in held]
        self.elsewhere = sum(self.tokens)


def _tokens(places: Places, position: int) -> list[tuple[int, int]]:
    """Return (worker, tokens before ``position``) of each worker with segments, the last segment's worker last."""
    held: dict[int, int] = {}
    for home, first, stop in places:
        tokens = max(0, (position if stop is None else min(stop, position)) - first)
        held[home] = held.pop(home, 0) + tokens
    return list(held.items())


class _Model:
    def __init__(self, deployment: Deployment) -> None:
        self._compute, self._engine, self._tp = deployment.compute_cost, deployment.host, deployment.shape.ranks
        shape, item = deployment.model, deployment.model.dtype.itemsize
        self._layers = shape.layers
        self._kept_bytes = 2 * shape.kv_heads * shape.head_size * item  # k and v of a row
        self._asked_bytes = shape.query_heads * shape.head_size * item  # q of a row; the reply has the same size
        self._slices = slice_times(self._compute, deployment.shape.ranks, deployment.max_num_batched_tokens)

    def _last_s(self, rows: int, draws: int) -> float:
        runtime, engine, slices = self._compute.fits.runtime, self._engine, self._slices
        drawing_s = runtime.step_s + engine.step_s + (runtime.step_row_s + engine.step_row_s) * draws
        return slices.after[rows] + slices.ends[draws] + drawing_s


class StepModel(_Model):
    """Times of steps as the runtime runs them (``compute/exchange.py``).

    Memory workers run decode attention and a chunk's attention to earlier chunks, unless these are in the replica's
    scratch memory; the replica runs a chunk's attention to itself. The time of an attention on a memory worker is
    linear in the tokens attended to, plus an arbitrary function of the number of rows.
    """

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        compute, memory, shape, tp = self._compute, deployment.memory_cost, deployment.model, self._tp
        self._memory = memory
        # Each rank sends the whole context to the same rank of the next stage.
        self._context_row_s = float(compute.wire_seconds(shape.hidden * shape.dtype.itemsize))
        # Each device of a group sends and receives the data of its heads.
        self._compute_byte_s = float(compute.wire_seconds(1.0)) / tp
        self._memory_byte_s = float(memory.wire_seconds(1.0))
        self.latency_s = memory.fits.runtime.round_trip_s / 2
        lengths = np.arange(deployment.max_num_batched_tokens + 1)
        self._chunk_s: list[float] = compute.chunk_attention_seconds(lengths, 0, tp).tolist()
        self._token_s, attend_s = memory.attention_line(lengths)
        self._shares = _native.DecodeShares(
            deployment.memory_workers,
            (self._kept_bytes + self._asked_bytes) * self._memory_byte_s,
            self._asked_bytes * self._memory_byte_s,
            self._token_s,
            attend_s.tolist(),
        )

    def times(
        self, plan: StepPlan, homes: Ints, chunk_homes: Sequence[int], split: Mapping[int, SplitSequence]
    ) -> tuple[int, _native.StepTimes]:
        """Return the rows and times of one step.

        ``homes``, ``chunk_homes``: memory worker of each decoding sequence and of each chunk. ``split``: sequences with
        KV on several memory workers, the last of which is in ``homes``.
        """
        starts = plan.decoding.starts
        chunks = list(zip(plan.chunks, chunk_homes, strict=True))
        if singles := [pair for pair in chunks if not attends_locally(pair[0])]:  # treated as decode rows
            chunks = [pair for pair in chunks if attends_locally(pair[0])]
            starts = starts + [chunk.start for chunk, _ in singles]
            homes = np.append(homes, [home for _, home in singles])
        rows = draws = len(starts)
        starts, homes = self._rows_of(plan.decoding.sequences, starts, homes, split)
        asked = len(starts)
        chunks_s = 0.0
        more: list[tuple[int, float, float, float]] = []
        for chunk, home in chunks:
            length = len(chunk.tokens)
            rows += length
            draws += bool(chunk.draws)
            if here_before := chunk.start - chunk.before_scratch:
                chunks_s += float(self._compute.chunk_attention_seconds(length, here_before, self._tp))
            else:
                chunks_s += self._chunk_s[length]
            own = split.get(chunk.sequence)
            places: Places = own.places if own is not None else ((home, 0, None),)
            before = dict(_tokens(places, chunk.start))
            for place, tokens in _tokens(places, chunk.start + length):
                if kept := tokens - before[place]:
                    more.append((place, kept * self._kept_bytes * self._memory_byte_s, 0.0, 0.0))
            if chunk.before_scratch:
                there = length * self._asked_bytes * self._memory_byte_s
                for place, prefix in _tokens(places, chunk.before_scratch):
                    if prefix:
                        asked += length
                        more.append((place, there, self._prefix_seconds(length, prefix), there))
        shares = self._shares.of(homes, starts, more)
        return rows, self._step_times(rows, draws, asked, chunks_s, shares)

    def repeated(
        self, plan: StepPlan, homes: Ints, split: Mapping[int, SplitSequence]
    ) -> Callable[[int], _native.StepTimes]:
        """Return a function from a number of steps to the times of the step that follows ``plan``, which has no chunks,
        after so many steps. The other arguments are those of ``times``."""
        decoding = plan.decoding
        starts, homes_of_rows = self._rows_of(decoding.sequences, decoding.starts, homes, split)
        shares = self._shares.of(homes_of_rows, starts, []).tuples()
        rows, asked = len(decoding.starts), len(starts)
        grown = (np.bincount(homes, minlength=1 + int(homes_of_rows.max())) * self._token_s).tolist()

        def after(steps: int) -> _native.StepTimes:
            later = [(place, begin, attends + steps * grown[place], end) for place, begin, attends, end in shares]
            return self._step_times(rows, rows, asked, 0.0, _native.Shares(later))

        return after

    def _step_times(
        self, rows: int, draws: int, asked: int, chunks_s: float, shares: _native.Shares
    ) -> _native.StepTimes:
        slices, runtime = self._slices, self._compute.fits.runtime
        exchange_s = runtime.exchange_s + runtime.exchange_row_s * rows
        return _native.StepTimes(
            first_s=slices.first[rows] + exchange_s,
            inner_s=slices.inner[rows] + exchange_s,
            last_s=self._last_s(rows, draws),
            chunks_s=chunks_s,
            send_s=(rows * self._kept_bytes + asked * self._asked_bytes) * self._compute_byte_s,
            receive_s=asked * self._asked_bytes * self._compute_byte_s,
            context_s=rows * self._context_row_s,
            shares=shares,
        )

    @staticmethod
    def _rows_of(
        sequences: Sequence[int], starts: list[int], homes: Ints, split: Mapping[int, SplitSequence]
    ) -> tuple[list[int], Ints]:
        """Return the tokens that rows of decoding sequences see, and their memory workers: a row for each worker with
        KV of a sequence; K and V of the token count at each of them."""
        if not split:
            return starts, homes
        seen, others = list(starts), list[int]()
        for place, sequence in enumerate(sequences):
            if (own := split.get(sequence)) is not None:
                seen[place] -= own.elsewhere
                seen += own.tokens
                others += own.homes
        return seen, np.append(homes, np.array(others, np.int64))

    def move_seconds(self, tokens: int) -> float:
        """Return seconds to move the KV of ``tokens`` tokens from one memory worker to another."""
        return 2 * self.latency_s + tokens * self._layers * self._kept_bytes * self._memory_byte_s

    def _prefix_seconds(self, chunk: int, prefix: int) -> float:
        """Return seconds of attention of ``chunk`` rows to ``prefix`` tokens on a memory worker, bound by FLOP/s or
        memory."""
        return float(self._memory.prefix_attention_seconds(chunk, prefix))


class Lent:
    """Attention for steps of other replicas, which lengthens the lender's own steps by as much in all.

    A step of the lender that is planned while such a step is in flight pays for the part that falls into it. What is
    left when the other step completes lengthens the lender's next step, if the lender runs one at that time. So the
    sum does not depend on when plans are made.

    Of several steps of a lane only the first runs.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Borrowing] = {}
        self._owed: dict[int, float] = {}  # by lender: seconds of attention for steps that have completed

    def __bool__(self) -> bool:
        return any(one.left_s for one in self._steps.values()) or bool(self._owed)

    def begin(self, step: int, lane: int, own: int, seconds: dict[int, float], period_s: float) -> None:
        """Record what a step borrows.

        Args:
            step: Number of the step.
            lane: Its lane.
            own: Replica that runs the step.
            seconds: Seconds of all attentions of the step, by lender.
            period_s: Seconds that the step takes.
        """
        shares = {lender: each / period_s for lender, each in seconds.items()}
        self._steps[step] = _Borrowing(lane, own, dict(seconds), shares)

    def end(self, step: int) -> None:
        """Record that a step has completed."""
        if (ended := self._steps.pop(step, None)) is None:
            return
        busy = {one.own for one in self._steps.values()}
        for lender, seconds in ended.left_s.items():
            if seconds and lender in busy:
                self._owed[lender] = self._owed.get(lender, 0.0) + seconds

    def pay(self, lender: int, step_s: float) -> float:
        """Return the seconds for which a lender attends for others during its next step.

        ``step_s``: Seconds that the step takes if the lender lends nothing.
        """
        first: dict[int, _Borrowing] = {}
        for one in self._steps.values():
            first.setdefault(one.lane, one)
        served = [one for one in first.values() if one.left_s.get(lender)]
        busy = sum(one.shares[lender] for one in served)
        paid_s = self._owed.pop(lender, 0.0)
        for one in served:  # of the time that the step takes then, each has its share
            part_s = step_s * one.shares[lender] / (1 - busy) if busy < 1 else math.inf
            part_s = min(one.left_s[lender], part_s)
            one.left_s[lender] -= part_s
            paid_s += part_s
        return paid_s


@dataclass(slots=True)
class _Borrowing:
    """A step in flight.

    Attributes:
        lane: Its lane.
        own: Replica that runs it.
        left_s: Seconds of attention that its lenders have not paid for yet.
        shares: Shares of its time in which the lenders attend for it.
    """

    lane: int
    own: int
    left_s: dict[int, float]
    shares: dict[int, float]


@dataclass
class _Borrowed:
    """What a step needs of another replica in each attention.

    Attributes:
        rows: Decoding rows.
        tokens: Tokens that these rows see.
        chunks_s: Seconds of attention of prompt chunks.
        asked: Rows whose q is sent, and whose attention comes back.
        kept: Decoding rows whose k and v are sent.
        pulled: Rows of prompt chunks whose k and v the replica pulls.
    """

    rows: int = 0
    tokens: int = 0
    chunks_s: float = 0.0
    asked: int = 0
    kept: int = 0
    pulled: int = 0


class LocalStepModel(_Model):
    """Times of steps with KV in the memory of replicas.

    Replicas attend to what steps of other replicas need of their memory as memory workers do, and their own steps take
    longer by as much. K and V of a prompt are pulled while its later slices run, and only delay a step that takes less
    time than the pulls.
    """

    latency_s = 0.0  # most attentions send no message; the latency of the others is part of their shares

    def __init__(self, deployment: Deployment, holders: Sequence[Deployment], lent: Lent) -> None:
        """``holders``: by replica, the deployment whose compute pool it is in."""
        super().__init__(deployment)
        self._holders, self._lent = [(one.compute_cost, one.shape.ranks) for one in holders], lent
        shape = deployment.model
        partial = shape.query_heads * (shape.head_size + 1) * 4  # of the attention after a stage's last slice
        nbytes = shape.hidden * shape.dtype.itemsize + partial / self._tp  # a rank has the partial of its heads
        self._context_row_s = float(self._compute.wire_seconds(nbytes))

    def times(
        self, plan: StepPlan, homes: Ints, chunk_homes: Sequence[int], split: Mapping[int, SplitSequence], own: int
    ) -> tuple[int, _native.StepTimes]:
        """Return the rows and times of one step of replica ``own``. The other arguments are those of ``StepModel``."""
        starts, cost, tp = plan.decoding.starts, self._compute, self._tp
        borrowed = collections.defaultdict[int, _Borrowed](_Borrowed)
        here, tokens = len(starts), sum(starts) + len(starts)
        if split or (homes != own).any():
            here, tokens = self._divide(plan, homes, split, own, borrowed)
        rows = draws = len(starts)
        attention_s = float(cost.attention_seconds(tokens, here, 1 / tp)) if here else 0.0
        for chunk, home in zip(plan.chunks, chunk_homes, strict=True):
            length = len(chunk.tokens)
            rows += length
            draws += bool(chunk.draws)
            places: Places = split[chunk.sequence].places if chunk.sequence in split else ((home, 0, None),)
            before, attended = (dict(_tokens(places, stop)) for stop in (chunk.start, chunk.before_scratch))
            for place, held in _tokens(places, chunk.start + length):
                if place != own and held:
                    other = borrowed[place]
                    other.pulled += held - before[place]
                    if prefix := attended[place]:
                        other.asked += length
                        holder, ranks = self._holders[place]
                        other.chunks_s += float(holder.prefix_attention_seconds(length, prefix)) / ranks
            here_before = chunk.start - chunk.before_scratch + attended.get(own, 0)
            attention_s += float(cost.chunk_attention_seconds(length, here_before, tp))
        dense_s = self._slices.inner[rows]
        shares = [self._share(place, one, dense_s + attention_s) for place, one in borrowed.items()]
        asked = sum(one.asked for one in borrowed.values()) * self._asked_bytes
        sent = asked + sum(one.kept for one in borrowed.values()) * self._kept_bytes
        elsewhere_s = max((sum(seconds) for _, *seconds in shares), default=0.0) + self._wire_s(sent)
        period_s = dense_s + max(attention_s, elsewhere_s)
        layers = self._layers
        lent = {place: layers * seconds for place, _, seconds, _ in shares if seconds}
        paid_s = self._lent.pay(own, layers * (dense_s + attention_s))
        self._lent.begin(plan.step, plan.lane, own, lent, layers * period_s)
        busy_s = attention_s + paid_s / layers
        return rows, self._step_times(rows, draws, busy_s, sent, asked, _native.Shares(shares))

    def repeated(
        self, plan: StepPlan, homes: Ints, split: Mapping[int, SplitSequence], own: int
    ) -> Callable[[int], _native.StepTimes] | None:
        """Return a function from a number of steps to the times of the step that follows ``plan``, which has no chunks,
        after so many steps; None if it borrows memory of other replicas. No replica may lend memory meanwhile. The
        other arguments are those of ``times``."""
        if (homes != own).any() or any(one in split for one in plan.decoding.sequences):
            return None
        rows, tokens = len(homes), sum(plan.decoding.starts) + len(homes)
        first, block, none = 0, list[float](), _native.Shares([])

        def after(steps: int) -> _native.StepTimes:
            nonlocal first, block
            if not first <= steps < first + len(block):
                seen = tokens + rows * np.arange(steps, steps + _AT_ONCE)
                first, block = steps, self._compute.attention_seconds(seen, rows, 1 / self._tp).tolist()
            return self._step_times(rows, rows, block[steps - first], 0, 0, none)

        return after

    def _step_times(
        self, rows: int, draws: int, attention_s: float, sent: int, asked: int, shares: _native.Shares
    ) -> _native.StepTimes:
        return _native.StepTimes(
            first_s=self._slices.first[rows],
            inner_s=self._slices.inner[rows],
            last_s=self._last_s(rows, draws),
            chunks_s=attention_s,
            send_s=self._wire_s(sent),
            receive_s=self._wire_s(asked),
            context_s=self._compute.fits.runtime.round_trip_s / 2 + rows * self._context_row_s,
            shares=shares,
        )

    def _wire_s(self, nbytes: int) -> float:
        return float(self._compute.wire_seconds(nbytes)) / self._tp if nbytes else 0.0

    def move_seconds(self, tokens: int) -> float:
        """Return seconds to move the KV of ``tokens`` tokens from one replica to another."""
        sending_s = float(self._compute.wire_seconds(tokens * self._layers * self._kept_bytes)) / self._tp
        return self._compute.fits.runtime.round_trip_s + sending_s

    @staticmethod
    def _divide(
        plan: StepPlan, homes: Ints, split: Mapping[int, SplitSequence], own: int, borrowed: dict[int, _Borrowed]
    ) -> tuple[int, int]:
        """Return the decoding rows that attend to the replica's own memory, and the tokens that they see there; add the
        others to ``borrowed``."""
        rows = tokens = 0
        decoding = plan.decoding
        for sequence, start, home in zip(decoding.sequences, decoding.starts, homes.tolist(), strict=True):
            places = _tokens(split[sequence].places, start) if sequence in split else [(home, start)]
            last, before = places[-1]
            for place, held in (*places[:-1], (last, before + 1)):
                if place == own:
                    rows, tokens = rows + 1, tokens + held
                elif held:
                    other = borrowed[place]
                    other.rows, other.tokens, other.asked = other.rows + 1, other.tokens + held, other.asked + 1
            if last != own:
                borrowed[last].kept += 1
        return rows, tokens

    def _share(self, place: int, borrowed: _Borrowed, slice_s: float) -> tuple[int, float, float, float]:
        """Return a share of ``_native.Shares``: a replica, and its seconds of receiving, attention and sending.

        ``slice_s``: Seconds from one attention to the next without messages.
        """
        (cost, ranks), rows = self._holders[place], borrowed.rows
        latency_s = cost.fits.runtime.round_trip_s / 2
        attention_s = borrowed.chunks_s
        if rows:
            attention_s += float(cost.attention_seconds(borrowed.tokens, rows, 1 / ranks))
        asked = borrowed.asked * self._asked_bytes
        received = asked + borrowed.kept * self._kept_bytes
        receive_s, send_s = (float(cost.wire_seconds(nbytes)) / ranks for nbytes in (received, asked))
        ends, pulled = ((self._compute, self._tp), (cost, ranks)), borrowed.pulled * self._kept_bytes
        pulling_s = max(float(one.wire_seconds(pulled)) / count for one, count in ends)
        receive_s += max(0.0, pulling_s - slice_s)
        return place, latency_s + receive_s, attention_s, latency_s + send_s
