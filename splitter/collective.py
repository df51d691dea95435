"""The operator by which the ranks of a replica add up what each has computed.

In a graph it only marks the place: ``bind`` gives the function that does it, which belongs to a process and its peers.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, fx

Reduce = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over all ranks, the same bits on each; may overwrite what it is given."""


@torch.library.custom_op("lamina::all_reduce", mutates_args=())
def _all_reduce(x: Tensor) -> Tensor:
    raise AssertionError("lamina::all_reduce marks where ranks meet; bind a function to it before it runs")


@_all_reduce.register_fake
def _all_reduce_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


ALL_REDUCE = torch.ops.lamina.all_reduce.default


def bind(module: fx.GraphModule, reduce: Reduce) -> fx.GraphModule:
    """Return a copy of ``module`` that calls ``reduce`` where ranks meet."""
    bound = copy.deepcopy(module)
    for node in bound.graph.find_nodes(op="call_function", target=ALL_REDUCE):
        node.target = reduce
    bound.recompile()
    return bound
