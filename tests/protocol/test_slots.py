"""Messages that a device writes where their receivers read them, over real links."""

import ctypes
from collections.abc import Iterator

import pytest

from lamina.protocol.choice import Transport
from lamina.protocol.leases import HEADER_NBYTES, SLOTS
from lamina.protocol.slots import Slots
from tests.protocol.test_links import Cluster

TIMEOUT_S = 5.0


class Device:
    """A ``Mapper`` that notes what it was told of. ``refuses``: peers whose memory it does not map."""

    def __init__(self, refuses: str = "") -> None:
        self.adopted: list[memoryview] = []
        self.mapped: dict[str, memoryview] = {}
        self._refuses = refuses

    def adopt(self, memory: memoryview) -> None:
        self.adopted.append(memory)

    def map(self, peer: str, memory: memoryview) -> bool:
        assert peer not in self.mapped, "its former memory has not been unmapped"
        if peer == self._refuses:
            return False
        self.mapped[peer] = memory
        return True

    def unmap(self, peer: str) -> None:
        del self.mapped[peer]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(["near", "far", "remote"])
    ways = {("near", "far"): Transport.SHM, ("near", "remote"): Transport.TCP}
    assert not any(linked.failures for linked in made.link(ways).values())
    yield made
    for links in made.links.values():
        links.close()


def test_what_is_written_into_a_place_arrives(cluster: Cluster) -> None:
    """In the slot that was taken for it, whatever is sent in between."""
    near, far = cluster.links["near"].channel("far"), cluster.links["far"].channel("near")
    device = Device()
    slots = Slots(cluster.links["near"], device)
    slots.add([near])
    assert [memory.nbytes for memory in device.adopted] == [len(near.slots[0])] * SLOTS
    slot = near.place(5)
    assert slot is not None
    near.send(1, 7, 6, [b"others"])
    assert near.place(1) is None, "no slot is free"
    ctypes.memmove(near.bodies[slot].address, b"abc", 3)
    near.bodies[slot].memory[3:5] = b"de"
    near.send(2, 8, 5, (), slot)
    bodies = {}
    for number, target in far.awaited.items():
        cluster.links["far"].wait([target], TIMEOUT_S)
        arrival = far.read(number)
        bodies[arrival.lane, arrival.turn] = bytes(arrival.whole)
    assert bodies == {(1, 7): b"others", (2, 8): b"abcde"}


def test_only_memory_that_the_device_maps_is_written(cluster: Cluster) -> None:
    near, remote = (cluster.links["near"].channel(name) for name in ("far", "remote"))
    device = Device(refuses="far")
    Slots(cluster.links["near"], device).add([near, remote])
    assert not device.mapped and near.place(1) is None and remote.place(1) is None
    slots = Slots(cluster.links["near"], device := Device())
    slots.add([near, remote])
    assert device.mapped.keys() == {"far"} and near.place(1) is not None and remote.place(1) is None
    assert device.mapped["far"].nbytes >= SLOTS * (HEADER_NBYTES + len(near.bodies[0].memory))


def test_memory_of_peers_that_leave_is_unmapped_before_it_is_mapped_again(cluster: Cluster) -> None:
    device = Device()
    slots = Slots(cluster.links["near"], device)
    slots.add([cluster.links["near"].channel("far")])
    slots.keep(["far", "remote"])
    assert device.mapped.keys() == {"far"}
    slots.keep(["remote"])
    assert not device.mapped
    slots.add([cluster.links["near"].channel("far")])
    assert device.mapped.keys() == {"far"}
