"""Records the operators that a model runs on fake tensors: as one graph (``write_operators``), and to find equal layers
(``LayerRecorder``).

``torch.export`` runs a model three times: to trace it, to find in-place writes, and to make them functional. This
module runs functional operators from the start, in a quarter of the time, which dominated the first start of a model.
The number of tokens is a symbol; models that work only with certain numbers of tokens are rejected.
"""

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.functions import FloorDiv
from transformers.modeling_utils import PreTrainedModel

from lamina.splitter.markers import ATTENTION, LINEAR

aten = torch.ops.aten
EXAMPLE_ROWS = 5
_CONDITIONS_HOLD_FOR = (2, 3, 4, 7, 8, 64, 1000, 1 << 20)
_ARITHMETIC: Mapping[type, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
}


class OperatorsError(ValueError):
    """The model is not a fixed sequence of functional operators for every number of tokens."""


@dataclass(frozen=True)
class Operators:
    """The recorded operators of a model.

    Attributes:
        graph: placeholders, functional operators, one output. A node's ``meta["val"]`` is its fake tensor,
            ``meta["path"]`` the path of the module whose code called the operator; ``meta["size"]`` of a node that
            computes a size is the symbolic expression.
        ids: placeholder of the token ids.
        positions: placeholder of the positions.
        tensors: placeholder name -> name of a parameter or buffer of the model.
        literals: placeholder name -> value, for tensors that the model's code creates from numbers.
    """

    graph: fx.Graph
    ids: fx.Node
    positions: fx.Node
    tensors: Mapping[str, str]
    literals: Mapping[str, Tensor]


def write_operators(model: nn.Module, mode: FakeTensorMode, writes_in_place: bool) -> Operators:
    """Run ``model`` on ids and positions, int64 [T], and record the operators that compute its result.

    Its parameters and buffers must be fake tensors of ``mode``, which has symbolic shapes, and gradients disabled.
    ``writes_in_place``: the model writes tensors in place.

    Raises OperatorsError, and any exception of the model.
    """
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    example = torch.zeros(EXAMPLE_ROWS, dtype=torch.long)
    ids = mode.from_tensor(example, symbolic_context=dynamic, source=ConstantSource("ids"))
    positions = ids.new_empty(ids.shape)
    writer = _Writer()
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {writer.add_input(tensor, name.replace(".", "_")).name: name for name, tensor in named}
    inputs = writer.add_input(ids, "ids"), writer.add_input(positions, "positions")
    writer.count_rows(inputs[0])
    with (
        enable_python_dispatcher(),
        _compiling_state_context(),
        _running(model) as writer.path,
        mode,
        writer,
        _WholeLinears(),
    ):
        result = (torch.func.functionalize(model) if writes_in_place else model)(ids, positions)
    graph = writer.build(result)
    _require_any_number_of_rows(ids)
    return Operators(graph, *inputs, tensors, writer.literals)


def _require_any_number_of_rows(ids: Tensor) -> None:
    rows: Any = ids.shape[0]
    if not isinstance(rows, torch.SymInt) or not rows.node.expr.is_Symbol:
        raise OperatorsError(f"it works only with {rows} tokens at a time")
    for guard in rows.node.shape_env.guards:
        failing = [count for count in _CONDITIONS_HOLD_FOR if guard.expr.subs(rows.node.expr, count) != sympy.true]
        if failing:
            raise OperatorsError(f"it requires {guard.expr} for the number of tokens, which {failing[0]} violates")


