"""Which weights of a lowered model become codes, on a CPU and on a GPU.

On a GPU, linear layers and experts have Lamina's product of codes. Linear layers that are quantised to int4 have
torchao's product instead, in bfloat16 and on CUDA alone, which reads the codes too. Outside of compiled graphs, torchao
multiplies int8 and fp8 weights by making each dense first.
"""

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from lamina import _native
from lamina.core.errors import ConfigError
from lamina.core.types import DType, Quantization
from lamina.lowering.cpu_codes import PRODUCTS, can_pack, grouped_by, is_turned, x_group
from lamina.lowering.cpu_slices import LoweredModel, LoweredPart
from lamina.models.quantisation.codes import (
    Codes,
    ExpertCodes,
    Form,
    LibraryWeight,
    StackedCodes,
    Weight,
    group_size,
    quantise,
    quantise_experts,
    stacked_group,
)
from lamina.splitter.split_model import Shard, cut

aten = torch.ops.aten


def linear_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights that linear layers alone use: neither embeddings nor experts in one tensor."""
    found, others = set[str](), {name for name in model.sinks if name is not None}
    for name, node in _inputs(model):
        (found if _is_linear_weight(node) else others).add(name)
    return frozenset(found - others)


def expert_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights that products of experts use, and nothing else does."""
    return frozenset(name for name, node in _inputs(model) if grouped_by(node))


def turned_weights(model: LoweredModel) -> frozenset[str]:
    """Return the ``expert_weights`` that are [experts, inputs, outputs]; all others are [experts, outputs, inputs]."""
    return frozenset(name for name, node in _inputs(model) if is_turned(node))


