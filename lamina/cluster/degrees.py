"""The replicas of the pools that hold weights: how many there are, and the ranks and stages of each. Pure.

Degrees at the end of a pool's text, such as ``h100:4/tp2/pp2``, are those of all replicas of this pool.
"""

import re
from dataclasses import dataclass

from lamina.cluster.pool import PoolEntry, parse, size
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Shape

_DEGREES = re.compile(r"(?:/tp(?P<ranks>[1-9][0-9]{0,3}))?(?:/pp(?P<stages>[1-9][0-9]{0,3}))?")


def parse_computes(config: EngineConfig, known: list[str] | None = None) -> tuple[PoolEntry, ...]:
    """Return the workers that hold weights, the prefill pool first. Raises ConfigError if a pool is malformed."""
    shapes(config)
    texts = [text.partition("/")[0] for text in (config.prefill, config.compute) if text is not None]
    return tuple(entry for text in texts for entry in parse(text, known))


def shapes(config: EngineConfig) -> tuple[Shape, Shape]:
    """Return the shapes of the replicas of the prefill pool and of the compute pool.

    Degrees at the end of a pool's text, such as ``/tp2/pp2``, replace those of ``tensor_parallel`` and
    ``pipeline_parallel``. Without a prefill pool, both shapes are equal. Raises ConfigError if degrees are malformed.
    """
    default = Shape(config.tensor_parallel, config.pipeline_parallel)
    compute = _shape(config.compute, default)
    return compute if config.prefill is None else _shape(config.prefill, default), compute


def degrees_text(shape: Shape) -> str:
    """Return the degrees of a pool's replicas as they follow the pool's last count, such as ``/tp2/pp2``."""
    return f"/tp{shape.ranks}" + (f"/pp{shape.stages}" if shape.stages > 1 else "")


@dataclass(frozen=True)
class Replicas:
    """The replicas of a cluster: how many only run prompts, how many do not, and the shapes of both."""

    prefill: int
    decode: int
    early: Shape
    late: Shape

    @property
    def count(self) -> int:
        """Number of replicas."""
        return self.prefill + self.decode

    @property
    def most_stages(self) -> int:
        """Stages of the replicas that have most."""
        return max(self.early.stages, self.late.stages)

    @property
    def most_ranks(self) -> int:
        """Ranks of the replicas that have most."""
        return max(self.early.ranks, self.late.ranks)


def replicas(config: EngineConfig, computes: int) -> Replicas:
    """Return the replicas of ``computes`` workers of both pools; at least one, also if workers lack.

    There are fewer workers than the settings ask for once some are lost.
    """
    (early, late), prefills = shapes(config), min(computes, size(config.prefill))
    prefill, decode = prefills // early.workers, (computes - prefills) // late.workers
    return Replicas(prefill, decode if prefill else max(1, decode), early, late)


def _shape(text: str, default: Shape) -> Shape:
    _, slash, degrees = text.replace(" ", "").lower().partition("/")
    match = _DEGREES.fullmatch(slash + degrees)
    if match is None:
        raise ConfigError(
            f"pool {text!r} ends in {slash + degrees!r}; give the ranks and stages of all its replicas once, after the "
            "last count, such as cpu:4/tp2 or a100:2,h100:4/tp2/pp2"
        )
    ranks, stages = match["ranks"], match["stages"]
    return Shape(int(ranks) if ranks else default.ranks, int(stages) if stages else default.stages)
