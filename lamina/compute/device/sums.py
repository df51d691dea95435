"""Sums over the ranks of a tensor-parallel replica on GPUs, by torch.distributed: NCCL, or gloo if they are emulated.

A sum is an operator like others, in place on the GPU's memory, so that recordings have it too: nothing goes through the
host. NCCL adds each element up in one place and sends the result to all, so that all ranks have the same bits.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.compute.device.kit import Kit
from lamina.control.sockets import SETUP_TIMEOUT_S
from lamina.core.errors import ConfigError
from lamina.splitter.parts import Rank
from lamina.transport.endpoint import Wait
from lamina.worker.links import Links

_ENVIRONMENT = {
    # All ranks are on one machine: nobody else should reach the sockets by which they find each other.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    # A thread that would look into the meeting file every second, for debugging; the file is removed.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class GpuSums:
    """``Sums`` on a GPU. At most one with several ranks in a process."""

    def __init__(self, rank: Rank, kit: Kit, meeting: str) -> None:
        """Join the other ranks, which takes until all of them have come. Raises ConfigError."""
        self.rank = rank
        self._kit = kit
        self._one = torch.ones(1, device=kit.place)
        if rank.count == 1:
            return
        if not Path(meeting).parent.is_dir():  # a store would wait for it
            raise ConfigError(
                f"rank {rank.number} of {rank.count} is on another machine than the engine; the ranks of a replica on "
                "GPUs must be on the engine's machine"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        bound = timedelta(seconds=SETUP_TIMEOUT_S)  # one may load for long; the engine ends a step that does not go on
        try:
            dist.init_process_group(
                kit.backend,
                store=dist.FileStore(meeting, rank.count),
                rank=rank.number,
                world_size=rank.count,
                timeout=bound,
                device_id=kit.place if kit.place.type == "cuda" else None,  # connects now, not at the first sum
            )
            assert dist.group.WORLD is not None
            self._group = dist.group.WORLD.group_name
            self.meet()
        except RuntimeError as error:
            raise ConfigError(
                f"rank {rank.number} of {rank.count} cannot join the others by {kit.backend}: {error}. Install a "
                "PyTorch that has it, or leave out tensor_parallel"
            ) from error

    def connect(self, links: Links, wait: Wait, names: Sequence[str]) -> None:
        """Nothing: they have joined."""

    def reduce(self, x: Tensor) -> Tensor:
        """Add up ``x`` over all ranks. The result is there for what is started on the GPU after this call."""
        total = torch.ops._c10d_functional.all_reduce_(x.contiguous(), "sum", self._group)
        waited: Tensor = torch.ops._c10d_functional.wait_tensor(total)
        return waited

    def reset(self, first: int) -> None:
        """Do nothing: with several ranks, the engine begins no other epoch, since NCCL cannot drop a sum."""

    def agree(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of rank 0. Sums over a vocabulary are not in the same order every time, so that ranks may
        draw different tokens from equal logits."""
        if self.rank.count == 1 or not tokens:
            return list(tokens)
        own = torch.tensor(tokens, device=self._kit.place)
        first: list[int] = self.reduce(own if self.rank.number == 0 else torch.zeros_like(own)).tolist()
        return first

    def meet(self) -> None:
        if self.rank.count > 1:
            self.reduce(self._one)
            self._kit.synchronize()
