"""The reference runtime of tests/splitter with lowered slices instead of those of the split model."""

from collections.abc import Mapping

from torch import Tensor

from lamina.lowering import LoweredModel, lower
from lamina.splitter import SliceOutput, SplitModel
from tests.support.split_oracle import Runner


class LoweredRunner(Runner):
    """Runs ``lowered``, or else what ``lower`` makes of ``model``."""

    def __init__(self, model: SplitModel, weights: Mapping[str, Tensor], lowered: LoweredModel | None = None) -> None:
        super().__init__(model, weights)
        self._slices = (lowered or lower(model)).with_weights(weights)

    def run(
        self, index: int, ids: Tensor, positions: Tensor, attention: Tensor | None, context: tuple[Tensor, ...]
    ) -> SliceOutput:
        """Compute one lowered slice."""
        part = self._slices[index]
        return part.run(ids, positions, attention, context, part.prepare(positions))
