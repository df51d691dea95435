"""How the workers on one GPU divide it, where CUDA's Multi-Process Service (MPS) lets their processes run at once."""

from collections.abc import Collection, Mapping
from pathlib import Path

from lamina.topology import Role

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The part of a GPU's multiprocessors that a process may use at most. MPS rounds down and reserves nothing."""

MEMORY_PERCENTAGE = 60
"""Of a memory worker beside a compute worker; an estimate. By its data sheet, an H200 reads at full bandwidth with 36
KB in flight per multiprocessor (``kernels.gpu.choice.default``); with the 64 KiB of attention, 55% of them would do."""


def mps_runs(variables: Mapping[str, str]) -> bool:
    """Whether MPS runs, by the environment of the processes that would use it."""
    return Path(variables.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control").exists()


def limits(role: Role, beside: Collection[Role], mps: bool, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker ``beside`` others on its GPU; see ``docs/decisions.md``.

    ``variables``: of the process that starts it. What is set there is left as it is.
    """
    if not mps or role != "memory" or "compute" not in beside or PERCENTAGE in variables:
        return {}
    return {PERCENTAGE: str(MEMORY_PERCENTAGE)}
