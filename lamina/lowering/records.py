"""Converts lowered models to records that can be written to a file, and back: names and numbers, no code.

A name that is read is looked up in lists of what lowered graphs may call; it is never evaluated or imported.
"""

import importlib
import keyword
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import fx

from lamina.core.types import AttentionSpec, DType
from lamina.lowering import native_operators
from lamina.lowering.cpu_slices import LoweredModel, LoweredPart, SliceGraphs
from lamina.lowering.expert_operators import FALLBACK
from lamina.lowering.fuse import METHODS
from lamina.splitter.collective import ALL_REDUCE
from lamina.splitter.parts import Runs
from lamina.splitter.split_model import Crossing

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(operator.add, operator.floordiv, operator.getitem, operator.mul, operator.sub),
        *(native_operators.add_rms_norm, native_operators.gate, native_operators.rms_norm, native_operators.rotate),
        *(native_operators.linear_native, native_operators.linear_onednn),
    )
}
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_METHOD_NAMES = frozenset(METHODS.values())
_TORCH_TYPES = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class NotStorableError(ValueError):
    """A lowered model contains something that records cannot represent, or a record is invalid."""


class StoredNode(msgspec.Struct, array_like=True):
    """One node of a graph; in ``args`` and ``kwargs`` a list is tagged by its first element, see ``_encode``."""

    op: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]


class StoredGraphs(msgspec.Struct):
    """``SliceGraphs``."""

    main: list[StoredNode]
    prelude: list[StoredNode] | None
    packed: list[int]


class StoredPart(msgspec.Struct):
    """``LoweredPart``; ``graphs`` is the index of its graphs in the model's list."""

    graphs: int
    weights: tuple[str, ...]
    constants: tuple[str, ...]
    last: bool


class StoredModel(msgspec.Struct):
    """``LoweredModel``; ``constants`` in the safetensors format. Holds ``torch.dtype`` values."""

    dtype: DType
    graphs: list[StoredGraphs]
    parts: list[StoredPart]
    contexts: tuple[tuple[Crossing, ...], ...]
    attentions: tuple[AttentionSpec, ...]
    sinks: tuple[str | None, ...]
    weights: tuple[str, ...]
    positions: int
    vocabulary: int
    constants: bytes
    shards: dict[str, dict[int, Runs]]
    whole: tuple[AttentionSpec, ...]


def store(model: LoweredModel) -> StoredModel:
    """Return the record of ``model``. Raises NotStorableError: its graphs have a target or an argument of an unknown
    kind."""
    places: dict[int, int] = {}
    graphs: list[StoredGraphs] = []
    for part in model.parts:
        if id(part.graphs) not in places:
            places[id(part.graphs)] = len(graphs)
            prelude = part.graphs.prelude
            graphs.append(
                StoredGraphs(
                    _store_graph(part.graphs.main.graph),
                    None if prelude is None else _store_graph(prelude.graph),
                    sorted(part.graphs.packed),
                )
            )
    return StoredModel(
        dtype=model.dtype,
        graphs=graphs,
        parts=[StoredPart(places[id(part.graphs)], part.weights, part.constants, part.last) for part in model.parts],
        contexts=model.contexts,
        attentions=model.attentions,
        sinks=model.sinks,
        weights=model.weights,
        positions=model.positions,
        vocabulary=model.vocabulary,
        constants=safetensors.torch.save({name: value.clone().contiguous() for name, value in model.constants.items()}),
        shards={name: dict(shard) for name, shard in model.shards.items()},
        whole=model.whole,
    )


def restore(stored: StoredModel) -> LoweredModel:
    """Return the model that ``store`` got. Raises NotStorableError: a graph is invalid or calls something not
    allowed."""
    graphs = [
        SliceGraphs(
            _restore_graph(graph.main, "Slice"),
            None if graph.prelude is None else _restore_graph(graph.prelude, "Prelude"),
            frozenset(graph.packed),
        )
        for graph in stored.graphs
    ]
    _require(all(0 <= part.graphs < len(graphs) for part in stored.parts), "graphs with such an index")
    return LoweredModel(
        dtype=stored.dtype,
        parts=tuple(LoweredPart(graphs[part.graphs], part.weights, part.constants, part.last) for part in stored.parts),
        contexts=stored.contexts,
        attentions=stored.attentions,
        sinks=stored.sinks,
        weights=stored.weights,
        positions=stored.positions,
        vocabulary=stored.vocabulary,
        constants=safetensors.torch.load(stored.constants),
        shards=stored.shards,
        whole=stored.whole,
    )


