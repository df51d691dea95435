"""What a profile of a machine has in place of predictions: slices, attention, and the overheads of the runtime."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lamina.planning.plan.kernel_times import Floats

ROUND_TRIP_S = 33e-6
"""Round trip of a small message by RDMA with device polling (Lamina, section 6.3; second paper: 33.0 us)."""


@dataclass(frozen=True, kw_only=True)
class SliceCurve:
    """Times of whole slices, measured instead of predicted from operators: seconds per slice and per weight, by rows.

    Interpolates logarithms between the measured rows and extrapolates them beyond the last.
    """

    rows: Sequence[float]
    slice_s: Sequence[float]
    weight_s: Sequence[float]

    @classmethod
    def fit(cls, rows: Sequence[float], weights: Sequence[int], seconds: Sequence[Sequence[float]]) -> "SliceCurve":
        """Fit to the slices of two models: one of ``weights[i]`` weights takes ``seconds[i][j]`` at ``rows[j]``."""
        small, large = (np.array(own) for own in seconds)
        per_weight = np.maximum((large - small) / (weights[1] - weights[0]), 1e-18)
        # Where noise makes the constant vanish, all time is attributed to the weights.
        constant = np.maximum(small - per_weight * weights[0], 1e-7)
        per_weight = np.maximum(per_weight, (large - constant) / weights[1])
        return cls(rows=list(rows), slice_s=constant.tolist(), weight_s=per_weight.tolist())

    def predict_slice(self, rows: ArrayLike, weights: ArrayLike) -> Floats:
        """Seconds of a slice, or of the output head, with so many weights."""
        at = np.log(np.asarray(rows, dtype=np.float64))
        return self._at(at, self.slice_s) + np.asarray(weights) * self._at(at, self.weight_s)

    def _at(self, at: Floats, values: Sequence[float]) -> Floats:
        known, logarithms = np.log(self.rows), np.log(values)
        slope = max(0.0, (logarithms[-1] - logarithms[-2]) / (known[-1] - known[-2]))
        return np.asarray(np.exp(np.interp(at, known, logarithms) + slope * np.maximum(0.0, at - known[-1])))


@dataclass(frozen=True, kw_only=True)
class AttendCurve:
    """Time of a memory worker per layer besides reading KV, by rows, as measured with ``heads`` query heads.

    ``seconds[0]``, at the fewest rows, counts as the fixed cost of a call; what further rows add grows with the heads.
    """

    rows: Sequence[float]
    seconds: Sequence[float]
    heads: int

    def predict(self, rows: ArrayLike, heads: float) -> Floats:
        """Seconds for ``rows`` sequences with ``heads`` query heads; proportional beyond the last measured row."""
        count = np.asarray(rows, dtype=np.float64)
        beyond = np.maximum(1.0, count / self.rows[-1])
        added = np.interp(count, self.rows, self.seconds) * beyond - self.seconds[0]
        return np.asarray((self.seconds[0] + added * heads / self.heads) * (count > 0))


@dataclass(frozen=True, kw_only=True)
class ChunkFit:
    """Causal attention of a prompt chunk on a CPU, measured instead of predicted from peaks.

    Attributes:
        fixed_s: of a call.
        row_s: per row of the chunk and query head.
        flops_s: FLOP/s besides.
    """

    fixed_s: float
    row_s: float
    flops_s: float

    def predict_chunk(self, chunk: ArrayLike, prefix: ArrayLike, query_heads: ArrayLike, head_size: int) -> Floats:
        """Seconds of one chunk after ``prefix`` cached tokens."""
        own, before = np.asarray(chunk, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        rows = own * np.asarray(query_heads, dtype=np.float64)
        return np.asarray(
            self.fixed_s + rows * self.row_s + attention_flops(rows, own, before, head_size) / self.flops_s
        )


def attention_flops(rows: ArrayLike, chunk: ArrayLike, prefix: ArrayLike, head_size: int) -> Floats:
    """FLOPs of causal attention of ``rows`` (tokens of the chunk x query heads)."""
    seen = np.asarray(prefix) + (np.asarray(chunk) + 1) / 2  # keys, on average
    return np.asarray(4 * head_size * np.asarray(rows) * seen, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class RuntimeFit:
    """Time the runtime spends besides slices and attention; as published for GPUs and RDMA, or measured.

    Attributes:
        exchange_s, exchange_row_s: on a compute worker, per layer and per row of it: messages, merging, and the
            slowdown of slices that alternate with messages.
        step_s, step_row_s: on a compute worker, per step and per row of it: sampling.
        attend, kv_bytes_s: on a memory worker, per layer besides reading KV, and the bandwidth of reading it.
        chunks: attention of prompt chunks, on either. None, like the two before: as the attention kernels of the fits.
        round_trip_s: per layer, time in which neither worker is busy.
        contention: where workers share one memory, the relative slowdown of each while both pools work.
    """

    exchange_s: float = 0.0
    exchange_row_s: float = 0.0
    step_s: float = 0.0
    step_row_s: float = 0.0
    attend: AttendCurve | None = None
    kv_bytes_s: float | None = None
    chunks: ChunkFit | None = None
    round_trip_s: float = ROUND_TRIP_S
    contention: float = 0.0

    @classmethod
    def stored(cls, *, attend: Mapping[str, Any], chunks: Mapping[str, float], **parameters: float) -> "RuntimeFit":
        """Build from the parameters of a measured fit."""
        return cls(attend=AttendCurve(**attend), chunks=ChunkFit(**chunks), **parameters)


AS_PUBLISHED = RuntimeFit()
"""The figures of the papers, for devices without a profile."""
