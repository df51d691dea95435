"""Slices by native kernels and torch on the cores of this process."""

from collections.abc import Mapping

import torch

from lamina.compute.runner import SliceRunner
from lamina.lowering import LoweredModel, Target
from lamina.splitter.collective import Reduce


class Cpu:
    """A ``Device``."""

    target = Target.CPU
    place = torch.device("cpu")

    def runner(
        self, model: LoweredModel, tensors: Mapping[str, torch.Tensor], reduce: Reduce | None = None
    ) -> SliceRunner:
        """See ``Device``. Packed weights are copies: drop ``tensors`` to free their memory."""
        return SliceRunner(model, tensors, reduce)
