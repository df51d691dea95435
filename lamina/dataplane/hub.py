"""What all links of a worker share: the pool that peers fetch from, and which links have something to do."""

from collections.abc import Sequence
from typing import Any, Protocol

from lamina.core.topology import Epoch, Topology
from lamina.dataplane.leases import ALIGNMENT, Space
from lamina.transport.base import Arena, Part, part_nbytes

Target = tuple[int, int]
"""A doorbell and the number that it has to reach."""


class End(Protocol):
    """This end of a link: what a hub needs of ``dataplane.channel.Channel``."""

    name: str

    @property
    def credits(self) -> Sequence[Target]:
        """Each of these gives back a slot or a region."""

    def read_credits(self) -> None:
        """Take in what the peer has rung."""

    def go_on(self) -> None:
        """Send the kept messages that can be sent now."""

    def flush(self) -> None:
        """Tell the peer what it is owed."""

    def drop(self) -> None:
        """Drop what was kept, and release all regions."""

    def restart(self, first: int) -> None:
        """Drop all messages, and count from ``first`` on."""


class Hub:
    """What all links of a worker share: the pool of regions that peers fetch from, and who has something to do.

    Attributes:
        channels: all of them.
        keeping: those with messages that wait for a slot or a region.
        owing: those whose peer may wait for a slot or a region of which it has not been told.
        sequence: what a doorbell of this worker was last rung with.
    """

    def __init__(self, arena: Arena, pool: tuple[int, int]) -> None:
        self.channels: list[End] = []
        self.keeping: set[End] = set()
        self.owing: set[End] = set()
        self.sequence = arena.sequence
        self._arena = arena
        self._space = Space(*pool, ALIGNMENT)
        self.nbytes = pool[1] - pool[0]

    def flush(self) -> None:
        """Tell peers what they are owed. Raises PeerLostError."""
        while self.owing:
            next(iter(self.owing)).flush()

    @property
    def credits(self) -> list[Target]:
        """What may let a kept message be sent; empty without one."""
        # A region that any peer has fetched makes room for a message to any other.
        return [target for channel in self.channels for target in channel.credits] if self.keeping else []

    def go_on(self) -> None:
        """Take in credits and send the kept messages that can be sent now. Raises PeerLostError."""
        if not self.keeping:
            return
        for channel in self.channels:
            channel.read_credits()
        for channel in [channel for channel in self.channels if channel in self.keeping]:
            channel.go_on()

    def forget(self, channel: End) -> None:
        """The link has ended: drop what was kept for it, and release what its peer has not fetched."""
        self.channels.remove(channel)
        self.keeping.discard(channel)
        self.owing.discard(channel)
        channel.drop()

    def restart(self, topology: Topology) -> None:
        """Restart counting, above all earlier numbers: all messages have been dropped, also by the peers that stay."""
        self.keeping.clear()
        self.owing.clear()
        for channel in list(self.channels):
            if channel.name in topology.names:
                channel.restart(first_use(topology.epoch))
            else:
                self.forget(channel)

    def take(self, nbytes: int) -> int | None:
        """Take a free region: its offset, or None while all are in use."""
        return self._space.take(nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Give back a region."""
        self._space.give(offset, nbytes)

    def write(self, offset: int, parts: Sequence[Part]) -> int:
        """Copy parts to ``offset`` of the arena, one after another; returns where they end."""
        for part in parts:
            if nbytes := part_nbytes(part):
                self._arena.view(offset, nbytes)[:] = buffer_of(part).cast("B")
                offset += nbytes
        return offset


def first_use(epoch: Epoch) -> int:
    """Above the numbers of all earlier epochs, with room for 2^40 uses of a slot in each. A doorbell has 64 bits, which
    are enough for 500,000 epochs."""
    return epoch.number << 40


def buffer_of(part: Any) -> memoryview:  # Any: numpy declares its buffer protocol from Python 3.12 on only
    """Return a part as a buffer."""
    return memoryview(part)
