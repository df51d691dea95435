"""Lamina: LLM inference that cuts the model at its attention operators."""

import importlib
from typing import TYPE_CHECKING, Any

from lamina.core import __version__ as __version__

if TYPE_CHECKING:
    from lamina.core.errors import (
        CapacityError,
        ConfigError,
        DeadlineError,
        EngineDeadError,
        LaminaError,
        LogitsError,
        ModelError,
        OverloadedError,
        PeerLostError,
        RequestError,
        TransportError,
        UnsupportedModelError,
        UserError,
        WorkerError,
    )
    from lamina.core.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, ToolCall
    from lamina.core.sampling import SamplingParams, StructuredOutputs
    from lamina.core.types import Segment
    from lamina.sdk import AsyncLamina, Lamina

__all__ = [
    "AsyncLamina",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "DeadlineError",
    "EngineDeadError",
    "FinishReason",
    "Lamina",
    "LaminaError",
    "LogitsError",
    "Logprob",
    "ModelError",
    "OverloadedError",
    "PeerLostError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Segment",
    "StructuredOutputs",
    "ToolCall",
    "TransportError",
    "UnsupportedModelError",
    "UserError",
    "WorkerError",
]


def __getattr__(name: str) -> Any:
    # Imported when first used: `import lamina` and `lamina --help` must not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elsewhere = {"SamplingParams": "core.sampling", "StructuredOutputs": "core.sampling", "Segment": "core.types"}
    source = "sdk" if name.endswith("Lamina") else "core.errors" if name.endswith("Error") else "core.outputs"
    source = elsewhere.get(name, source)
    return getattr(importlib.import_module(f"lamina.{source}"), name)
