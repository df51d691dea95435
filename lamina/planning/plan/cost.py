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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from lamina.core.errors import ConfigError
from lamina.planning.plan.fit_store import Fit, ProfileStore, packaged_fit
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import (
    DecodeAttentionFit,
    ExpertsFit,
    Floats,
    GemmFit,
    PeerReadFit,
    PrefillAttentionFit,
    RingFit,
    SliceCurve,
    gemm_seconds,
)
from lamina.planning.plan.model_shapes import Experts, ModelShape
from lamina.planning.plan.overheads import AS_PUBLISHED, ROUND_TRIP_S, RuntimeFit

NETWORK_SHARE = 0.914
"""Share of the NIC's line rate that is reached (second Lamina paper: 45.7 of 50 GB/s; the first: 96.8% of 25)."""

MEMORY_SHARE_USABLE = 0.9
"""Share of a device's memory for weights or KV; the rest holds activations, arenas and the driver's data."""

CODES_ON_CPU = 0.6
"""Bytes of int8 or fp8 codes and scales that attention on a CPU reads per second, over those of bfloat16: it converts
them (``bench.kernels.attention --only codes``). GPUs are taken to read both at one rate; no GPU was measured."""

T = TypeVar("T")
Gemm = Callable[[ModelShape, int], tuple[float, float]]

GEMMS: dict[str, Gemm] = {
    "attn_pre_proj": lambda s, tp: ((s.query_heads + 2 * s.kv_heads) * s.head_size / tp, s.hidden),
    "attn_post_proj": lambda s, tp: (s.hidden, s.query_heads * s.head_size / tp),
    "mlp_up_proj": lambda s, tp: ((2 if s.gated else 1) * s.intermediate / tp, s.hidden),
    "mlp_down_proj": lambda s, tp: (s.hidden, s.intermediate / tp),
}
"""Matrix products of a layer: operator -> (columns, depth) of its weight on one of ``tp`` devices."""

OF_EXPERTS = ("mlp_up_proj", "mlp_down_proj", "mlp_act")
"""Operators that a layer with experts runs for each expert's rows."""

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
    """Fit of pointwise operators: ``(fixed^overlap + (bytes / rate)^overlap)^(1 / overlap)``.

    ``rate = min(memory, per_clock processors clock)``: an operator is bound by memory bandwidth, or by the bytes that
    its kernel processes per clock cycle on each processor. The addition is always bound by memory. The fixed time is
    the kernel's with few rows.
    """

    norm_s: float
    rope_s: float
    activation_s: float
    add_s: float
    overlap: float
    memory_share: float
    norm_per_clock: float
    rope_per_clock: float
    activation_per_clock: float

    def predict_pointwise(self, operator: str, nbytes: ArrayLike, hardware: Hardware) -> Floats:
        """Return seconds of ``operator``, one of ``POINTWISE``, that reads and writes ``nbytes``."""
        fixed: float = getattr(self, f"{_SORTS[operator]}_s")
        moving = np.asarray(nbytes, dtype=np.float64) / self._bytes_s(operator, hardware) / fixed
        return np.asarray(fixed * (1 + moving**self.overlap) ** (1 / self.overlap))

    def _bytes_s(self, operator: str, hardware: Hardware) -> float:
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
    "add": "add",
}


