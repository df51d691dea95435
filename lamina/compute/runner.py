"""Runs the slices of a split model with their weights."""

from collections.abc import Mapping

import torch

from lamina.compute.exchange import Floats, StepExchange
from lamina.splitter import LoweredSlice, SplitModel, lower


class SliceRunner:
    """A split model with its weights: token ids and positions in, logits out, attention left to the caller."""

    def __init__(self, model: SplitModel, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors`` holds the model's weights by name; its constants are its own."""
        self._attentions = model.attentions
        *self._inner, self._last = lower(model, {**tensors, **model.constants})
        self._sinks: list[Floats | None] = [
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
        prelude = _Prelude(positions)
        for piece, spec, sinks in zip(self._inner, self._attentions, self._sinks, strict=True):
            output = piece.run(ids, positions, attention, context, prelude.of(piece))
            assert output.q is not None and output.k is not None and output.v is not None
            attention = exchange.attend(spec, output.q, output.k, output.v, sinks)
            context = output.context
        if len(rows) == 0:
            return None
        assert attention is not None
        ids, positions, attention = ids[rows], positions[rows], attention[rows]
        context = tuple(tensor[rows] for tensor in context)
        return self._last.run(ids, positions, attention, context, self._last.prepare(positions)).logits


class _Prelude:
    """What slices need of the positions alone, computed once a step for all that need the same."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._prepared: dict[object, tuple[torch.Tensor, ...]] = {}

    def of(self, piece: LoweredSlice) -> tuple[torch.Tensor, ...]:
        if piece.prelude_key not in self._prepared:
            self._prepared[piece.prelude_key] = piece.prepare(self._positions)
        return self._prepared[piece.prelude_key]
