"""Time and memory that a serving engine needs besides its kernels, by engine and version."""

from dataclasses import dataclass, replace


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
