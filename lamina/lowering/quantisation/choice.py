"""Which weights of a lowered model become codes, on a CPU."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lamina import _native
from lamina.core.errors import ConfigError
from lamina.core.types import DType, Quantization
from lamina.lowering.cpu_slices import LoweredModel, LoweredPart
from lamina.lowering.quantisation.cpu_codes import PRODUCTS, can_pack, grouped_by, is_turned
from lamina.models.quantisation.codes import Codes, ExpertCodes, quantise, quantise_experts, turned
from lamina.splitter.split_model import Shard


def linear_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights that linear layers use, and nothing else does: neither embeddings nor experts in one
    tensor."""
    found, others = set[str](), {name for name in model.sinks if name is not None}
    for part in model.parts:
        for name, node in zip(part.weights, _inputs(part), strict=False):
            (found if _is_linear_weight(node) else others).add(name)
    return frozenset(found - others)


def expert_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights that products of experts use, and nothing else does."""
    return frozenset(name for part in model.parts for name, node in _named_inputs(part) if grouped_by(node))


def turned_weights(model: LoweredModel) -> frozenset[str]:
    """Names of ``expert_weights`` that are [experts, inputs, outputs]; the others are [experts, outputs, inputs]."""
    return frozenset(name for part in model.parts for name, node in _named_inputs(part) if is_turned(node))


def head_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights of the linear layers whose results become logits without another in between."""
    return frozenset[str]().union(
        *(_last_before(part, [part.graphs.main.graph.output_node()]) for part in model.parts if part.last)
    )


def router_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights of the linear layers that choose experts."""
    found = frozenset[str]()
    for part in model.parts:
        chosen = [node for node in part.graphs.main.graph.nodes if node.target is torch.ops.aten.topk.default]
        found |= _last_before(part, chosen)
    return found


def _last_before(part: LoweredPart, nodes: Sequence[fx.Node]) -> set[str]:
    """Return the weights of the linear layers before some nodes, without another in between."""
    names, found, seen = dict(zip(_inputs(part), part.weights, strict=False)), set[str](), set(nodes)
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node.target in PRODUCTS:
            found |= {names[source] for source in node.all_input_nodes if source in names}
        else:
            todo += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
    return found


def _named_inputs(part: LoweredPart) -> Iterator[tuple[str, fx.Node]]:
    return zip(part.weights, _inputs(part), strict=False)


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
    experts: frozenset[str]
    names: frozenset[str]
    inputs_first: frozenset[str]
    to: Quantization

    @classmethod
    def for_model(cls, model: LoweredModel, to: Quantization) -> "HostForm":
        """Return the form of a model lowered for ``Target.CPU``. Raises ConfigError: this processor does not run it
        with ``to``."""
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
        experts = expert_weights(model) if runs else frozenset()
        names = chosen(model, linear, to) | (frozenset() if to == "none" else experts)
        inputs_first = turned_weights(model)
        return cls(linear, experts - inputs_first, names, inputs_first, to)

    def quantise(self, name: str, weight: torch.Tensor, shard: Shard) -> Codes | ExpertCodes:
        if name in self.inputs_first:
            weight, shard = turned(weight, shard)
        if weight.dim() == 3:
            return ExpertCodes(tuple(quantise_experts(name, weight, self.to, shard)))
        return quantise(name, weight, self.to, shard)

    def keep_codes(self, name: str, codes: Codes, dtype: torch.dtype) -> Codes | None:
        return codes if name in self.held and dtype == torch.bfloat16 and can_pack(codes) else None

    def hold_experts(self, codes: ExpertCodes, dtype: torch.dtype) -> ExpertCodes | None:
        return codes if dtype == torch.bfloat16 and all(map(can_pack, codes.each)) else None


def chosen(model: LoweredModel, linear: Collection[str], to: Quantization) -> frozenset[str]:
    """Return the weights to quantise: those of linear layers but for the head, and for what chooses experts.

    Raises ConfigError if there are none.
    """
    if to == "none":
        return frozenset()
    names = frozenset(linear) - head_weights(model) - router_weights(model)
    if not names:
        raise ConfigError(
            f"--quantization {to}: this model has no linear layers whose weights can be quantised; leave it out"
        )
    return names
