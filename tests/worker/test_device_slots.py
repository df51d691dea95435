"""Messages that a device writes where their receivers read them, over real links."""

import ctypes
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from lamina.control.messages import Grant, Link, Linked, LinkWay, Register
from lamina.core.errors import TransportError
from lamina.dataplane.leases import HEADER_NBYTES, SLOTS
from lamina.dataplane.transport_choice import Transport
from lamina.transport.base import DeviceMemory, Peer
from lamina.transport.device.inboxes import Inboxes, PeerInbox, SharedMaker
from lamina.transport.shm import ShmEndpoint
from lamina.worker.device_slots import DeviceSlots
from lamina.worker.links import Member, open_links
from tests.support.linked_workers import PLAN, SECRET, Cluster, Device

TIMEOUT_S = 5.0


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
    slots = DeviceSlots(cluster.links["near"], device)
    slots.register_channels([near])
    (adopted,) = device.adopted
    assert adopted.nbytes >= SLOTS * len(near.slots[0])
    slot = near.place(5)
    assert slot is not None
    near.send_message(1, 7, 6, [b"others"])
    assert near.place(1) is None, "no slot is free"
    ctypes.memmove(near.bodies[slot].address, b"abc", 3)
    near.bodies[slot].array[3:5] = list(b"de")
    near.send_message(2, 8, 5, (), slot)
    bodies = {}
    for number, target in far.awaited.items():
        cluster.links["far"].wait([target], TIMEOUT_S)
        arrival = far.read(number)
        bodies[arrival.lane, arrival.turn] = bytes(arrival.whole)
    assert bodies == {(1, 7): b"others", (2, 8): b"abcde"}


def test_only_memory_that_the_device_maps_is_written(cluster: Cluster) -> None:
    near, remote = (cluster.links["near"].channel(name) for name in ("far", "remote"))
    device = Device(refuses="far")
    DeviceSlots(cluster.links["near"], device).register_channels([near, remote])
    assert not device.mapped and near.place(1) is None and remote.place(1) is None
    slots = DeviceSlots(cluster.links["near"], device := Device())
    slots.register_channels([near, remote])
    assert device.mapped.keys() == {"far"} and near.place(1) is not None and remote.place(1) is None
    assert device.mapped["far"].nbytes >= SLOTS * (HEADER_NBYTES + len(near.bodies[0].array))


def test_memory_of_peers_that_leave_is_unmapped_before_it_is_mapped_again(cluster: Cluster) -> None:
    device = Device()
    slots = DeviceSlots(cluster.links["near"], device)
    slots.register_channels([cluster.links["near"].channel("far")])
    slots.unmap_others(["far", "remote"])
    assert device.mapped.keys() == {"far"}
    slots.unmap_others(["remote"])
    assert not device.mapped
    slots.register_channels([cluster.links["near"].channel("far")])
    assert device.mapped.keys() == {"far"}


@pytest.fixture
def on_devices() -> Iterator[tuple[Cluster, dict[str, DeviceSlots]]]:
    """Two workers whose devices write into each other's inboxes, and one whose device has none."""
    inboxes = {name: Inboxes(SharedMaker()) for name in ("near", "far")}
    made = Cluster(["near", "far", "plain"], inboxes)
    made.link({("near", "far"): Transport.SHM, ("near", "plain"): Transport.SHM})
    yield made, {name: DeviceSlots(made.links[name], Device(inboxes=inboxes.get(name))) for name in made.links}
    for links in made.links.values():
        links.close()
    assert all(each.own(name) is each.theirs(name) is None for each in inboxes.values() for name in made.links)


def test_what_a_device_writes_arrives_in_the_inbox_and_all_else_in_slots(
    on_devices: tuple[Cluster, dict[str, DeviceSlots]],
) -> None:
    cluster, slots = on_devices
    near, far = cluster.links["near"].channel("far"), cluster.links["far"].channel("near")
    slots["near"].register_channels([near])
    slots["far"].register_channels([far])
    written = near.place(5)
    assert written is not None
    ctypes.memmove(near.bodies[written].address, b"inbox", 5)
    near.send_message(2, 8, 5, (), written)
    near.send_message(1, 7, 5, [b"slots"])
    arrivals = {}
    for number, target in list(far.awaited.items()):
        cluster.links["far"].wait([target], TIMEOUT_S)
        assert not bytes(far.slots[number][HEADER_NBYTES:]).startswith(b"inbox")
        arrival = far.read(number)
        arrivals[arrival.lane] = arrival
    assert isinstance(arrivals[1].whole, memoryview) and not isinstance(arrivals[2].whole, memoryview)
    for arrival in arrivals.values():
        arrival.set_aside()  # copies it, so that the next one may come
    ctypes.memmove(near.bodies[written].address, b"later", 5)
    assert {lane: bytes(arrival.whole) for lane, arrival in arrivals.items()} == {1: b"slots", 2: b"inbox"}


