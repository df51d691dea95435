"""Steps of attention offloaded to memory workers, in the closed form: how long they take with and without chunks.

Decoding rows and chunks of prompts share a step. Every layer, q, k and v of all rows leave the compute workers. A
prompt's later chunks ask the memory worker that has its earlier ones, which gets their q and sends answers as for
decoding rows. The prompts in a step lie on different memory workers, and other lanes ask the same ones.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.prompts import PERCENTILE, PromptAttention
from lamina.planning.plan.ways import Way


@dataclass(frozen=True)
class LaneSteps:
    """Seconds of a lane's step by batch: without a chunk, at PERCENTILE, on average, and with a chunk of its own."""

    plain: Floats
    longest: Floats
    average: Floats
    with_chunk: Floats


@dataclass(frozen=True, kw_only=True)
class OffloadedSteps:
    """The steps of ``way``'s lanes, by batch.

    Attributes:
        compute, memory: cost models of a worker of each pool.
        rows: sequences that decode in a lane.
        live: tokens cached of each.
        parts: memory workers that each lies on.
        dense_s: seconds of a lane's slices, of ``rows``.
        attends: attention of chunks.
    """

    way: Way
    compute: CostModel
    memory: CostModel
    rows: Floats
    live: float
    parts: int
    dense_s: Floats
    attends: PromptAttention

    @property
    def together(self) -> int:
        """Lanes that share replicas keep one pace: a lane behind one with a chunk waits for it at every slice."""
        return self.way.lanes if self.way.rotates else self.way.lanes // self.way.replicas

    @property
    def replicas(self) -> int:
        """Replicas that those lanes share."""
        return self.way.replicas if self.way.rotates else 1

    @cached_property
    def attention_s(self) -> Floats:
        """Attention of a lane's decoding rows, on the worker with most of it."""
        busiest = np.ceil(self.rows * self.parts / self.way.memory_workers)
        layer = self.memory.attention_seconds(busiest * self.live / self.parts, busiest)
        return np.asarray(self.compute.shape.layers * layer)

    def step_seconds(
        self, tokens: Floats, added_s: Floats, having: int, elsewhere: Floats | float = 0.0, late: bool = False
    ) -> Floats:
        """Seconds of a step while ``having`` of the lanes that share replicas have a chunk of ``tokens``, which takes
        ``added_s`` more on the replica, and so have ``elsewhere`` of the other lanes. ``late``: those of the former are
        at PERCENTILE by their attention."""
        way, attends = self.way, self.attends
        own, prefix_s, asked = (
            (attends.late_size, attends.late_prefix_s, attends.late_asked)
            if late
            else (attends.size, attends.prefix_s, attends.asked)
        )
        spread = np.clip(own / tokens, 1 / way.memory_workers, 1.0)
        kept, query = self._row_bytes
        out_s = tokens * self._here_s(kept + asked * query)
        one = np.minimum(asked, 1.0)  # a worker is asked by a row once, though several may be
        in_s, back_s = (tokens * spread * self._there_s(nbytes) for nbytes in (kept + one * query, one * query))
        here_s, there_s = self._decoding_wire_s
        latency_s = self.compute.shape.layers * self.memory.fits.runtime.round_trip_s
        path = self.dense_s + here_s + there_s + latency_s + self.attention_s
        path = path + min(having, 1) * (added_s + out_s + in_s + tokens * spread * prefix_s + back_s)
        load = (self.together * self.dense_s + having * added_s) / self.replicas
        arriving_s = tokens * self._there_s(kept + asked * query) / way.memory_workers
        wire = np.maximum(
            (self.together * here_s + having * out_s) / self.replicas,
            way.lanes * there_s + (having + elsewhere) * arriving_s,
        )
        each_s = tokens * attends.prefix_load_s / way.memory_workers
        reading = way.lanes * self.attention_s + (having + elsewhere) * each_s
        others_s = (having * (1 - 1 / self.together) + elsewhere) * each_s
        path = self._behind(path, reading, others_s, tokens * spread * attends.prefix_s)
        return np.asarray(np.maximum.reduce([path, load, wire]))

    def _behind(self, path: Floats, reading: Floats, others_s: Floats, chunk_s: Floats) -> Floats:
        """Return the step of a lane that waits behind other lanes' chunks at memory workers.

        Every layer it finds one of its workers busy with a chunk with the probability ``met``, for half of what that
        takes, and longer the busier the worker is: T = path + met chunk_s / 2 / (1 - reading / T). Lanes without chunks
        keep out of each other's way: then T is the longer of path and ``reading``, the load of the workers.
        """
        met = 1 - (1 - np.minimum(others_s / np.maximum(path, reading), 1.0)) ** self.way.memory_workers
        linear = path + reading + met * chunk_s / 2
        return np.asarray((linear + np.sqrt(np.maximum(linear**2 - 4 * path * reading, 0.0))) / 2)

    def steps(self, chunk: Floats, share: Floats, added_s: Floats) -> LaneSteps:
        """While a ``share`` of each lane's steps have a chunk of ``chunk`` tokens, independently of other lanes."""
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
        """Bytes of k and v of a row, and of its q or its answer; of all layers."""
        shape = self.compute.shape
        each = shape.layers * shape.head_size * shape.dtype.itemsize
        return 2.0 * shape.kv_heads * each, float(shape.query_heads * each)

    @cached_property
    def _decoding_wire_s(self) -> tuple[Floats, Floats]:
        """Seconds for which a lane's decoding rows occupy the NICs of a replica, and of each memory worker."""
        _, query = self._row_bytes
        sent = self.compute.shape.layers * self.compute.exchange_bytes(self.rows)
        sent = sent + (self.parts - 1) * 2 * self.rows * query
        return self._here_s(sent), self._there_s(sent / self.way.memory_workers)

    def _here_s(self, nbytes: Floats) -> Floats:
        return self.compute.wire_seconds(nbytes / self.way.tensor_parallel)

    def _there_s(self, nbytes: Floats) -> Floats:
        return self.memory.wire_seconds(nbytes)
