"""The cost model: seconds of every part of a step, from a model's shape and a catalogue entry.

``CostModel(shape, hardware, fits)`` gives, for one kind of device:

* ``slice_seconds(rows, tp)``: the dense work of one layer (one slice) of ``rows`` token rows on ``tp`` devices;
* ``ends_seconds(rows, tp)``: embedding and output head; ``pass_seconds`` is all layers and both ends;
* ``attention_seconds(kv_tokens, rows)``: one layer's decode attention over the KV on one device;
* ``chunk_attention_seconds(chunk, prefix, tp)``: one layer's attention of a prompt chunk;
* ``link_seconds(nbytes)``: a message between a compute and a memory worker, one way;
* ``exchange_bytes(rows)``: what a layer of ``rows`` decode rows sends and receives.

Sizes may be numpy arrays; the results then are arrays too. ``docs/cost-model.md`` derives the formulas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from lamina.errors import ConfigError
from lamina.plan.gemm import Floats, GemmFit, gemm_seconds
from lamina.plan.hardware import Hardware
from lamina.plan.models import ModelShape
from lamina.plan.store import Fit, ProfileStore, packaged_fit

ATTENTION_MEMORY_SHARE = 0.8
"""Share of the memory bandwidth that decode attention reaches when it reads KV (Lamina, section 3.1: above 80%)."""

CHUNK_ATTENTION_SHARE = 0.6
"""Share of peak FLOP/s that attention of a prompt chunk reaches (FlashAttention-2 on an A100: 50 to 73%)."""

ROUND_TRIP_S = 33e-6
"""Round trip of a small message by RDMA with device polling (Lamina, section 6.3; second paper: 33.0 us)."""

NETWORK_SHARE = 0.914
"""Share of the NIC's line rate that is reached (second Lamina paper: 45.7 of 50 GB/s; the first: 96.8% of 25)."""

MEMORY_SHARE_USABLE = 0.9
"""Share of a device's memory for weights or KV; the rest holds activations, arenas and the driver's data."""

T = TypeVar("T")
Gemm = Callable[[ModelShape, int], tuple[float, float]]

GEMMS: dict[str, Gemm] = {
    "attn_pre_proj": lambda s, tp: ((s.query_heads + 2 * s.kv_heads) * s.head_size / tp, s.hidden),
    "attn_post_proj": lambda s, tp: (s.hidden, s.query_heads * s.head_size / tp),
    "mlp_up_proj": lambda s, tp: ((2 if s.gated else 1) * s.intermediate / tp, s.hidden),
    "mlp_down_proj": lambda s, tp: (s.hidden, s.intermediate / tp),
}
"""Matrix products of a layer: operator -> (columns, depth) of its weight on one of ``tp`` devices."""

POINTWISE: dict[str, Callable[[ModelShape, int], float]] = {
    "input_layernorm": lambda s, tp: 2 * s.hidden,
    "attn_rope": lambda s, tp: 2 * (s.query_heads + s.kv_heads) * s.head_size / tp,
    "post_attention_layernorm": lambda s, tp: 2 * s.hidden,
    "mlp_act": lambda s, tp: (3 if s.gated else 2) * s.intermediate / tp,
    "add": lambda s, tp: 3 * s.hidden,
}
"""The other operators of a layer: operator -> elements read and written for each row on one of ``tp`` devices."""

LAYER_ADDS = 2
"""Residual additions in a layer; every other operator runs once."""


@dataclass(frozen=True, kw_only=True)
class PointwiseFit:
    """``launch_s + bytes / min(memory_share * bandwidth, per_clock * processors * clock)``.

    An operator is bound by memory, or by the bytes that its kernel processes per clock cycle on each processor. The
    addition is always bound by memory.
    """

    launch_s: float
    memory_share: float
    norm_per_clock: float
    rope_per_clock: float
    activation_per_clock: float

    def bytes_s(self, operator: str, hardware: Hardware) -> float:
        """Bytes per second that ``operator``, one of ``POINTWISE``, reads and writes."""
        memory = self.memory_share * hardware.memory_bytes_s
        if operator == "add":
            return memory
        per_clock: float = getattr(self, f"{_SORTS[operator]}_per_clock")
        return min(memory, per_clock * hardware.processors * hardware.clock_hz)


