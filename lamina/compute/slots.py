"""The slots of a compute worker's links, made known to its device: those that peers write, and those of peers."""

from collections.abc import Collection, Iterable

from lamina.compute.device.base import Device
from lamina.protocol.channel import Channel
from lamina.protocol.links import Links


class Slots:
    """Which slots the device has been told of. One thread owns it."""

    def __init__(self, links: Links, device: Device) -> None:
        self._links, self._device = links, device
        self._mapped = set[str]()

    def add(self, channels: Iterable[Channel]) -> None:
        """Tell the device of new links. From now on it writes messages where their receivers read them, if it can."""
        for channel in channels:
            for slot in channel.slots:
                self._device.adopt(slot)
            direct = self._links.direct(channel.name)
            if direct is not None and self._device.map(channel.name, direct.their_memory):
                self._mapped.add(channel.name)
                channel.bodies = direct.bodies

    def keep(self, names: Collection[str]) -> None:
        """The links to all other peers have ended."""
        for name in self._mapped.difference(names):
            self._device.unmap(name)
        self._mapped.intersection_update(names)