def encode_dtype(value: Any) -> str:
    """msgspec's ``enc_hook`` for records."""
    if not isinstance(value, torch.dtype):
        raise NotStorableError(f"records cannot hold a {type(value).__name__}")
    return str(value).removeprefix("torch.")


def decode_dtype(_: type, name: Any) -> torch.dtype:
    """msgspec's ``dec_hook`` for records."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise NotStorableError(f"torch has no dtype {name!r}")
    return dtype


def _store_graph(graph: fx.Graph) -> list[StoredNode]:
    number = {node: place for place, node in enumerate(graph.nodes)}
    return [
        StoredNode(
            node.op,
            _target_name(node),
            [_encode(argument, number) for argument in node.args],
            {name: _encode(argument, number) for name, argument in node.kwargs.items()},
        )
        for node in graph.nodes
    ]


def _restore_graph(stored: Sequence[StoredNode], name: str) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for node in stored:
        _require(all(map(_is_name, node.kwargs)), f"argument names {sorted(node.kwargs)}")
        arguments = tuple(_decode(argument, nodes) for argument in node.args)
        named = {key: _decode(argument, nodes) for key, argument in node.kwargs.items()}
        nodes.append(graph.create_node(node.op, _target(node), arguments, named))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name)


def _target_name(node: fx.Node) -> str:
    known = _FUNCTION_NAMES.get(node.target) if callable(node.target) else None
    name = known or str(node.target)
    found = _target(StoredNode(node.op, name, [], {}))
    _require(found == node.target, f"a call of {node.target}")
    return name


def _target(node: StoredNode) -> Any:
    """Return the function or method a node calls, or the name of an input."""
    match node.op:
        case "placeholder" | "output" if _is_name(node.target):
            return node.target
        case "call_method" if node.target in _METHOD_NAMES:
            return node.target
        case "call_function" if node.target in _FUNCTIONS:
            return _FUNCTIONS[node.target]
        case "call_function" if node.target == FALLBACK:
            importlib.import_module("transformers.integrations.moe")  # registers it
            return torch.ops.transformers.grouped_mm_fallback.default
        case "call_function" if node.target == str(ALL_REDUCE):
            return ALL_REDUCE
        case "call_function" if node.target.startswith("aten.") and node.target.count(".") == 2:
            _, operation, overload = node.target.split(".")
            found = getattr(getattr(torch.ops.aten, operation, None), overload, None)
            if isinstance(found, torch._ops.OpOverload):
                return found
    raise NotStorableError(f"lowered graphs have no {node.op} of {node.target!r}")


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _encode(argument: Any, number: Mapping[fx.Node, int]) -> Any:
    """Numbers, strings and None unchanged; everything else as a list that begins with its kind."""
    if argument is None or type(argument) in (bool, int, float, str):
        return argument
    if isinstance(argument, fx.Node):
        return ["node", number[argument]]
    if isinstance(argument, list | tuple):
        kind = "list" if isinstance(argument, list) else "tuple"
        return [kind, *(_encode(item, number) for item in argument)]
    if isinstance(argument, slice):
        return ["slice", *(_encode(item, number) for item in (argument.start, argument.stop, argument.step))]
    if isinstance(argument, torch.device):
        return ["device", str(argument)]
    for kind, torch_type in _TORCH_TYPES.items():
        if isinstance(argument, torch_type):
            return [kind, str(argument).removeprefix("torch.")]
    raise NotStorableError(f"lowered graphs have no argument of type {type(argument).__name__}")


def _decode(stored: Any, nodes: Sequence[fx.Node]) -> Any:
    match stored:
        case None | bool() | int() | float() | str():
            return stored
        case ["node", int(place)] if 0 <= place < len(nodes):
            return nodes[place]
        case ["list" | "tuple" | "slice" as kind, *items] if kind != "slice" or len(items) == 3:
            decoded = [_decode(item, nodes) for item in items]
            return decoded if kind == "list" else tuple(decoded) if kind == "tuple" else slice(*decoded)
        case ["device", "cpu"]:
            return torch.device("cpu")
        case ["dtype" | "layout" | "memory_format" as kind, str(name)]:
            value = getattr(torch, name, None)
            if isinstance(value, _TORCH_TYPES[kind]):
                return value
    raise NotStorableError(f"lowered graphs have no argument {stored!r}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise NotStorableError(f"lowered graphs have no {what}")
