"""The result of splitting a model: its slices, the tensors that cross between them, and its attentions."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from lamina.core.types import AttentionSpec, DType
from lamina.splitter.parts import Runs

if TYPE_CHECKING:
    from transformers.configuration_utils import PretrainedConfig


@dataclass(frozen=True)
class Weight:
    """Shape and element type of one tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Crossing:
    """One tensor [T, *shape] of a cut's context. ``name`` has the module and the operator that compute it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Cut:
    """The context of cut ``index``: the tensors that slice ``index`` passes to the next slice besides q, k and v."""

    index: int
    context: tuple[Crossing, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of context per token."""
        return sum(crossing.bytes_per_token for crossing in self.context)


Array = npt.NDArray[Any]

Shard = Mapping[int, Runs]
"""The part of a weight that a rank holds: by dimension, ranges of indices. Other dimensions are whole."""


def cut(tensor: Tensor, shard: Shard) -> Tensor:
    """Return the part of a whole weight that ``shard`` selects; a view if it is one range."""
    for dim, ranges in shard.items():
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return tensor


@dataclass(frozen=True)
class SliceOutput:
    """The results of one slice's graph for T rows: (q, k, v, *context), or (logits,) from the last slice.

    Tensors may be views, not contiguous. Only the last slice has ``logits``; only the other slices have the other
    properties.
    """

    results: tuple[Tensor, ...]

    @property
    def q(self) -> Tensor:
        """[T, Hq, D]."""
        return self.results[0]

    @property
    def k(self) -> Tensor:
        """[T, Hkv, D]."""
        return self.results[1]

    @property
    def v(self) -> Tensor:
        """[T, Hkv, Dv]."""
        return self.results[2]

    @property
    def context(self) -> tuple[Tensor, ...]:
        return self.results[3:]

    @property
    def logits(self) -> Tensor:
        """[T, vocab]."""
        return self.results[0]

    @functools.cached_property
    def arrays(self) -> tuple[Array, Array, Array]:
        """q, k and v as C-contiguous arrays; bfloat16 as uint16 bits."""
        return as_numpy(self.q), as_numpy(self.k), as_numpy(self.v)


def as_numpy(tensor: Tensor) -> Array:
    """Return the tensor's memory, or a copy in host memory, as a C-contiguous array; bfloat16 as uint16 bits."""
    tensor = tensor.detach().contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: Array = tensor.numpy()
    return array


@dataclass(frozen=True)
class Slice:
    """The part of the model between attention ``index - 1`` and attention ``index``.

    Attributes:
        graph: takes weights, constants, ids, positions, attention (not in slice 0), context, in this order, and
            returns (q, k, v, *context), or (logits,) from the last slice. Equal slices share one graph.
        weights: checkpoint names of its weights, in the graph's input order.
        constants: names of its ``SplitModel.constants``, in the graph's input order.
        last: True for the last slice.
        linears_before_q: (linear layers that run before q exists, all linear layers).
    """

    index: int
    graph: fx.GraphModule
    weights: tuple[str, ...]
    constants: tuple[str, ...]
    last: bool
    linears_before_q: tuple[int, int]

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: Tensor | None,
        context: tuple[Tensor, ...],
        weights: Mapping[str, Tensor],
    ) -> SliceOutput:
        """Compute T rows, which may belong to any number of sequences.

        Args:
            ids: [T] int64.
            positions: [T] int64.
            attention: [T, Hq, Dv], contiguous: result of the previous attention; None for slice 0.
            context: context of the previous slice, for the same rows.
            weights: by name, all of ``self.weights`` and ``self.constants``, on the device of the rows.
        """
        arguments = [weights[name] for name in self.weights]
        arguments += [weights[name] for name in self.constants]
        arguments += (ids, positions) if attention is None else (ids, positions, attention)
        return SliceOutput(tuple(self.graph(*arguments, *context)))


@dataclass(frozen=True)
class SplitModel:
    """A model cut at its n attentions into n + 1 slices.

    Attributes:
        config: configuration of the model.
        dtype: element type of weights, activations and KV.
        slices: n + 1 slices.
        cuts: n cuts; cut k is between slices k and k + 1.
        attentions: n attentions; attention k is between slices k and k + 1.
        sinks: for each attention: the checkpoint name of its sink logits [Hq], or None.
        weights: shape and element type of every weight that slices or sinks use, by checkpoint name.
        ties: other names that checkpoints may use for a weight -> the name in ``weights``.
        constants: tensors that checkpoints do not hold (inv_freq), on the CPU.
        shards: by name: the part of a divided weight that the rank holds; empty for an unsharded model.
        whole: the attentions with the heads of all ranks.
    """

    config: "PretrainedConfig"
    dtype: DType
    slices: tuple[Slice, ...]
    cuts: tuple[Cut, ...]
    attentions: tuple[AttentionSpec, ...]
    sinks: tuple[str | None, ...]
    weights: Mapping[str, Weight]
    ties: Mapping[str, str]
    constants: Mapping[str, Tensor]
    shards: Mapping[str, Shard] = field(default_factory=dict)
    whole: tuple[AttentionSpec, ...] = ()
