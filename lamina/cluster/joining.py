"""Brings one more worker into a cluster that serves, as conversations with it and with those that serve."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from lamina.cluster.gather import CONNECT_TIMEOUT_S, LOAD_TIMEOUT_S, START_TIMEOUT_S, Ask, Conversation
from lamina.cluster.linking import Pair, link
from lamina.cluster.pool import CPU
from lamina.errors import ConfigError
from lamina.protocol.choice import Choice, Offer, Transport
from lamina.protocol.control import Bootstrap, ControlServer
from lamina.protocol.leases import Messages
from lamina.protocol.messages import (
    ComputeSetup,
    Connect,
    Connected,
    Hello,
    MemorySetup,
    ModelLoaded,
    Register,
    Registered,
    SlabReady,
)
from lamina.topology import Member, Role, Topology
from lamina.types import TransportName


@dataclass(frozen=True)
class Fabric:
    """How the workers of a cluster are set up and linked.

    Attributes:
        start: see ``Launcher``.
        compute_setup, memory_setup: of every worker; capacities may differ. loaded: what compute workers have loaded.
        bytes_per_token: of KV on a memory worker.
        kv_bytes: of another memory worker, given those that the largest has, and those promised to all and not used.
        sizes: of messages. spare: links that every arena has room for besides those at the start.
        transports: that workers offer; wanted: as configured.
        offers, links: of the workers so far, by name and by pair.
    """

    start: Callable[[str, Role, Bootstrap], None]
    compute_setup: ComputeSetup
    memory_setup: MemorySetup
    loaded: ModelLoaded
    bytes_per_token: int
    kv_bytes: Callable[[int, int], int]
    sizes: Messages
    spare: int
    transports: tuple[Transport, ...]
    wanted: TransportName
    spins_s: float
    tls: bool
    offers: dict[str, Offer] = field(default_factory=dict)
    links: dict[Pair, Choice] = field(default_factory=dict)

    def register(self, role: Role, computes: int, memories: int) -> Register:
        """The arena of a worker of a cluster with so many of each role, itself included."""
        arena = self.sizes.compute_arena if role == "compute" else self.sizes.memory_arena
        return Register(arena(computes, memories, self.spare), list(self.transports), self.spins_s, self.tls)

    def forget(self, members: Collection[str]) -> None:
        """Forget the offers and links of all but these."""
        for name in self.offers.keys() - set(members):
            del self.offers[name]
        for pair in [pair for pair in self.links if not set(pair) <= set(members)]:
            del self.links[pair]

    def slots(self, roles: Mapping[str, Role], near: str, far: str) -> tuple[int, int] | None:
        """Bytes of the slots that each of two workers has for the other's messages; None: they need no link."""
        sizes = self.sizes
        match roles[near], roles[far]:
            case "compute", "memory":
                return sizes.reply, sizes.request
            case "memory", "compute":
                return sizes.request, sizes.reply
            case "memory", "memory":
                return 0, 0
        return (sizes.context, sizes.context) if sizes.context else None


def prepare_memory(
    control: ControlServer, fabric: Fabric, name: str, promised: Callable[[], int]
) -> Conversation[Member]:
    """Wait for a memory worker that was started and have it make its slab. ``promised``: see ``Fabric.kv_bytes``.

    Raises ConfigError if there is too little memory.
    """
    hello: dict[str, Hello] = yield Ask(Hello, [name], START_TIMEOUT_S)
    most = fabric.memory_setup.capacity
    nbytes = fabric.kv_bytes(most * fabric.bytes_per_token, promised())
    capacity = min(most, nbytes // fabric.bytes_per_token)
    if capacity < 2:
        raise ConfigError(
            f"{nbytes} bytes are free for the KV of {name}, and a token takes {fabric.bytes_per_token}; free memory"
        )
    control.send([name], msgspec.structs.replace(fabric.memory_setup, capacity=capacity))
    yield Ask(SlabReady, [name], LOAD_TIMEOUT_S)
    return Member(name, "memory", CPU, hello[name].host, capacity)


def prepare_compute(control: ControlServer, fabric: Fabric, name: str) -> Conversation[Member]:
    """Wait for a compute worker that was started and have it load the model. Raises ConfigError for another model."""
    hello: dict[str, Hello] = yield Ask(Hello, [name], START_TIMEOUT_S)
    control.send([name], fabric.compute_setup)
    loaded: dict[str, ModelLoaded] = yield Ask(ModelLoaded, [name], LOAD_TIMEOUT_S)
    ours = fabric.memory_setup
    if loaded[name].attentions != ours.attentions or loaded[name].dtype != ours.dtype:
        raise ConfigError(f"{name} has loaded another model than the others: {fabric.compute_setup.model} has changed")
    return Member(name, "compute", CPU, hello[name].host)


def enter(control: ControlServer, fabric: Fabric, topology: Topology, joiner: Member) -> Conversation[None]:
    """Link a prepared worker with the members of ``topology``, which includes it.

    Raises TransportError if it cannot be linked with one of them.
    """
    name, roles = joiner.name, {member.name: member.role for member in topology.members}
    computes, memories = list(topology.computes), list(topology.capacities)
    control.send([name], fabric.register(joiner.role, len(computes), len(memories)))
    registered: dict[str, Registered] = yield Ask(Registered, [name], CONNECT_TIMEOUT_S)
    offers = {**fabric.offers, name: registered[name].offer}
    sizes = {(other, name): fabric.slots(roles, other, name) for other in roles if other != name}
    slots = {pair: each for pair, each in sizes.items() if each is not None}
    links = yield from link(control, fabric.wanted, offers, slots, fabric.links)
    control.send([name], Connect(computes, memories, topology.pipeline, topology.epoch))
    yield Ask(Connected, [name], CONNECT_TIMEOUT_S)
    fabric.offers[name] = registered[name].offer
    fabric.links.update(links)
