"""Runs the slices of a split model with their weights."""

from collections.abc import Mapping

import torch

from lamina.compute.exchange import Floats, StepExchange
from lamina.splitter import SplitModel


class SliceRunner:
    """A split model with its weights: token ids and positions in, logits out, attention left to the caller."""

    def __init__(self, model: SplitModel, tensors: Mapping[str, torch.Tensor]) -> None:
        self.model = model
        self._weights = tensors
        self.sinks: list[Floats | None] = [
            None if name is None else tensors[name].float().numpy() for name in model.sinks
        ]

    @torch.inference_mode()
    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, exchange: StepExchange, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Logits [len(rows), vocab] of the step's tokens at ``rows``, None if there are no such rows.

        ids and positions are int64 [T]. Only ``rows`` go through the last slice: everything after the last
        attention is per token.
        """
        attention: torch.Tensor | None = None
        context: tuple[torch.Tensor, ...] = ()
        *inner, last = self.model.slices
        for piece, spec, sinks in zip(inner, self.model.attentions, self.sinks, strict=True):
            output = piece.run(ids, positions, attention, context, self._weights)
            assert output.q is not None and output.k is not None and output.v is not None
            attention = exchange.attend(spec, output.q, output.k, output.v, sinks)
            context = output.context
        if len(rows) == 0:
            return None
        assert attention is not None
        chosen = tuple(tensor[rows] for tensor in context)
        return last.run(ids[rows], positions[rows], attention[rows], chosen, self._weights).logits
