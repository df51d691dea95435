"""The shape of a mixture of experts, and how many of its experts a step touches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.planning.plan.kernel_times import Floats

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs."""

_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_DENSE = ("first_k_dense_replace", "moe_layer_start_index")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: feed-forward networks, of which each token uses a few.

    Attributes:
        count: experts of a layer.
        active: how many of them each token uses.
        intermediate: width of one expert.
        shared: width of the experts that every token uses.
        layers: number of layers with experts; others are dense.
    """

    count: int
    active: int
    intermediate: int
    layers: int
    shared: int = 0

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any], layers: int) -> "Experts | None":
        """From a parsed config.json; None for a dense model.

        Raises:
            ModelError: a size is missing. UnsupportedModelError: layers have different numbers of experts.
        """
        unequal = next((key for key in COUNTS if isinstance(config.get(key), list)), None)
        if unequal:
            raise UnsupportedModelError(
                f"{name} has a mixture of experts whose layers differ ({unequal} {config[unequal]}); the cost model "
                "covers equal ones"
            )
        count = _first(config, COUNTS)
        if count is None or count == 1:
            return None
        active, width = _first(config, _ACTIVE), _first(config, _WIDTH)
        if active is None or width is None or active > count:
            raise ModelError(
                f"the config of {name} has {count} experts, of which each token uses {active}, {width} wide; give "
                f"one of {', '.join(_ACTIVE)}, at most {count}, and one of {', '.join(_WIDTH)}"
            )
        shared = _first(config, ("shared_expert_intermediate_size",)) or width * (_first(config, _SHARED) or 0)
        if config.get("model_type") == "llama4_text":
            shared = width
        return cls(
            count=count,
            active=active,
            intermediate=width,
            shared=shared,
            layers=max(1, (layers - (_first(config, _DENSE) or 0)) // _step(config)),
        )

    @property
    def width(self) -> int:
        """Width of all experts of a layer together."""
        return self.count * self.intermediate + self.shared

    def touched(self, rows: ArrayLike) -> Floats:
        """Mean number of experts that ``rows`` tokens use, if they choose independently and uniformly."""
        missed = (1 - self.active / self.count) ** np.asarray(rows, dtype=np.float64)
        return np.asarray(self.count * (1 - missed))


def _step(config: Mapping[str, Any]) -> int:
    """Return the period of layers with experts: 1 if all have them."""
    return _first(config, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")) or 1


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    found = (config.get(key) for key in keys)
    return next((one for one in found if isinstance(one, int) and not isinstance(one, bool) and one > 0), None)
