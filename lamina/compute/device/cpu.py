"""Slices by native kernels and torch on the cores of this process."""

from collections.abc import Mapping
from typing import Any

import torch

from lamina.compute.ranks import Ranks
from lamina.compute.runner import SliceRunner
from lamina.core.types import Quantization
from lamina.lowering import LoweredModel, Target
from lamina.lowering.quantisation.choice import HostForm
from lamina.models.quantisation.codes import Weight
from lamina.splitter.collective import Reduce
from lamina.splitter.parts import Rank


class Cpu:
    """A ``Device``."""

    target = Target.CPU
    place = torch.device("cpu")
    inboxes = None

    def adopt(self, memory: memoryview) -> None:
        """See ``Device``; it is as quick as any."""

    def map(self, peer: str, memory: memoryview) -> bool:
        """See ``Device``; sending a message copies it there."""
        return False

    def unmap(self, peer: str) -> None:
        """See ``Device``."""

    def arrived(self, array: Any) -> Any:
        return array

    def copied(self, body: Any) -> memoryview:
        return memoryview(bytearray(body))

    def limit(self, share: float) -> None:
        """See ``Device``; the share is of GPUs' memory."""

    def sums(self, rank: Rank, meeting: str) -> Ranks:
        """See ``Device``. The ranks find each other by their links."""
        return Ranks(rank)

    def form(self, model: LoweredModel, to: Quantization) -> HostForm:
        return HostForm.of(model, to)

    def runner(self, model: LoweredModel, tensors: Mapping[str, Weight], reduce: Reduce | None = None) -> SliceRunner:
        """See ``Device``. Packed weights are copies: drop ``tensors`` to free their memory."""
        return SliceRunner(model, tensors, reduce)