@dataclass(frozen=True, kw_only=True)
class Fits:
    """All fitted parts of the cost model for one kind. ``slices`` takes precedence over ``gemm`` and ``pointwise``.

    Attributes:
        gemm: Matrix products in 16 or 32 bits, and of quantised weights that are converted to them.
        gemm_fp8: Matrix products of 8-bit floats on devices that multiply them.
        experts: Products of experts in 16 bits.
        experts_int4: The same with weights of 4 bits.
        experts_fp8: The same of 8-bit floats.
        experts_marlin: The same with weights of 4 bits, by Marlin's kernels; all others are Triton's.
    """

    gemm: GemmFit
    gemm_fp8: GemmFit
    pointwise: PointwiseFit
    decode: DecodeAttentionFit
    prefill: PrefillAttentionFit
    nvlink: RingFit
    pcie: RingFit
    peer_read: PeerReadFit
    experts: ExpertsFit
    experts_int4: ExpertsFit
    experts_fp8: ExpertsFit
    experts_marlin: ExpertsFit
    slices: SliceCurve | None = None
    runtime: RuntimeFit = AS_PUBLISHED

    @classmethod
    def load(cls, hardware: Hardware, measured: ProfileStore | None = None) -> "Fits":
        """Return the fits for a kind: from ``measured``, else the package's for the kind or the kind that it is like.

        Raises ConfigError if a store lacks a part, or was written by another version.
        """

        def own(name: str) -> Fit | None:
            return measured.fit(name, hardware.kind) if measured else None

        def part(build: Callable[..., T], name: str) -> T:
            return _build(build, own(name) or packaged_fit(name, hardware.like or hardware.kind))

        slices, runtime = own("slices"), own("runtime")
        return cls(
            slices=_build(SliceCurve, slices) if slices else None,
            runtime=_build(RuntimeFit.stored, runtime) if runtime else AS_PUBLISHED,
            gemm=part(GemmFit, "gemm"),
            gemm_fp8=part(GemmFit, "gemm_fp8"),
            pointwise=part(PointwiseFit, "pointwise"),
            decode=part(DecodeAttentionFit, "decode"),
            prefill=part(PrefillAttentionFit, "prefill"),
            nvlink=part(RingFit, "nvlink"),
            pcie=part(RingFit, "pcie"),
            peer_read=part(PeerReadFit, "peer_read"),
            experts=part(ExpertsFit, "experts"),
            experts_int4=part(ExpertsFit, "experts_int4"),
            experts_fp8=part(ExpertsFit, "experts_fp8"),
            experts_marlin=part(ExpertsFit, "experts_marlin"),
        )


def _build(part: Callable[..., T], fit: Fit) -> T:
    try:
        return part(**fit.parameters)
    except TypeError as error:
        raise ConfigError(
            f"the fit {fit.name!r} of {fit.kind} was written by another version ({error}); repeat lamina plan "
            "--measure or, for the package's fits, python -m bench.cost.fit"
        ) from error


