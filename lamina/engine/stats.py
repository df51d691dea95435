"""What the engine shows of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryStats:
    """Token slots of one memory worker, as it reported them last."""

    used: int
    capacity: int
    sequences: int


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine. ``steps`` counts those that have completed, ``moved`` sequences that went from one memory
    worker to another; ``dead`` says why it has stopped, if it has: then nothing runs or waits. ``silent`` are workers
    that have not answered for some seconds, with how many: the engine gives them up soon."""

    running: int
    waiting: int
    steps: int
    moved: int
    memory: Mapping[str, MemoryStats]
    dead: str | None
    silent: Mapping[str, float] = field(default_factory=dict)
