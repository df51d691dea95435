"""The reference runtime with slices on a card."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.compute.device.base import Rows, pad
from lamina.compute.device.emulated import Emulated
from lamina.compute.device.gpu import Gpu
from lamina.compute.device.kit import Kit, padded_rows
from lamina.lowering import Target, lower
from lamina.splitter import SliceOutput, SplitModel
from lamina.splitter.markers import Reduce
from tests.support.split_oracle import Runner


class OnGpu(Runner):
    """The reference runtime with slices on an emulated card, where another lane runs between any two of them."""

    def __init__(
        self,
        model: SplitModel,
        weights: Mapping[str, Tensor],
        kit: Kit | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        super().__init__(model, weights)
        card = Gpu(kit or Emulated())
        lowered = lower(model, Target.GPU)
        self._runner = card.runner(lowered, {name: weights[name].to(card.place) for name in lowered.weights}, reduce)

    def run(
        self, index: int, ids: Tensor, positions: Tensor, attention: Tensor | None, context: tuple[Tensor, ...]
    ) -> SliceOutput:
        """Compute one slice, padded as steps are."""
        count, total = len(ids), padded_rows(len(ids))
        rows = Rows(pad(ids, total), pad(positions, total))
        context = tuple(padded(tensor, total) for tensor in context)
        if attention is not None:
            attention = padded(attention, total)
            if index == len(self.model.slices) - 1:
                return SliceOutput((self._runner.logits(rows, attention, context, torch.arange(count)).cpu().clone(),))
        out = self._runner.run(index, rows, attention, context)
        results = tuple(tensor.clone() for tensor in out.results)
        other = Rows(torch.full((total,), 5), torch.arange(total))
        noise = None if attention is None else torch.full_like(attention, 0.5)
        self._runner.run(index, other, noise, tuple(torch.full_like(tensor, 0.5) for tensor in context))
        for kept, tensor in zip(results[3:], out.context, strict=True):
            assert torch.equal(kept, tensor)
        return SliceOutput(tuple(tensor[:count].cpu() for tensor in results))


def padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
