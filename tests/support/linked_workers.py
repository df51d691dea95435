"""Workers of one process that are linked as a cluster's are, and a device that maps their memory."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lamina.control.messages import Grant, Link, Linked, LinkWay, Register
from lamina.dataplane.leases import ArenaPlan, Lease, lease_nbytes
from lamina.dataplane.transport_choice import Transport
from lamina.transport.device.inboxes import Inboxes
from lamina.worker.links import Member, open_links

SECRET = b"a secret of these tests"
TIMEOUT_S = 30.0
SHM, TCP = Transport.SHM, Transport.TCP
PLAN = ArenaPlan(0, stages=False, pool_nbytes=256, leases={lease_nbytes(128): 3})
LONG_SPIN_S = 0.001


class Cluster:
    """Workers that all let each other in by shm and tcp, and are linked as a test says. ``inboxes``: of some."""

    def __init__(self, names: list[str], inboxes: Mapping[str, Inboxes] | None = None) -> None:
        register, self.inboxes = Register(PLAN, [SHM, TCP], spin_s=LONG_SPIN_S), inboxes or {}
        self.links = {
            name: open_links(Member(name, SECRET, "127.0.0.1"), register, self.inboxes.get(name)) for name in names
        }
        self.arenas = {name: links.arena for name, links in self.links.items()}
        self.offers = {name: links.offer for name, links in self.links.items()}
        self.leases: dict[tuple[str, str], Lease] = {}

    def link(self, pairs: dict[tuple[str, str], Transport], round_: int = 1) -> dict[str, Linked]:
        """What every worker answers, each working in a thread of its own."""
        peers: dict[str, dict[str, LinkWay]] = {}
        for (a, b), transport in pairs.items():
            for name, peer in ((a, b), (b, a)):
                peers.setdefault(name, {})[peer] = self.way(name, peer, transport)
        with ThreadPoolExecutor(len(peers)) as pool:
            messages = {name: Link(round_, peers[name], len(peers)) for name in peers}
            answers = {name: pool.submit(self.links[name].link, messages[name]) for name in peers}
            return {name: answer.result(TIMEOUT_S) for name, answer in answers.items()}

    def way(self, name: str, peer: str, transport: Transport) -> LinkWay:
        """How ``name`` reaches ``peer``, which leases it a part of its arena at the first call."""
        if (peer, name) not in self.leases:
            inboxes = [name] if {name, peer} <= self.inboxes.keys() else []
            self.leases[peer, name] = self.links[peer].grant(Grant({name: 128}, inboxes)).leases[name]
        return LinkWay(transport, self.offers[peer].descriptors[transport], self.leases[peer, name])


class Device:
    """A ``Mapper`` that notes what it was told of. ``refuses``: peers whose memory it does not map."""

    def __init__(self, refuses: str = "", inboxes: Inboxes | None = None) -> None:
        self.inboxes = inboxes
        self.adopted: list[memoryview] = []
        self.mapped: dict[str, memoryview] = {}
        self._refuses = refuses

    def register_own(self, memory: memoryview) -> None:
        self.adopted.append(memory)

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        assert peer not in self.mapped, "its former memory has not been unmapped"
        if peer == self._refuses:
            return False
        self.mapped[peer] = memory
        return True

    def unmap_peer(self, peer: str) -> None:
        del self.mapped[peer]

    def arrived(self, array: Any) -> Any:
        return array

    def copied(self, body: Any) -> memoryview:
        return memoryview(body.tobytes())