_SORTS = {
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "attn_rope": "rope",
    "mlp_act": "activation",
}


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """``latency_s + (devices - 1) * hop_s + 2 (devices - 1) / devices * bytes / (link_share * link)``: a ring."""

    latency_s: float
    hop_s: float
    link_share: float


@dataclass(frozen=True, kw_only=True)
class TransferFit:
    """``latency_s + bytes / (link_share * link)``: to a peer in the same machine."""

    latency_s: float
    link_share: float


@dataclass(frozen=True, kw_only=True)
class SliceCurve:
    """Times of whole slices, measured instead of predicted from operators: seconds per slice and per weight, by rows.

    Interpolates logarithms between the measured rows and extrapolates them beyond the last.
    """

    rows: Sequence[float]
    slice_s: Sequence[float]
    weight_s: Sequence[float]

    @classmethod
    def of(cls, rows: Sequence[float], weights: Sequence[int], seconds: Sequence[Sequence[float]]) -> "SliceCurve":
        """Fit to the slices of two models: one of ``weights[i]`` weights takes ``seconds[i][j]`` at ``rows[j]``."""
        small, large = (np.array(own) for own in seconds)
        per_weight = np.maximum((large - small) / (weights[1] - weights[0]), 1e-18)
        # Where noise makes the constant vanish, all time is attributed to the weights.
        constant = np.maximum(small - per_weight * weights[0], 1e-7)
        per_weight = np.maximum(per_weight, (large - constant) / weights[1])
        return cls(rows=list(rows), slice_s=constant.tolist(), weight_s=per_weight.tolist())

    def seconds(self, rows: ArrayLike, weights: float) -> Floats:
        """Seconds of a slice, or of the output head, with so many weights."""
        at = np.log(np.asarray(rows, dtype=np.float64))
        return self._at(at, self.slice_s) + weights * self._at(at, self.weight_s)

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

    def at(self, rows: ArrayLike, heads: float) -> Floats:
        """Seconds for ``rows`` sequences with ``heads`` query heads; proportional beyond the last measured row."""
        count = np.asarray(rows, dtype=np.float64)
        beyond = np.maximum(1.0, count / self.rows[-1])
        added = np.interp(count, self.rows, self.seconds) * beyond - self.seconds[0]
        return np.asarray((self.seconds[0] + added * heads / self.heads) * (count > 0))


@dataclass(frozen=True, kw_only=True)
class RuntimeFit:
    """Time the runtime spends besides slices and attention; as published for GPUs and RDMA, or measured.

    Attributes:
        exchange_s, exchange_row_s: on a compute worker, per layer and per row of it: messages, merging, and the
            slowdown of slices that alternate with messages.
        step_s, step_row_s: on a compute worker, per step and per row of it: sampling.
        attend: on a memory worker, per layer. None: one kernel launch.
        kv_bytes_s: bandwidth at which attention reads KV. None: ATTENTION_MEMORY_SHARE of the memory's.
        round_trip_s: per layer, time in which neither worker is busy.
        contention: where workers share one memory, the relative slowdown of each while both pools work.
    """

    exchange_s: float = 0.0
    exchange_row_s: float = 0.0
    step_s: float = 0.0
    step_row_s: float = 0.0
    attend: AttendCurve | None = None
    kv_bytes_s: float | None = None
    round_trip_s: float = ROUND_TRIP_S
    contention: float = 0.0

    @classmethod
    def stored(cls, *, attend: Mapping[str, Any], **parameters: float) -> "RuntimeFit":
        """Build from the parameters of a measured fit."""
        return cls(attend=AttendCurve(**attend), **parameters)


@dataclass(frozen=True, kw_only=True)
class Fits:
    """All fitted parts of the cost model for one kind. ``slices`` takes precedence over ``gemm`` and ``pointwise``."""

    gemm: GemmFit
    pointwise: PointwiseFit
    all_reduce: CollectiveFit
    send_recv: TransferFit
    slices: SliceCurve | None = None
    runtime: RuntimeFit = RuntimeFit()

    @classmethod
    def load(cls, kind: str, measured: ProfileStore | None = None) -> "Fits":
        """The fits for ``kind``: from ``measured`` where it has them, else the package's.

        Raises:
            ConfigError: a store lacks a part, or was written by another version.
        """

        def own(name: str) -> Fit | None:
            return measured.fit(name, kind) if measured else None

        def part(build: Callable[..., T], name: str) -> T:
            return _build(build, own(name) or packaged_fit(name, kind))

        slices, runtime = own("slices"), own("runtime")
        return cls(
            slices=_build(SliceCurve, slices) if slices else None,
            runtime=_build(RuntimeFit.stored, runtime) if runtime else RuntimeFit(),
            gemm=part(GemmFit, "gemm"),
            pointwise=part(PointwiseFit, "pointwise"),
            all_reduce=part(CollectiveFit, "all_reduce"),
            send_recv=part(TransferFit, "send_recv"),
        )


