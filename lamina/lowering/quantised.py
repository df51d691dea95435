"""Which weights of a lowered model become codes, on a CPU."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from lamina import _native
from lamina.errors import ConfigError
from lamina.lowering.linear_codes import PRODUCTS, can_pack
from lamina.lowering.lowered import LoweredModel, LoweredPart
from lamina.models.codes import Codes, quantise
from lamina.splitter.split_model import Shard
from lamina.types import DType, Quantization


def linear_weights(model: LoweredModel) -> frozenset[str]:
    """The weights that linear layers use, and nothing else does: neither embeddings nor experts in one tensor."""
    found, others = set[str](), {name for name in model.sinks if name is not None}
    for part in model.parts:
        for name, node in zip(part.weights, _inputs(part), strict=False):
            (found if _is_linear_weight(node) else others).add(name)
    return frozenset(found - others)


def head_weights(model: LoweredModel) -> frozenset[str]:
    """The weights of the linear layers whose results become logits without another in between."""
    found: set[str] = set()
    for part in model.parts:
        if not part.last:
            continue
        names = dict(zip(_inputs(part), part.weights, strict=False))
        todo = [part.graphs.main.graph.output_node()]
        while todo:
            node = todo.pop()
            if node.target in PRODUCTS:
                found |= {names[source] for source in node.all_input_nodes if source in names}
            else:
                todo += node.all_input_nodes
    return frozenset(found)


def _inputs(part: LoweredPart) -> list[fx.Node]:
    return [node for node in part.graphs.main.graph.nodes if node.op == "placeholder"]


def _is_linear_weight(node: fx.Node) -> bool:
    return bool(node.users) and all(
        user.target in PRODUCTS and user.args[1] is node and node not in (user.args[0], *user.args[2:])
        for user in node.users
    )


@dataclass(frozen=True)
class HostForm:
    """A ``Form`` of weights on a CPU."""

    held: frozenset[str]
    names: frozenset[str]
    to: Quantization

    @classmethod
    def of(cls, model: LoweredModel, to: Quantization) -> "HostForm":
        """For a model lowered for ``Target.CPU``. Raises ConfigError: this processor does not run it with ``to``."""
        runs = _native.linear_available() and model.dtype is DType.BFLOAT16
        if to == "fp8":
            raise ConfigError(
                "compute workers on CPUs have no product of fp8 weights: give --quantization int8 or int4"
            )
        if to != "none" and not runs:
            raise ConfigError(
                f"--quantization {to} on a CPU needs AVX2 or AVX-512, and bfloat16; this model has "
                f"{model.dtype.value}, and this processor {'has' if _native.linear_available() else 'lacks'} "
                "these instructions: give --dtype bfloat16, or leave out --quantization"
            )
        linear = linear_weights(model) if runs else frozenset()
        return cls(linear, chosen(model, linear, to), to)

    def quantise(self, name: str, weight: torch.Tensor, shard: Shard) -> Codes:
        """See ``Form``."""
        return quantise(name, weight, self.to, shard)

    def hold(self, name: str, codes: Codes, dtype: torch.dtype) -> Codes | None:
        """See ``Form``."""
        return codes if name in self.held and dtype == torch.bfloat16 and can_pack(codes) else None


def chosen(model: LoweredModel, linear: Collection[str], to: Quantization) -> frozenset[str]:
    """The weights to quantise: those of linear layers but for the head. Raises ConfigError if there are none."""
    if to == "none":
        return frozenset()
    names = frozenset(linear) - head_weights(model)
    if not names:
        raise ConfigError(
            f"--quantization {to}: this model has no linear layers whose weights can be quantised; leave it out"
        )
    return names