class _WholeLinears(TorchFunctionMode):
    """Keeps linear layers as one operator; torch would decompose them before a dispatch mode sees them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (LINEAR if func is nn.functional.linear else func)(*args, **(kwargs or {}))


class _Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run inside it. Enter it inside the fake tensor mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path: list[str] = []
        self.literals: dict[str, Tensor] = {}
        self._graph = fx.Graph()
        self._inputs = self._graph.create_node("placeholder", "inputs")  # in front of all inputs, until they are known
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # so that no id() is reused
        self._sizes: dict[sympy.Expr, fx.Node] = {}

    def add_input(self, tensor: Tensor, name: str) -> fx.Node:
        with self._graph.inserting_before(self._inputs):
            node = self._graph.placeholder(name)
        self._assign(tensor, node)
        return node

    def count_rows(self, node: fx.Node) -> None:
        """Use the first dimension of ``node``'s tensor [T] for every number of rows."""
        rows: Any = node.meta["val"].shape[0]
        count = self._graph.call_function(aten.sym_size.int, (node, 0))
        count.meta |= {"val": rows, "size": rows.node.expr}
        self._sizes[rows.node.expr] = count

    def build(self, result: Tensor) -> fx.Graph:
        self._graph.output(self._node(result))
        self._graph.erase_node(self._inputs)
        self._graph.eliminate_dead_code()
        self._graph.lint()
        return self._graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = list(out) if isinstance(out, list | tuple) else [out]
        if not any(isinstance(result, Tensor) for result in results):
            return out
        if func is aten.detach.default:  # a no-op, since nothing is written in place
            self._assign(out, self._node(args[0]))
            return out
        if func._schema.is_mutable:
            raise OperatorsError(f"{self.path[-1]} writes into a weight or buffer, by {func}")
        target = aten.linear.default if func is LINEAR else func
        node = self._graph.call_function(target, self._described(args), self._described(kwargs))
        node.meta["path"] = self.path[-1]
        if isinstance(out, Tensor):
            self._assign(out, node)
            return out
        node.meta["val"] = out
        for place, result in enumerate(results):
            if isinstance(result, Tensor):
                item = self._graph.call_function(operator.getitem, (node, place))
                item.meta["path"] = self.path[-1]
                self._assign(result, item)
        return out

    def _assign(self, tensor: Tensor, node: fx.Node) -> None:
        self._alive.append(tensor)
        self._nodes[id(tensor)] = node
        node.meta["val"] = tensor

    def _node(self, tensor: Tensor) -> fx.Node:
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        if isinstance(tensor, FakeTensor):
            raise OperatorsError(f"{self.path[-1]} uses a tensor {list(tensor.shape)} of unknown origin")
        node = self.add_input(tensor, f"literal_{len(self.literals)}")
        self.literals[node.name] = tensor
        return node

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, torch.SymInt):
            return self._size(value.node.expr)
        if isinstance(value, list | tuple):
            return type(value)(self._described(item) for item in value)
        if isinstance(value, dict):
            return {name: self._described(item) for name, item in value.items()}
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise OperatorsError(f"{self.path[-1]} computes {value} from the number of tokens")
        return value

    def _size(self, expression: sympy.Expr) -> fx.Node | int:
        """Return the node that computes a size from the number of rows."""
        if expression.is_Integer:
            return int(expression)
        if expression in self._sizes:
            return self._sizes[expression]
        function = _ARITHMETIC.get(type(expression))
        if function is None:
            raise OperatorsError(f"{self.path[-1]} uses the size {expression}")
        total, *rest = (self._size(term) for term in expression.args)
        for term in rest:
            total = self._graph.call_function(function, (total, term))
        assert isinstance(total, fx.Node)
        total.meta["size"] = expression
        self._sizes[expression] = total
        return total


@contextmanager
def _running(model: nn.Module) -> Iterator[list[str]]:
    """Provide the list of paths of the modules that are running, the innermost last."""
    paths: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: paths.append(name)

    def leave(*_: Any) -> None:
        paths.pop()

    handles = [module.register_forward_pre_hook(enter(name)) for name, module in model.named_modules()]
    handles += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        yield paths
    finally:
        for handle in handles:
            handle.remove()


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def shift(name: str, layers: int) -> str:
    """Return the name of the same weight ``layers`` layers later; names without a layer do not change."""
    return _LAYER.sub(lambda match: str(int(match.group()) + layers), name, count=1)


def relative(name: str, layer: int) -> str:
    """Return the name with its layer relative to ``layer``: equal for corresponding weights of different layers."""
    return _LAYER.sub(lambda match: f"{int(match.group()) - layer:+d}", name, count=1)


Record = Hashable
_Name = Callable[[int], Hashable]  # index of the stretch that uses a tensor -> name of the tensor in that stretch


def _weight(name: str) -> _Name:
    return lambda user: ("weight", relative(name, user))


