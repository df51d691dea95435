"""Graph passes that replace groups of operators by one native call each, found by their structure.

A pattern is matched from its characteristic operator (rsqrt, neg, silu), backwards and forwards. Replaced nodes without
users are removed. Nothing is replaced unless shapes and element types are known to match.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from lamina.lowering import native_operators

aten = torch.ops.aten
_END = 2**63 - 1


def fuse(module: fx.GraphModule) -> None:
    """Rewrite the graph of ``module`` in place, with the same results up to rounding in float32."""
    for rewrite in (_fuse_norms, _fuse_rotations, _fuse_gates, _join_views, _call_directly):
        rewrite(module.graph)
        module.graph.eliminate_dead_code()
        module.graph.lint()
    module.recompile()


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _value(node: Any) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _alike(a: Any, b: Any) -> bool:
    """Return whether both are tensors of the same shape and of the same element type, which kernels support."""
    x, y = _value(a), _value(b)
    return x is not None and y is not None and x.shape == y.shape and x.dtype == y.dtype and _known(x.dtype)


def _known(dtype: torch.dtype) -> bool:
    return dtype in native_operators.ELEMENT_TYPES


def _operands(node: Any, target: Any) -> tuple[tuple[Any, Any], ...]:
    """Return the two operands of a commutative operator in both orders; empty for any other node."""
    if not _is(node, target) or node.kwargs or len(node.args) != 2:
        return ()
    a, b = node.args
    return (a, b), (b, a)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _cast_source(node: Any, to: torch.dtype | None = None) -> Any:
    """Return the operand if ``node`` is a cast (to ``to``, if given), else ``node`` itself."""
    if not _is(node, aten._to_copy.default) or not {"dtype"} <= set(node.kwargs) <= {"dtype", "layout", "device"}:
        return node  # device and layout are those of all tensors
    return node.args[0] if to in (None, node.kwargs["dtype"]) else node


_Norm = tuple[fx.Node, fx.Node, tuple[fx.Node, float, float, bool]]
"""Result, x, and the arguments of ``native_operators.rms_norm`` from the weight on."""


def _fuse_norms(graph: fx.Graph) -> None:
    for root in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        norm = _match_norm(root)
        if norm is None:
            continue
        result, x, settings = norm
        if _operands(x, aten.add.Tensor) and _alike(*x.args) and _alike(x, x.args[0]):
            with graph.inserting_before(x):
                both = graph.call_function(native_operators.add_rms_norm, (*x.args, *settings))
                total = graph.call_function(operator.getitem, (both, 0))
                fused = graph.call_function(operator.getitem, (both, 1))
            total.meta = x.meta
            x.replace_all_uses_with(total)
        else:
            with graph.inserting_before(result):
                fused = graph.call_function(native_operators.rms_norm, (x, *settings))
        fused.meta = result.meta
        result.replace_all_uses_with(fused)


def _match_norm(root: fx.Node) -> _Norm | None:
    """Match x * rsqrt(mean(x ** 2) + epsilon) in float32, times a weight before or after the cast to x's type."""
    for mean, epsilon in _operands(root.args[0], aten.add.Tensor):
        if not (_is(mean, aten.mean.dim) and mean.args[1:] == ([-1], True) and isinstance(epsilon, float)):
            continue
        square = mean.args[0]
        if not (_is(square, aten.pow.Tensor_Scalar) and square.args[1] == 2):
            continue
        wide = square.args[0]
        scaled = _only_user(root)
        x = _cast_source(wide, torch.float32)
        value, widened = _value(x), _value(wide)
        if scaled is None or value is None or widened is None or widened.dtype != torch.float32:
            continue
        if not _known(value.dtype) or (wide, root) not in _operands(scaled, aten.mul.Tensor):
            continue
        return _match_weight(scaled, x, value, float(epsilon))
    return None


