"""Parses failures and slowdowns of workers, such as ``memory:3@120s`` and ``compute:0@60s:2x``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lamina.errors import ConfigError
from lamina.simulate.deployment import Deployment

Role = Literal["compute", "memory"]

_FAULT = re.compile(
    r"(?P<role>compute|memory):(?P<worker>\d{1,6})@(?P<at>\d+(\.\d+)?)s(:(?P<factor>\d+(\.\d+)?)x)?", re.ASCII
)


@dataclass(frozen=True)
class Fault:
    """A worker takes ``factor`` times as long, or is lost (None), from ``at_s`` seconds after the first arrival."""

    role: Role
    worker: int
    at_s: float
    factor: float | None = None

    def __str__(self) -> str:
        return f"{self.role}:{self.worker}@{self.at_s:g}s" + ("" if self.factor is None else f":{self.factor:g}x")


def parse_failure(text: str) -> Fault:
    """Parse ``memory:3@120s``: memory worker 3 is lost at that time. Raises ConfigError."""
    fault = _parse(text)
    if fault is None or fault.factor is not None:
        raise ConfigError(f"{text!r} is not a failure; give role:worker@seconds, such as memory:3@120s")
    return fault


def parse_slowdown(text: str) -> Fault:
    """Parse ``compute:0@60s:2x``: compute worker 0 takes twice as long from then on. Raises ConfigError."""
    fault = _parse(text)
    if fault is None or fault.factor is None or fault.factor == 0:
        raise ConfigError(f"{text!r} is not a slowdown; give role:worker@seconds:factor, such as compute:0@60s:2x")
    return fault


def check_faults(deployment: Deployment, faults: Sequence[Fault]) -> None:
    """Raise ConfigError for a fault of a worker that does not exist."""
    workers = {"compute": deployment.compute_workers, "memory": deployment.memory_workers}
    for fault in faults:
        if fault.worker >= workers[fault.role]:
            raise ConfigError(
                f"{fault}: {fault.role} worker {fault.worker} does not exist; the pool has "
                f"{workers[fault.role]}, counted from 0"
            )


def _parse(text: str) -> Fault | None:
    match = _FAULT.fullmatch(text.strip().lower())
    if match is None:
        return None
    role: Role = "compute" if match["role"] == "compute" else "memory"
    return Fault(role, int(match["worker"]), float(match["at"]), float(match["factor"]) if match["factor"] else None)
