"""Memory of a device that NICs write into directly (GPUDirect RDMA). "Device" here is the GPU.

That needs a GPU driver that exports the memory as a dma-buf and a NIC driver that registers it. Both are asked; where
one of them refuses, bytes go through the host's memory, and the log says why.
"""

import errno
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# Cause and remedy when a NIC's driver rejects a dma-buf, by the errno of ibv_reg_dmabuf_mr.
REFUSALS = {
    errno.EOPNOTSUPP: "its driver does not support dma-bufs; use a NIC whose driver does (mlx5 of Linux 5.12 or later)",
    errno.EPROTONOSUPPORT: "the kernel does not support dma-bufs for RDMA; use Linux 5.12 or later",
    errno.EBADF: "the device's driver did not export a valid dma-buf",
    errno.EINVAL: "it cannot map the device's memory: both must be behind PCIe bridges that allow peer-to-peer access",
    errno.ENOMEM: "it cannot map that much memory; raise the limit of locked memory (ulimit -l unlimited)",
}


@dataclass(frozen=True)
class Refusal:
    """A NIC driver's error for a dma-buf: the errno and pyverbs' message."""

    number: int
    message: str

    def __str__(self) -> str:
        why = REFUSALS.get(self.number, "the kernel's log may say more")
        return f"{self.message} (errno {self.number}): {why}"


class DmaBuf(NamedTuple):
    """Device memory as a file that other drivers can map; the caller of ``export`` closes ``fd``. Offsets in bytes."""

    fd: int
    offset: int
    nbytes: int


class DeviceMemory(Protocol):
    """Memory of a device for NICs to write into.

    Attributes:
        name: of the device, for errors and logs. address: of its first byte, for this process or for the device.
    """

    name: str
    address: int
    nbytes: int

    def export(self) -> DmaBuf | None:
        """Export all of it as a dma-buf; None if it is the host's memory, which NICs register by its address. Raises
        TransportError with the reason if neither is possible."""