def _match_weight(scaled: fx.Node, x: fx.Node, value: Tensor, epsilon: float) -> _Norm | None:
    rounded = _only_user(scaled)
    early = rounded is not None and _cast_source(rounded) is scaled
    normed = rounded if early else scaled
    product = _only_user(normed) if normed is not None else None
    for factor, other in _operands(product, aten.mul.Tensor):
        if other is not normed or product is None:
            continue
        weight, offset = _match_offset(factor)
        size = _value(weight)
        if size is None or weight.op != "placeholder" or size.shape != value.shape[-1:] or size.dtype != value.dtype:
            continue
        if early and (offset or factor is not weight):  # an offset would be added in the narrow type
            continue
        result = product
        narrowed = _only_user(product)
        if not early and narrowed is not None and _cast_source(narrowed) is product:
            result = narrowed
        if _alike(result, x):
            return result, x, (weight, epsilon, offset, early)
    return None


def _match_offset(factor: Any) -> tuple[Any, float]:
    """Return the weight, and the number added to it in float32."""
    for term, number in _operands(factor, aten.add.Tensor):
        if isinstance(number, int | float):
            return _cast_source(term, torch.float32), float(number)
    return _cast_source(factor, torch.float32), 0.0


def _fuse_rotations(graph: fx.Graph) -> None:
    """Fuse x * cos + rotate_half(x) * sin of x [1, H, T, D], with the transpositions from [1, T, H, D] to [T, H, D]."""
    for root in graph.find_nodes(op="call_function", target=aten.neg.default):
        match = _match_rotation(root)
        if match is None:
            continue
        result, x, cosines, sines = match
        value = _value(x)
        if value is None or not _is(x, aten.transpose.int) or x.args[1:] not in ((1, 2), (2, 1)):
            continue
        if not isinstance(value.shape[1], int):  # tokens, not heads
            continue
        source = _before_split_of_heads(x.args[0])
        with graph.inserting_before(result):
            fused = graph.call_function(native_operators.rotate, (source, cosines, sines, value.shape[1]))
            transposed = graph.call_function(aten.transpose.int, (fused, 0, 1))
            whole = graph.call_function(aten.unsqueeze.default, (transposed, 0))
        fused.meta = {"val": value[0].transpose(0, 1)}
        transposed.meta, whole.meta = {"val": value[0]}, result.meta
        result.replace_all_uses_with(whole)


