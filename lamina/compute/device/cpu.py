"""Slices by native kernels and torch on the cores of this process."""

from collections.abc import Mapping

import torch

from lamina.compute.runner import SliceRunner
from lamina.lowering import LoweredModel, Target


class Cpu:
    """A ``Device``."""

    target = Target.CPU
    place = torch.device("cpu")

    def runner(self, model: LoweredModel, tensors: Mapping[str, torch.Tensor]) -> SliceRunner:
        """See ``Device``. Packed weights are copies: drop ``tensors`` to free their memory."""
        return SliceRunner(model, tensors)
