"""How the workers on one GPU divide it, where CUDA's Multi-Process Service (MPS) lets their processes run at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lamina.topology import Role

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The part of a GPU's multiprocessors that a process may use at most. MPS rounds down and reserves nothing."""

MEMORY_PERCENTAGE = 60
"""Of a memory worker beside a compute worker. On an H200, 36 KB in flight per multiprocessor read at full bandwidth
(``kernels.gpu.choice.default``), and attention has about 64 KiB in flight: 55% of the multiprocessors are enough."""


def mps_runs(variables: Mapping[str, str]) -> bool:
    """Whether MPS runs, by the environment of the processes that would use it."""
    return Path(variables.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control").exists()


def parts(roles: Sequence[Role], mps: bool, variables: Mapping[str, str]) -> list[dict[str, str]]:
    """Environment variables for each worker on one GPU, in the order of ``roles``; see ``docs/decisions.md``.

    ``variables``: of the process that starts them. What is set there is left as it is.
    """
    if not mps or "compute" not in roles or PERCENTAGE in variables:
        return [{} for _ in roles]
    return [{PERCENTAGE: str(MEMORY_PERCENTAGE)} if role == "memory" else {} for role in roles]
