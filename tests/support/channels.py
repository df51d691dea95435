"""Workers of one process, linked by channels over any endpoints, for tests of what uses them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lamina.dataplane.channel import Channel, Hub
from lamina.dataplane.fetching import Fetcher
from lamina.dataplane.leases import ArenaPlan, Lease, Leases
from lamina.transport.base import Arena, Endpoint, Fetch, Peer


@dataclass
class Station:
    """One worker: its arena with everything in it, and its end of every link."""

    name: str
    endpoint: Endpoint
    plan: ArenaPlan
    arena: Arena = field(init=False)
    hub: Hub = field(init=False)
    books: Leases = field(init=False)
    leases: dict[str, Lease] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arena = self.endpoint.register(self.plan.nbytes, self.plan.doorbells)
        self.hub = Hub(self.arena, self.plan.pool)
        self.books = Leases(self.plan)

    def fetch(self, peer: str, fetch: Fetch) -> None:
        """As ``Links.fetch``."""
        self.endpoint.fetch(self.peers[peer], fetch)

    def fetcher(self) -> Fetcher:
        """Fetches into this worker's landings."""
        return Fetcher(self.fetch, self.arena, self.plan)


def link(stations: Collection[Station], slots: Mapping[tuple[str, str], int]) -> None:
    """Link stations: ``slots`` has the bytes of the slots in the arena of the first for messages of the second."""
    by_name = {station.name: station for station in stations}
    for (owner, peer), nbytes in slots.items():
        by_name[owner].leases[peer] = by_name[owner].books.lease(nbytes)
    for owner, peer in slots:
        near, far = by_name[owner], by_name[peer]
        near.peers[peer] = near.endpoint.connect(far.endpoint.descriptor(), 5.0)
        near.channels[peer] = Channel(
            near.endpoint, near.peers[peer], near.arena, near.hub, near.leases[peer], far.leases[owner]
        )