class CostModel:
    """Predicts seconds on devices of one kind; the module's docstring lists its main methods."""

    def __init__(self, shape: ModelShape, hardware: Hardware, fits: Fits, widens: bool = False) -> None:
        """Raise ConfigError for quantised weights on hardware whose slices were measured with 16 or 32 bits.

        ``widens``: 8-bit floats are multiplied in 16 bits even where the device multiplies them in 8.
        """
        if shape.weight_dtype != "auto" and fits.slices is not None:
            raise ConfigError(
                f"the profile of {hardware.kind} was measured with weights in 16 or 32 bits; leave out --weight-dtype"
            )
        self.shape = shape
        self.hardware = hardware
        self.fits = fits
        self.widens = widens

    @cached_property
    def widened(self) -> "CostModel":
        """Return the model where 8-bit floats are multiplied in 16 bits."""
        return CostModel(self.shape, self.hardware, self.fits, widens=True) if self._multiplies_fp8 else self

    def operator_seconds(self, operator: str, rows: ArrayLike, tensor_parallel: ArrayLike) -> Floats:
        """Return seconds of an operator of ``GEMMS`` or ``POINTWISE``; the mean over layers if some have experts."""
        count, tp, shape = np.asarray(rows, dtype=np.float64), np.asarray(tensor_parallel), self.shape
        if shape.experts is None or operator not in OF_EXPERTS:
            return self._operator(operator, count, tp, shape)
        sparse = shape.experts.layers / shape.layers
        seconds = sparse * self._of_experts(operator, count, tp, shape.experts)
        if sparse < 1:
            seconds = seconds + (1 - sparse) * self._operator(operator, count, tp, shape)
        return seconds

    def _operator(self, operator: str, rows: Floats, tp: Any, shape: ModelShape) -> Floats:
        if operator in GEMMS:
            columns, depth = GEMMS[operator](shape, tp)
            return self._product(rows, columns, depth)
        moved = rows * POINTWISE[operator](shape, tp) * shape.dtype.itemsize
        return self.fits.pointwise.predict_pointwise(operator, moved, self.hardware)

    @property
    def _multiplies_fp8(self) -> bool:
        return self.shape.fp8 and self.hardware.fp8_flops > 0 and not self.widens

    def _product(self, rows: Any, columns: Any, depth: Any) -> Floats:
        shape, native = self.shape, self._multiplies_fp8 and not self.shape.only_experts
        kinds = shape.dtype, native, shape.dense_itemsize
        fit = self.fits.gemm_fp8 if native else self.fits.gemm
        return gemm_seconds(fit, self.hardware, rows, columns, depth, *kinds)

    def _of_experts(self, operator: str, rows: Floats, tp: Any, experts: Experts) -> Floats:
        """Return seconds of an operator of layers with experts: products of the experts that rows use, plus the shared
        experts."""
        shape = self.shape
        always = replace(shape, intermediate=experts.shared)
        each = replace(shape, intermediate=experts.intermediate)
        if operator in POINTWISE:
            return self._operator(operator, rows * (experts.active + experts.shared / experts.intermediate), tp, each)
        columns, depth = GEMMS[operator](each, tp)
        if experts.count == 1:
            seconds = self._product(rows, columns, depth)
        else:
            seconds = self._grouped(rows, experts, columns, depth)
        if operator == "mlp_up_proj":  # the router's product, and gathering each expert's rows
            seconds = seconds + gemm_seconds(
                self.fits.gemm, self.hardware, rows, experts.count, shape.hidden, shape.dtype
            )
            gathered = self._operator("add", rows * experts.active, tp, shape)
            seconds = seconds + gathered + self._experts.dispatch_s + self._experts.expert_s * experts.count
        return seconds + (self._operator(operator, rows, tp, always) if experts.shared else 0.0)

    def _grouped(self, rows: Floats, experts: Experts, columns: Any, depth: Any) -> Floats:
        """Return seconds of one product of all experts, which are taken to be no better than dense products."""
        shape, hardware, native = self.shape, self.hardware, self._multiplies_fp8
        dense = self.fits.gemm_fp8 if native else self.fits.gemm
        fit = replace(self._experts, share=min(self._experts.share, hardware.product_share or dense.share))
        moved = depth * (1 if native else shape.dtype.itemsize) + columns * shape.dtype.itemsize
        return fit.predict_products(
            hardware,
            hardware.fp8_flops if native else hardware.flops[shape.dtype],
            rows * experts.active,
            experts.touched(rows),
            columns * depth,
            shape.weight_itemsize,
            moved,
        )

    @property
    def _experts(self) -> ExpertsFit:
        if self._multiplies_fp8:
            return self.fits.experts_fp8
        return self.fits.experts_int4 if self.shape.weight_dtype == "int4" else self.fits.experts

    def slice_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Return seconds of one layer's dense operators and, on several devices, of its two all-reduces."""
        rows = np.asarray(rows, dtype=np.float64)
        if self.fits.slices is not None and tensor_parallel == 1:
            return self.fits.slices.predict_slice(rows, self._touched_weights(rows))
        total = sum(self.operator_seconds(operator, rows, tensor_parallel) for operator in (*GEMMS, *POINTWISE))
        total = total + (LAYER_ADDS - 1) * self.operator_seconds("add", rows, tensor_parallel)
        return np.asarray(total + 2 * self.all_reduce_seconds(self._row_bytes(rows), tensor_parallel))

    def _touched_weights(self, rows: Floats) -> ArrayLike:
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return shape.layer_parameters
        idle = (experts.count - experts.touched(rows)) * experts.intermediate * experts.layers / shape.layers
        return shape.layer_parameters - shape.hidden * (3 if shape.gated else 2) * idle

    def ends_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Return seconds of reading ``rows`` embeddings and of the output head, whose vocabulary is split."""
        rows = np.asarray(rows, dtype=np.float64)
        columns = self.shape.vocabulary / tensor_parallel
        if self.fits.slices is not None and tensor_parallel == 1:
            return self.fits.slices.predict_slice(rows, columns * self.shape.hidden)
        head = gemm_seconds(self.fits.gemm, self.hardware, rows, columns, self.shape.hidden, self.shape.dtype)
        return head + self.operator_seconds("input_layernorm", rows, tensor_parallel)

    def pass_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Return seconds of all slices of a step, without attention."""
        return self.shape.layers * self.slice_seconds(rows, tensor_parallel) + self.ends_seconds(rows, tensor_parallel)

    def decode_seconds(self, rows: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Return seconds for which a decode step occupies a compute worker: slices, messages, sampling."""
        layer, ends = self.decode_parts(rows, tensor_parallel)
        return np.asarray(self.shape.layers * layer + ends)

    def decode_parts(self, rows: ArrayLike, tensor_parallel: int = 1) -> tuple[Floats, Floats]:
        """Return the seconds of ``decode_seconds`` of one layer, and of the rest: the model's ends and sampling."""
        rows, runtime = np.asarray(rows, dtype=np.float64), self.fits.runtime
        layer = self.slice_seconds(rows, tensor_parallel) + runtime.exchange_s + runtime.exchange_row_s * rows
        sampling = runtime.step_s + runtime.step_row_s * rows
        return layer, self.ends_seconds(rows, tensor_parallel) + sampling

    def attention_seconds(self, kv_tokens: ArrayLike, rows: ArrayLike, heads_share: float = 1.0) -> Floats:
        """Return seconds of one layer's decode attention on one device.

        Args:
            kv_tokens: cached tokens of all sequences together.
            rows: number of sequences.
            heads_share: share of the KV heads that the device holds.
        """
        rows, tokens = np.asarray(rows, dtype=np.float64), np.asarray(kv_tokens, dtype=np.float64)
        seconds = self._attend(tokens, rows, heads_share)
        if not self.shape.windowed:
            return seconds
        near = self._attend(np.minimum(tokens, rows * self.shape.window), rows, heads_share)
        return self._mean_of_layers(seconds, near)

    def _mean_of_layers(self, full: Floats, windowed: Floats) -> Floats:
        share = self.shape.windowed / self.shape.layers
        return np.asarray((1 - share) * full + share * windowed)

    def _attend(self, kv_tokens: Floats, rows: Floats, heads_share: float) -> Floats:
        shape, tokens = self.shape, kv_tokens * heads_share
        read = tokens * self._kv_bytes
        runtime = self.fits.runtime
        if runtime.attend is None or runtime.kv_bytes_s is None or runtime.chunks is None:
            return self.fits.decode.predict_decode(self.hardware, read, rows * shape.kv_heads * heads_share)
        flops = tokens * 4 * shape.query_heads * shape.head_size
        busy = np.maximum(read / runtime.kv_bytes_s, flops / runtime.chunks.flops_s)
        return np.asarray(busy + runtime.attend.predict(rows, shape.query_heads * heads_share))

    def attention_line(self, rows: ArrayLike) -> tuple[float, Floats]:
        """Return decode attention as linear in the cached tokens: (seconds per token, seconds at 0 tokens by ``rows``).

        Exact for kernels much longer than the ramp (``DecodeAttentionFit.ramp_s``), which is added to shorter ones.
        """
        count = np.asarray(rows, dtype=np.float64)
        runtime = self.fits.runtime
        if runtime.attend is not None:
            many = 2.0**20
            at_none = self.attention_seconds(0, count)
            return (float(self.attention_seconds(many, 1)) - float(self.attention_seconds(0, 1))) / many, at_none
        fit = self.fits.decode
        per_token = self._kv_bytes / (fit.memory_share * self.hardware.memory_bytes_s)
        return per_token, np.where(count > 0, fit.fixed_s + fit.ramp_s(self.hardware), 0.0)

    def chunk_attention_seconds(self, chunk: ArrayLike, prefix: ArrayLike, tensor_parallel: int = 1) -> Floats:
        """Return seconds of one layer's causal attention of ``chunk`` prompt tokens after ``prefix`` cached ones."""
        seconds = self._attend_chunk(chunk, prefix, tensor_parallel)
        if not self.shape.windowed:
            return seconds
        near = self._attend_chunk(chunk, prefix, tensor_parallel, self.shape.window)
        return self._mean_of_layers(seconds, np.minimum(seconds, near))

    def _attend_chunk(
        self, chunk: ArrayLike, prefix: ArrayLike, tensor_parallel: int, window: float = np.inf
    ) -> Floats:
        shape, own = self.shape, np.asarray(chunk, dtype=np.float64)
        heads = shape.query_heads / tensor_parallel, shape.kv_heads / tensor_parallel
        if (measured := self.fits.runtime.chunks) is not None:  # a long chunk as chunks of a window's length
            parts = np.maximum(1.0, own / window)
            return parts * measured.predict_chunk(own / parts, np.minimum(prefix, window), heads[0], shape.head_size)
        return self.fits.prefill.predict_prefill(
            self.hardware, shape.dtype, own, prefix, *heads, shape.head_size, window=window
        )

    def prefix_attention_seconds(self, chunk: ArrayLike, prefix: ArrayLike) -> Floats:
        """Return seconds of one layer's attention of ``chunk`` rows to ``prefix`` cached tokens alone, on one
        device."""
        tokens, shape = np.asarray(prefix, dtype=np.float64), self.shape
        if self.fits.runtime.chunks is not None:
            arithmetic = self.chunk_attention_seconds(chunk, tokens) - self.chunk_attention_seconds(chunk, 0)
        else:
            heads = shape.query_heads, shape.kv_heads
            arithmetic = self.fits.prefill.prefix_seconds(
                self.hardware, shape.dtype, chunk, tokens, *heads, shape.head_size
            )
        return np.where(tokens > 0, np.maximum(arithmetic, self.attention_seconds(tokens, 1)), 0.0)

    def prefill_seconds(self, prompt: int, chunk: int, tensor_parallel: int = 1) -> float:
        """Return seconds of a whole prompt on one replica, in chunks of at most ``chunk`` tokens."""
        starts = np.arange(0, prompt, chunk, dtype=np.float64)
        sizes = np.minimum(chunk, prompt - starts)
        attention = self.shape.layers * self.chunk_attention_seconds(sizes, starts, tensor_parallel)
        dense = self.shape.layers * self.slice_seconds(sizes, tensor_parallel)
        return float((attention + dense).sum() + self.ends_seconds(1, tensor_parallel))

    def all_reduce_seconds(self, nbytes: ArrayLike, devices: int) -> Floats:
        """Return seconds of summing ``nbytes`` over devices of one machine, by the fastest kernel for their link."""
        sizes = np.asarray(nbytes, dtype=np.float64)
        if devices == 1:
            return np.zeros_like(sizes)
        fits, link = self.fits, self.hardware.link_bytes_s
        if not self.hardware.link.startswith("PCIe"):
            return np.minimum(
                fits.nvlink.predict_all_reduce(sizes, devices, link),
                fits.peer_read.predict_all_reduce(sizes, devices, link),
            )
        return fits.pcie.predict_all_reduce(sizes, devices, link)

    def link_seconds(self, nbytes: ArrayLike) -> Floats:
        """Return seconds of one message over this device's NIC, one way."""
        return ROUND_TRIP_S / 2 + self.wire_seconds(nbytes)

    def wire_seconds(self, nbytes: ArrayLike) -> Floats:
        """Return seconds for which ``nbytes`` occupy this device's NIC."""
        return np.asarray(nbytes, dtype=np.float64) / (NETWORK_SHARE * self.hardware.nic_bytes_s)

    def exchange_bytes(self, rows: ArrayLike) -> Floats:
        """Return bytes of q, k, v sent and attention received for one layer of ``rows`` decode rows."""
        width = 2 * (self.shape.query_heads + self.shape.kv_heads) * self.shape.head_size
        return np.asarray(rows, dtype=np.float64) * width * self.shape.dtype.itemsize

    def weights_fit(self, tensor_parallel: int) -> bool:
        """Return whether each of ``tensor_parallel`` devices has room for its share of the weights."""
        return self.shape.weight_bytes / tensor_parallel <= self.usable_bytes

    @property
    def usable_bytes(self) -> float:
        """Bytes of the device's memory for weights or KV."""
        return MEMORY_SHARE_USABLE * self.hardware.memory_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV, for all layers and heads, fits on one device."""
        return int(self.usable_bytes / self.shape.kv_bytes_per_token)

    @property
    def _kv_bytes(self) -> float:
        """Bytes of one token's cached keys and values of one layer; more where codes are read at a lower rate."""
        slower = self.shape.kv_element.scaled and self.fits.runtime.attend is not None
        return self.shape.kv_bytes_per_token / self.shape.layers / (CODES_ON_CPU if slower else 1.0)

    def _row_bytes(self, rows: Floats) -> Floats:
        return rows * self.shape.hidden * self.shape.dtype.itemsize
