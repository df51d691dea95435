"""Predicts the time of attention kernels: decoding over cached keys and values, and a chunk of a prompt.

The parameters are fitted per class of kernels, which devices share (``like`` in the hardware catalogue): Ampere's
(FlashAttention 2) on an A100, Hopper's (FlashAttention 3) on an H100. ``docs/cost-model.md`` gives the errors, also of
each class on the other's device.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lamina.plan.gemm import Floats
from lamina.plan.hardware import Hardware
from lamina.types import DType

TILE = 128
"""Rows of a chunk that one processor attends with at a time."""

CACHE_STEEPNESS = 4
"""How fast the share of reads that the last-level cache serves falls once KV outgrows it."""


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionFit:
    """Parameters of attention that reads each sequence's keys and values once, for one new token.

    Attributes:
        fixed_s: launch, and the sum of the parts of a sequence.
        ramp_cycles: time, in clock cycles, that a long enough kernel loses to filling the memory system.
        unit_cycles: cycles of one processor for one KV head of one sequence, whatever its length.
        overlap: exponent that combines reading and that work; 1 adds them, infinity takes the larger.
        cached_gain: how much faster KV that fits the last-level cache is read, less one.
        memory_share: reached share of the memory bandwidth; published, not fitted.
    """

    fixed_s: float
    ramp_cycles: float
    unit_cycles: float
    overlap: float
    cached_gain: float
    memory_share: float

    def seconds(self, hardware: Hardware, nbytes: ArrayLike, units: ArrayLike) -> Floats:
        """Seconds of one kernel that reads ``nbytes`` of keys and values of ``units`` (sequences x KV heads)."""
        read, count = np.asarray(nbytes, dtype=np.float64), np.asarray(units, dtype=np.float64)
        served = np.minimum(1.0, (hardware.cache_bytes / np.maximum(read, 1.0)) ** CACHE_STEEPNESS)
        memory = read / (self.memory_share * hardware.memory_bytes_s)
        memory = memory * (1 - served * (1 - 1 / (1 + self.cached_gain)))
        work = count * self.unit_cycles / (hardware.processors * hardware.clock_hz)
        largest = np.maximum(np.maximum(memory, work), 1e-12)
        busy = largest * ((memory / largest) ** self.overlap + (work / largest) ** self.overlap) ** (1 / self.overlap)
        ramp = max(self.ramp_s(hardware), 1e-12)
        return np.asarray((self.fixed_s + busy + ramp * (1 - np.exp(-busy / ramp))) * (count > 0))

    def ramp_s(self, hardware: Hardware) -> float:
        """Seconds that a kernel much longer than this loses at its ends."""
        return self.ramp_cycles / hardware.clock_hz


@dataclass(frozen=True, kw_only=True)
class PrefillAttentionFit:
    """Parameters of causal attention of a chunk of a prompt.

    Attributes:
        fixed_s: launch. share: reached share of peak FLOP/s.
        tail: share of a tile's time by which the processors' last tiles end one after another.
        memory_share: reached share of the memory bandwidth; published, not fitted.
    """

    fixed_s: float
    share: float
    tail: float
    memory_share: float

    def seconds(
        self,
        hardware: Hardware,
        dtype: DType,
        chunk: ArrayLike,
        prefix: ArrayLike,
        query_heads: ArrayLike,
        kv_heads: ArrayLike,
        head_size: int,
        batch: ArrayLike = 1,
    ) -> Floats:
        """Seconds of ``batch`` chunks, each after ``prefix`` cached tokens. No file has times with a prefix: keys of
        the prefix are taken to be divided evenly over the processors."""
        own, before = np.asarray(chunk, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        queries, kept, many = (np.asarray(part, dtype=np.float64) for part in (query_heads, kv_heads, batch))
        rows = np.ceil(own / TILE) * TILE
        rate = self.share * hardware.flops[dtype]
        flops = 4 * many * queries * head_size * rows * (before + (rows + TILE) / 2)
        moved = 2 * many * head_size * (queries * own + kept * (own + before)) * dtype.itemsize
        last_tile = 4 * TILE * head_size * own / (rate / hardware.processors)
        return np.asarray(
            self.fixed_s + flops / rate + moved / (self.memory_share * hardware.memory_bytes_s) + self.tail * last_tile
        )

    def prefix_seconds(
        self,
        hardware: Hardware,
        dtype: DType,
        chunk: ArrayLike,
        prefix: ArrayLike,
        query_heads: float,
        kv_heads: float,
        head_size: int,
    ) -> Floats:
        """Seconds of a chunk's attention to ``prefix`` cached tokens alone, by kernels that divide the prefix over the
        processors and pack the query heads of a KV head into one tile, as ``lamina.kernels.gpu`` does."""
        own, before = np.asarray(chunk, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        packed = kv_heads * np.ceil(own * query_heads / kv_heads / TILE) * TILE
        flops = 4 * packed * head_size * before
        moved = 2 * head_size * kv_heads * before * dtype.itemsize
        memory = moved / (self.memory_share * hardware.memory_bytes_s)
        return np.asarray(flops / (self.share * hardware.flops[dtype]) + memory)