def test_a_peer_without_inbox_gets_messages_in_slots(on_devices: tuple[Cluster, dict[str, DeviceSlots]]) -> None:
    cluster, slots = on_devices
    near, plain = cluster.links["near"].channel("plain"), cluster.links["plain"].channel("near")
    slots["near"].register_channels([near])
    assert not near.writes_inbox and not near.inbox
    slot = near.place(3)
    assert slot is not None
    ctypes.memmove(near.bodies[slot].address, b"abc", 3)
    near.send_message(0, 1, 3, (), slot)
    cluster.links["plain"].wait([plain.awaited[slot]], TIMEOUT_S)
    assert bytes(plain.read(slot).whole) == b"abc"


def test_an_inbox_lasts_as_long_as_its_lease(on_devices: tuple[Cluster, dict[str, DeviceSlots]]) -> None:
    cluster, _ = on_devices
    near, far = cluster.inboxes["near"], cluster.inboxes["far"]
    own = near.own("far")
    cluster.links["near"].disconnect("far")
    assert near.theirs("far") is None and near.own("far") is own, "the peer may still write"
    assert cluster.links["near"].direct("far") is None
    cluster.links["near"].end_lease("far")
    assert near.own("far") is None and far.theirs("near") is not None


class Astray(SharedMaker):
    """Writes of other processes' devices do not arrive, although nothing fails."""

    def open(self, handle: bytes, nbytes: int) -> PeerInbox:
        self.elsewhere = self.make(nbytes)
        return super().open(self.elsewhere.handle, nbytes)


def test_a_device_whose_writes_do_not_arrive_writes_into_slots(caplog: pytest.LogCaptureFixture) -> None:
    inboxes = {"near": Inboxes(Astray()), "far": Inboxes(SharedMaker())}
    cluster = Cluster(["near", "far"], inboxes)
    cluster.link({("near", "far"): Transport.SHM})
    channels = {name: cluster.links[name].channel(peer) for name, peer in (("near", "far"), ("far", "near"))}
    for name, channel in channels.items():
        DeviceSlots(cluster.links[name], Device(inboxes=inboxes[name])).register_channels([channel])
    assert not channels["near"].writes_inbox and channels["near"].place(3) is not None
    assert channels["far"].writes_inbox, "the other direction is another matter"
    assert "what the device of near writes into the memory of that of far does not arrive" in caplog.text
    for links in cluster.links.values():
        links.close()


class Nic(ShmEndpoint):
    """In place of RDMA, which needs hardware: its network interface writes into memory of this process."""

    shared: ClassVar[dict[bytes, DeviceMemory]] = {}

    def share(self, memory: DeviceMemory) -> bytes:
        key = b"key %d" % len(self.shared)
        self.shared[key] = memory
        return key

    def unshare(self, key: bytes) -> None:
        del self.shared[key]

    def post_apart(
        self, peer: Peer, key: bytes, at: int, parts: Any, offset: int, header: bytes, doorbell: int, sequence: int
    ) -> None:
        body = b"".join(bytes(part) for part in parts)
        ctypes.memmove(self.shared[key].address + at, body, len(body))
        self.post(peer, offset, len(header), [header], doorbell, sequence)


def open_nic(member: Member, transport: Transport, tls: bool) -> Nic:
    return Nic(member.name)


def test_a_nic_writes_bodies_into_an_inbox_as_long_as_the_lease_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register, inboxes = Register(PLAN, [Transport.RDMA], spin_s=0.0), Inboxes(SharedMaker())
    near = open_links(Member("near", SECRET, "127.0.0.1"), register, None, open_nic)
    far = open_links(Member("far", SECRET, "127.0.0.1"), register, inboxes, open_nic)
    own = near.grant(Grant({"far": 128}, [], ["far"])).leases["far"]
    theirs = far.grant(Grant({"near": 128}, [], ["near"])).leases["near"]
    assert not own.inbox_key and theirs.inbox_key and not theirs.inbox, "the near one's device has no inboxes"
    ways = [
        LinkWay(Transport.RDMA, links.offer.descriptors[Transport.RDMA], lease)
        for links, lease in ((far, theirs), (near, own))
    ]
    near.connect(Link(1, {"far": ways[0]}))
    far.connect(Link(1, {"near": ways[1]}))
    assert near.linked(TIMEOUT_S) == far.linked(TIMEOUT_S) == Linked({})
    near.close_unused_endpoints()
    far.close_unused_endpoints()
    to, at = near.channel("far"), far.channel("near")
    slots = DeviceSlots(far, Device(inboxes=inboxes))
    slots.register_channels([at])
    to.send_message(3, 4, 5, [b"in", b"box"])
    arrival = at.read(0)
    assert (arrival.lane, arrival.turn, bytes(arrival.whole)) == (3, 4, b"inbox")
    assert not isinstance(arrival.whole, memoryview)
    far.end_lease("near")
    assert not Nic.shared and inboxes.own("near") is None
    monkeypatch.setattr(Nic, "share", Mock(side_effect=TransportError("no memory is mapped")))
    refused = far.grant(Grant({"near": 128}, [], ["near"])).leases["near"]
    assert not refused.inbox_key and inboxes.own("near") is None
    assert "messages of near over rdma go through the host's memory: no memory is mapped" in caplog.text
    near.close()
    far.close()
