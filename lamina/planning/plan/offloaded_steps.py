"""Terms of the closed form in ``serving``: steps with offloaded attention.

Decode rows and prompt chunks share a step. With offloaded attention, q, k and v of all rows are sent to memory workers
in every layer. A later chunk sends its q to the memory worker that has the earlier chunks, and receives the partials,
like decode rows, unless the replica attends to a copy of them in scratch memory. The prompts of a step are on different
memory workers, which also serve other lanes.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lamina.planning.plan.closed_form import PERCENTILE, PromptAttention
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.stages import busiest_share
from lamina.planning.plan.ways import Way

MOST_RECEIVING = 0.9
"""Most of the time that memory workers are taken to receive chunks of prompts."""


@dataclass(frozen=True)
class LaneSteps:
    """Seconds of a lane's step by batch: without a chunk, at PERCENTILE, on average, and with a chunk of its own."""

    plain: Floats
    longest: Floats
    average: Floats
    with_chunk: Floats


@dataclass(frozen=True, kw_only=True)
class OffloadedSteps:
    """Predicts the steps of a way's lanes, by batch.

    Attributes:
        way: The way.
        compute: Cost model of a compute worker.
        memory: Cost model of a memory worker.
        rows: Sequences that decode in a lane.
        live: Cached tokens of a sequence.
        dense_s: Seconds of a lane's slices with ``rows`` rows.
        attends: Attention of chunks.
    """

    way: Way
    compute: CostModel
    memory: CostModel
    rows: Floats
    live: float
    dense_s: Floats
    attends: PromptAttention

    @property
    def parts(self) -> int:
        """Number of memory workers that hold a sequence."""
        return min(self.way.memory_workers, math.ceil(self.live / (self.way.segment or self.memory.kv_tokens)))

    @property
    def together(self) -> int:
        """Number of lanes that share replicas, and therefore wait for each other's chunks at every slice."""
        return self.way.lanes if self.way.rotates else self.way.lanes // self.way.replicas

    @property
    def replicas(self) -> int:
        """Number of replicas, or of stages, that ``together`` lanes share."""
        return self.way.replicas if self.way.rotates else self.way.shape.stages

    @cached_property
    def busiest_share(self) -> float:
        """Share of the dense work of ``together`` lanes that the replica or stage with most of it runs."""
        if self.way.shape.stages == 1:
            return 1 / self.replicas
        model, (ranks, stages) = self.compute, (self.way.shape.ranks, self.way.shape.stages)
        layer_s, ends_s = (float(part(1, ranks)) for part in (model.slice_seconds, model.ends_seconds))
        return busiest_share(model.shape, stages, layer_s, ends_s)

    def _hops_s(self, tokens: Floats, having: int) -> Floats | float:
        """Return seconds in which a step's context goes from stage to stage, beyond the time of attention."""
        stages, shape = self.way.shape.stages, self.compute.shape
        if stages == 1:
            return 0.0
        rows = self.rows + min(having, 1) * tokens
        own_s = self.compute.wire_seconds(rows * shape.hidden * shape.dtype.itemsize)
        return np.asarray((stages - 1) * own_s + self.memory.fits.runtime.round_trip_s / 2)

    @cached_property
    def attention_s(self) -> Floats:
        """Return seconds of attention of a lane's decode rows, on the memory worker with most of it."""
        busiest = np.ceil(self.rows * self.parts / self.way.memory_workers)
        layer = self.memory.attention_seconds(busiest * self.live / self.parts, busiest)
        return np.asarray(self.compute.shape.layers * layer)

    def step_seconds(
        self, tokens: Floats, added_s: Floats, having: int, elsewhere: Floats | float = 0.0, late: bool = False
    ) -> Floats:
        """Return seconds of a step.

        Args:
            tokens: Tokens of a chunk.
            added_s: Seconds that a chunk adds to the replica's slices.
            having: Lanes with a chunk, of the lanes that share replicas.
            elsewhere: Lanes with a chunk, of the other lanes.
            late: Whether the chunks of ``having`` are those at PERCENTILE, late in long prompts.
        """
        way, attends = self.way, self.attends
        own_s = np.maximum(attends.late_own_s, attends.own_s) if late and way.scratch else attends.own_s
        added_s = added_s + tokens * (own_s - attends.own_s)
        own, prefix_s, asked = (
            (attends.late_size, attends.late_prefix_s, attends.late_asked)
            if late
            else (attends.size, attends.prefix_s, attends.asked)
        )
        spread = np.clip(own / tokens, 1 / way.memory_workers, 1.0)
        kept, query = self._row_bytes
        out_s = tokens * self._compute_nic_s(kept + asked * query)
        one = np.minimum(asked, 1.0)  # one worker receives a row's q at most once
        in_s, back_s = (tokens * spread * self._memory_nic_s(nbytes) for nbytes in (kept + one * query, one * query))
        here_s, there_s = self._decoding_wire_s
        latency_s = self.compute.shape.layers * self.memory.fits.runtime.round_trip_s + self._hops_s(tokens, having)
        path = self.dense_s + here_s + there_s + latency_s + self.attention_s
        path = path + min(having, 1) * (added_s + out_s + in_s + tokens * spread * prefix_s + back_s)
        if way.scratch:  # K and V travel while the replica attends
            travel_s = tokens * (self._compute_nic_s(kept) + spread * self._memory_nic_s(kept))
            path = path - min(having, 1) * np.minimum(tokens * own_s, travel_s)
        load = (self.together * self.dense_s + having * added_s) * self.busiest_share
        arriving_s = tokens * self._memory_nic_s(kept + asked * query) / way.memory_workers
        wire = np.maximum(
            (self.together * here_s + having * out_s) / self.replicas,
            way.lanes * there_s + (having + elsewhere) * arriving_s,
        )
        each_s = tokens * attends.prefix_load_s / way.memory_workers
        reading = way.lanes * self.attention_s + (having + elsewhere) * each_s
        others_s = (having * (1 - 1 / self.together) + elsewhere) * each_s
        path = self._behind(path, reading, others_s, tokens * spread * attends.prefix_s)
        return np.asarray(np.maximum.reduce([path, load, wire]))

    def arrivals_s(self, tokens: float, chunks: Floats, step_s: Floats, late: bool) -> Floats:
        """Return seconds for which a step's messages wait behind chunks of prompts that memory workers receive.

        In every layer, with a probability that grows with the number of workers, one of them is receiving a chunk, for
        half of its time on average. A prompt whose slices keep pace with the step makes it wait for all of a chunk in
        each of these layers.

        Args:
            tokens: Tokens of a chunk.
            chunks: Chunks during a step.
            step_s: Seconds of the step.
            late: Whether prompts keep pace.
        """
        kept, query = self._row_bytes
        chunk_s = tokens * self._memory_nic_s(kept + np.minimum(self.attends.asked, 1.0) * query)
        busy = np.minimum(chunks * chunk_s / self.way.memory_workers / step_s, MOST_RECEIVING)
        met = 1 - (1 - busy) ** self.way.memory_workers
        return np.asarray(met * chunk_s / (1 if late else 2) / (1 - busy))

    def _behind(self, path: Floats, reading: Floats, others_s: Floats, chunk_s: Floats) -> Floats:
        """Return seconds of a step that waits for other lanes' chunks at memory workers.

        In every layer, with probability ``met``, a worker is busy with a chunk, for half of its time on average, and
        longer with a higher load: T = path + met chunk_s / 2 / (1 - reading / T). Without chunks, T is the longer of
        ``path`` and ``reading``, the load of the workers.
        """
        met = 1 - (1 - np.minimum(others_s / np.maximum(path, reading), 1.0)) ** self.way.memory_workers
        linear = path + reading + met * chunk_s / 2
        return np.asarray((linear + np.sqrt(np.maximum(linear**2 - 4 * path * reading, 0.0))) / 2)

    def steps(self, chunk: Floats, share: Floats, added_s: Floats) -> LaneSteps:
        """Return a lane's steps if a ``share`` of every lane's steps has a chunk of ``chunk`` tokens, independently."""
        likely = np.minimum(share, 1.0)
        elsewhere = (self.way.lanes - self.together) * likely
        plain = self.step_seconds(chunk, added_s, 0, elsewhere)
        average, below, with_chunk = np.zeros_like(plain), np.zeros_like(plain), np.zeros_like(plain)
        longest = plain
        for having in range(self.together + 1):
            late = self.step_seconds(chunk, added_s, having, elsewhere, late=True) if having else plain
            longest = np.where(below < PERCENTILE, late, longest)
            odds = math.comb(self.together, having) * likely**having * (1 - likely) ** (self.together - having)
            step = self.step_seconds(chunk, added_s, having, elsewhere) if having else plain
            average += odds * step
            with_chunk += odds * having / self.together * step
            below = below + odds
        return LaneSteps(plain, longest, average, with_chunk / np.maximum(likely, 1e-9))

    @property
    def _row_bytes(self) -> tuple[float, float]:
        """Return a row's bytes of k and v, and its bytes of q (or of the reply), in all layers."""
        shape = self.compute.shape
        each = shape.layers * shape.head_size * shape.dtype.itemsize
        return 2.0 * shape.kv_heads * each, float(shape.query_heads * each)

    @cached_property
    def _decoding_wire_s(self) -> tuple[Floats, Floats]:
        """Return seconds for which a lane's decode rows occupy the NICs of a replica, and of each memory worker."""
        _, query = self._row_bytes
        sent = self.compute.shape.layers * self.compute.exchange_bytes(self.rows)
        sent = sent + (self.parts - 1) * 2 * self.rows * query
        return self._compute_nic_s(sent), self._memory_nic_s(sent / self.way.memory_workers)

    def _compute_nic_s(self, nbytes: Floats | float) -> Floats:
        return self.compute.wire_seconds(nbytes / self.way.shape.ranks)

    def _memory_nic_s(self, nbytes: Floats | float) -> Floats:
        return self.memory.wire_seconds(nbytes)
