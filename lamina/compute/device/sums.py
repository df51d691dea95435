"""All-reduce over the ranks of a tensor-parallel replica on GPUs: NCCL, or gloo if GPUs are emulated.

An all-reduce works in place in GPU memory and can be recorded with a slice. NCCL computes each element on one rank and
sends it to all, so that all ranks get the same bits.
"""

import os
import shutil
import tempfile
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
    # All ranks of a stage are on one machine: nobody else should reach the sockets by which they find each other.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    # The monitor is a thread that reads the store every second; rank 0 removes the store once all have joined.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class GpuSums:
    """Implements ``Sums`` on a GPU. A process has at most one instance with several ranks."""

    def __init__(self, rank: Rank, kit: Kit, meeting: str) -> None:
        """Join the other ranks; blocks until all have joined. Raises ConfigError.

        ``meeting``: Name of a folder for temporary files on this machine, in which the ranks find each other.
        """
        self.rank = rank
        self._kit = kit
        self._one = torch.ones(1, device=kit.place)
        if rank.count == 1:
            return
        folder = Path(tempfile.gettempdir(), meeting)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to another user; run all ranks of a machine as one user")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        bound = timedelta(seconds=SETUP_TIMEOUT_S)  # a rank may load its weights for long
        try:
            dist.init_process_group(
                kit.backend,
                store=dist.FileStore(str(folder / "ranks"), rank.count),
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
        finally:
            if rank.number == 0:  # which has met all others
                shutil.rmtree(folder, ignore_errors=True)

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
