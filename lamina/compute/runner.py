"""Runs the slices of a split model with their weights."""

from collections.abc import Mapping

import torch

from lamina.compute.exchange import Floats, StepExchange
from lamina.splitter import LoweredSlice, SplitModel, lower


def padded(rows: int) -> int:
    """Rows that ``rows`` are padded to: at most an eighth more, and few different numbers.

    oneDNN makes a kernel for every number of rows it meets, at half a millisecond and a megabyte each.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


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
        ids, positions = _pad(ids, exchange.rows), _pad(positions, exchange.rows)
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
        chosen = _pad(rows, padded(len(rows)))
        ids, positions, attention = ids[chosen], positions[chosen], attention[chosen]
        context = tuple(tensor[chosen] for tensor in context)
        logits = self._last.run(ids, positions, attention, context, self._last.prepare(positions)).logits
        return None if logits is None else logits[: len(rows)]


def _pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [T] with zeros up to [count]."""
    return torch.nn.functional.pad(rows, (0, count - len(rows)))


class _Prelude:
    """What slices need of the positions alone, computed once a step for all that need the same."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._prepared: dict[object, tuple[torch.Tensor, ...]] = {}

    def of(self, piece: LoweredSlice) -> tuple[torch.Tensor, ...]:
        if piece.prelude_key not in self._prepared:
            self._prepared[piece.prelude_key] = piece.prepare(self._positions)
        return self._prepared[piece.prelude_key]