def head_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights of the linear layers whose results become logits without another in between."""
    last = [part for part in model.parts if part.last]
    return frozenset[str]().union(*(_last_before(model, part, [_graph(model, part).output_node()]) for part in last))


def router_weights(model: LoweredModel) -> frozenset[str]:
    """Return the weights of the linear layers that choose experts."""
    found = frozenset[str]()
    for part in model.parts:
        found |= _last_before(model, part, [node for node in _graph(model, part).nodes if _chooses(node)])
    return found


def _chooses(node: fx.Node) -> bool:
    """Return whether a node selects the largest of some values, and the graph uses which they are."""
    if node.target is aten.argmax.default:
        return True
    found = node.target in (aten.topk.default, aten.max.dim, aten.sort.default, aten.sort.stable)
    return found and any(user.args[1] == 1 for user in node.users)  # by its users, which are ``operator.getitem``


def chosen(model: LoweredModel, linear: Collection[str], to: Quantization) -> frozenset[str]:
    """Return the linear weights to quantise: not the head's, nor a router's. Raises ConfigError if none is left."""
    names = frozenset(linear) - head_weights(model) - router_weights(model)
    if not names:
        raise ConfigError(
            f"--quantization {to}: this model has no linear layers whose weights can be quantised; leave it out"
        )
    return names


def _last_before(model: LoweredModel, part: LoweredPart, nodes: Sequence[fx.Node]) -> set[str]:
    names, found, seen = {node: name for name, node in _part_inputs(model, part)}, set[str](), set(nodes)
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node.target in PRODUCTS:
            found |= {names[source] for source in node.all_input_nodes if source in names}
        else:
            todo += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
    return found


def _graph(model: LoweredModel, part: LoweredPart) -> fx.Graph:
    return model.graphs[part.graphs].main.graph


def _part_inputs(model: LoweredModel, part: LoweredPart) -> Iterator[tuple[str, fx.Node]]:
    return zip(part.weights, _graph(model, part).find_nodes(op="placeholder"), strict=False)


def _inputs(model: LoweredModel) -> Iterator[tuple[str, fx.Node]]:
    for part in model.parts:
        yield from _part_inputs(model, part)


def _is_linear_weight(node: fx.Node) -> bool:
    return bool(node.users) and all(
        user.target in PRODUCTS and user.args[1] is node and node not in (user.args[0], *user.args[2:])
        for user in node.users
    )


class _ModelForm(Form):
    """What the forms of a lowered model have in common. Without ``products``, this device multiplies by no codes."""

    def __init__(self, model: LoweredModel, to: Quantization, products: bool = True) -> None:
        self._to = to
        self._linear = linear_weights(model) if products else frozenset()
        experts = expert_weights(model) if products else frozenset()
        self._inputs_first = turned_weights(model)
        self.experts = experts - self._inputs_first
        self.names = frozenset() if to == "none" else chosen(model, self._linear, to) | experts

    def quantise(self, name: str, weight: Tensor, shard: Shard) -> Weight:
        if name in self._inputs_first:
            weight, shard = weight.mT, {(0, 2, 1)[dim]: ranges for dim, ranges in shard.items()}
        return self._quantise_experts(name, weight, shard) if weight.dim() == 3 else self._matrix(name, weight, shard)

    def _quantise_experts(self, name: str, weight: Tensor, shard: Shard) -> Weight:
        raise NotImplementedError

    def _matrix(self, name: str, weight: Tensor, shard: Shard) -> Weight:
        raise NotImplementedError


class HostForm(_ModelForm):
    """How a CPU holds the weights of a model lowered for ``Target.CPU``."""

    def __init__(self, model: LoweredModel, to: Quantization) -> None:
        """Raises ConfigError: this processor does not run the model with ``to``."""
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
        super().__init__(model, to, runs)

    def _quantise_experts(self, name: str, weight: Tensor, shard: Shard) -> ExpertCodes:
        return ExpertCodes(tuple(quantise_experts(name, weight, self._to, shard)))

    def _matrix(self, name: str, weight: Tensor, shard: Shard) -> Codes:
        return quantise(name, weight, self._to, shard)

    def keep_codes(self, name: str, codes: Codes, dtype: torch.dtype) -> Codes | None:
        return codes if name in self._linear and dtype == torch.bfloat16 and can_pack(codes) else None

    def hold_experts(self, codes: ExpertCodes, dtype: torch.dtype) -> ExpertCodes | None:
        return codes if dtype == torch.bfloat16 and all(map(can_pack, codes.each)) else None


def takes_byte_rows(tensors: Mapping[str, Weight]) -> bool:
    """Return whether this CPU multiplies some of these weights by activations of 8 bits."""
    held = [weight for weight in tensors.values() if isinstance(weight, Codes | ExpertCodes)]
    codes = [one for weight in held for one in (weight.each if isinstance(weight, ExpertCodes) else [weight])]
    return _native.linear_takes_byte_rows() and any(map(x_group, codes))


def require_byte_rows(tensors: Mapping[str, Weight]) -> None:
    """Raise ConfigError if a CPU multiplies none of these weights by activations of 8 bits."""
    if not _native.linear_takes_byte_rows():
        raise ConfigError(
            "--activation-dtype int8 needs AVX-512 with bfloat16 and VNNI, which this processor lacks: leave it out"
        )
    if not takes_byte_rows(tensors):
        raise ConfigError(
            f"--activation-dtype int8 concerns weights held as int8 or int4 in groups that are multiples of 16 inputs, "
            f"of which this model has none among {len(tensors)}: give --quantization int8 or int4, or leave it out"
        )


class PlacedForm(_ModelForm):
    """How a GPU, or an emulated one, holds the weights of a model lowered for ``Target.GPU``.

    Codes that a checkpoint stores stay as they are if Lamina's product keeps their values (``stacked_group``): with a
    scale for each output, or in groups of 32 inputs or more, which may be scattered (``desc_act``).
    """

    def __init__(self, model: LoweredModel, to: Quantization, place: torch.device) -> None:
        """Raises ConfigError: ``to`` does not run on ``place``."""
        if to == "int4" and (place.type != "cuda" or model.dtype is not DType.BFLOAT16):
            raise ConfigError(
                f"int4 weights run on NVIDIA GPUs in bfloat16, not on {place.type} in {model.dtype.value}: give "
                "--dtype bfloat16, or --quantization int8"
            )
        if to == "int4" and torch.cuda.get_device_capability(place) < (8, 0):
            raise ConfigError(
                f"int4 weights need a GPU of compute capability 8.0 or later; {torch.cuda.get_device_name(place)} has "
                "less: give --quantization int8"
            )
        if to == "int4" and importlib.util.find_spec("torchao") is None:
            raise ConfigError("--quantization int4 on a GPU needs torchao: run pip install torchao")
        super().__init__(model, to)

    def _quantise_experts(self, name: str, weight: Tensor, shard: Shard) -> StackedCodes:
        count = sum(stop - start for start, stop in shard[0]) if 0 in shard else len(weight)
        return StackedCodes.stack(quantise_experts(name, weight, self._to, shard), count)

    def _matrix(self, name: str, weight: Tensor, shard: Shard) -> LibraryWeight | StackedCodes:
        if self._to == "int4":
            from torchao.quantization import Int4TilePackedTo4dTensor

            block = [1, group_size(name, weight.shape[1], shard)]
            return LibraryWeight(Int4TilePackedTo4dTensor.from_hp(cut(weight, shard).contiguous(), block))
        return StackedCodes.stack([quantise(name, weight, self._to, shard)], 1)

    def keep_codes(self, name: str, codes: Codes, dtype: torch.dtype) -> StackedCodes | None:
        fits = name in self._linear and stacked_group(codes) is not None
        return StackedCodes.stack([codes], 1) if fits else None

    def hold_experts(self, codes: ExpertCodes, dtype: torch.dtype) -> StackedCodes | None:
        groups = set(map(stacked_group, codes.each))
        return StackedCodes.stack(codes.each, len(codes.each)) if len(groups) == 1 and None not in groups else None
