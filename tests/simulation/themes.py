"""Choices of a seed that belong together: what only many rare choices at once bring about gets a theme.

Half of the seeds have none, so that whatever no theme thinks of still comes up.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Theme:
    """What the seeds of a theme have instead of what they would choose.

    Attributes:
        settings: Of the engine.
        memories: Fewest memory workers.
        knobs: Values of constants of the product, as ``layouts.KNOBS``.
        chances: Of rare branches, by point.
        load: Attributes of ``scenario.Load``.
        kinds: Weights of kinds of faults.
        moments: At which faults happen.
        chase: Chance of a change of a pool to be followed by faults while it is under way.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    memories: int = 0
    knobs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    chances: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, float] = field(default_factory=dict)
    moments: Sequence[str] = ()
    chase: float = 0.0


THEMES: Mapping[str, Theme] = {
    # Idle lanes borrow chunks that are longer than the window, whose rows are collected meanwhile; prefixes are shared.
    "windows": Theme(
        settings={
            "max_num_batched_tokens": 64,
            "prefix_cache": True,
            "prompt_attention": "memory",
            "kv_cache_memory_bytes": 500_000,
            "lanes": 6,
            "pipelining": "fixed",
        },
        knobs={
            ("lamina.cluster.slabs", "LEAST_GAIN"): 0.0,
            ("lamina.memory.device.windows", "FEWEST"): 1,
            ("lamina.memory.device.windows", "SPARE"): 1_000_000,
        },
        load={
            "_completions": [1],
            "_prompts": [60],
            "_shared": 1.0,
            "_cut_prefixes": 0.8,
            "_longest": [1, 5],
            "_pause_s": 0.1,
            "_burst": 0.0,
            "_searches": 0.0,
        },
        kinds={"slow": 1.0, "stop": 1.0},
    ),
    # KV of prompts of several completions moves while they are computed, and workers that it has left are lost.
    "unforked": Theme(
        settings={
            "max_num_batched_tokens": 8,
            "max_num_seqs": 8,
            "prefix_cache": True,
            "partition": "auto",
            "balance": "bandwidth",
            "kv_overcommit": 1.0,
            "kv_spill_dir": None,
            "kv_tokens_per_worker": None,
            "kv_cache_memory_bytes": 500_000,
        },
        memories=3,
        knobs={
            ("lamina.schedule.moves", "TOKENS_PER_STEP"): 256,
            ("lamina.schedule.moves", "MOST_TOKENS"): 256,
            ("lamina.schedule.balancing", "LOOK_STEPS"): 2,
            ("lamina.schedule.balancing", "BACK_STEPS"): 4,
            ("lamina.kv.balancing", "LEAST"): 4,
            ("lamina.kv.prefix_cache", "SHORTEST"): 2,
        },
        chances={"look": 0.9, "move": 0.9},
        load={
            "_completions": [2, 3],
            "_prompts": [60],
            "_shared": 1.0,
            "_cut_prefixes": 0.2,
            "_longest": [60],
            "_pause_s": 0.1,
            "_searches": 0.0,
        },
        kinds={"kill": 1.0},
        moments=("moved",),
    ),
    # Requests of several completions, some of which end early, are preempted again and again, and little is cached.
    "released": Theme(
        settings={"max_num_batched_tokens": 16, "max_num_seqs": 8, "prefix_cache": True, "partition": "request"},
        knobs={("lamina.kv.prefix_tree", "GRAIN"): 1, ("lamina.kv.prefix_cache", "SHORTEST"): 2},
        chances={"preempt": 0.05, "evict": 0.9},
        load={"_completions": [2, 3], "_prompts": [1, 5], "_shared": 1.0, "_longest": [20, 60], "_burst": 0.9},
        kinds={"cut": 1.0},
        moments=("recomputed",),
    ),
    # Sequences whose heads are on several workers go on elsewhere, also after these have got other neighbours.
    "stripes": Theme(
        settings={"partition": "head", "kv_tokens_per_worker": None, "prefix_cache": True},
        memories=3,
        chances={"spread": 0.3},
        load={"_longest": [20, 60, 120], "_shared": 0.5},
        kinds={"kill": 1.0, "scale": 1.0},
    ),
    # Workers leave while others join, and those that join are slow or die.
    "changes": Theme(memories=2, kinds={"scale": 3.0, "stop": 1.0}, chase=0.7),
}
NONE = Theme()


def theme(seed: int) -> Theme:
    """Return the theme of a seed."""
    chance = random.Random(f"theme {seed}")
    return NONE if chance.random() < 0.5 else THEMES[chance.choice([*THEMES])]