def _match_rotation(root: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """Return result, x, cosines and sines around the negation ``root`` in rotate_half."""
    upper, cat = root.args[0], _only_user(root)
    if not isinstance(upper, fx.Node) or cat is None:
        return None
    if not (_is(upper, aten.slice.Tensor) and _is(cat, aten.cat.default)):
        return None
    part = upper.args[0]
    value = _value(part)
    product = _only_user(cat)
    total = _only_user(product) if product is not None else None
    if value is None or value.dim() != 4 or total is None or not isinstance(part, fx.Node):
        return None
    if not _is_rotated_half(cat, root, part, value.shape[-1]):
        return None
    for half, sines in _operands(product, aten.mul.Tensor):
        for straight, turned in _operands(total, aten.add.Tensor):
            for whole, cosines in _operands(straight, aten.mul.Tensor):
                if half is cat and turned is product and whole is part and _are_angles(cosines, sines, value):
                    return _with_rest(total, part, cosines, sines)
    return None


def _is_rotated_half(cat: fx.Node, negated: fx.Node, part: fx.Node, size: int) -> bool:
    """Return whether ``cat``, which uses ``negated``, is cat([-upper half, lower half]) of ``part``."""
    halves: Any = cat.args[0]
    return (
        len(halves) == 2
        and cat.args[1:] in ((-1,), (3,))
        and _is_slice(negated.args[0], part, size // 2, size)
        and _is_slice(halves[1], part, 0, size // 2)
        and size % 2 == 0
    )


def _is_slice(node: Any, of: fx.Node, start: int, end: int) -> bool:
    """Return whether ``node`` is of[..., start:end], ``end`` being at most the size of a tensor of rank 4."""
    if not _is(node, aten.slice.Tensor) or node.args[0] is not of or len(node.args) != 4:
        return False
    _, dim, first, last = node.args
    size = _value(of)
    if size is None or dim not in (-1, 3) or first != start:
        return False
    return bool(last == end or (last == _END and end == size.shape[-1]))


def _are_angles(cosines: Any, sines: Any, x: Tensor) -> bool:
    """Return whether both are [1, 1, T, R] for x [1, H, T, R]."""
    value = _value(cosines)
    shape = (1, 1, *x.shape[2:])
    return value is not None and value.dtype == x.dtype and tuple(value.shape) == shape and _alike(cosines, sines)


def _with_rest(
    total: fx.Node, part: fx.Node, cosines: fx.Node, sines: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Return the nodes for whole heads if elements of a head that are not rotated follow; else the nodes as given."""
    whole = part.args[0] if _is(part, aten.slice.Tensor, aten.alias.default) else None
    cat, size, rotated = _only_user(total), _value(whole), _value(part)
    if not isinstance(whole, fx.Node) or cat is None or size is None or rotated is None:
        return total, part, cosines, sines
    if _is(cat, aten.cat.default):
        pieces: Any = cat.args[0]
        first = part.target is aten.alias.default or _is_slice(part, whole, 0, rotated.shape[-1])
        rest = len(pieces) == 2 and _is_slice(pieces[1], whole, rotated.shape[-1], size.shape[-1])
        if first and rest and pieces[0] is total and cat.args[1:] in ((-1,), (3,)):
            return cat, whole, cosines, sines
    return total, part, cosines, sines


def _before_split_of_heads(x: Any) -> Any:
    """Return the value [1, T, H * D] of which ``x`` [1, T, H, D] is a view, or ``x``."""
    source = x.args[0] if _is(x, aten.view.default) else None
    value, heads = _value(source), _value(x)
    if value is None or heads is None or value.dim() != 3:
        return x
    return source if tuple(value.shape) == (*heads.shape[:2], heads.shape[2] * heads.shape[3]) else x


def _fuse_gates(graph: fx.Graph) -> None:
    for target, name, options in (
        (aten.silu.default, "silu", {}),
        (aten.gelu.default, "gelu_tanh", {"approximate": "tanh"}),
    ):
        for root in graph.find_nodes(op="call_function", target=target):
            product = _only_user(root)
            for activated, up in _operands(product, aten.mul.Tensor):
                if product is None or activated is not root or root.kwargs != options or len(root.args) != 1:
                    continue
                if not (_alike(root, up) and _alike(root, product)):
                    continue
                with graph.inserting_before(product):
                    fused = graph.call_function(native_operators.gate, (root.args[0], up, name))
                fused.meta = product.meta
                product.replace_all_uses_with(fused)
                break


def _join_views(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if _is(node, aten.squeeze.dim, aten.transpose.int, aten.view.default):
            _join_view(graph, node)


def _join_view(graph: fx.Graph, node: fx.Node) -> None:
    source: Any = node.args[0]
    if _is(node, aten.view.default) and _is(source, aten.unsqueeze.default):
        node.args = (source.args[0], *node.args[1:])
    elif _is(node, aten.transpose.int) and _is(source, aten.transpose.int):
        if node.args[1:] == source.args[1:]:
            node.replace_all_uses_with(source.args[0])
    elif _is(node, aten.squeeze.dim) and node.args[1] == 0:
        if _is(source, aten.unsqueeze.default) and source.args[1] == 0:
            node.replace_all_uses_with(source.args[0])
        elif _is(source, aten.view.default) and source.args[1][0] == 1:
            node.target, node.args = aten.view.default, (source.args[0], source.args[1][1:])
        elif _is(source, aten.transpose.int) and source.args[1:] == (1, 2):
            # Swap the two, so that the transposition may meet one that undoes it.
            with graph.inserting_before(node):
                squeezed = graph.call_function(aten.squeeze.dim, (source.args[0], 0))
            node.target, node.args = aten.transpose.int, (squeezed, 0, 1)
            _join_view(graph, squeezed)


METHODS = {
    aten.reshape.default: "reshape",
    aten.squeeze.dim: "squeeze",
    aten.sym_size.int: "size",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.view.default: "view",
}
FUNCTIONS = {aten.add.Tensor: operator.add, aten.mul.Tensor: operator.mul}


def _call_directly(graph: fx.Graph) -> None:
    """Call operators as tensor methods where these exist: that takes half as long as calling the overload."""
    for node in graph.nodes:
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
