"""Registers the message slots of a worker's links with its device, so that a GPU reads and writes them directly."""

import logging
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from lamina.dataplane.channel import Channel
from lamina.dataplane.leases import SLOTS
from lamina.transport.base import Buffer
from lamina.transport.device.inboxes import Inboxes
from lamina.worker.links import Links

logger = logging.getLogger(__name__)

_ASTRAY = (
    "what the device of %s writes into the memory of that of %s does not arrive, so messages go through the host's "
    "memory. Check whether the IOMMU or PCIe's access control keeps GPUs from writing to each other"
)


class Mapper(Protocol):
    """A device of this process."""

    @property
    def inboxes(self) -> Inboxes | None:
        """Inboxes that the device reads and writes; None if it has no memory of its own."""

    def register_own(self, memory: memoryview) -> None:
        """Pin ``memory``, which peers write as long as this process lives, for quick copies to the device."""

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        """Let kernels write messages into ``memory`` of a peer, until ``unmap_peer``. False if they cannot."""

    def unmap_peer(self, peer: str) -> None:
        """End writing into a peer's memory."""

    def arrived(self, array: Any) -> Any:
        """Return a part of an inbox of this worker, uint8 [nbytes], as an array of the device."""

    def copied(self, body: Any) -> Buffer:
        """Copy a result of ``arrived`` into the host's memory."""


class DeviceSlots:
    """Registers channels with the device, and maps peers' slots into it. One thread owns it."""

    def __init__(self, links: Links, device: Mapper) -> None:
        self._links, self._device = links, device
        self._mapped = set[str]()

    def register_channels(self, channels: Iterable[Channel]) -> None:
        """Register new links with the device. Where it can, the device then writes messages into their peers' slots."""
        for channel in channels:
            own, _ = self._links.leases(channel.name)
            self._device.register_own(self._links.arena.view(own.offset, own.nbytes))
            direct, inbox = self._links.direct(channel.name), self._links.inbox(channel.name)
            if inbox is not None:
                channel.inbox = [self._device.arrived(part) for part in inbox.parts(SLOTS)]
                channel.copied = self._device.copied
                if direct is None:
                    channel.settle_inbox = inbox.settle
            if direct is None:
                continue
            channel.writes_inbox = direct.their_inbox is not None
            if channel.writes_inbox:
                channel.bodies = direct.bodies
                continue
            self._warn_if_astray(channel.name)
            if self._device.map_peer(channel.name, direct.their_memory):
                self._mapped.add(channel.name)
                channel.bodies = direct.bodies

    def _warn_if_astray(self, peer: str) -> None:
        inboxes = self._links.inboxes
        if inboxes is not None and inboxes.theirs(peer) is not None:
            logger.warning(_ASTRAY, self._links.name, peer)

    def unmap_others(self, names: Collection[str]) -> None:
        """Unmap the memory of all peers but ``names``: the links to the others have ended."""
        for name in self._mapped.difference(names):
            self._device.unmap_peer(name)
        self._mapped.intersection_update(names)
