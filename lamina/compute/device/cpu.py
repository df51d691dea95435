"""Implements compute workers' ``Device`` on CPUs, with native kernels and torch."""

from collections.abc import Mapping
from typing import Any

import torch

from lamina.compute.ranks import Ranks
from lamina.compute.runner import SliceRunner
from lamina.core.types import ActivationDType, Quantization
from lamina.lowering import LoweredModel, Target
from lamina.lowering.weight_forms import HostForm, require_byte_rows
from lamina.models.quantisation.codes import Weight
from lamina.splitter.markers import Reduce
from lamina.splitter.parts import Rank


class Cpu:
    """Implements ``Device`` on this process's CPU cores."""

    target = Target.CPU
    place = torch.device("cpu")
    inboxes = None

    def register_own(self, memory: memoryview) -> None:
        """Do nothing: the CPU reads all host memory equally fast."""

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        """Return False: the host copies messages to peers itself."""
        return False

    def unmap_peer(self, peer: str) -> None:
        """Do nothing: nothing was mapped."""

    def arrived(self, array: Any) -> Any:
        return array

    def copied(self, body: Any) -> memoryview:
        return memoryview(bytearray(body))

    def limit(self, share: float) -> None:
        """Do nothing: the limit concerns the memory of GPUs."""

    def sums(self, rank: Rank, meeting: str) -> Ranks:
        """Return the all-reduce over ranks, which connect by their links; ``meeting`` is unused."""
        return Ranks(rank)

    def form(self, model: LoweredModel, to: Quantization) -> HostForm:
        return HostForm(model, to)

    def runner(
        self,
        model: LoweredModel,
        tensors: Mapping[str, Weight],
        reduce: Reduce | None = None,
        activations: ActivationDType = "auto",
    ) -> SliceRunner:
        """Return a runner of the model's slices. Packed weights are copies: drop ``tensors`` to free their memory."""
        if activations == "int8":
            require_byte_rows(tensors)
        return SliceRunner(model, tensors, reduce, activations)