def _global(name: Hashable) -> _Name:
    return lambda user: ("global", name)


def _value(stretch: int, place: Hashable) -> _Name:
    return lambda user: ("value", stretch - user, place)


class LayerRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run inside it, by *stretch*: the operators from one attention to the next.

    Enter it inside the fake tensor mode of ``model``. Layers with equal stretches are equal. Tensors that depend only
    on the model's inputs (positions, cos, sin) have the same name everywhere, and their operators are not recorded: a
    model may compute them once or in every layer.

    Attributes:
        writes_in_place: True once an operator has written a tensor in place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes_in_place = False
        self._stretches: list[list[Hashable]] = [[]]
        self._names: dict[int, _Name] = {}
        self._global: dict[Hashable, int] = {}  # values that depend only on inputs, numbered by how they are computed
        self._alive: list[Tensor] = []  # so that no id() is reused
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            self._assign(weight, _weight(name))
        for name, buffer in model.named_non_persistent_buffers():
            if relative(name, 0) == name:  # belongs to no layer: inv_freq of the whole model
                self._assign(buffer, _global(name))

    @property
    def attentions(self) -> int:
        return len(self._stretches) - 1

    def records(self) -> tuple[Record, ...]:
        """Return ``attentions + 1`` records, one per stretch; an attention belongs to the stretch that it ends."""
        return tuple(tuple(stretch) for stretch in self._stretches)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.writes_in_place |= func._schema.is_mutable
        out = func(*args, **kwargs)
        entry = (str(func), self._describe((args, kwargs)))
        outputs = [
            tensor for tensor in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(tensor, Tensor)
        ]
        if _depends_on_inputs_alone(entry):
            for index, tensor in enumerate(outputs):
                number = self._global.setdefault((entry, index), len(self._global))
                self._assign(tensor, _global(number))
            return out
        stretch = len(self._stretches) - 1
        place = len(self._stretches[-1])
        self._stretches[-1].append(entry)
        for index, tensor in enumerate(outputs):
            self._assign(tensor, _value(stretch, (place, index)))
        if func is ATTENTION:
            self._stretches.append([])
        return out

    def _assign(self, tensor: Tensor, name: _Name) -> None:
        self._alive.append(tensor)
        self._names[id(tensor)] = name

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            name = self._names.get(id(value))
            return name(len(self._stretches) - 1) if name else ("global", *_unnamed(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._describe(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._describe(item)) for key, item in value.items())
        return repr(value)


def _unnamed(tensor: Tensor) -> tuple[Hashable, ...]:
    """Describe a tensor that the model's code created: with its values, unless it is a fake tensor."""
    if isinstance(tensor, FakeTensor):
        return tuple(tensor.shape), str(tensor.dtype)
    with unset_fake_temporarily():
        return tuple(tensor.shape), str(tensor.dtype), repr(tensor.tolist())


def _depends_on_inputs_alone(entry: Hashable) -> bool:
    """True if an operator's description contains no weight and no recorded value."""
    if not isinstance(entry, tuple):
        return True
    if entry and entry[0] in ("weight", "value"):
        return False
    return all(_depends_on_inputs_alone(item) for item in entry)


def shortest_prefix(records: Sequence[Record]) -> int:
    """Return how many layers must be captured so that every slice of the whole model occurs among them.

    A slice depends on its own stretch and the two neighbouring ones, because the cut moves nodes across attentions.
    The shortened model keeps its head: the last record follows its last layer.
    """
    layers = len(records) - 1
    wanted = set(_triples(records))
    for count in range(1, layers):
        if wanted <= set(_triples([*records[:count], records[-1]])):
            return count
    return layers


def representatives(records: Sequence[Record], prefix: int) -> tuple[int, ...]:
    """Return, for every slice of the whole model, the equal slice of the model cut down to ``prefix`` layers."""
    places = {triple: index for index, triple in reversed(list(enumerate(_triples([*records[:prefix], records[-1]]))))}
    return tuple(places[triple] for triple in _triples(records))


def _triples(records: Sequence[Record]) -> list[tuple[Record, Record, Record]]:
    padded = [None, *records, None]
    return [(padded[i - 1], padded[i], padded[i + 1]) for i in range(1, len(padded) - 1)]
