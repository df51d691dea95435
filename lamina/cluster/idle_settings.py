"""Lists settings that have no effect with the workers of the start, and what would give them one. Pure.

They are not refused, since workers may join later. What can never have an effect is in ``lamina.cluster.refusals``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lamina.cluster.degrees import replicas, shapes
from lamina.cluster.pool import LOCAL, parse_bounds, size
from lamina.config.engine_config import EngineConfig
from lamina.core.topology import Pool


@dataclass(frozen=True)
class IdleSetting:
    """A setting without effect.

    Attributes:
        what: The setting with its value.
        why: The reason.
        remedy: What gives it an effect.
    """

    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what} has no effect: {self.why}; {self.remedy}"


def idle_settings(config: EngineConfig, computes: Sequence[str], memories: Sequence[str]) -> Iterator[IdleSetting]:
    """Yield those of the settings without effect, where none are refused. The arguments are those of ``refusals``."""
    places = _places(config, len(computes), memories)
    if places == 1:
        yield from _of_one_place(config)
    elif LOCAL in memories and config.balance not in ("auto", "off") and _moving(config, len(computes), memories) < 2:
        yield IdleSetting(
            f"balance {config.balance}",
            "KV does not move between replicas of stages",
            "give --memory cpu:2, or leave it out",
        )
    if config.prompt_attention == "memory" and set(memories) == {LOCAL} and not size(config.prefill):
        yield IdleSetting(
            "prompt_attention memory",
            "every replica attends to the KV in its own memory",
            "leave it out, or give memory workers, such as --memory cpu:1",
        )
    if config.kv_overcommit > 1 and not config.prefix_cache:
        yield IdleSetting(
            f"kv_overcommit {config.kv_overcommit:g}",
            "cached prefixes are what disks hold, and prefix_cache is off",
            "leave out one of them",
        )


def _places(config: EngineConfig, computes: int, memories: Sequence[str]) -> int:
    """Return the number of workers over which the KV of one request can be, with those that autoscaling may add.

    Replicas that only run prompts hold no KV in their local memory.
    """
    bounds, workers = _bounds(config), _memory_workers(config, memories)
    if LOCAL not in memories:
        return workers
    made = replicas(config, max(computes, size(config.prefill) + bounds.get("compute", (0, 0))[1]))
    return workers + (made.count if "prefill" in bounds else made.decode)


def _moving(config: EngineConfig, computes: int, memories: Sequence[str]) -> int:
    """Return the number of those workers between which KV may move."""
    stages = max(shape.stages for shape in shapes(config))
    return _memory_workers(config, memories) if stages > 1 else _places(config, computes, memories)


def _memory_workers(config: EngineConfig, memories: Sequence[str]) -> int:
    return max(sum(kind != LOCAL for kind in memories), _bounds(config).get("memory", (0, 0))[1])


def _bounds(config: EngineConfig) -> dict[Pool, tuple[int, int]]:
    return {} if config.autoscale is None else parse_bounds(config.autoscale)


def _of_one_place(config: EngineConfig) -> Iterator[IdleSetting]:
    why = "one worker holds all KV"
    remedy = "give --memory cpu:2, let a memory worker join (lamina scale --memory +1), or leave it out"
    if config.balance not in ("auto", "off"):
        yield IdleSetting(f"balance {config.balance}", why, remedy)
    if config.partition in ("head", "token"):
        yield IdleSetting(f"partition {config.partition}", why, remedy)
    if config.kv_tokens_per_worker is not None:
        yield IdleSetting(f"kv_tokens_per_worker {config.kv_tokens_per_worker}", why, remedy)
