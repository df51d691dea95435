"""Predicts the time of kernels: matrix products, attention and all-reduces, from shapes or from measured curves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lamina.core.types import DType
from lamina.planning.plan.hardware import Hardware

Floats = NDArray[np.float64]

TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
)
"""Rows x columns of the output that one processor computes at a time, as in kernels of cuBLAS and CUTLASS."""

CUTS = (1, 2, 3)
"""Parts of K that different processors compute (split-K); more than one only if every part gets its own processor."""

_KERNELS = np.array([(*tile, cuts) for tile in TILES for cuts in CUTS], dtype=np.float64).T
"""Rows, columns and cuts of every kernel."""

DEPTH = 32
"""A tile advances along K in steps of this many elements."""

PARTIAL_BYTES = 4
"""Bytes per element of a partial sum, in float32."""


@dataclass(frozen=True, kw_only=True)
class GemmFit:
    """Parameters that ``bench.cost.fit`` fits to measured matrix products. Shares are of the catalogue's peak.

    Attributes:
        share: Reached share of a processor's FLOP/s while it works on a tile.
        memory_share: Reached share of the memory bandwidth.
        activation_weight: Bytes moved per byte of the two activation matrices.
        overlap: Exponent that combines compute and memory time; 1 adds them, infinity takes the larger.
        quantisation: 1 if a partial last wave costs a whole one, 0 if it costs in proportion.
        choice: Exponent, above 1, of the mean over kernels; infinity takes the fastest.
        launch_s: Fixed time per kernel.
        tile_s: Fixed time per wave of tiles.
        cast_share: Reached share of the memory bandwidth while activations are cast to 8-bit floats before the product;
            0 if they are not cast.
    """

    share: float
    memory_share: float
    activation_weight: float
    overlap: float
    quantisation: float
    choice: float
    launch_s: float
    tile_s: float
    cast_share: float = 0.0


def gemm_seconds(
    fit: GemmFit,
    hardware: Hardware,
    rows: ArrayLike,
    columns: ArrayLike,
    depth: ArrayLike,
    dtype: DType,
    fp8: bool = False,
    weight_itemsize: float | None = None,
) -> Floats:
    """Return seconds of products of ``[rows, depth]`` activations and ``[depth, columns]`` weights.

    ``rows``, ``columns`` and ``depth`` (M, N and K) are arrays that broadcast together.

    Args:
        fit: Fitted parameters.
        hardware: The device.
        rows: M.
        columns: N.
        depth: K.
        dtype: Element type of activations and outputs.
        fp8: Weights are 8-bit floats, and activations too where the hardware multiplies 8-bit floats.
        weight_itemsize: Bytes of a weight; None: those of ``dtype``, or 1 with ``fp8``.
    """
    m, n, k = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (rows, columns, depth)))
    stored = weight_itemsize or (1 if fp8 else dtype.itemsize)
    times = _kernel_seconds(fit, hardware, m, n, k, dtype, fp8, stored)
    fastest = times.min(axis=0)
    ratios = fastest / times
    return np.asarray(fastest * (ratios ** (fit.choice - 1)).sum(axis=0) / (ratios**fit.choice).sum(axis=0))


def _kernel_seconds(
    fit: GemmFit, hardware: Hardware, m: Floats, n: Floats, k: Floats, dtype: DType, fp8: bool, weight: float
) -> Floats:
    """Return seconds of every kernel variant, ``[len(TILES) * len(CUTS), *m.shape]``; infinite where K is not split."""
    processors = hardware.processors
    rows, columns, cuts = (size.reshape(-1, *[1] * m.ndim) for size in _KERNELS)
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * cuts
    waves = np.where(
        tiles <= processors,
        1.0,
        fit.quantisation * np.ceil(tiles / processors) + (1 - fit.quantisation) * tiles / processors,
    )
    products = rows * columns * np.ceil(k / cuts / DEPTH) * DEPTH
    native = fp8 and hardware.fp8_flops > 0
    peak = hardware.fp8_flops if native else hardware.flops[dtype]
    entry = 1 if native else dtype.itemsize
    reached = peak * (hardware.product_share or fit.share)
    compute = waves * (2 * products / (reached / processors) + fit.tile_s)
    moved = n * k * weight + fit.activation_weight * (m * k * entry + m * n * dtype.itemsize)
    partials = np.where(cuts > 1, 2 * PARTIAL_BYTES * cuts * m * n, 0.0)  # written and read again
    memory = (moved + partials) / (hardware.memory_bytes_s * fit.memory_share)
    seconds = _joined(fit.overlap, compute, memory) + fit.launch_s
    if native and fit.cast_share:
        seconds = seconds + m * k * (dtype.itemsize + 1) / (hardware.memory_bytes_s * fit.cast_share)
    return np.where((tiles <= processors) | (cuts == 1), seconds, np.inf)


def _joined(exponent: float, *seconds: Floats) -> Floats:
    """Return the smooth maximum ``(a^p + b^p + ...)^(1/p)``, scaled so that it neither overflows nor vanishes."""
    largest = np.maximum.reduce(seconds)
    return np.asarray(largest * sum((part / largest) ** exponent for part in seconds) ** (1 / exponent))


@dataclass(frozen=True, kw_only=True)
class ExpertsFit:
    """Parameters of the products of a layer's experts, all in one kernel.

    Attributes:
        share: Reached share of the peak FLOP/s.
        memory_share: Reached share of the memory bandwidth.
        uneven_rows: Rows by which each expert's product is longer than its mean load: loads differ, and fill their
            tiles in part.
        overlap: Exponent that combines compute and memory time; 1 adds them, infinity takes the larger.
        dispatch_s: Fixed time of a layer's experts besides their products: choosing them, sorting rows by expert,
            adding their outputs.
        expert_s: The same, per expert of the layer.
    """

    share: float
    memory_share: float
    uneven_rows: float
    overlap: float
    dispatch_s: float
    expert_s: float

    def predict_products(
        self,
        hardware: Hardware,
        peak: float,
        rows: Floats,
        touched: Floats,
        weights: Any,
        weight_itemsize: float,
        moved: Any,
    ) -> Floats:
        """Return seconds of the products of one matrix of each of ``touched`` experts.

        Args:
            hardware: The device.
            peak: Its peak FLOP/s for the type of the products.
            rows: Rows of all experts together.
            touched: Experts that have rows.
            weights: Elements of an expert's matrix.
            weight_itemsize: Bytes of an element.
            moved: Bytes of activations and outputs of one row.
        """
        flops = 2 * (rows + touched * self.uneven_rows) * weights
        read = touched * weights * weight_itemsize + rows * moved
        compute, memory = flops / (self.share * peak), read / (self.memory_share * hardware.memory_bytes_s)
        return _joined(self.overlap, compute, memory)


TILE = 128
"""Rows of a chunk that one processor attends with at a time."""

CACHE_STEEPNESS = 4
"""How fast the share of reads that the last-level cache serves falls once KV outgrows it."""


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionFit:
    """Parameters of attention that reads each sequence's keys and values once, for one new token.

    Attributes:
        fixed_s: Launch, and merging the parts of a sequence.
        ramp_cycles: Clock cycles that a long kernel loses to filling the memory system.
        unit_cycles: Cycles of one processor for one KV head of one sequence, whatever its length.
        overlap: Exponent that combines reading and that work; 1 adds them, infinity takes the larger.
        cached_gain: How much faster KV that fits the last-level cache is read, less one.
        memory_share: Reached share of the memory bandwidth; published, not fitted.
    """

    fixed_s: float
    ramp_cycles: float
    unit_cycles: float
    overlap: float
    cached_gain: float
    memory_share: float

    def predict_decode(self, hardware: Hardware, nbytes: ArrayLike, units: ArrayLike, repeated: bool = False) -> Floats:
        """Return seconds of one kernel that reads ``nbytes`` of keys and values of ``units`` (sequences x KV heads).

        ``repeated``: the kernel runs many times on the same KV, which then stays in the last-level cache if it fits. In
        a model, weights and other layers' KV are read in between.
        """
        read, count = np.asarray(nbytes, dtype=np.float64), np.asarray(units, dtype=np.float64)
        served = np.minimum(1.0, (hardware.cache_bytes / np.maximum(read, 1.0)) ** CACHE_STEEPNESS)
        memory = read / (self.memory_share * hardware.memory_bytes_s)
        if repeated:
            memory = memory * (1 - served * (1 - 1 / (1 + self.cached_gain)))
        work = count * self.unit_cycles / (hardware.processors * hardware.clock_hz)
        largest = np.maximum(np.maximum(memory, work), 1e-12)
        busy = largest * ((memory / largest) ** self.overlap + (work / largest) ** self.overlap) ** (1 / self.overlap)
        ramp = max(self.ramp_s(hardware), 1e-12)
        return np.asarray((self.fixed_s + busy + ramp * (1 - np.exp(-busy / ramp))) * (count > 0))

    def ramp_s(self, hardware: Hardware) -> float:
        """Return seconds that a kernel much longer than this loses at its ends."""
        return self.ramp_cycles / hardware.clock_hz


@dataclass(frozen=True, kw_only=True)
class PrefillAttentionFit:
    """Parameters of causal attention of a chunk of a prompt.

    Attributes:
        fixed_s: Launch.
        share: Reached share of peak FLOP/s.
        tail: Share of a tile's time that the last wave adds, as processors end at different times.
        memory_share: Reached share of the memory bandwidth; published, not fitted.
    """

    fixed_s: float
    share: float
    tail: float
    memory_share: float

    def predict_prefill(
        self,
        hardware: Hardware,
        dtype: DType,
        chunk: ArrayLike,
        prefix: ArrayLike,
        query_heads: ArrayLike,
        kv_heads: ArrayLike,
        head_size: int,
        batch: ArrayLike = 1,
        window: float = np.inf,
    ) -> Floats:
        """Return seconds of ``batch`` chunks, each after ``prefix`` cached tokens.

        Not fitted with a prefix, whose keys are assumed to be divided evenly over the processors, nor with a window: a
        tile attends to the keys in the windows of its rows.
        """
        own, before = np.asarray(chunk, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        queries, kept, many = (np.asarray(part, dtype=np.float64) for part in (query_heads, kv_heads, batch))
        rows = np.ceil(own / TILE) * TILE
        rate = self.share * hardware.flops[dtype]
        seen = np.minimum(before + (rows + TILE) / 2, window + TILE)
        flops = 4 * many * queries * head_size * rows * seen
        moved = 2 * many * head_size * (queries * own + kept * (own + np.minimum(before, window))) * dtype.itemsize
        last_tile = 4 * TILE * head_size * np.minimum(own, window + TILE) / (rate / hardware.processors)
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
        """Return seconds of a chunk's attention to ``prefix`` cached tokens alone, by kernels that divide the prefix
        over the processors and pack the query heads of a KV head into one tile, as ``lamina.kernels.gpu`` does."""
        own, before = np.asarray(chunk, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        packed = kv_heads * np.ceil(own * query_heads / kv_heads / TILE) * TILE
        flops = 4 * packed * head_size * before
        moved = 2 * head_size * kv_heads * before * dtype.itemsize
        memory = moved / (self.memory_share * hardware.memory_bytes_s)
        return np.asarray(flops / (self.share * hardware.flops[dtype]) + memory)


CUSTOM_BYTES, CUSTOM_DEVICES = 8 * 2**20, 8
"""vLLM leaves all-reduces of fewer bytes to its own kernel, on up to so many devices: its defaults, as on the A100 that
was measured. On Hopper, another kernel takes over from smaller sizes on, which was not."""


@dataclass(frozen=True, kw_only=True)
class RingFit:
    """Fit of NCCL's ring all-reduce, with volume = 2 (n - 1) / n of the bytes.

        latency_s + (n - 1) hop_s + volume / (link_share link (2 / n)^sharing) + ramp_s (1 - exp(-volume / ramp_bytes))

    Attributes:
        latency_s: Fixed time.
        hop_s: Time per further device.
        link_share: Reached share of the link's bandwidth.
        ramp_s: Fixed time that long transfers add.
        ramp_bytes: Volume at which this time begins to count.
        sharing: 0 where every device has its own link (NVLink), more where all share one bus (PCIe).
    """

    latency_s: float
    hop_s: float
    link_share: float
    ramp_s: float
    ramp_bytes: float
    sharing: float

    def predict_all_reduce(self, nbytes: ArrayLike, devices: int, link_bytes_s: float) -> Floats:
        """Return seconds of summing ``nbytes`` over ``devices``."""
        volume = 2 * (devices - 1) / devices * np.asarray(nbytes, dtype=np.float64)
        rate = self.link_share * link_bytes_s * (2 / devices) ** self.sharing
        ramp = self.ramp_s * (1 - np.exp(-volume / self.ramp_bytes))
        return np.asarray(self.latency_s + (devices - 1) * self.hop_s + volume / rate + ramp)


@dataclass(frozen=True, kw_only=True)
class PeerReadFit:
    """Fit of vLLM's all-reduce kernel: every device reads all other devices' data, or in two phases a share each.

        latency_s + (n - 1) hop_s + min((n - 1) bytes / rate, 2 (n - 1) / n bytes / rate + phase_s)

    with rate = link_share link, and phase_s the synchronisation between the phases.
    """

    latency_s: float
    hop_s: float
    link_share: float
    phase_s: float

    def predict_all_reduce(self, nbytes: ArrayLike, devices: int, link_bytes_s: float) -> Floats:
        """Return seconds of summing ``nbytes`` over ``devices``; infinite where vLLM does not use this kernel."""
        sizes, rate = np.asarray(nbytes, dtype=np.float64), self.link_share * link_bytes_s
        once = (devices - 1) * sizes / rate
        twice = 2 * (devices - 1) / devices * sizes / rate + self.phase_s
        found = self.latency_s + (devices - 1) * self.hop_s + np.minimum(once, twice)
        return np.where((sizes < CUSTOM_BYTES) & (devices <= CUSTOM_DEVICES), found, np.inf)


@dataclass(frozen=True, kw_only=True)
class SliceCurve:
    """Measured times of whole slices: seconds per slice and per weight, by rows.

    Interpolates logarithms between the measured rows and extrapolates them beyond the last.
    """

    rows: Sequence[float]
    slice_s: Sequence[float]
    weight_s: Sequence[float]

    @classmethod
    def fit(cls, rows: Sequence[float], weights: Sequence[int], seconds: Sequence[Sequence[float]]) -> "SliceCurve":
        """Fit to two models: a slice with ``weights[i]`` weights takes ``seconds[i][j]`` at ``rows[j]``."""
        small, large = (np.array(own) for own in seconds)
        per_weight = np.maximum((large - small) / (weights[1] - weights[0]), 1e-18)
        # Where noise makes the constant negative, all time is attributed to the weights.
        constant = np.maximum(small - per_weight * weights[0], 1e-7)
        per_weight = np.maximum(per_weight, (large - constant) / weights[1])
        return cls(rows=list(rows), slice_s=constant.tolist(), weight_s=per_weight.tolist())

    def predict_slice(self, rows: ArrayLike, weights: ArrayLike) -> Floats:
        """Return seconds of a slice, or of the output head, with ``weights`` weights."""
        at = np.log(np.asarray(rows, dtype=np.float64))
        return self._at(at, self.slice_s) + np.asarray(weights) * self._at(at, self.weight_s)

    def _at(self, at: Floats, values: Sequence[float]) -> Floats:
        known, logarithms = np.log(self.rows), np.log(values)
        slope = max(0.0, (logarithms[-1] - logarithms[-2]) / (known[-1] - known[-2]))
        return np.asarray(np.exp(np.interp(at, known, logarithms) + slope * np.maximum(0.0, at - known[-1])))


@dataclass(frozen=True, kw_only=True)
class AttendCurve:
    """Measured time of a memory worker per layer besides reading KV, by rows, with ``heads`` query heads.

    ``seconds[0]``, at the fewest rows, is the fixed time of a call; the time of further rows scales with the heads.
    """

    rows: Sequence[float]
    seconds: Sequence[float]
    heads: int

    def predict(self, rows: ArrayLike, heads: float) -> Floats:
        """Return seconds for ``rows`` sequences with ``heads`` query heads; proportional beyond the last measured
        row."""
        count = np.asarray(rows, dtype=np.float64)
        beyond = np.maximum(1.0, count / self.rows[-1])
        added = np.interp(count, self.rows, self.seconds) * beyond - self.seconds[0]
        return np.asarray((self.seconds[0] + added * heads / self.heads) * (count > 0))


@dataclass(frozen=True, kw_only=True)
class ChunkFit:
    """Fit of causal attention of a prompt chunk on a CPU.

    Attributes:
        fixed_s: Fixed time of a call.
        row_s: Time per row of the chunk and query head.
        flops_s: FLOP/s of the rest.
    """

    fixed_s: float
    row_s: float
    flops_s: float

    def predict_chunk(self, chunk: ArrayLike, prefix: ArrayLike, query_heads: ArrayLike, head_size: int) -> Floats:
        """Return seconds of one chunk after ``prefix`` cached tokens."""
        own, before = np.asarray(chunk, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        rows = own * np.asarray(query_heads, dtype=np.float64)
        return np.asarray(
            self.fixed_s + rows * self.row_s + attention_flops(rows, own, before, head_size) / self.flops_s
        )


def attention_flops(rows: ArrayLike, chunk: ArrayLike, prefix: ArrayLike, head_size: int) -> Floats:
    """Return FLOPs of causal attention of ``rows`` (tokens of the chunk x query heads)."""
    seen = np.asarray(prefix) + (np.asarray(chunk) + 1) / 2  # keys, on average
    return np.asarray(4 * head_size * np.asarray(rows) * seen, dtype=np.float64)
