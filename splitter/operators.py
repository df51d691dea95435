"""Records a model's operators as one graph while the model runs once on fake tensors.

``torch.export`` runs a model three times for this: to trace it, to find in-place writes, and to make them functional.
This module runs functional operators from the start, in a quarter of the time, which dominated the first start. The
number of tokens is a symbol; models that work only with certain numbers of tokens are rejected.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.functions import FloorDiv

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
        ids, positions: the placeholders of the model's inputs.
        tensors: placeholder name -> name of a parameter or buffer of the model.
        literals: placeholder name -> value, of tensors that the model's code creates from numbers.
    """

    graph: fx.Graph
    ids: fx.Node
    positions: fx.Node
    tensors: Mapping[str, str]
    literals: Mapping[str, Tensor]


def write_operators(model: nn.Module, mode: FakeTensorMode, writes_in_place: bool) -> Operators:
    """Run ``model`` on ids and positions, int64 [T], and record the operators that compute the tensor it returns.

    Its parameters and buffers are fake tensors of ``mode``, which has symbolic shapes; ``writes_in_place`` says
    whether it writes any tensor in place. Call it without gradients.

    Raises OperatorsError, and what the model raises.
    """
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    example = torch.zeros(EXAMPLE_ROWS, dtype=torch.long)
    ids = mode.from_tensor(example, symbolic_context=dynamic, source=ConstantSource("ids"))
    positions = ids.new_empty(ids.shape)
    writer = _Writer()
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {writer.take_in(tensor, name.replace(".", "_")).name: name for name, tensor in named}
    inputs = writer.take_in(ids, "ids"), writer.take_in(positions, "positions")
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


@torch.library.custom_op("lamina::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise AssertionError("lamina::linear marks a linear layer while a model is captured; it must not be executed")


@_linear.register_fake
def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class _WholeLinears(TorchFunctionMode):
    """Keeps linear layers as one operator; torch would decompose them before a dispatch mode sees them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            return _linear_of(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear_of(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.lamina.linear.default(input, weight, bias)
    return out


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

    def take_in(self, tensor: Tensor, name: str) -> fx.Node:
        """Add an input to the graph."""
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
        """Return the graph of ``result``."""
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
        target = aten.linear.default if func is torch.ops.lamina.linear.default else func
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
        node = self.take_in(tensor, f"literal_{len(self.literals)}")
        self.literals[node.name] = tensor
        return node

    def _described(self, value: Any) -> Any:
        """Return an argument with nodes in place of tensors and sizes."""
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
    """Paths of the modules that are running, the innermost last."""
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
