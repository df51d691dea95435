"""Overheads besides kernels: ``RuntimeFit`` for Lamina's workers, ``Engine`` for an engine's host time and memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lamina.planning.plan.kernel_times import AttendCurve, ChunkFit

ROUND_TRIP_S = 33e-6
"""Round trip of a small message by RDMA with device polling (Lamina, section 6.3; second paper: 33.0 us)."""


@dataclass(frozen=True, kw_only=True)
class RuntimeFit:
    """Time of the runtime besides slices and attention; published for GPUs and RDMA, or measured.

    Attributes:
        exchange_s: On a compute worker, per layer: messages, merging, and the slowdown of interrupted slices.
        exchange_row_s: The same, per row.
        step_s: On a compute worker, per step: sampling.
        step_row_s: The same, per row.
        attend: On a memory worker, per layer besides reading KV; None: that of the attention kernels' fits.
        kv_bytes_s: Bandwidth of reading KV on a memory worker; None: that of the attention kernels' fits.
        chunks: Attention of prompt chunks on either worker; None: that of the attention kernels' fits.
        round_trip_s: Per layer, time in which neither worker is busy.
        contention: Relative slowdown of both pools while both work, where they share one memory.
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


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Host time and reserved memory of one serving engine.

    Attributes:
        name: Name of the engine.
        version: Its version.
        step_s: Host time of a step that does not overlap with the device: scheduling, launches, output.
        step_row_s: The same, per sequence that draws a token.
        prompt_token_s: Tokenization per prompt token, by one process for all requests.
        request_s: Latency of a request to the engine plus that of its first token to the client.
        reserve_bytes: Device memory of CUDA graphs and buffers.
        reserve_token_bytes: Device memory of activations, per token of the largest step.
        source: What the figures were fitted to.
        plans_ahead: Whether a step is planned when the one before it begins, so that a request which arrives meanwhile
            runs in the one after it.
        multiplies_fp8: Whether weights of 8-bit floats are multiplied in 8 bits on devices that can, or in 16 bits.
        marlin: Whether experts whose weights have 4 bits are multiplied by Marlin's kernels, or by Triton's.
    """

    name: str
    version: str
    step_s: float
    step_row_s: float
    prompt_token_s: float
    request_s: float
    reserve_bytes: float
    reserve_token_bytes: float
    source: str
    plans_ahead: bool = False
    multiplies_fp8: bool = True
    marlin: bool = False

    @property
    def lamina(self) -> "Engine":
        """Return this engine's figures with products in 16 bits: Lamina's own were not measured on GPUs."""
        return replace(self, name="Lamina", version="", multiplies_fp8=False)

    def reserved(self, tokens: int) -> float:
        """Return the reserved bytes of a device if steps have up to ``tokens`` tokens."""
        return self.reserve_bytes + self.reserve_token_bytes * tokens


NO_OVERHEAD = Engine(
    name="none",
    version="",
    step_s=0.0,
    step_row_s=0.0,
    request_s=0.0,
    prompt_token_s=0.0,
    reserve_bytes=0.0,
    reserve_token_bytes=0.0,
    source="kernels alone",
)

VLLM_012 = Engine(
    name="vLLM",
    version="0.12",
    step_s=1.2e-3,
    step_row_s=2e-5,
    request_s=10e-3,
    prompt_token_s=2e-6,
    reserve_bytes=1.2e9,
    reserve_token_bytes=0.3e6,
    source="Qwen3-32B on H100s, the rows called fitted of python -m bench.cost.measured",
)

VLLM = replace(
    VLLM_012,
    version="0.18",
    request_s=15e-3,
    step_s=6e-4,
    step_row_s=0.0,
    plans_ahead=True,
    source="gpt-oss-120b on H200s and Llama-3.1-8B on two cards, the rows called fitted of python -m "
    "bench.cost.measured; release notes of vLLM 0.14: asynchronous scheduling, now by default",
)
"""The engine that plans assume for other systems and, as ``VLLM.lamina``, for Lamina."""
