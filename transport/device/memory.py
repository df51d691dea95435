"""Arenas in GPU memory: the NIC accesses them directly (GPUDirect RDMA) or through a copy in host memory.

Direct access needs a GPU driver that exports the memory as a dma-buf and a NIC driver that registers it. Otherwise
peers write into host memory, and the GPU copies from and to there. One attempt decides which route is used, and the
reason is logged. Doorbells are in host memory either way. "Device" here is the GPU.
"""

import enum
import errno
import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lamina._native import Arena as NativeArena
from lamina.transport.base import Buffer, check_range

logger = logging.getLogger(__name__)

# Cause and remedy when a NIC's driver rejects a dma-buf, by the errno of ibv_reg_dmabuf_mr.
REFUSALS = {
    errno.EOPNOTSUPP: "its driver does not support dma-bufs; use a NIC whose driver does (mlx5 of Linux 5.12 or later)",
    errno.EPROTONOSUPPORT: "the kernel does not support dma-bufs for RDMA; use Linux 5.12 or later",
    errno.EBADF: "the device's driver did not export a valid dma-buf",
    errno.EINVAL: "it cannot map the device's memory: both must be behind PCIe bridges that allow peer-to-peer access",
    errno.ENOMEM: "it cannot map that much memory; raise the limit of locked memory (ulimit -l unlimited)",
}


class Route(enum.Enum):
    """How peers' bytes reach the device's memory."""

    DIRECT = "dma-buf"
    HOST = "host"


@dataclass(frozen=True)
class Decision:
    """The route, and why."""

    route: Route
    reason: str


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
    """Device memory to hold an arena's bytes, allocated and freed by its owner.

    Attributes:
        name: of the device, for errors and logs.
    """

    name: str
    nbytes: int

    def export(self) -> DmaBuf:
        """Export all of it as a dma-buf. Raises TransportError with the reason if that is not possible."""
        ...

    def read(self, offset: int, into: Buffer) -> None:
        """Copy [offset, offset + len(into)) to the host; complete on return."""
        ...

    def write(self, offset: int, data: Buffer) -> None:
        """Copy from the host to [offset, offset + len(data)); ``data`` may be reused on return."""
        ...

    def settle(self) -> None:
        """Make what NICs have written so far visible to kernels that the device starts from now on."""
        ...


def choose(device: str, nic: str, obstacle: str, refusal: Refusal | None) -> Decision:
    """Decide the route into an arena in ``device``'s memory through ``nic``.

    Args:
        obstacle: why the device's driver cannot export a dma-buf; empty if it did.
        refusal: the NIC driver's error for the dma-buf; None if it registered it or did not get one.
    """
    if obstacle:
        return Decision(Route.HOST, f"{device} cannot export a dma-buf: {obstacle}")
    if refusal is None:
        return Decision(Route.DIRECT, f"{nic} registered the dma-buf of {device}")
    return Decision(Route.HOST, f"{nic} rejected the dma-buf of {device}: {refusal}")


def log(name: str, decision: Decision) -> None:
    """Log the route of endpoint ``name``: as a warning if it costs a copy."""
    if decision.route is Route.DIRECT:
        logger.info("%s: peers write directly into GPU memory; %s", name, decision.reason)
    else:
        logger.warning("%s: peers' bytes are copied through host memory; %s", name, decision.reason)


class ArenaOnDevice:
    """An arena in a device's memory, with the same calls for both routes.

    Attributes:
        decision: the route and its reason.
    """

    def __init__(self, native: NativeArena, memory: DeviceMemory, decision: Decision) -> None:
        self.nbytes = native.nbytes
        self.doorbells = native.doorbells
        self.decision = decision
        self._memory = memory
        self._host = memoryview(native)

    def take_in(self, offset: int, nbytes: int) -> None:
        """Make bytes that ``Endpoint.wait`` has announced visible to kernels that the device starts from now on."""
        check_range(offset, nbytes, self.nbytes)
        if self.decision.route is Route.DIRECT:
            self._memory.settle()
        else:
            self._memory.write(offset, self._host[offset : offset + nbytes])

    def give_out(self, offset: int, nbytes: int) -> None:
        """Make bytes that the device has finished writing available to peers' fetches."""
        check_range(offset, nbytes, self.nbytes)
        if self.decision.route is Route.HOST:
            self._memory.read(offset, self._host[offset : offset + nbytes])
