"""Arenas whose bytes lie in the memory of a device, a GPU: the network card reaches them itself, or the host between.

The card reaches them (GPUDirect) where the device's driver exports the memory as a dma-buf and the card's driver
registers it. Everywhere else peers write into memory of the host, and the device copies from and to there. Which of
the two it is, is decided by one try, and logged with its reason; doorbells lie in the host's memory in both.
"""

import enum
import errno
import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lamina._native import Arena as NativeArena
from lamina.transport.base import Buffer, check_range

logger = logging.getLogger(__name__)

# Why a card's driver refuses a dma-buf, by the errno of ibv_reg_dmabuf_mr, and what helps.
REFUSALS = {
    errno.EOPNOTSUPP: "its driver registers no dma-buf; use a card whose driver does (mlx5 of Linux 5.12 or later)",
    errno.EPROTONOSUPPORT: "the kernel registers no dma-buf; use Linux 5.12 or later",
    errno.EBADF: "the device's driver exported no dma-buf",
    errno.EINVAL: "it cannot map the device's memory: both must lie under PCIe bridges that let them reach each other",
    errno.ENOMEM: "it has no room to map so much; raise the limit of locked memory (ulimit -l unlimited)",
}


class Route(enum.Enum):
    """How peers' bytes get into the device's memory."""

    DIRECT = "dma-buf"
    HOST = "host"


@dataclass(frozen=True)
class Decision:
    """The route, and why."""

    route: Route
    reason: str


@dataclass(frozen=True)
class Refusal:
    """What a card's driver said to a dma-buf: the errno, and pyverbs' words."""

    number: int
    words: str

    def __str__(self) -> str:
        why = REFUSALS.get(self.number, "the kernel's log may say more")
        return f"{self.words} (errno {self.number}): {why}"


class DmaBuf(NamedTuple):
    """Device memory as a file that other drivers can map; whoever asked for it closes ``fd``. Offsets in bytes."""

    fd: int
    offset: int
    nbytes: int


class DeviceMemory(Protocol):
    """Memory of a device that an arena's bytes are to lie in, allocated and freed by its owner.

    Attributes:
        name: of the device, for errors and logs.
    """

    name: str
    nbytes: int

    def export(self) -> DmaBuf:
        """All of it as a dma-buf. Raises TransportError, which says why there is none."""
        ...

    def read(self, offset: int, into: Buffer) -> None:
        """Copy [offset, offset + len(into)) to the host; it is there on return."""
        ...

    def write(self, offset: int, data: Buffer) -> None:
        """Copy from the host to [offset, offset + len(data)); ``data`` may change on return."""
        ...

    def settle(self) -> None:
        """Let what the device starts from now on see what network cards have written before."""
        ...


def choose(device: str, card: str, obstacle: str, refusal: Refusal | None) -> Decision:
    """The route of an arena in ``device``'s memory behind network card ``card``.

    Args:
        obstacle: why the device's driver exports no dma-buf; empty if it does.
        refusal: what the card's driver said to the dma-buf; None if it registered it, or was not asked.
    """
    if obstacle:
        return Decision(Route.HOST, f"{device} exports no dma-buf: {obstacle}")
    if refusal is None:
        return Decision(Route.DIRECT, f"{card} registered the dma-buf of {device}")
    return Decision(Route.HOST, f"{card} refused the dma-buf of {device}: {refusal}")


def log(name: str, decision: Decision) -> None:
    """Tell the operator of endpoint ``name`` which route was taken: a warning if it costs a copy."""
    if decision.route is Route.DIRECT:
        logger.info("%s: peers write into the device's memory; %s", name, decision.reason)
    else:
        logger.warning("%s: peers' bytes go by way of the host's memory; %s", name, decision.reason)


class ArenaOnDevice:
    """An arena in a device's memory. The same calls serve both routes.

    Attributes:
        decision: the route, and why it was taken.
    """

    def __init__(self, native: NativeArena, memory: DeviceMemory, decision: Decision) -> None:
        self.nbytes = native.nbytes
        self.doorbells = native.doorbells
        self.decision = decision
        self._memory = memory
        self._host = memoryview(native)

    def take_in(self, offset: int, nbytes: int) -> None:
        """Let what the device starts from now on see a message that ``Endpoint.wait`` has seen, or what was fetched."""
        check_range(offset, nbytes, self.nbytes)
        if self.decision.route is Route.DIRECT:
            self._memory.settle()
        else:
            self._memory.write(offset, self._host[offset : offset + nbytes])

    def give_out(self, offset: int, nbytes: int) -> None:
        """Let peers fetch what the device has finished writing."""
        check_range(offset, nbytes, self.nbytes)
        if self.decision.route is Route.HOST:
            self._memory.read(offset, self._host[offset : offset + nbytes])
