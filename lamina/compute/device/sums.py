"""All-reduce over the ranks of a tensor-parallel replica on GPUs: NCCL, or gloo if GPUs are emulated.

An all-reduce works in place in GPU memory and can be recorded with a slice. NCCL computes each element on one rank and
sends it to all, so that all ranks get the same bits.
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
    # The monitor is a thread that reads the meeting file every second; the file is removed once all have joined.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class GpuSums:
    """Implements ``Sums`` on a GPU. A process has at most one instance with several ranks."""

    def __init__(self, rank: Rank, kit: Kit, meeting: str) -> None:
        """Join the other ranks; blocks until all have joined. Raises ConfigError.

        ``meeting``: Path of a file on this machine by which the ranks find each other.
        """
        self.rank = rank
        self._kit = kit
        self._one = torch.ones(1, device=kit.place)
        if rank.count == 1:
            return
        if not Path(meeting).parent.is_dir():  # the store would wait until the folder exists
            raise ConfigError(
                f"rank {rank.number} of {rank.count} is on another machine than the engine; the ranks of a replica on "
                "GPUs must be on the engine's machine"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        bound = timedelta(seconds=SETUP_TIMEOUT_S)  # a rank may load its weights for long
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

    @property
    def may_leave(self) -> bool:
        return self.rank.count == 1

    def connect(self, links: Links, wait: Wait, names: Sequence[str]) -> None:
        """Do nothing: the constructor has connected the ranks."""

    def reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over all ranks in place; GPU work launched after this call sees the result."""
        total = torch.ops._c10d_functional.all_reduce_(x.contiguous(), "sum", self._group)
        waited: Tensor = torch.ops._c10d_functional.wait_tensor(total)
        return waited

    def reset(self, first: int) -> None:
        """Do nothing: no sum has begun. The engine ends ranks that may be in one, since NCCL cannot drop a sum."""

    def agree(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of rank 0.

        GPUs do not sum over a vocabulary in a fixed order, so that ranks may draw different tokens from equal logits.
        """
        if self.rank.count == 1 or not tokens:
            return list(tokens)
        own = torch.tensor(tokens, device=self._kit.place)
        first: list[int] = self.reduce(own if self.rank.number == 0 else torch.zeros_like(own)).tolist()
        return first

    def meet(self) -> None:
        if self.rank.count > 1:
            self.reduce(self._one)
            self._kit.synchronize()
