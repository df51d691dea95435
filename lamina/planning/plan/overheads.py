"""Time and memory that serving needs besides kernels: in Lamina's runtime, published or measured, and in engines."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lamina.planning.plan.kernel_times import AttendCurve, ChunkFit

ROUND_TRIP_S = 33e-6
"""Round trip of a small message by RDMA with device polling (Lamina, section 6.3; second paper: 33.0 us)."""


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


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine.

    Attributes:
        step_s: host time of a step that nothing hides: scheduling, launches, output.
        step_row_s: the same of each sequence that draws a token.
        prompt_token_s: of each token of a prompt before the engine knows the request: one process tokenizes one prompt
            after another.
        request_s: from a request to its engine and from its first token to the client, besides; not the engine's time.
        reserve_bytes, reserve_token_bytes: memory of a device, of the share that the engine may use, that holds neither
            weights nor KV: CUDA graphs and buffers; and activations, for each token that a step may have.
        source: what the figures were fitted to.
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

    def reserved(self, tokens: int) -> float:
        """Return the bytes of a device that the engine keeps if its steps have up to so many tokens."""
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
    request_s=15e-3,
    prompt_token_s=8e-6,
    reserve_bytes=1.2e9,
    reserve_token_bytes=0.3e6,
    source="Qwen3-32B on H100s, the rows called fitted of python -m bench.cost.measured",
)

VLLM = replace(
    VLLM_012,
    version="0.18",
    request_s=25e-3,
    step_s=4e-4,
    step_row_s=0.0,
    source="gpt-oss-120b on H200s and Llama-3.1-8B on two cards, the rows called fitted of python -m "
    "bench.cost.measured: it schedules a step while the last one runs",
)
"""The engine that plans assume for systems other than Lamina."""
