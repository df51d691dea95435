"""Operators that mark places in captured graphs. They have shapes, but no arithmetic, and cannot be executed."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

Reduce = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over all ranks, bitwise equal on each; may overwrite its argument."""


def _marker(name: str, signature: str, result: Callable[..., Tensor]) -> Any:
    torch.library.define(f"lamina::{name}", signature)
    torch.library.register_fake(f"lamina::{name}", result)
    return getattr(torch.ops.lamina, name).default


ATTENTION = _marker(
    "attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, float[] slopes, float scale, int window, int chunk, "
    "float softcap) -> Tensor",
    lambda query, key, value, *_: query.new_empty(query.shape[0], query.shape[1], value.shape[2]),
)
"""An attention, where the model is cut: query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, Hq, Dv]."""

LINEAR = _marker(
    "linear",
    "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    lambda input, weight, bias=None: input.new_empty((*input.shape[:-1], weight.shape[0])),
)
"""A linear layer while a model is captured."""

ALL_REDUCE = _marker("all_reduce", "(Tensor x) -> Tensor", torch.empty_like)
"""A sum over the ranks of a replica; ``bind`` replaces it by a function."""


def bind(module: fx.GraphModule, reduce: Reduce) -> fx.GraphModule:
    """Return a copy of ``module`` that calls ``reduce`` in place of ``ALL_REDUCE``."""
    bound = copy.deepcopy(module)
    for node in bound.graph.find_nodes(op="call_function", target=ALL_REDUCE):
        node.target = reduce
    bound.recompile()
    return bound
