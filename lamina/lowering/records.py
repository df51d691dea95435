"""Converts lowered models to records for a file, and back. Records hold names and numbers, no code.

A name that is read is looked up among the functions that lowered graphs may call; it is never evaluated or imported.
"""

import importlib
import keyword
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor, fx

from lamina.lowering import native_operators
from lamina.lowering.expert_operators import FALLBACK
from lamina.lowering.fuse import METHODS
from lamina.splitter.markers import ALL_REDUCE

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
    """One node of a graph. In ``args`` and ``kwargs``, the first element of a list is its kind (``_encode``)."""

    op: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]


def encode(value: Any) -> Any:
    """Convert graphs, tensors and element types of a ``LoweredModel`` for msgspec, as its ``enc_hook``.

    Raises NotStorableError: a graph has a target or an argument of an unknown kind.
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return safetensors.torch.save({"": value.clone().contiguous()})
    if isinstance(value, fx.GraphModule):
        return store_graph(value.graph)
    raise NotStorableError(f"records cannot hold a {type(value).__name__}")


def decode(kind: type, stored: Any) -> Any:
    """Convert back a result of ``encode``, as msgspec's ``dec_hook``.

    Raises NotStorableError: a graph is invalid or calls something not allowed.
    """
    if kind is Tensor:
        return safetensors.torch.load(stored)[""]
    if kind is fx.GraphModule:
        return restore_graph(msgspec.convert(stored, list[StoredNode]))
    dtype = getattr(torch, str(stored), None)
    if not isinstance(dtype, torch.dtype):
        raise NotStorableError(f"torch has no dtype {stored!r}")
    return dtype


def store_graph(graph: fx.Graph) -> list[StoredNode]:
    """Return the record of a graph. Raises NotStorableError."""
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


def restore_graph(stored: Sequence[StoredNode]) -> fx.GraphModule:
    """Return the graph of a record, as a module. Raises NotStorableError."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for node in stored:
        _require(all(map(_is_name, node.kwargs)), f"argument names {sorted(node.kwargs)}")
        arguments = tuple(_decode(argument, nodes) for argument in node.args)
        named = {key: _decode(argument, nodes) for key, argument in node.kwargs.items()}
        nodes.append(graph.create_node(node.op, _target(node), arguments, named))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Slice")


def _target_name(node: fx.Node) -> str:
    known = _FUNCTION_NAMES.get(node.target) if callable(node.target) else None
    name = known or str(node.target)
    found = _target(StoredNode(node.op, name, [], {}))
    _require(found == node.target, f"a call of {node.target}")
    return name


def _target(node: StoredNode) -> Any:
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
    """Return numbers, strings and None unchanged, everything else as a list that begins with its kind."""
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