def _build(part: Callable[..., T], fit: Fit) -> T:
    try:
        return part(**fit.parameters)
    except TypeError as error:
        raise ConfigError(
            f"the fit {fit.name!r} of {fit.kind} was written by another version ({error}); repeat lamina plan "
            "--measure or, for the package's fits, python -m lamina.profiling.fit"
        ) from error


class CostModel:
    """Seconds on devices of one kind. See the module docstring."""

    def __init__(self, shape: ModelShape, hardware: Hardware, fits: Fits) -> None:
        self.shape = shape
        self.hardware = hardware
        self.fits = fits

    def operator_seconds(self, operator: str, rows: ArrayLike, tensor_parallel: ArrayLike) -> Floats:
        """Seconds of one operator named in ``GEMMS`` or ``POINTWISE``."""
        shape, dtype = self.shape, self.shape.dtype
        rows, tp = np.asarray(rows, dtype=np.float64), np.asarray(tensor_parallel)
        if operator in GEMMS:
            columns, depth = GEMMS[operator](shape, tp)  # type: ignore[arg-type]
            return gemm_seconds(self.fits.gemm, self.hardware, rows, columns, depth, dtype)
        moved = rows * POINTWISE[operator](shape, tp) * dtype.itemsize  # type: ignore[arg-type]
        fit = self.fits.pointwise
        return np.asarray(fit.launch_s + moved / fit.bytes_s(operator, self.hardware))

    def slice_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Seconds of one layer's dense operators and, on several devices, of its two all-reduces."""
        rows = np.asarray(rows, dtype=np.float64)
        if self.fits.slices is not None and tensor_parallel == 1:
            return self.fits.slices.seconds(rows, self.shape.layer_parameters)
        total = sum(self.operator_seconds(operator, rows, tensor_parallel) for operator in (*GEMMS, *POINTWISE))
        total = total + (LAYER_ADDS - 1) * self.operator_seconds("add", rows, tensor_parallel)
        return np.asarray(total + 2 * self.all_reduce_seconds(self._row_bytes(rows), tensor_parallel))

    def ends_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Seconds of reading ``rows`` embeddings and of the output head, whose vocabulary is split."""
        rows = np.asarray(rows, dtype=np.float64)
        columns = self.shape.vocabulary / tensor_parallel
        if self.fits.slices is not None and tensor_parallel == 1:
            return self.fits.slices.seconds(rows, columns * self.shape.hidden)
        head = gemm_seconds(self.fits.gemm, self.hardware, rows, columns, self.shape.hidden, self.shape.dtype)
        return head + self.operator_seconds("input_layernorm", rows, tensor_parallel)

    def pass_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Seconds of all slices of a step, without attention."""
        return self.shape.layers * self.slice_seconds(rows, tensor_parallel) + self.ends_seconds(rows, tensor_parallel)

    def decode_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Seconds for which a decode step occupies a compute worker: slices, messages, sampling."""
        rows, runtime = np.asarray(rows, dtype=np.float64), self.fits.runtime
        exchange = self.shape.layers * (runtime.exchange_s + runtime.exchange_row_s * rows)
        sampling = runtime.step_s + runtime.step_row_s * rows
        return self.pass_seconds(rows, tensor_parallel) + exchange + sampling

    def attention_seconds(self, kv_tokens: ArrayLike, rows: ArrayLike, heads_share: float = 1.0) -> Floats:
        """Seconds of one layer's decode attention on one device.

        Args:
            kv_tokens: cached tokens of all sequences together.
            rows: number of sequences.
            heads_share: share of the KV heads that the device holds.
        """
        shape = self.shape
        tokens = np.asarray(kv_tokens, dtype=np.float64) * heads_share
        width = shape.kv_heads * shape.head_size
        read = 2 * width * shape.dtype.itemsize * tokens
        flops = 4 * shape.query_heads * shape.head_size * tokens
        runtime, rows = self.fits.runtime, np.asarray(rows, dtype=np.float64)
        busy = np.maximum(
            read / (runtime.kv_bytes_s or ATTENTION_MEMORY_SHARE * self.hardware.memory_bytes_s),
            flops / (CHUNK_ATTENTION_SHARE * self.hardware.flops[shape.dtype]),
        )
        if runtime.attend is None:
            return np.asarray(busy + self.fits.pointwise.launch_s * (rows > 0))
        return np.asarray(busy + runtime.attend.at(rows, shape.query_heads * heads_share))

    def chunk_attention_seconds(self, chunk: ArrayLike, prefix: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Seconds of one layer's causal attention of ``chunk`` prompt tokens after ``prefix`` cached ones.

        Bound by arithmetic or, for small chunks, by reading the keys and values of both.
        """
        chunk, prefix = np.asarray(chunk, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
        shape, device = self.shape, self.hardware
        flops = 4 * chunk * (prefix + chunk / 2) * shape.query_heads * shape.head_size / tensor_parallel
        read = 2 * (prefix + chunk) * shape.kv_heads * shape.head_size * shape.dtype.itemsize / tensor_parallel
        busy = np.maximum(
            flops / (CHUNK_ATTENTION_SHARE * device.flops[shape.dtype]),
            read / (ATTENTION_MEMORY_SHARE * device.memory_bytes_s),
        )
        return np.asarray(self.fits.pointwise.launch_s + busy)

    def prefill_seconds(self, prompt: int, chunk: int, tensor_parallel: int = 1) -> float:
        """Seconds of a whole prompt on one replica, in chunks of at most ``chunk`` tokens."""
        starts = np.arange(0, prompt, chunk, dtype=np.float64)
        sizes = np.minimum(chunk, prompt - starts)
        attention = self.shape.layers * self.chunk_attention_seconds(sizes, starts, tensor_parallel)
        dense = self.shape.layers * self.slice_seconds(sizes, tensor_parallel)
        return float((attention + dense).sum() + self.ends_seconds(1, tensor_parallel))

    def all_reduce_seconds(self, nbytes: ArrayLike, devices: int) -> Floats:
        """Seconds of summing ``nbytes`` over devices of one machine."""
        sizes = np.asarray(nbytes, dtype=np.float64)
        if devices == 1:
            return np.zeros_like(sizes)
        fit = self.fits.all_reduce
        moved = 2 * (devices - 1) / devices * sizes
        return fit.latency_s + (devices - 1) * fit.hop_s + moved / (fit.link_share * self.hardware.link_bytes_s)

    def send_recv_seconds(self, nbytes: ArrayLike) -> Floats:
        """Seconds of a transfer to a peer in the same machine."""
        fit = self.fits.send_recv
        return fit.latency_s + np.asarray(nbytes, dtype=np.float64) / (fit.link_share * self.hardware.link_bytes_s)

    def link_seconds(self, nbytes: ArrayLike) -> Floats:
        """Seconds of one message over this device's NIC, one way."""
        return ROUND_TRIP_S / 2 + self.wire_seconds(nbytes)

    def wire_seconds(self, nbytes: ArrayLike) -> Floats:
        """Seconds for which ``nbytes`` occupy this device's NIC."""
        return np.asarray(nbytes, dtype=np.float64) / (NETWORK_SHARE * self.hardware.nic_bytes_s)

    def exchange_bytes(self, rows: ArrayLike) -> Floats:
        """Bytes of q, k, v sent and attention received for one layer of ``rows`` decode rows: (2 + 2/G) e d B."""
        width = 2 * (self.shape.query_heads + self.shape.kv_heads) * self.shape.head_size
        return np.asarray(rows, dtype=np.float64) * width * self.shape.dtype.itemsize

    def weights_fit(self, tensor_parallel: int) -> bool:
        """Whether a replica's share of the weights fits one device."""
        return self.shape.weight_bytes / tensor_parallel <= self.usable_bytes

    @property
    def usable_bytes(self) -> float:
        """Bytes of the device's memory for weights or KV."""
        return MEMORY_SHARE_USABLE * self.hardware.memory_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV, for all layers and heads, fits on one device."""
        return int(self.usable_bytes / self.shape.kv_bytes_per_token)

    def _row_bytes(self, rows: Floats) -> Floats:
        return rows * self.shape.hidden * self.shape.dtype.itemsize
